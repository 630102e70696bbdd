"""The owner's lease on this host: who watches, and since when nobody does.

Kept by the servicer's `WatchHost`; the daemon runs its two watchers. The clock is a parameter.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol


class Clock(Protocol):
    """Time that only rises, in seconds, and a way to wait."""

    def now(self) -> float:
        """The seconds since some fixed point."""

    async def sleep(self, seconds: float) -> None:
        """Waits."""


class MonotonicClock:
    """The machine's own clock."""

    def now(self) -> float:
        """The monotonic time."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Waits on the event loop."""
        await asyncio.sleep(seconds)


class Lease:
    """Held while at least one `WatchHost` stream is open, and for a while after."""

    def __init__(self, clock: Clock) -> None:
        """Counts as just cut: a controller has the whole lease to come for the first time."""
        self._clock = clock
        self._streams = 0
        self._cut_at = clock.now()

    def open(self) -> None:
        """A stream was opened."""
        self._streams += 1

    def close(self) -> None:
        """A stream was cut."""
        self._streams -= 1
        self._cut_at = self._clock.now()

    def unwatched_seconds(self) -> float:
        """Since when nobody watches; 0 while somebody does."""
        return 0.0 if self._streams else self._clock.now() - self._cut_at

    async def run_orphan_watch(
        self, limit_seconds: float, destroy_all: Callable[[], Awaitable[object]]
    ) -> None:
        """Destroys the owner's sandboxes each time nobody has watched for `limit_seconds`."""
        while True:
            await self._wait_unwatched(limit_seconds)
            await destroy_all()
            await self._clock.sleep(max(1.0, limit_seconds / 10))

    async def run_exit_watch(
        self, limit_seconds: float, idle: Callable[[], bool], leave: Callable[[], object]
    ) -> None:
        """Calls `leave` once nobody has watched for `limit_seconds` and the host is idle."""
        while True:
            await self._wait_unwatched(limit_seconds)
            if idle():
                leave()
                return
            await self._clock.sleep(min(1.0, max(0.05, limit_seconds / 10)))

    async def _wait_unwatched(self, limit_seconds: float) -> None:
        while (left := limit_seconds - self.unwatched_seconds()) > 0:
            # While somebody watches, `left` is the whole limit; a cut restarts the count anyway.
            await self._clock.sleep(left)
