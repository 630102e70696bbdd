"""Whole invocations through the SDK: a cold start, a child, and where the time goes.

Called by `bench.run`; calls the public SDK only, against a controller of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from datetime import datetime

import hutch
from bench.floors import Bare
from bench.stats import Figure, figure

_CHILDREN = """
import time
import hutch

seconds = []
for number in range(count + 1):
    begin = time.perf_counter()
    hutch.invoke(program="return 1")
    seconds.append(time.perf_counter() - begin)
return seconds[1:]
"""


def cold_starts(
    client: hutch.Client, bare_starts: Bare, count: int
) -> tuple[Figure, Figure, float]:
    """From `invoke` to its value, each with a sandbox made for it, in turn with a bare start.

    The speed of a machine drifts, so the two alternate.

    Returns:
        The bare starts, the cold starts, and the median of their ratios pair by pair.
    """
    bare, cold = [], []
    for _ in range(count + 2):
        bare.append(bare_starts.once())
        begin = time.perf_counter()
        client.invoke(program="return 1")
        cold.append(time.perf_counter() - begin)
    bare, cold = bare[2:], cold[2:]
    ratio = statistics.median(mine / floor for floor, mine in zip(bare, cold, strict=True))
    return figure("bare_start", bare), figure("cold_start", cold), ratio


def children(client: hutch.Client, count: int) -> Figure:
    """From `invoke` in a sandbox to its value, one after the other."""
    seconds = client.invoke(hutch.ReturnType(list[float]), program=_CHILDREN, count=count)
    return figure("child", seconds)


def fan_out(client: hutch.Client, bare: Bare, count: int, at_once: int) -> tuple[float, float]:
    """Children a second with a fresh sandbox each, so many at once; beside bare starts likewise.

    Returns:
        The rate of children, and that of bare starts: the mean of before and after.
    """
    before = bare.rate(count, at_once)
    program = """
import time
from concurrent.futures import ThreadPoolExecutor
import hutch

def child(number):
    return hutch.invoke(program="return 1")

begin = time.perf_counter()
with ThreadPoolExecutor(at_once) as pool:
    list(pool.map(child, range(count)))
return count / (time.perf_counter() - begin)
"""
    rate: float = client.invoke(program=program, count=count, at_once=at_once)
    return rate, (before + bare.rate(count, at_once)) / 2


def breakdown(client: hutch.Client, count: int) -> dict[str, float]:
    """The median milliseconds between an invocation's own events, in their order."""
    gaps: dict[str, list[float]] = {}
    for _ in range(count):
        handle = client.spawn(program="return 1")
        handle.result()
        last: datetime | None = None
        for name, moment in _moments(handle.events()):
            if last is not None:
                gaps.setdefault(name, []).append((moment - last).total_seconds())
            last = moment
    return {name: figure(name, values).summary()["p50_ms"] for name, values in gaps.items()}


def _moments(events: Iterable[hutch.Event]) -> Iterable[tuple[str, datetime]]:
    for event in events:
        if event.event_time is not None:
            state = getattr(event.detail, "state", "")
            yield f"to {event.kind} {state}".strip(), event.event_time
