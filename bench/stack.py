"""A controller and a host for one measurement, with a warm pool of a known size.

Called by `bench.run`. Both are the processes that `hutch up` starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

READY_SECONDS = 60.0
QUIET_LOOKS = 8


class Stack:
    """Where the two listen, and which processes they are."""

    def __init__(self, folder: Path, pool_size: int, capacity: int) -> None:
        self.folder = folder
        self.target = f"unix:{folder / 'c.sock'}"
        host = ["sandbox.host", "--state", str(folder / "state" / "host")]
        host += ["--socket", str(folder / "h.sock")]
        host += ["--pool-size", str(pool_size), "--capacity", str(capacity)]
        controller = ["controller", "--state", str(folder / "state")]
        controller += ["--socket", str(folder / "c.sock")]
        controller += ["--host-socket", str(folder / "h.sock")]
        self.host = self._start("host", host)
        self.controller = self._start("controller", controller)

    def _start(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        reader, writer = os.pipe()
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-I", "-m", *command, "--ready-fd", str(writer)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(writer,),
            )
        os.close(writer)
        with os.fdopen(reader) as file:
            line = file.readline()
        if not line or not json.loads(line)["ready"]:
            raise SystemExit((self.folder / f"{name}.log").read_text("utf-8", "replace"))
        return process

    def until_quiet(self) -> None:
        """Waits until the host has used no CPU for a while: its pool is full then."""
        limit, quiet, used = time.monotonic() + READY_SECONDS, 0, -1
        while quiet < QUIET_LOOKS:
            if time.monotonic() > limit:
                raise SystemExit("the pool does not fill")
            time.sleep(0.1)
            before, used = used, _cpu_ticks(self.host.pid)
            quiet = quiet + 1 if used - before <= 1 else 0

    def close(self) -> None:
        """Ends both."""
        for process in (self.controller, self.host):
            process.terminate()
            process.wait(READY_SECONDS)


@contextmanager
def stack(*, pool_size: int = 0, capacity: int = 64) -> Iterator[Stack]:
    """Both processes, for as long as the block runs."""
    with tempfile.TemporaryDirectory(prefix="hutch-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # sandboxes run as other users
        (folder / "state").mkdir(mode=0o700)
        (folder / "state" / "host").mkdir(mode=0o700)
        found = Stack(folder, pool_size, capacity)
        try:
            yield found
        finally:
            found.close()


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15]))  # its own and that of children it has waited for
