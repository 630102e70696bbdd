"""Cells that are to be cancelled because their stream was cut, until its grace is over.

Made by the invocation servicer; called by `boxes`. A client that comes back in time and names its
cells takes them over, so that a bad connection cancels nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from controller.core.errors import Refused
from controller.core.ids import CellId, InvocationId
from controller.engine import events as ev
from controller.loop import Loop


class CutCells:
    """The cells of streams that were cut a moment ago."""

    def __init__(self, loop: Loop, grace_seconds: float) -> None:
        self._loop = loop
        self._grace_seconds = grace_seconds
        self._cells: dict[tuple[InvocationId, CellId], asyncio.TimerHandle] = {}

    def leave(self, invocation_id: InvocationId, cells: Iterable[CellId]) -> None:
        """Has cells of one box cancelled, in this order, unless they are taken over in time."""
        loop = asyncio.get_running_loop()
        due = loop.time() + self._grace_seconds
        for cell_id in cells:
            key = (invocation_id, cell_id)
            if (earlier := self._cells.get(key)) is not None:
                earlier.cancel()
            self._cells[key] = loop.call_at(due, self._cancel, *key)

    def take(self, invocation_id: InvocationId, cell_id: CellId) -> bool:
        """Takes a cell over; whether it was waiting for that."""
        timer = self._cells.pop((invocation_id, cell_id), None)
        if timer is not None:
            timer.cancel()
        return timer is not None

    def _cancel(self, invocation_id: InvocationId, cell_id: CellId) -> None:
        del self._cells[invocation_id, cell_id]
        try:
            self._loop.post(
                ev.InterruptRequested(invocation_id=invocation_id, cell_id=cell_id, queue=False)
            )
        except Refused:
            return  # it has ended, or its box
