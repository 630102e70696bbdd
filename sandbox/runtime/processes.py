"""The processes of a sandbox: who is there, and ending them without missing one.

Called by the supervisor. As PID 1 everything but itself is a process of the sandbox; as an
ordinary process (in tests) only its own descendants are, and it touches nothing else.
"""

from __future__ import annotations

import posix

from .linux import read_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection

SIGINT, SIGKILL, SIGTERM, SIGCONT, SIGSTOP = 2, 9, 15, 18, 19
PF_EXITING = 4  # of linux/sched.h
EMPTY_SCANS = 8  # without PID 1's powers a process that forks and exits may slip through a look


class Process:
    """One process at one look."""

    __slots__ = ("parent", "pid", "start", "state")

    def __init__(self, pid: int, parent: int, state: bytes, start: bytes) -> None:
        """Holds pid, parent's pid, state letter and start time."""
        self.pid = pid
        self.parent = parent
        self.state = state
        self.start = start

    @property
    def key(self) -> tuple[int, bytes]:
        """What tells it from a later process with the same pid."""
        return (self.pid, self.start)


def scan() -> list[Process]:
    """Returns the sandbox's live processes, without the caller and without zombies."""
    own = posix.getpid()
    found = {}
    for name in posix.listdir("/proc"):
        if name.isdigit():
            process = look(int(name))
            if process is not None:
                found[process.pid] = process
    if own != 1:
        found = _descendants(found, own)
    found.pop(own, None)
    return [process for process in found.values() if process.state not in b"ZX"]


def is_alone_with(pid: int) -> bool:
    """Whether there is no process but the caller and one other, by one look at the names in /proc;
    False where that cannot be told so, as for anybody but PID 1."""
    if posix.getpid() != 1:
        return False
    return all(name in ("1", str(pid)) for name in posix.listdir("/proc") if name.isdigit())


def look(pid: int) -> Process | None:
    """Returns one process, or None when it is gone."""
    # pid (name) state ppid ... : the name may hold anything, so the last parenthesis counts.
    data = read_file(f"/proc/{pid}/stat")
    fields = data[data.rfind(b")") + 2 :].split()
    if len(fields) < 20:
        return None
    return Process(pid, int(fields[1]), fields[0], fields[19])


def is_ending(pid: int) -> bool:
    """Whether a process is on its way out: it closes its descriptors before it is dead."""
    data = read_file(f"/proc/{pid}/stat")
    fields = data[data.rfind(b")") + 2 :].split()
    return len(fields) < 20 or fields[0] in (b"Z", b"X") or bool(int(fields[6]) & PF_EXITING)


def _descendants(processes: dict[int, Process], root: int) -> dict[int, Process]:
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    result = {}
    pending = list(children.get(root, ()))
    while pending:
        pid = pending.pop()
        if pid not in result:
            result[pid] = processes[pid]
            pending += children.get(pid, ())
    return result


def signal_all(processes: list[Process], number: int) -> None:
    """Sends a signal to each process that is still there."""
    for process in processes:
        signal_one(process.pid, number)


def signal_one(pid: int, number: int) -> None:
    """Sends a signal to a process if it is still there."""
    try:
        posix.kill(pid, number)
    except OSError:
        pass  # it is gone, which is what signals of this module are for


def _is_childless() -> bool:
    """Whether the kernel knows of no child. Every orphan becomes a child of the caller (PID 1, or a
    subreaper), so then there is no other process at all, and no look at /proc could find one."""
    try:
        posix.waitid(posix.P_ALL, 0, posix.WEXITED | posix.WNOHANG | posix.WNOWAIT)
    except ChildProcessError:
        return True
    return False


class Sweep:
    """Kills every process but some, look by look, until none is found any more.

    PID 1 stops everybody first, in one call during which nobody can fork, so that a process which
    forks and exits all the time cannot slip through between two looks.
    """

    __slots__ = ("_empty", "_group", "_is_spared", "_spared", "killed")

    def __init__(
        self,
        spared: Collection[tuple[int, bytes]],
        is_spared: Callable[[Process], bool] | None = None,
        group: int = 0,
    ) -> None:
        """Spares the processes with these keys, and those of which the function says so.

        Args:
            spared: keys of processes.
            is_spared: tells of others.
            group: a process group in which victims may be: what can be stopped at once where this
                process is not PID 1.
        """
        self._group = group
        self._spared = spared
        self._is_spared = is_spared
        self._empty = 0
        self.killed: set[tuple[int, bytes]] = set()

    def step(self) -> bool:
        """Looks once and kills what it finds; returns whether nothing was left.

        The caller reaps between the steps.
        """
        if not self._spared and _is_childless():
            return True
        frozen = _signal_everybody(SIGSTOP, self._group)
        victims = [process for process in scan() if not self._spares(process)]
        signal_all(victims, SIGKILL)
        _signal_everybody(SIGCONT, self._group)
        self.killed.update(process.key for process in victims)
        self._empty = 0 if victims else self._empty + 1
        return self._empty >= (1 if frozen else EMPTY_SCANS)

    def _spares(self, process: Process) -> bool:
        if process.key in self._spared:
            return True
        return self._is_spared is not None and self._is_spared(process)


def _signal_everybody(number: int, group: int) -> bool:
    """Signals all other processes of the sandbox at once, as only PID 1 of it may: anywhere else
    the same call would reach the whole machine, and only a group can be meant."""
    if posix.getpid() != 1:
        if group:
            signal_one(-group, number)
        return False
    try:
        posix.kill(-1, number)
    except OSError:
        pass  # there is nobody
    return True
