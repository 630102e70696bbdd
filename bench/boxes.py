"""Cells of a live box and children from a warm pool, beside the floors.

Called by `bench.run`. A cell is measured on the stream itself (grpc.aio, as the floor is), so that
the ratio is that of the system, not of one client library.
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Any

import grpc

import hutch
from bench import floors
from bench.stack import Stack
from bench.stats import Figure, figure
from hutch.v1 import invocation_pb2
from hutch.v1 import invocation_service_pb2 as isv
from hutch.v1.invocation_service_pb2_grpc import InvocationServiceStub

WARM_UP = 20

_CHILDREN = """
import time
import hutch

seconds = []
for number in range(count):
    begin = time.perf_counter()
    hutch.invoke(program="return 1")
    seconds.append(time.perf_counter() - begin)
return seconds
"""

_CHILDREN_AT_ONCE = """
import time
from concurrent.futures import ThreadPoolExecutor
import hutch

def one(number):
    begin = time.perf_counter()
    hutch.invoke(program="return 1")
    return time.perf_counter() - begin

with ThreadPoolExecutor(at_once) as pool:
    return list(pool.map(one, range(count)))
"""


async def cells(running: Stack, folder: Path, count: int) -> tuple[list[Figure], float]:
    """A cell `1+1` in a live box, in turn with the floors of the same moments.

    Returns:
        The figures `cell`, `cell_pingpong` and `cell_commit`, and the median cell over F(1).
    """
    found: dict[str, list[float]] = {"cell": [], "cell_pingpong": [], "cell_commit": []}
    async with grpc.aio.insecure_channel(running.target) as channel:
        box = await Box.open(channel)
        for _ in range(WARM_UP):
            await box.run("1+1")
        for _ in range(5):  # the speed of a machine drifts, so they take turns
            for _ in range(count // 5):
                begin = time.perf_counter()
                await box.run("1+1")
                found["cell"].append(time.perf_counter() - begin)
            room = folder / secrets.token_hex(4)
            room.mkdir()
            found["cell_pingpong"] += (await floors.pingpong(room, count // 5)).seconds
            found["cell_commit"] += (await floors.commits(room, count // 10, 1)).seconds
        await box.close()
    figures = [figure(name, seconds) for name, seconds in found.items()]
    return figures, figures[0].p50 / floor(figures[1], figures[2], 1)


NEIGHBOURS = {
    "a flood of output": "while True: print('x' * 1000)",
    "a fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "a flood of displays": "class Wide:\n    def _repr_html_(self): return 'x' * 10_000\n"
    "for number in range(250): display(Wide())\nwhile True: pass",
}


async def beside(running: Stack, count: int) -> dict[str, float]:
    """The p99 of a cell `1+1` beside each hostile neighbour, over that of quiet moments before.

    The neighbour is a box of its own with its own CPU limit.
    """
    found: dict[str, float] = {}
    async with grpc.aio.insecure_channel(running.target) as channel:
        box = await Box.open(channel)
        for _ in range(WARM_UP):
            await box.run("1+1")
        for name, code in NEIGHBOURS.items():
            quiet = await _p99(box, count)
            neighbour = await Box.open(channel, output=False)
            await neighbour.begin(code)
            try:
                found[name] = await _p99(box, count) / quiet
            finally:
                await neighbour.cancel(channel)
        await box.close()
    return found


async def _p99(box: Box, count: int) -> float:
    seconds = []
    for _ in range(count):
        begin = time.perf_counter()
        await box.run("1+1")
        seconds.append(time.perf_counter() - begin)
    return figure("cell", seconds).percentile(0.99)


def floor(pingpong: Figure, commit: Figure, commits: int) -> float:
    """F(n) of the design: two ping-pongs and n durable commits, in seconds."""
    return 2 * pingpong.p50 + commits * commit.p50


class Box:
    """One interactive box on its own stream."""

    def __init__(self, call: Any, invocation_id: str) -> None:
        self._call = call
        self._invocation_id = invocation_id

    @classmethod
    async def open(cls, channel: grpc.aio.Channel, *, output: bool = True) -> Box:
        """Makes a box and attaches to it, with or without its output."""
        stub: Any = InvocationServiceStub(channel)
        spec = invocation_pb2.InvocationSpec(interactive=invocation_pb2.InteractiveWork())
        created = await stub.CreateInvocation(
            isv.CreateInvocationRequest(request_id=secrets.token_hex(8), spec=spec)
        )
        call = stub.AttachInvocation()
        invocation_id = created.invocation.invocation_id
        attach = isv.AttachBox(invocation_id=invocation_id, without_output=not output)
        await call.write(isv.AttachInvocationRequest(attach=attach))
        return cls(call, invocation_id)

    async def begin(self, code: str) -> None:
        """Gives a cell and returns once it was accepted."""
        submit = isv.SubmitCell(cell_id=secrets.token_hex(8), code=code)
        await self._call.write(isv.AttachInvocationRequest(submit=submit))
        while not (await self._call.read()).HasField("cell_accepted"):
            pass

    async def cancel(self, channel: grpc.aio.Channel) -> None:
        """Ends the box whatever it does."""
        stub: Any = InvocationServiceStub(channel)
        await stub.CancelInvocation(
            isv.CancelInvocationRequest(
                request_id=secrets.token_hex(8), invocation_id=self._invocation_id
            )
        )
        self._call.cancel()

    async def run(self, code: str) -> None:
        """Runs a cell and reads up to its result."""
        cell_id = secrets.token_hex(8)
        submit = isv.SubmitCell(cell_id=cell_id, code=code)
        await self._call.write(isv.AttachInvocationRequest(submit=submit))
        while True:
            message = await self._call.read()
            if message.HasField("cell_completed") and message.cell_completed.cell_id == cell_id:
                return
            if message.HasField("refused") or message.HasField("ended"):
                raise SystemExit(str(message))

    async def close(self) -> None:
        """Ends the box by returning from it."""
        cell = isv.SubmitCell(cell_id=secrets.token_hex(8), code="return")
        await self._call.write(isv.AttachInvocationRequest(submit=cell))
        while not (await self._call.read()).HasField("ended"):
            pass


def children(running: Stack, count: int) -> Figure:
    """From `invoke` in a sandbox to its value, back to back, each from the pool."""
    return _spawning(running, "warm_child", _CHILDREN, count=count)


def children_at_once(running: Stack, count: int, at_once: int) -> Figure:
    """The same, so many at once."""
    return _spawning(running, "warm_child_of_20", _CHILDREN_AT_ONCE, count=count, at_once=at_once)


def refilling(running: Stack, count: int) -> Figure:
    """Back to back for longer than the pool lasts, so that it refills meanwhile."""
    return _spawning(running, "refilled_child", _CHILDREN, count=count)


def _spawning(running: Stack, name: str, program: str, **inputs: int) -> Figure:
    with hutch.connect(running.target) as client:
        seconds = client.invoke(
            hutch.ReturnType(list[float]), program=program, max_concurrent=32, inputs=inputs
        )
    return figure(name, seconds)
