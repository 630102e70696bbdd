"""One sandbox step by step, on the driver alone: no host, no controller, no gRPC.

Called by `bench.run`; calls the bubblewrap driver and speaks the frame channel itself. It tells how
much of a cold start is the sandbox's own.
"""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from pathlib import Path

from bench.stats import Figure, figure
from sandbox.drivers import procfs
from sandbox.drivers.bubblewrap import BubblewrapDriver
from sandbox.drivers.driver import Container, Limits, SandboxRequest
from sandbox.runtime import frames

STEPS = ("created", "ready", "started", "done", "captured", "destroyed")
_MIB = 1024 * 1024
_PROGRAM = b"return 1"
_IDLE_SECONDS = 1.0  # then it has loaded what it loads when idle
_LIMITS = Limits(
    memory_limit_bytes=512 * _MIB,
    pids_limit=128,
    cpu_limit_millis=1000,
    tmpfs_limit_bytes=128 * _MIB,
    open_files_limit=1024,
)
_CELL = {
    "type": "cell",
    "cell": "cell_1",
    "code": {"at": 0, "n": len(_PROGRAM)},
    "inputs": [],
    "mode": "program",
    "invocation": "inv_1",
    "depth": 1,
    "max_depth": 1,
    "timeout_ms": 0,
    "output_limit": _MIB,
    "tools": [],
    "stdin": False,
}
_CAPTURE = {"type": "capture", "patterns": ["artifacts/**"], "max_files": 256, "max_bytes": _MIB}


class _Channel:
    def __init__(self, container: Container) -> None:
        self._socket = container.channel
        self._decoder = frames.Decoder()
        self._waiting: list[frames.Frame] = []

    async def send(self, header: dict[str, object], payload: bytes = b"") -> None:
        frame = frames.encode(header, payload)
        await asyncio.get_running_loop().sock_sendall(self._socket, frame)

    async def until(self, kind: str) -> None:
        """Reads until a frame of that type has come."""
        while True:
            while self._waiting:
                if self._waiting.pop(0).type == kind:
                    return
            data = await asyncio.get_running_loop().sock_recv(self._socket, 65536)
            if not data:
                raise SystemExit(f"the sandbox ended before its {kind!r} frame")
            self._waiting += self._decoder.feed(data)


async def _one(driver: BubblewrapDriver, number: int) -> list[float]:
    moments = [time.perf_counter()]
    request = SandboxRequest(sandbox_id=f"sbx_{number}", template="default", limits=_LIMITS)
    container = await driver.create(request)
    try:
        moments.append(time.perf_counter())
        channel = _Channel(container)
        await channel.until("ready")
        moments.append(time.perf_counter())
        await channel.send(_CELL, _PROGRAM)
        await channel.until("started")
        moments.append(time.perf_counter())
        await channel.until("done")
        moments.append(time.perf_counter())
        await channel.send(_CAPTURE)
        await channel.until("captured")
        moments.append(time.perf_counter())
    finally:
        await container.destroy()
    moments.append(time.perf_counter())
    return [after - before for before, after in pairwise(moments)]


async def _idle(driver: BubblewrapDriver) -> int:
    container = await driver.create(
        SandboxRequest(sandbox_id="sbx_idle", template="default", limits=_LIMITS)
    )
    try:
        channel = _Channel(container)
        await channel.until("ready")
        await channel.send(_CELL, _PROGRAM)
        await channel.until("done")
        await asyncio.sleep(_IDLE_SECONDS)
        own = [pid for pid in procfs.pids() if b"sbx_idle" in procfs.read(pid, "cmdline")]
        every = {*own, *(below for pid in own for below in procfs.descendants(pid))}
        return sum(procfs.pss_bytes(pid) for pid in every)
    finally:
        await container.destroy()


async def lives(folder: Path, count: int) -> tuple[Figure, dict[str, float], int]:
    """A sandbox's life, again and again.

    Returns:
        From `create` to the end of the first cell; the median milliseconds of every step; the
        proportional share of memory of all processes of one that is idle, in bytes.
    """
    for name in ("alone", "alone-shared"):
        (folder / name).mkdir(mode=0o755)
    driver = BubblewrapDriver("bench-alone", folder / "alone", shared=folder / "alone-shared")
    statement = await driver.prepare()
    if not statement.usable:
        raise SystemExit(statement.problem)
    try:
        lives = [await _one(driver, number) for number in range(count + 2)][2:]
        idle = await _idle(driver)
    finally:
        await driver.close()
    until_done = STEPS.index("done") + 1
    steps = {
        step: round(1000 * figure(step, [life[index] for life in lives]).p50, 2)
        for index, step in enumerate(STEPS)
    }
    return figure("sandbox_alone", [sum(life[:until_done]) for life in lives]), steps, idle
