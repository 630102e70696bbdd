"""Which events of a sandbox its host may forget: those from which nothing more can be lost.

Made by `hosts.attachment`. An event is done once what followed from it is durable; bytes that came
ahead of the event that names them are held until that one is done.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

ACK_BYTES = 1024 * 1024
ACK_EVENTS = 64

Done = asyncio.Future[None]


class Acknowledgements:
    """The events that were handled, in order, and what was acknowledged of them.

    Attributes:
        due: up to here the host should be told.
    """

    def __init__(self, on_due: Callable[[], object]) -> None:
        self._on_due = on_due
        self._events: deque[tuple[int, Done | None, int]] = deque()
        self._held: dict[str, Done] = {}
        self._told = 0
        self._durable = 0  # the last event of which the host need know no more
        self._bytes = 0  # of durable events, of which the host was not told
        self._counted = 0  # of the event that is being handled
        self.due = 0

    def restart(self) -> None:
        """Begins with a new stream, which has told nothing yet."""
        self._told = 0

    @property
    def waiting(self) -> bool:
        """Whether the host is to be told."""
        return self.due > self._told

    def take(self) -> int:
        """What to tell the host now."""
        self._told = self.due
        return self._told

    def count(self, size: int) -> None:
        """Counts bytes of the event that is being handled, which the host keeps until then."""
        self._counted += size

    def add(self, sequence: int, done: Done | None) -> None:
        """Takes an event that was handled; `done` is done once it is durable; None: it is."""
        self._events.append((sequence, done, self._counted))
        self._counted = 0
        if done is not None:
            done.add_done_callback(lambda _: self.advance())
        self.advance()

    def advance(self, *, urgent: bool = False) -> None:
        """Lets the host forget what is durable: in lots, since each one costs a message."""
        while self._events and (self._events[0][1] is None or self._events[0][1].done()):
            sequence, done, size = self._events.popleft()
            if done is not None and (done.cancelled() or done.exception() is not None):
                return  # it was not journalled, so the host must keep it
            self._durable = sequence
            self._bytes += size
        many = self._durable - self.due >= ACK_EVENTS
        if urgent or many or self._bytes >= ACK_BYTES:
            self.due = self._durable
            self._bytes = 0
        if self.waiting:
            self._on_due()

    def hold(self, name: str) -> Done:
        """Keeps the host from forgetting bytes whose use is not durable yet."""
        if name not in self._held:
            self._held[name] = asyncio.get_running_loop().create_future()
        return self._held[name]

    def release(self, names: Iterable[str], done: Done | None) -> None:
        """Lets go of the bytes that an event used, once what followed from it is durable."""
        held = [self._held.pop(name) for name in names if name in self._held]

        def let_go(_: object = None) -> None:
            for future in held:
                if not future.done():
                    future.set_result(None)

        if done is None:
            let_go()
        else:
            done.add_done_callback(let_go)

    def release_all(self) -> None:
        """Lets go of what nothing will use any more, so that the host can forget the sandbox."""
        for future in self._held.values():
            future.set_result(None)
        self._held.clear()
