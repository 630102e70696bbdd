"""Starts made ready ahead: a shell in a cgroup of its own and under its uid, that waits for bwrap.

Called by the bubblewrap driver. What a start needs before it is known which sandbox it is for costs
as much as a quarter of bwrap: a process, a cgroup, a change of the uid. A few are made ahead; each
is used once, has run nothing yet, and ends by itself when the host is gone, because it reads from a
pipe that only the host holds.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sandbox.drivers import launch
from sandbox.drivers.driver import StartFailed
from sandbox.drivers.process import Begun, SpawnedProcess, begin

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from sandbox.drivers.cgroups import Cgroup, Hierarchy
    from sandbox.drivers.users import Slot, Users

READY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One shell that waits, with what it holds."""

    begun: Begun
    tell: int
    group: Cgroup | None
    slot: Slot | None
    seccomp: int  # the filter's descriptor there

    def go(self, line: bytes) -> SpawnedProcess:
        """Has the shell become a program; see `launch.line`.

        Raises:
            OSError: It is gone.
        """
        os.set_blocking(self.tell, False)
        if os.write(self.tell, line) != len(line):
            raise OSError("the command line of a sandbox does not fit into a pipe")
        os.close(self.tell)
        return self.begun.watch()


class Starts:
    """Makes starts, some of them ahead.

    Args:
        users: Where each gets its uids; None for this process's own.
        hierarchy: Where each gets its cgroup; None for none.
        filter_path: The compiled system call filter.
    """

    def __init__(self, users: Users | None, hierarchy: Hierarchy | None, filter_path: Path) -> None:
        self._users = users
        self._hierarchy = hierarchy
        self._filter_path = filter_path
        self._ready: deque[Start] = deque()
        self._made = 0
        self._closed = False

    def take(self) -> Start:
        """Gives one that is ready, or makes one.

        Raises:
            OSError: It could not be made; nothing of it is left.
            StartFailed: Likewise.
        """
        while self._ready:
            start = self._ready.popleft()
            if start.begun.child.poll() is None:
                return start
            self.drop(start)
        return self.make()

    def refill(self) -> None:
        """Makes ready what was taken; what cannot be made now is made, or refused, when needed."""
        with contextlib.suppress(OSError, StartFailed):
            while not self._closed and len(self._ready) < READY:
                self._ready.append(self.make())

    def make(
        self,
        *,
        prefix: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Start:
        """Makes one.

        Args:
            prefix: Words before the shell.
            env: The shell's environment.
            pass_fds: Further descriptors that it keeps.

        Raises:
            OSError: It could not be made; nothing of it is left.
            StartFailed: Likewise.
        """
        slot = self._users.take() if self._users is not None else None
        group: Cgroup | None = None
        try:
            if self._hierarchy is not None:
                self._made += 1
                group = self._hierarchy.create(str(self._made))
            with contextlib.ExitStack() as stack:
                reads, tell = os.pipe()
                stack.callback(os.close, reads)
                closing = stack.enter_context(contextlib.ExitStack())
                closing.callback(os.close, tell)
                seccomp = os.open(self._filter_path, os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, seccomp)
                join = group.join_files() if group else ()
                begun = begin(
                    [*prefix, *launch.waiting(join=join, uid=slot.uid if slot else None)],
                    env=env or {},
                    pass_fds=[seccomp, *([slot.user_namespace] if slot else ()), *pass_fds],
                    reads=reads,
                )
                closing.pop_all()
        except (OSError, StartFailed):
            self._give_back(group, slot)
            raise
        return Start(begun=begun, tell=tell, group=group, slot=slot, seccomp=seccomp)

    def drop(self, start: Start) -> None:
        """Ends one that was not used, and frees what it holds."""
        os.close(start.tell)
        start.begun.drop()
        self._give_back(start.group, start.slot)

    def close(self) -> None:
        """Drops those that are ready and makes no more."""
        self._closed = True
        while self._ready:
            self.drop(self._ready.popleft())

    def _give_back(self, group: Cgroup | None, slot: Slot | None) -> None:
        if group is not None:
            with contextlib.suppress(OSError):  # the next host of this owner removes it
                group.remove()
        if slot is not None and self._users is not None:
            self._users.give_back(slot)
