"""A controller and a host for one measurement, with a warm pool of a known size.

Called by `bench.run`. Both are the processes that `hutch up` starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

READY_SECONDS = 60.0


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


def memory_bytes(pid: int) -> int:
    """The resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no process {pid}")
