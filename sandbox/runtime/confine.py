"""Turns a fork of the supervisor into a process that user code may run in.

Called by `repl` and `capture`, in the child, first of all. Afterwards the child has no descriptor
of the supervisor's, no right that it had, and a system call filter that it cannot take off.
"""

from __future__ import annotations

import posix

from . import linux
from .linux import signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .settings import Settings

HIGHEST_DESCRIPTOR = 65_536


def confine(settings: Settings, supervisor: int, kept: tuple[int, ...]) -> None:
    """Gives up everything but the kept descriptors.

    Raises:
        OSError: something that must hold does not; the caller must exit.
    """
    signals.set_wakeup_fd(-1)
    for number in (signals.SIGCHLD, signals.SIGTERM, signals.SIGHUP):
        signals.signal(number, signals.SIG_DFL)
    linux.go_first_without_memory()
    posix.setsid()
    _close_all_but(kept)
    null = posix.open("/dev/null", posix.O_RDWR)
    for descriptor in (0, 1, 2):
        if descriptor != null:
            posix.dup2(null, descriptor)
    if settings.repl_uid >= 0:
        linux.become(settings.repl_uid)
    linux.prctl(linux.PR_SET_DUMPABLE, 1)  # inherited from the supervisor; here it must be off
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    if settings.use_filter and linux.can_filter() and not linux.install_filter(supervisor):
        raise OSError("the system call filter could not be installed")
    if settings.open_files:
        _limit_files(settings.open_files)


def _close_all_but(kept: tuple[int, ...]) -> None:
    low = 0
    for descriptor in (*sorted(kept), HIGHEST_DESCRIPTOR):
        posix.closerange(low, descriptor)
        low = descriptor + 1


def _limit_files(limit: int) -> None:
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
