"""The command line as a process, with a state directory of its own.

Called by the end-to-end tests of the CLI. At the end of a test everything that the command line
started by itself must be gone by itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hutch import local
from tests.support import leaks

SECONDS = 60


class Cli:
    """A shell's view of one state directory."""

    def __init__(self, folder: Path, target: str = "") -> None:
        self.folder = folder
        self.state = folder / "state"
        runtime = folder / "run"
        runtime.mkdir(mode=0o700)
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("HUTCH_")},
            "HUTCH_STATE": str(self.state),
            "XDG_RUNTIME_DIR": str(runtime),
            "COLUMNS": "200",
        }
        if target:
            self.environment["HUTCH_TARGET"] = target

    def command(self, *words: str) -> list[str]:
        """The command line's words."""
        return [sys.executable, "-I", "-m", "hutch.cli", *words]

    def run(
        self, *words: str, stdin: bytes = b"", cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end."""
        done = subprocess.run(
            self.command(*words),
            input=stdin,
            capture_output=True,
            cwd=cwd or self.folder,
            env=self.environment,
            timeout=SECONDS,
        )
        return subprocess.CompletedProcess(
            done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
        )

    def json(self, *words: str) -> Any:
        """Runs a command with `--json` and reads its document."""
        done = self.run(*words, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Starts a command."""
        return subprocess.Popen(
            self.command(*words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env=self.environment,
        )

    def program(self, source: str, name: str = "program.py") -> str:
        """Writes a program's file."""
        path = self.folder / name
        path.write_text(source)
        return str(path)

    def controller(self) -> local.LiveProcess | None:
        """The live controller of the state directory."""
        found = local.read_process(self.state / "controller.json")
        return found if found is not None and found.alive() else None

    def host(self) -> local.LiveProcess | None:
        """The live host of the state directory."""
        found = local.read_process(self.state / "host" / "host.json")
        return found if found is not None and found.alive() else None

    def everything_has_ended(self) -> bool:
        """Whether neither supervisor nor controller nor host lives."""
        return self.controller() is None and self.host() is None and self._up_is_free()

    def _up_is_free(self) -> bool:
        path = self.state / "up.lock"
        if not path.exists():
            return True
        lock = local.lock_file(path)
        if lock is None:
            return False
        lock.close()
        return True

    def wait_until_everything_has_ended(self) -> None:
        """Waits; what was started by itself ends by itself."""
        wait_until(self.everything_has_ended)


def wait_until(condition: Any, seconds: float = 30.0) -> None:
    """Waits until a condition holds that only other processes can make true."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{condition} did not come true within {seconds} s")
        time.sleep(0.02)


def read_line(process: subprocess.Popen[str]) -> str:
    """The next line that a process prints."""
    assert process.stdout is not None
    return process.stdout.readline()


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Waits for a process: exit code, standard output and error."""
    stdout, stderr = process.communicate(timeout=SECONDS)
    return process.returncode, stdout, stderr


def interrupt(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Presses Ctrl-C and waits."""
    process.send_signal(signal.SIGINT)
    return finish(process)


@contextmanager
def command_line(target: str = "") -> Iterator[Cli]:
    """A command line whose processes are gone when the block has ended."""
    base = Path(tempfile.gettempdir(), "pytest-of-all")
    base.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="c", dir=base) as folder:
        cli = Cli(Path(folder), target)
        before = leaks.take_census(Path(tempfile.gettempdir()))
        try:
            yield cli
            cli.wait_until_everything_has_ended()
        except BaseException:
            leaks.end_processes(before)
            raise
