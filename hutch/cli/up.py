"""`hutch up`: a controller and a host in the foreground.

Called by `hutch.cli.main`, and by the SDK as a process of its own with `--ephemeral`; calls
`hutch.supervise`.
"""

from __future__ import annotations

import asyncio
import os
import re
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from hutch import local
from hutch.cli import context, display
from hutch.errors import HutchError
from hutch.supervise import Supervisor, UpOptions

_LISTEN = re.compile(r"(127\.0\.0\.1|localhost|\[::1\]):([0-9]{1,5})")


def up(
    ctx: typer.Context,
    listen: Annotated[
        str, typer.Option(metavar="127.0.0.1:PORT", help="Loopback TCP, which needs the key.")
    ] = "",
    driver: Annotated[str, typer.Option(help="The host's driver.")] = "",
    capacity: Annotated[int, typer.Option(min=0, help="Sandboxes at once; 0 counts.")] = 0,
    config: Annotated[
        Path | None, typer.Option(help="A TOML file with the tables controller and host.")
    ] = None,
    reflection: Annotated[bool, typer.Option(help="Answer gRPC reflection.")] = False,
    ephemeral: Annotated[bool, typer.Option("--ephemeral", hidden=True)] = False,
    ready_fd: Annotated[int | None, typer.Option("--ready-fd", hidden=True)] = None,
    target: context.Target = None,
    api_key: context.ApiKey = None,
    state: context.State = None,
    as_json: context.Json = False,
) -> None:
    """Runs a controller and one host, and restarts either when it dies."""
    shared = context.common(ctx, target, api_key, state, as_json)
    if shared.target or shared.api_key:
        raise typer.BadParameter("up runs a controller of its own: --target does not go with it")
    if listen and not _LISTEN.fullmatch(listen):
        raise typer.BadParameter(f"--listen {listen}: only 127.0.0.1:PORT can be listened on")
    options = UpOptions(
        listen=listen,
        driver=driver,
        capacity=capacity,
        config=str(config.absolute()) if config is not None else "",
        reflection=reflection,
        ephemeral=ephemeral,
    )
    if ephemeral and os.fork() != 0:
        # Whoever started us waits for this process only; the one that serves is nobody's child.
        os._exit(0)
    console = display.error_console()

    def announce(facts: dict[str, object]) -> None:
        local.write_ready(ready_fd, facts)
        if shared.as_json:
            display.print_json({"version": metadata.version("hutch"), **facts})
        elif not ephemeral:
            display.write_output(ready_line(facts) + "\n")

    def warn(sentence: str) -> None:
        console.print(Text(display.safe(f"hutch up: {sentence}"), style="yellow"))

    try:
        paths = local.prepare(shared.settings().state or None)
        supervisor = Supervisor(paths, options, announce=announce, warn=warn)
        code = asyncio.run(supervisor.run())
    except HutchError as error:
        with suppress(OSError):
            local.write_ready(ready_fd, problem=str(error))
        raise
    raise typer.Exit(code)


def ready_line(facts: dict[str, object]) -> str:
    """The one line that says that it is ready."""
    where = f"unix:{facts['socket']}"
    if facts.get("listen"):
        where += f" and {facts['listen']}"
    adopted = " (adopted)" if facts.get("adopted") else ""
    version = metadata.version("hutch")
    return f"hutch {version} is up{adopted} at {where}, state in {facts['state']}; Ctrl-C ends it"
