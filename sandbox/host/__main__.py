"""The command line of the sandbox host: `python -I -m sandbox.host`.

Started by `hutch up` and by people; runs the daemon, or the self-check with `--check`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO, cast

import structlog

from sandbox.host import check
from sandbox.host.check import EXIT_PROBLEM
from sandbox.host.config import ConfigError, load
from sandbox.host.daemon import HostOptions, HostProblem, run
from sandbox.host.identity import StateDamaged
from sandbox.host.offers import (
    DriverProblem,
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sandbox.host", description=__doc__)
    parser.add_argument("--state", type=Path, help="the host's own folder, 0700")
    parser.add_argument("--socket", type=Path, help="the unix socket to serve on")
    parser.add_argument("--driver", help="the default driver")
    parser.add_argument("--capacity", type=int, help="how many sandboxes at once")
    parser.add_argument("--pool-size", type=int, help="how many sandboxes are kept ready; 0: none")
    parser.add_argument("--config", type=Path, help="a TOML file with a [host] table")
    parser.add_argument(
        "--exit-when-unwatched",
        type=float,
        metavar="SECONDS",
        help="exit when no controller has watched for so long and no sandbox is there",
    )
    parser.add_argument(
        "--ready-fd", type=int, metavar="N", help="where to write one JSON line when ready"
    )
    parser.add_argument("--check", action="store_true", help="only check what can be enforced here")
    parser.add_argument("--json", action="store_true", help="with --check: print JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, or 2 when it cannot start."""
    parser = _parser()
    options = parser.parse_args(arguments)
    configure_logging()
    if not options.check and (options.state is None or options.socket is None):
        parser.error("--state and --socket are needed")
    starter = _Starter(options.ready_fd)
    try:
        config = load(
            options.config,
            driver=options.driver,
            capacity=options.capacity,
            pool_size=options.pool_size,
        )
        if options.check:
            return asyncio.run(check.run(as_json=options.json, config=config))
        host = HostOptions(
            state=options.state.absolute(),
            socket=options.socket.absolute(),
            config=config,
            exit_when_unwatched_seconds=options.exit_when_unwatched,
        )
        asyncio.run(run(host, starter.ready))
    except (ConfigError, HostProblem, DriverProblem, StateDamaged) as problem:
        starter.tell({"ready": False, "problem": str(problem)})
        print(f"sandbox host: {problem}", file=sys.stderr)  # noqa: T201
        return EXIT_PROBLEM
    return 0


class _Log:
    """Standard error, straight to its descriptor. A log that cannot be written ends nothing."""

    def write(self, text: str) -> None:
        with suppress(OSError):
            os.write(2, text.encode("utf-8", "backslashreplace"))

    def flush(self) -> None:
        """Nothing is kept back."""


def configure_logging() -> None:
    """Logs JSON lines to stderr."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(file=cast("TextIO", _Log())),
    )


class _Starter:
    """Whoever waits at the other end of `--ready-fd`; it is told once."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def ready(self, facts: dict[str, object]) -> None:
        """Says that the host is ready; what was made for that is never collected."""
        gc.collect()
        gc.freeze()
        self.tell({"ready": True, **facts})

    def tell(self, document: dict[str, object]) -> None:
        """Writes one line and closes the descriptor."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(json.dumps(document) + "\n")
        except OSError:
            structlog.get_logger().warning("starter_gone")


if __name__ == "__main__":
    sys.exit(main())
