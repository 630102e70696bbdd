"""Sandboxes that are ready before anybody asks for one.

Filled in the background; claimed by the table, each once. A warm sandbox has run no code and holds
nobody's files: its supervisor has said that it is ready, and that is all. It counts for no one's
capacity. One that dies, or says anything more, is destroyed and another one made.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from sandbox.drivers.driver import Container, Driver, Limits, SandboxRequest
from sandbox.host.channel import FrameChannel
from sandbox.host.disposal import dispose
from sandbox.host.fields import ProtocolBreach
from sandbox.host.inbound import Inbound
from sandbox.host.workshop import Workshop
from sandbox.runtime import frames

MEMORY_FACTS = Path("/proc/meminfo")
BUSY_SECONDS = 0.05  # after a claim
_LOOK_AGAIN_SECONDS = 5.0
_MAX_PAUSE_SECONDS = 32.0
_MAX_PROBLEM = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a sandbox is made from; one stands for another only if all of it is equal."""

    driver: str
    template: str
    limits: Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmSandbox:
    """A sandbox that nobody has: its container, its channel, and its `ready` frame."""

    container: Container
    channel: FrameChannel
    greeting: frames.Frame


class Pool:
    """The warm sandboxes of a host."""

    def __init__(self, drivers: Mapping[Shape, Driver], workshop: Workshop) -> None:
        """Makes none yet; `run` does.

        Args:
            drivers: What is kept ready, and who makes it.
            workshop: What is shared; `pool_size` of its configuration is kept of each shape.
        """
        self._drivers = drivers
        self._workshop = workshop
        self._idle: dict[Shape, deque[WarmSandbox]] = {shape: deque() for shape in drivers}
        self._building: dict[Shape, int] = dict.fromkeys(drivers, 0)
        self._existing = 0
        self._failures = 0
        self._rest_until = self._busy_until = workshop.clock.now()
        self._wanted = True
        self._changed = asyncio.Event()
        self._changed.set()
        self._none_left = asyncio.Event()
        self._none_left.set()
        self._log = structlog.get_logger()

    @property
    def ready_count(self) -> int:
        """How many can be claimed now."""
        return sum(map(len, self._idle.values()))

    @property
    def existing_count(self) -> int:
        """How many are being made, can be claimed or are not proved gone."""
        return self._existing

    def claim(self, shape: Shape) -> WarmSandbox | None:
        """Gives one away for good, or None if none of that shape is ready."""
        idle = self._idle.get(shape)
        if idle is None:
            return None
        self._busy_until = self._workshop.clock.now() + BUSY_SECONDS
        self._wanted, self._failures = True, 0
        self._changed.set()
        for warm in idle:
            if warm.channel.is_silent():
                idle.remove(warm)
                self._existing_changes(-1)
                return warm
        return None

    async def run(self) -> None:
        """Keeps it filled until it is cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while (shape := self._missing()) is not None:
                if pause := self._pause(shape):
                    await self._workshop.clock.sleep(pause)
                    continue
                if self._is_busy() and any(self._building.values()):
                    break  # one at a time then; its end is a change
                await self._workshop.builders.begin_refill()
                if not self._wanted:
                    self._workshop.builders.end_refill()
                    break
                self._building[shape] += 1
                self._existing_changes(1)
                self._workshop.nursery.start(self._make(shape), "warm sandbox")

    async def drain(self) -> None:
        """Ends all and returns once they are proved gone; the next claim lets it fill again."""
        self._wanted = False
        for shape in self._idle:
            self._drop(shape, list(self._idle[shape]))
        await self._none_left.wait()

    def _missing(self) -> Shape | None:
        size = self._workshop.config.pool_size
        for shape, idle in self._idle.items():
            if self._wanted and len(idle) + self._building[shape] < size:
                return shape
        return None

    def _pause(self, shape: Shape) -> float:
        """How long nothing is made, in seconds: what is made ahead takes CPU from what runs."""
        now = self._workshop.clock.now()
        if now < self._rest_until:
            return self._rest_until - now
        if self._is_busy() and 2 * len(self._idle[shape]) >= self._workshop.config.pool_size:
            return self._busy_until - now
        short = available_memory() < self._workshop.config.pool_spare_memory_bytes
        return _LOOK_AGAIN_SECONDS if short else 0.0

    def _is_busy(self) -> bool:
        return self._workshop.clock.now() < self._busy_until

    async def _make(self, shape: Shape) -> None:
        newborn = _Newborn(self._workshop.config.channel_queue_bytes)
        container: Container | None = None
        try:
            container = await self._drivers[shape].create(_request(shape))
            newborn.channel.connect(container.channel)
            async with asyncio.timeout(self._workshop.config.start_timeout_seconds):
                await newborn.settled.wait()
        except Exception as error:
            newborn.problem = newborn.problem or str(error) or "it was not ready in time"
        finally:
            self._building[shape] -= 1
            self._workshop.builders.end_refill()
        if container is None or newborn.greeting is None or newborn.problem:
            await self._fail(newborn, container)
            return
        warm = WarmSandbox(container=container, channel=newborn.channel, greeting=newborn.greeting)
        newborn.on_spoiled = lambda: self._spoiled(shape, warm, newborn.problem)
        self._idle[shape].append(warm)
        self._failures = 0
        self._changed.set()
        if not self._wanted:
            self._drop(shape, [warm])

    async def _fail(self, newborn: _Newborn, container: Container | None) -> None:
        self._rest("warm_sandbox_failed", newborn.problem)
        newborn.channel.close()
        if container is not None:
            await dispose(container, self._workshop, self._log)
        self._existing_changes(-1)

    def _spoiled(self, shape: Shape, warm: WarmSandbox, problem: str) -> None:
        self._rest("warm_sandbox_lost", problem)
        self._drop(shape, [warm])

    def _rest(self, event: str, problem: str) -> None:
        """Makes none for a while: what ended this one may end the next one too."""
        self._log.warning(event, problem=problem[:_MAX_PROBLEM])
        self._failures += 1
        pause = min(_MAX_PAUSE_SECONDS, 2.0 ** (self._failures - 1))
        self._rest_until = self._workshop.clock.now() + pause
        self._changed.set()

    def _drop(self, shape: Shape, dropped: Iterable[WarmSandbox]) -> None:
        for warm in dropped:
            self._idle[shape].remove(warm)
            warm.channel.close()
            self._workshop.nursery.start(self._end(warm.container), "end a warm sandbox")

    async def _end(self, container: Container) -> None:
        await dispose(container, self._workshop, self._log)
        self._existing_changes(-1)

    def _existing_changes(self, by: int) -> None:
        self._existing += by
        if self._existing:
            self._none_left.clear()
        else:
            self._none_left.set()


class _Newborn:
    """Hears the greeting of a sandbox that nobody has; anything more spoils it."""

    def __init__(self, queue_bytes: int) -> None:
        self.channel = FrameChannel(self, queue_bytes)
        self.settled = asyncio.Event()
        self.greeting: frames.Frame | None = None
        self.problem = ""
        self.on_spoiled: Callable[[], object] | None = None

    def frame_received(self, frame: frames.Frame) -> None:
        """Takes the one frame that may come."""
        if self.greeting is not None:
            raise ProtocolBreach("a frame of a sandbox that was told nothing")
        Inbound(open_calls=0, output_limit_bytes=0).accept(frame)
        self.greeting = frame
        self.settled.set()

    def channel_breached(self, problem: str) -> None:
        """It is of no use."""
        self._spoil(problem)

    def channel_failed(self, problem: str) -> None:
        """It is of no use."""
        self._spoil(problem)

    def channel_ended(self, truncated: bool) -> None:
        """It is of no use."""
        self._spoil("its channel ended")

    def _spoil(self, problem: str) -> None:
        self.problem = problem
        self.settled.set()
        if self.on_spoiled is not None:
            self.on_spoiled()


def available_memory() -> int:
    """The bytes that this machine could give to new processes without swapping."""
    for line in MEMORY_FACTS.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{MEMORY_FACTS} does not say what is available")


def _request(shape: Shape) -> SandboxRequest:
    # A name of its own, which nobody can know or choose.
    name = f"warm_{secrets.token_hex(8)}"
    return SandboxRequest(sandbox_id=name, template=shape.template, limits=shape.limits)
