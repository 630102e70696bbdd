"""A real controller and a real host as processes, on a state directory of their own.

Used by the end-to-end tests. Both are started as `hutch up` starts them; a test may kill either.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

READY_SECONDS = 60.0


class NotReady(Exception):
    """A process that did not become ready; the text is its own problem."""


class Stack:
    """Two processes and where they listen."""

    def __init__(self, folder: Path, driver: str, config: str = "") -> None:
        self.folder = folder
        self.state = folder / "state"
        self.target = f"unix:{folder / 'c.sock'}"
        self.driver = driver
        self.controller: subprocess.Popen[bytes] | None = None
        self.host: subprocess.Popen[bytes] | None = None
        self._config: list[str] = []
        self.state.mkdir(mode=0o700)
        if config:
            path = folder / "hutch.toml"
            path.write_text(config)
            self._config = ["--config", str(path)]

    def start_host(self, *extra: str) -> None:
        """Starts the host and waits until it is ready."""
        (self.state / "host").mkdir(mode=0o700, exist_ok=True)
        self.host = self._start(
            "host",
            [
                "sandbox.host",
                *("--state", str(self.state / "host")),
                *("--socket", str(self.folder / "h.sock")),
                *("--driver", self.driver),
                *self._config,
                *extra,
            ],
        )

    def start_controller(self, *extra: str) -> None:
        """Starts the controller and waits until it is ready."""
        self.controller = self._start(
            "controller",
            [
                "controller",
                *("--state", str(self.state)),
                *("--socket", str(self.folder / "c.sock")),
                *("--host-socket", str(self.folder / "h.sock")),
                *self._config,
                *extra,
            ],
        )

    def _start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        reader, writer = os.pipe()
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-I", "-m", *command, "--ready-fd", str(writer)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(writer,),
                start_new_session=True,
            )
        os.close(writer)
        with os.fdopen(reader) as file:
            line = file.readline()
        if not line or not json.loads(line)["ready"]:
            process.wait(READY_SECONDS)
            raise NotReady(f"{name}: {line or self.log(name)}")
        return process

    def log(self, name: str) -> str:
        """What a process has logged."""
        return (self.folder / f"{name}.log").read_text("utf-8", "replace")

    def kill_controller(self) -> None:
        """`kill -9` and wait."""
        assert self.controller is not None
        self.controller.send_signal(signal.SIGKILL)
        self.controller.wait()
        self.controller = None

    def kill_host(self) -> None:
        """`kill -9` and wait."""
        assert self.host is not None
        self.host.send_signal(signal.SIGKILL)
        self.host.wait()
        self.host = None

    def close(self) -> None:
        """Ends both, gracefully; their exit codes must say so."""
        codes = []
        for process in (self.controller, self.host):
            if process is not None:
                process.terminate()
                codes.append(process.wait(READY_SECONDS))
        self.controller = self.host = None
        assert not any(codes), f"exit codes {codes}\n{self.log('controller')}\n{self.log('host')}"


@contextmanager
def stack(driver: str = "bubblewrap", config: str = "") -> Iterator[Stack]:
    """A running pair, ended and removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="hutch-e2e-") as name:
        os.chmod(name, 0o711)
        found = Stack(Path(name), driver, config)
        try:
            found.start_host()
            found.start_controller()
            yield found
        finally:
            found.close()
