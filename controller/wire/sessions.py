"""Which clients are there.

Called by the invocation servicer (`OpenSession`) and by the application, which ends an ephemeral
controller when nobody is left. A session that is gone for longer than the grace is lost, and what
was bound to it is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from controller.core.ids import SessionId
from controller.engine import events as ev
from controller.loop import Loop


class Sessions:
    """The open sessions and the grace timers of those that are gone."""

    def __init__(self, loop: Loop, grace_seconds: float, changed: Callable[[], None]) -> None:
        self._loop = loop
        self._grace_seconds = grace_seconds
        self._changed = changed
        self._open: dict[SessionId, int] = {}
        self._timers: dict[SessionId, asyncio.TimerHandle] = {}

    @property
    def count(self) -> int:
        """How many clients are there."""
        return len(self._open)

    def expect(self, sessions: Iterable[SessionId]) -> None:
        """Gives sessions that are not open yet, such as an earlier controller's, their grace."""
        for session_id in sessions:
            if session_id and session_id not in self._open:
                self._start_timer(session_id)

    def opened(self, session_id: SessionId) -> None:
        """A client is there."""
        self._open[session_id] = self._open.get(session_id, 0) + 1
        if (timer := self._timers.pop(session_id, None)) is not None:
            timer.cancel()
        self._changed()

    def closed(self, session_id: SessionId) -> None:
        """A stream of the client ended."""
        left = self._open.get(session_id, 1) - 1
        if left:
            self._open[session_id] = left
            return
        self._open.pop(session_id, None)
        self._start_timer(session_id)
        self._changed()

    def _start_timer(self, session_id: SessionId) -> None:
        if session_id in self._timers:
            return
        loop = asyncio.get_running_loop()
        self._timers[session_id] = loop.call_later(self._grace_seconds, self._lost, session_id)

    def _lost(self, session_id: SessionId) -> None:
        self._timers.pop(session_id, None)
        self._loop.post(ev.SessionLost(session_id=session_id))
        self._changed()

    def close(self) -> None:
        """Forgets the timers."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
