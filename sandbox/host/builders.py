"""Who may start a sandbox now: whoever was asked for one, before the pool that makes some ahead.

Held by the workshop; used by each hosted sandbox and by the pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Builders:
    """As many starts at once as there are builders.

    Demand waits for demand only. The pool begins a sandbox while no demanded one is starting, so
    what it has begun may run beside a demand, and is never waited for.
    """

    def __init__(self, count: int) -> None:
        """Takes the number of builders, of either kind."""
        self.slots = asyncio.Semaphore(count)
        self._refills = asyncio.Semaphore(count)
        self._starting = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    @contextmanager
    def demand(self) -> Iterator[None]:
        """A sandbox that was asked for is being started while the block runs."""
        self._starting += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._starting -= 1
            if not self._starting:
                self._quiet.set()

    async def begin_refill(self) -> None:
        """Waits until the pool may begin a sandbox; `end_refill` gives the builder back."""
        await self._refills.acquire()
        try:
            await self._quiet.wait()
        except BaseException:
            self._refills.release()
            raise

    def end_refill(self) -> None:
        """Gives a builder back."""
        self._refills.release()
