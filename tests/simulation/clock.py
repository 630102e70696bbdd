"""Simulated time: a heap of what happens next, and the only source of chance of a run."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

MILLISECOND = 1000
SECOND = 1000 * MILLISECOND


class Clock:
    """Time passes only from one action to the next, so a seed is a run, step by step."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now_us = 1_000 * SECOND
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, delay_us: int, action: Callable[[], None]) -> int:
        """Does something later; gives back when."""
        return self.at(self.now_us + delay_us, action)

    def at(self, time_us: int, action: Callable[[], None]) -> int:
        """Does something at a time; those of one time in the order in which they were asked for."""
        self._count += 1
        heapq.heappush(self._heap, (time_us, self._count, action))
        return time_us

    def soon(self, action: Callable[[], None], most_us: int = 4 * MILLISECOND) -> int:
        """Does something after a delay of chance; most are short, a few very long."""
        if self.chance.random() < 0.03:
            most_us *= 30
        return self.after(self.chance.randint(1, most_us), action)

    def likely(self, probability: float) -> bool:
        """Throws the dice."""
        return self.chance.random() < probability

    def step(self) -> bool:
        """Does what is next; False when nothing is."""
        if not self._heap:
            return False
        time_us, _, action = heapq.heappop(self._heap)
        self.now_us = max(time_us, self.now_us + 1)  # no two things happen at once
        action()
        return True


class Pipe:
    """One direction of a stream: delayed, in order, and silent once it is cut."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_us = 0
        self.open = True

    def send(self, action: Callable[[], None]) -> None:
        """Delivers unless the pipe is cut before."""
        delay = self._clock.chance.randint(1, 3 * MILLISECOND)
        self._last_us = max(self._last_us, self._clock.now_us + delay)
        self._clock.at(self._last_us, lambda: action() if self.open else None)
