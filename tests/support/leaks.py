"""Finds what a test left behind: descriptors, processes, folders, control groups.

Called by `tests/conftest.py` around every test. Orphans of a test become children of the test
process (it is a subreaper), so that a process whose parent is gone is seen as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

PREFIXES = ("hutch", "hutch-", "bwrap")
_PR_SET_CHILD_SUBREAPER = 36
_CGROUP = "control group"
_CGROUP_ROOT = Path("/sys/fs/cgroup")
# gRPC keeps its poller for the life of the process.
_LASTING = ("anon_inode:[eventpoll]", "anon_inode:[eventfd]", "anon_inode:[io_uring]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """What the test process holds at one moment."""

    descriptors: frozenset[tuple[int, str]]
    processes: frozenset[tuple[int, str]]
    folders: frozenset[str]
    cgroups: frozenset[str]


def become_subreaper() -> None:
    """Makes orphans of this process's descendants its own children."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def take_census(temporary: Path) -> Census:
    """Counts what there is now; folders are those directly in `temporary`."""
    return Census(
        descriptors=_descriptors(),
        processes=_children(),
        folders=frozenset(
            name for name in os.listdir(temporary) if not name.startswith("pytest-of-")
        ),
        cgroups=_cgroups(),
    )


def find_leaks(before: Census, temporary: Path, patience_seconds: float = 5.0) -> list[str]:
    """What is there now and was not before, after waiting a little for it to go."""
    deadline = time.monotonic() + patience_seconds
    while found := _compare(before, take_census(temporary)):
        gc.collect()
        if all(line.startswith(_CGROUP) for line in found) and _others_run_sandboxes():
            return []  # control groups belong to the machine: these may be another run's
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return found


def end_processes(before: Census) -> None:
    """Kills children that were not there before, so that the next test starts clean."""
    for pid, _ in _children() - before.processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended but was not reaped does not."""
    try:
        return _state(pid) not in ("Z", "X", "x")
    except (FileNotFoundError, ProcessLookupError):
        return False


def _compare(before: Census, after: Census) -> list[str]:
    found = [
        f"descriptor {number} -> {_describe(number, what)}"
        for number, what in after.descriptors - before.descriptors
    ]
    found += [f"process {pid}: {line}" for pid, line in after.processes - before.processes]
    found += [f"temporary {name}" for name in after.folders - before.folders]
    found += [f"{_CGROUP} {name}" for name in after.cgroups - before.cgroups]
    return sorted(found)


def _describe(number: int, target: str) -> str:
    """What a descriptor is; for a socket also its ends."""
    if not target.startswith("socket:"):
        return target
    try:
        with socket.socket(fileno=os.dup(number)) as copy:
            ends = copy.family.name, copy.getsockname(), copy.getpeername()
    except OSError as problem:
        return f"{target} {problem.strerror}"
    return f"{target} {ends}"


def _others_run_sandboxes() -> bool:
    """Whether a test run or a host that is not below this process is alive."""
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            if (b"pytest" in line or b"sandbox.host" in line) and not _is_below_us(pid):
                return True
        except (FileNotFoundError, ProcessLookupError):
            continue
    return False


def _is_below_us(pid: int) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = _parent(pid)
    return False


def _descriptors() -> frozenset[tuple[int, str]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the descriptor of this very listing
        if target not in _LASTING:
            found.add((int(name), target))
    return frozenset(found)


def _children() -> frozenset[tuple[int, str]]:
    """Children that run. Those that have ended are reaped: a subreaper owes that to orphans."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return frozenset()
    found = set()
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            if _parent(pid) != os.getpid():
                continue
            if _state(pid) == "Z":
                os.waitpid(pid, os.WNOHANG)
                continue
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        except (FileNotFoundError, ProcessLookupError, ChildProcessError):
            continue
        found.add((pid, line.decode(errors="replace")[:300]))
    return frozenset(found)


def _fields(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def _state(pid: int) -> str:
    return _fields(pid)[0]


def _parent(pid: int) -> int:
    return int(_fields(pid)[1])


def _cgroups() -> frozenset[str]:
    """Control groups of ours: directly in a hierarchy's root, or beside this process."""
    found: set[str] = set()
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        hierarchy = controllers.removeprefix("name=").split(",")[0]
        for root in (_CGROUP_ROOT / hierarchy, _CGROUP_ROOT / "unified", _CGROUP_ROOT):
            for folder in {root, root / path.lstrip("/")}:
                with contextlib.suppress(OSError):
                    found.update(
                        entry.path
                        for entry in os.scandir(folder)
                        if entry.name.startswith(PREFIXES) and entry.is_dir()
                    )
    return frozenset(found)
