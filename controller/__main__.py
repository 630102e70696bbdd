"""`python -m controller`: the command line of the controller process.

Started by `hutch up`. It prints nothing to standard output; logs go to standard error as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO, cast

import structlog

from controller.app import Controller, Settings, StartFailed
from controller.config import ConfigInvalid, load
from controller.store.ports import StoreError


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="controller", description=__doc__)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--host-socket", type=Path, required=True)
    parser.add_argument("--listen", default="")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--exit-when-idle", type=float)
    parser.add_argument("--reflection", action="store_true")
    parser.add_argument("--ready-fd", type=int)
    return parser.parse_args()


def _tell(descriptor: int | None, content: dict[str, object]) -> None:
    if descriptor is not None:
        with os.fdopen(descriptor, "w") as file:
            file.write(json.dumps(content) + "\n")


async def _run(arguments: argparse.Namespace) -> None:
    settings = Settings(
        state=arguments.state.absolute(),
        socket=arguments.socket.absolute(),
        host_socket=arguments.host_socket.absolute(),
        listen=arguments.listen,
        exit_when_idle_seconds=arguments.exit_when_idle,
        reflection=arguments.reflection,
    )
    controller = Controller(settings, load(arguments.config))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, controller.stop)

    def ready() -> None:
        descriptor, arguments.ready_fd = arguments.ready_fd, None
        gc.collect()
        gc.freeze()  # what is here stays: no collection need look at it again
        _tell(descriptor, {"ready": True, "socket": str(settings.socket)})

    await controller.run(ready)


class _Log:
    """Standard error, straight to its descriptor. A log that cannot be written ends nothing."""

    def write(self, text: str) -> None:
        with suppress(OSError):
            os.write(2, text.encode("utf-8", "backslashreplace"))

    def flush(self) -> None:
        """Nothing is kept back."""


def main() -> int:
    """Runs a controller: 0 after a graceful end, 2 if it cannot start, 70 if its store fails."""
    arguments = _arguments()
    structlog.configure(
        processors=[
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.WriteLoggerFactory(file=cast("TextIO", _Log())),
    )
    try:
        asyncio.run(_run(arguments))
    except (StartFailed, ConfigInvalid, StoreError) as problem:
        structlog.get_logger(__name__).critical("controller_failed", problem=str(problem))
        started = arguments.ready_fd is None
        _tell(arguments.ready_fd, {"ready": False, "problem": str(problem)})
        return 70 if started and isinstance(problem, StoreError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
