"""Reading `/proc`: which processes exist, what they are, and ending a set of them to a fixpoint.

Called by the drivers; calls the kernel only. Every read may meet a process that is just ending, so
every function answers with "not there" instead of raising.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_POLL_SECONDS = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process as `/proc/PID/stat` shows it."""

    pid: int
    parent: int
    session: int
    start_time: str  # field 22, clock ticks since boot; with the pid it names one process for good
    zombie: bool


def pids() -> Iterator[int]:
    """Yields the ids of all processes that this process can see."""
    for name in os.listdir(PROC):
        if name.isdecimal():
            yield int(name)


def read(pid: int, name: str) -> bytes:
    """Reads one file of a process; empty when it is gone or not ours to read."""
    try:
        return (PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""


def process(pid: int) -> Process | None:
    """Reads one process, or answers None when it is gone."""
    # The command's name is in parentheses and may contain any byte, so split at the last one.
    _, parenthesis, rest = read(pid, "stat").rpartition(b")")
    fields = rest.split()
    if not parenthesis or len(fields) < 20:
        return None
    return Process(
        pid=pid,
        parent=int(fields[1]),
        session=int(fields[3]),
        start_time=fields[19].decode("ascii"),
        zombie=fields[0] in (b"Z", b"X"),
    )


def alive(pid: int) -> bool:
    """Says whether a process runs; a zombie does not."""
    found = process(pid)
    return found is not None and not found.zombie


def uids(pid: int) -> frozenset[int]:
    """The real, effective, saved and file system uid of a process; empty when it is gone."""
    for line in read(pid, "status").splitlines():
        if line.startswith(b"Uid:"):
            return frozenset(int(word) for word in line.split()[1:])
    return frozenset()


def namespace(pid: int, kind: str) -> int | None:
    """The inode number of a namespace of a process; None when it cannot be read."""
    try:
        return os.stat(PROC / str(pid) / "ns" / kind).st_ino
    except OSError:
        return None


def kill(pid: int) -> None:
    """Sends SIGKILL; a process that is gone or out of reach is left to the caller's own proof."""
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def end_all(members: Callable[[], list[int]], *, within_seconds: float) -> list[int]:
    """Kills what `members` finds until it finds nothing more, and answers with the survivors.

    It must be called off the event loop. One scan that finds nothing is the proof, so `members`
    has to see every process that could still start another one.
    """
    deadline = time.monotonic() + within_seconds
    while found := members():
        for pid in found:
            kill(pid)
        if time.monotonic() > deadline:
            return found
        time.sleep(_POLL_SECONDS)
    return []
