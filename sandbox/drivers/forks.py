"""Processes that a zygote forked ahead of the sandboxes they will be.

Called by the bubblewrap driver; calls its zygote. A few are made ahead, each in its own namespaces
and control group and under its own uid; each is used once and has run nothing yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sandbox.drivers.arguments import ZYGOTE_UID
from sandbox.drivers.users import REPL_UID
from sandbox.drivers.zygotes import ForkedProcess, Zygote

if TYPE_CHECKING:
    from sandbox.drivers.cgroups import Cgroup, Hierarchy
    from sandbox.drivers.users import Slot, Users

READY = 2
ONE_UID = f"{REPL_UID} {ZYGOTE_UID} 1\n"  # outside both are this process's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """One process that waits for its order, with what it holds."""

    child: ForkedProcess
    group: Cgroup | None
    slot: Slot | None


class Forks:
    """Makes forks, some of them ahead.

    Args:
        start: Starts a zygote, which has imported what these sandboxes find.
        users: Where each gets its uids; None for this process's own.
        hierarchy: Where each gets its cgroup; None for none.
        numbers: Names of cgroups.
    """

    def __init__(
        self,
        start: Callable[[], Zygote],
        users: Users | None,
        hierarchy: Hierarchy | None,
        numbers: Iterator[int],
    ) -> None:
        self._start = start
        self._users = users
        self._hierarchy = hierarchy
        self._zygote: Zygote | None = None
        self._ready: deque[Fork] = deque()
        self._making: set[asyncio.Task[Fork]] = set()
        self._numbers = numbers
        self._closed = False

    async def take(self) -> Fork:
        """Gives one that is ready, or makes one.

        Raises:
            OSError: It could not be made; nothing of it is left.
            StartFailed: Likewise.
        """
        while self._ready:
            fork = self._ready.popleft()
            if fork.child.is_alive():
                return fork
            await self.drop(fork)
        task = self._begin()
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._keep)
            raise

    def refill(self) -> None:
        """Begins to make ready what was taken; what cannot be made now is made when needed."""
        while not self._closed and len(self._ready) + len(self._making) < READY:
            self._begin().add_done_callback(self._keep)

    async def drop(self, fork: Fork) -> None:
        """Ends one that was not used, and frees what it holds."""
        fork.child.kill()
        await fork.child.wait()
        fork.child.close()
        await asyncio.to_thread(self._give_back, fork.group, fork.slot)

    async def close(self) -> None:
        """Drops those that are ready, ends the zygote and makes no more."""
        self._closed = True
        if self._making:
            await asyncio.wait(self._making)
            await asyncio.sleep(0)  # for what is done with those that were made
        while self._ready:
            await self.drop(self._ready.popleft())
        if self._zygote is not None:
            await self._zygote.close()
            self._zygote = None

    def _begin(self) -> asyncio.Task[Fork]:
        task = asyncio.get_running_loop().create_task(self._make())
        self._making.add(task)
        task.add_done_callback(self._making.discard)
        return task

    def _keep(self, task: asyncio.Task[Fork]) -> None:
        if task.exception() is None:
            self._ready.append(task.result())

    async def _make(self) -> Fork:
        zygote = await self._living()
        slot = self._users.take() if self._users is not None else None
        group: Cgroup | None = None
        try:
            with contextlib.ExitStack() as stack:
                join: list[int] = []
                if self._hierarchy is not None:
                    group = self._hierarchy.create(str(next(self._numbers)))
                    for path in group.join_files():
                        join.append(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
                        stack.callback(os.close, join[-1])
                maps = slot.maps if slot is not None else ONE_UID
                child = await zygote.fork(maps=maps, is_root=slot is not None, join=join)
        except BaseException:
            self._give_back(group, slot)
            raise
        return Fork(child=child, group=group, slot=slot)

    async def _living(self) -> Zygote:
        if self._zygote is not None and not self._zygote.is_open:
            ended, self._zygote = self._zygote, None
            await ended.close()
        if self._zygote is None:
            self._zygote = self._start()
        return self._zygote

    def _give_back(self, group: Cgroup | None, slot: Slot | None) -> None:
        if group is not None:
            with contextlib.suppress(OSError):  # the next host of this owner removes it
                group.remove()
        if slot is not None and self._users is not None:
            self._users.give_back(slot)
