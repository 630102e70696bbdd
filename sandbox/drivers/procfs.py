"""Reading `/proc`: which processes exist, what they are, and ending a set of them to a fixpoint.

Called by the drivers; calls the kernel only. Every read may meet a process that is just ending, so
every function answers with "not there" instead of raising.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
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


def children(parent: int) -> list[int]:
    """The processes that a process started and that have not been reaped."""
    return [
        found.pid
        for pid in pids()
        if (found := process(pid)) is not None and found.parent == parent
    ]


def direct_children(parent: int) -> list[int]:
    """The children of a process with one thread, without a look at all processes; empty also where
    the kernel does not keep the list."""
    return [int(word) for word in read(parent, f"task/{parent}/children").split()]


def descendants(root: int) -> list[int]:
    """All processes below a process, itself not among them."""
    below: dict[int, list[int]] = {}
    for pid in pids():
        if (found := process(pid)) is not None:
            below.setdefault(found.parent, []).append(pid)
    result: list[int] = []
    waiting = list(below.get(root, ()))
    while waiting:
        result.append(waiting.pop())
        waiting += below.get(result[-1], ())
    return result


def pss_bytes(pid: int) -> int:
    """A process's proportional share of memory; 0 when it is gone or not ours to read."""
    for line in read(pid, "smaps_rollup").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def namespace_pids(pid: int) -> list[int]:
    """The ids of a process in each pid namespace from this process's own to its innermost."""
    for line in read(pid, "status").splitlines():
        if line.startswith(b"NSpid:"):
            return [int(word) for word in line.split()[1:]]
    return []


def end_all(members: Callable[[], Iterable[int]], *, within_seconds: float) -> list[int]:
    """Kills what `members` finds until it finds nothing more, and answers with the survivors.

    It must be called off the event loop. A process that was found once is followed until it has
    ended, also when `members` no longer recognises it: the first process of a pid namespace loses
    its command line before the kernel has ended all others of that namespace, but becomes a zombie
    only afterwards.
    """
    deadline = time.monotonic() + within_seconds
    followed: dict[int, str] = {}
    while True:
        fresh = False
        for pid in members():
            found = process(pid)
            if found is not None and not found.zombie:
                fresh = True
                followed[pid] = found.start_time
                kill(pid)
        survivors = [pid for pid, start_time in followed.items() if same(pid, start_time)]
        if not fresh and not survivors:
            return []
        if time.monotonic() > deadline:
            return survivors
        time.sleep(_POLL_SECONDS)


def same(pid: int, start_time: str) -> bool:
    """Says whether the process that began at `start_time` still runs under this id."""
    found = process(pid)
    return found is not None and not found.zombie and found.start_time == start_time
