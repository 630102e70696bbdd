"""The few Linux calls that Python has no function for, without the import cost of `ctypes`.

Called by the supervisor (to protect itself) and by its children (to give up what they could use
against it). Where the interpreter has no `_ctypes`, nothing here holds, and each says so.
"""

from __future__ import annotations

import posix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

signals: Any = __import__("_signal")  # the module `signal` would import much more
PR_GET_DUMPABLE = 3
PR_SET_DUMPABLE = 4
PR_GET_SECCOMP = 21
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2
CAP_SETUID = 7
OOM_SCORE = b"500"


def prctl(option: int, first: int = 0, second: Any = 0) -> int:
    """Calls prctl(2); returns -1 when it failed or cannot be called."""
    try:
        import _ctypes
    except ImportError:
        return -1
    library: Any = _ctypes
    address = library.dlsym(library.dlopen(None, 2), "prctl")
    return int(library.call_cdeclfunction(address, (option, first, second, 0, 0)))


def hide_memory() -> bool:
    """Makes this process not dumpable: nobody of its uid can trace it or open its /proc files."""
    prctl(PR_SET_DUMPABLE, 0)
    return prctl(PR_GET_DUMPABLE) == 0


def adopt_orphans() -> None:
    """Makes this process the parent of its descendants' orphans; PID 1 is that anyway."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def can_filter() -> bool:
    """Tells whether a system call filter can be installed here."""
    from .syscalls import numbers

    return bool(numbers(posix.uname().machine)) and prctl(PR_GET_SECCOMP) in (0, 2)


def install_filter(supervisor_pid: int) -> bool:
    """Denies this process and its descendants what could harm the supervisor; for good.

    Args:
        supervisor_pid: the process that must not be signalled, traced or slowed down.

    Returns:
        Whether the filter holds.
    """
    from .syscalls import build_filter

    program = build_filter(posix.uname().machine, supervisor_pid)
    if not program or prctl(PR_SET_NO_NEW_PRIVS, 1) != 0:
        return False
    kept, address = _place(program)
    # struct sock_fprog: the number of 8-byte instructions, padding, a pointer to them.
    head = (len(program) // 8).to_bytes(2, "little") + bytes(6) + address.to_bytes(8, "little")
    holds = prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, head) == 0
    del kept
    return holds


def _place(data: bytes) -> tuple[object, int]:
    """Copies bytes to a place in memory; it stays there as long as the first result does."""
    import _ctypes

    # The module `array` would do it too, and import `collections.abc` first.
    octet = type("octet", (_ctypes._SimpleCData,), {"_type_": "B"})
    octets = type("octets", (_ctypes.Array,), {"_type_": octet, "_length_": len(data)})
    library: Any = octets
    copy = library.from_buffer_copy(data)
    return copy, int(_ctypes.addressof(copy))


def has_capability(bit: int) -> bool:
    """Tells whether this process has a capability in effect."""
    for line in read_file("/proc/self/status").splitlines():
        if line.startswith(b"CapEff:"):
            return bool(int(line.split()[1], 16) >> bit & 1)
    return False


def go_first_without_memory() -> None:
    """Asks the kernel to end this process and its descendants before others, PID 1 above all, when
    memory is short. What cannot be asked for is left as it is."""
    try:
        descriptor = posix.open("/proc/self/oom_score_adj", posix.O_WRONLY | posix.O_CLOEXEC)
    except OSError:
        return
    try:
        posix.write(descriptor, OOM_SCORE)
    except OSError:
        pass  # it is lower than what it may not leave
    finally:
        posix.close(descriptor)


def read_file(path: str) -> bytes:
    """Reads a small file of /proc; empty when it is gone."""
    try:
        descriptor = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return posix.read(descriptor, 65_536)
    except OSError:
        return b""
    finally:
        posix.close(descriptor)


def become(uid: int) -> None:
    """Changes to another uid and gid of the same number, for good, without groups.

    Raises:
        OSError: the process may not, or has its old uid afterwards.
    """
    if posix.getuid() == uid:
        return
    posix.setgroups([])
    posix.setresgid(uid, uid, uid)
    posix.setresuid(uid, uid, uid)
    if posix.getresuid() != (uid, uid, uid):
        raise OSError("the uid did not change")
    # Changing the uid made the process not dumpable; its own /proc files must be its own.
    prctl(PR_SET_DUMPABLE, 1)
