"""Timers by name: one that is put off fires once, at its last time; one that is not due never."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from controller.app import Timers
from controller.core.clock import now_us
from controller.core.ids import InvocationId
from controller.engine import events as ev

STEP_US = 20_000


class _Posted:
    """Notes what the timers post and when."""

    def __init__(self) -> None:
        self.timers = Timers(self.post)
        self.events: asyncio.Queue[tuple[int, ev.Event]] = asyncio.Queue()

    def post(self, event: ev.Event) -> None:
        self.events.put_nowait((now_us(), event))

    def set(self, at_us: int, number: int = 1) -> None:
        event = ev.IdlePassed(invocation_id=InvocationId(f"inv_{number}"))
        self.timers.set(("idle", f"inv_{number}"), at_us, event)


@pytest.fixture
async def posted() -> AsyncIterator[_Posted]:
    found = _Posted()
    yield found
    found.timers.close()


async def test_a_timer_that_is_put_off_fires_once_at_its_last_time(posted: _Posted) -> None:
    begin = now_us()
    for steps in (1, 2, 4):
        posted.set(begin + steps * STEP_US)
    posted.set(begin + 6 * STEP_US, number=2)
    first, event = await posted.events.get()
    assert isinstance(event, ev.IdlePassed)
    assert (event.invocation_id, first >= begin + 4 * STEP_US) == ("inv_1", True)
    _, event = await posted.events.get()
    assert isinstance(event, ev.IdlePassed)
    assert event.invocation_id == "inv_2", "the first did not fire again"


async def test_a_timer_that_is_set_earlier_fires_earlier(posted: _Posted) -> None:
    begin = now_us()
    posted.set(begin + 3_600_000_000)
    posted.set(begin + STEP_US)
    fired, _ = await posted.events.get()
    assert fired >= begin + STEP_US


async def test_what_is_dropped_or_not_due_never_fires(posted: _Posted) -> None:
    begin = now_us()
    posted.set(begin + STEP_US)
    posted.set(0)
    posted.set(begin + STEP_US, number=2)
    posted.timers.drop(("idle", "inv_2"))
    posted.set(begin + 2 * STEP_US, number=3)
    _, event = await posted.events.get()
    assert isinstance(event, ev.IdlePassed)
    assert event.invocation_id == "inv_3"
    posted.set(now_us() + STEP_US)  # not due is not gone: it may be set again
    _, event = await posted.events.get()
    assert isinstance(event, ev.IdlePassed)
    assert event.invocation_id == "inv_1"
