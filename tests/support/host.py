"""A host in the test's own loop, behind a real unix socket, with a driver whose supervisor is the
test itself or a real one.

Called by the tests of the host; calls `sandbox.host` and grpc.aio.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc_status.rpc_status
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]

from hutch.v1 import ending_pb2, host_pb2, host_service_pb2_grpc, invocation_pb2
from hutch.v1 import host_service_pb2 as pb
from sandbox.drivers.driver import (
    Driver,
    Enforcement,
    Isolation,
    Level,
    Measurement,
    SandboxRequest,
    StartFailed,
    Statement,
)
from sandbox.host.config import HostConfig
from sandbox.host.daemon import HostOptions, RunningHost, serving
from sandbox.host.identity import Identity
from sandbox.host.lease import Clock, MonotonicClock
from sandbox.host.table import Offer
from sandbox.runtime import frames

HELD = (
    Enforcement(limit="memory", level=Level.SANDBOX, mechanism="a test's word"),
    Enforcement(limit="open_files", level=Level.PROCESS, mechanism="a test's word"),
)
GENERATION = 7
EPOCH = 3
READY = {
    "type": "ready",
    "version": 1,
    "python": "3.11.2",
    "protections": {"dumpable": False, "separate_uid": True, "filter": True},
}


class ScriptedContainer:
    """A sandbox whose supervisor is played by the test."""

    def __init__(self, request: SandboxRequest) -> None:
        """Connects both ends."""
        self.request = request
        self._ours, self._theirs = socket.socketpair()
        for end in (self._ours, self._theirs):
            end.setblocking(False)
        self._decoder = frames.Decoder()
        self._received: list[frames.Frame] = []
        self._exit: asyncio.Future[Measurement] = asyncio.get_running_loop().create_future()
        self.measurement = Measurement()
        self.destroy_count = 0
        self.survivors = 0
        self.measure_gate: asyncio.Event | None = None

    @property
    def sandbox_id(self) -> str:
        """The id it was made for."""
        return self.request.sandbox_id

    @property
    def channel(self) -> socket.socket:
        """The host's end."""
        return self._ours

    @property
    def enforcement(self) -> Sequence[Enforcement]:
        """What the test says."""
        return HELD

    async def measure(self) -> Measurement:
        """What the test says."""
        if self.measure_gate is not None:
            await self.measure_gate.wait()
        return self.measurement

    async def wait(self) -> Measurement:
        """Waits for `exit`."""
        return await asyncio.shield(self._exit)

    async def destroy(self) -> Measurement:
        """Closes both ends; fails as often as the test wants a process to survive."""
        self.destroy_count += 1
        if self.survivors:
            self.survivors -= 1
            raise RuntimeError("process 4711 survived")
        self._exit.cancel()
        self._ours.close()
        self._theirs.close()
        return self.measurement

    # The supervisor's side.

    async def say(self, header: dict[str, Any], payload: bytes = b"") -> None:
        """Sends one frame."""
        await self.say_raw(frames.encode(header, payload))

    async def say_raw(self, data: bytes) -> None:
        """Sends bytes as they are."""
        await asyncio.get_running_loop().sock_sendall(self._theirs, data)

    async def hear(self) -> frames.Frame:
        """Receives one frame."""
        while not self._received:
            data = await asyncio.get_running_loop().sock_recv(self._theirs, 1 << 18)
            assert data, "the host closed the channel"
            self._received += self._decoder.feed(data)
        return self._received.pop(0)

    def hang_up(self) -> None:
        """Closes the supervisor's end."""
        self._theirs.close()

    def exit(self, *, code: int | None = None, signal: int | None = None) -> None:
        """Ends the supervisor."""
        self.measurement = Measurement(exit_code=code, signal=signal)
        self._exit.set_result(self.measurement)
        self._theirs.close()


class ScriptedDriver:
    """Makes sandboxes that the test plays."""

    name = "scripted"

    def __init__(self) -> None:
        """Has none yet."""
        self.made: dict[str, ScriptedContainer] = {}
        self._arrivals: asyncio.Queue[ScriptedContainer] = asyncio.Queue()
        self.problem = ""
        self.gate: asyncio.Event | None = None

    async def prepare(self) -> Statement:
        """States what the test wants."""
        return Statement(driver=self.name, isolation=Isolation.CONTAINER, enforcement=HELD)

    async def create(self, request: SandboxRequest) -> ScriptedContainer:
        """Makes one."""
        if self.gate is not None:
            await self.gate.wait()
        if self.problem:
            raise StartFailed(self.problem)
        assert request.sandbox_id not in self.made, "a sandbox was started twice"
        container = ScriptedContainer(request)
        self.made[request.sandbox_id] = container
        self._arrivals.put_nowait(container)
        return container

    async def next(self) -> ScriptedContainer:
        """The next sandbox that the host makes."""
        return await self._arrivals.get()

    async def list(self) -> Sequence[str]:
        """What is there."""
        return sorted(self.made)

    async def close(self) -> None:
        """Nothing is left to close."""


@dataclass(slots=True, kw_only=True)
class ManualClock:
    """Time that passes when the test says so."""

    seconds: float = 1_000.0
    _sleepers: list[tuple[float, asyncio.Future[None]]] = field(default_factory=list)

    def now(self) -> float:
        """The time."""
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        """Waits for the test."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.seconds + seconds, waiter))
        await waiter

    async def advance(self, seconds: float) -> None:
        """Lets time pass and what waited for it run."""
        self.seconds += seconds
        for _ in range(20):
            for due, waiter in self._sleepers:
                if due <= self.seconds and not waiter.done():
                    waiter.set_result(None)
            self._sleepers = [item for item in self._sleepers if not item[1].done()]
            await asyncio.sleep(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUnderTest:
    """A host that serves, and a client of it."""

    running: RunningHost
    stub: host_service_pb2_grpc.HostServiceAsyncStub
    channel: grpc.aio.Channel
    state: Path
    stop: Callable[[], Awaitable[None]]

    def attach(self, sandbox_id: str = "sbx_1", **options: Any) -> Conversation:
        """Opens a stream about a sandbox; by default it starts it."""
        return Conversation(self.stub, sandbox_id, **options)

    async def destroy(
        self, sandbox_id: str, epoch: int = EPOCH, generation: int = GENERATION
    ) -> ending_pb2.Evidence:
        """Destroys a sandbox."""
        request = pb.DestroySandboxRequest(
            sandbox_id=sandbox_id, owner_epoch=epoch, host_generation=generation
        )
        return (await self.stub.DestroySandbox(request)).evidence

    async def sandboxes(self) -> dict[str, host_pb2.Sandbox]:
        """What the host lists."""
        answer = await self.stub.ListSandboxes(pb.ListSandboxesRequest())
        return {item.sandbox_id: item for item in answer.sandboxes}


class Conversation:
    """One AttachSandbox stream from the controller's side."""

    def __init__(
        self,
        stub: host_service_pb2_grpc.HostServiceAsyncStub,
        sandbox_id: str,
        *,
        spec: host_pb2.SandboxSpec | None = None,
        start: bool = True,
        after: int = 0,
        epoch: int = EPOCH,
        generation: int = GENERATION,
    ) -> None:
        """Opens it; nothing is sent before the first call."""
        self.call = stub.AttachSandbox()
        self.last_sequence = after
        attach = pb.SandboxAttach(
            sandbox_id=sandbox_id,
            owner_epoch=epoch,
            host_generation=generation,
            after_sequence=after,
        )
        if start:
            attach.spec.CopyFrom(spec or make_spec())
        self._first: pb.SandboxAttach | None = attach
        self._ahead: pb.AttachSandboxResponse | None = None  # read, and not yet asked for

    async def send(self, **message: Any) -> None:
        """Sends one request."""
        if self._first is not None:
            first, self._first = self._first, None
            await self.call.write(pb.AttachSandboxRequest(attach=first))
        if message:
            await self.call.write(pb.AttachSandboxRequest(**message))

    async def greeting(self) -> pb.SandboxAttached:
        """Attaches and returns the answer."""
        await self.send()
        event = await self._read()
        assert event.sequence == 0
        assert event.HasField("attached")
        return event.attached

    async def next(self, kind: str) -> Any:
        """The next event, of that kind, which must follow the one before without a gap; output
        may be several events in one, which has the sequence of the last. The start of a cell may
        be left out where more was there already: then its sequence is."""
        event = await self._read()
        if (
            kind == "cell_started"
            and not event.HasField("cell_started")
            and event.sequence > self.last_sequence + 1
        ):
            self._ahead = event
            self.last_sequence += 1
            return event.cell_started
        assert event.WhichOneof("event") == kind, event
        if kind == "output":
            assert event.sequence > self.last_sequence
        else:
            assert event.sequence == self.last_sequence + 1
        self.last_sequence = event.sequence
        return getattr(event, kind)

    async def printed(self, size: int, offset: int = 0) -> bytes:
        """The next so many bytes of one stream, without a gap."""
        data = b""
        while len(data) < size:
            chunk = await self.next("output")
            assert chunk.offset == offset + len(data)
            data += chunk.data
        assert len(data) == size
        return data

    async def acknowledge(self, sequence: int | None = None) -> None:
        """Acknowledges all that was read, or up to a sequence."""
        sequence = self.last_sequence if sequence is None else sequence
        await self.send(acknowledge=pb.EventAcknowledgement(sequence=sequence))

    async def run(self, code: str = "pass", cell: str = "cell_1", **inputs: bytes) -> None:
        """Sends a cell whose contents are small."""
        await self.send(run_cell=make_cell(code, cell, **inputs))

    async def over(self) -> None:
        """The stream ends without an error."""
        await self.send()
        event = await self.call.read()
        assert event is grpc.aio.EOF, event
        assert await self.call.code() == grpc.StatusCode.OK

    def cut(self) -> None:
        """Cuts the stream as a dead controller would."""
        self.call.cancel()

    async def _read(self) -> pb.AttachSandboxResponse:
        if (ahead := self._ahead) is not None:
            self._ahead = None
            return ahead
        event = await self.call.read()
        assert event is not grpc.aio.EOF, "the host ended the stream"
        assert isinstance(event, pb.AttachSandboxResponse)
        return event


def make_spec(**changes: Any) -> host_pb2.SandboxSpec:
    """A specification that every driver can make."""
    resources = invocation_pb2.ResourceLimits(
        memory_limit_bytes=512 << 20,
        pids_limit=128,
        cpu_limit_millis=1_000,
        tmpfs_limit_bytes=64 << 20,
        open_files_limit=1_024,
    )
    values: dict[str, Any] = {
        "invocation_id": "inv_1",
        "template": "default",
        "resources": resources,
        "output_limit_bytes": 1 << 30,
    }
    return host_pb2.SandboxSpec(**{**values, **changes})


def content(data: bytes) -> pb.Content:
    """Bytes in a message."""
    return pb.Content(data=data, size_bytes=len(data))


def make_cell(code: str, cell: str = "cell_1", **inputs: bytes) -> pb.RunCell:
    """A cell whose contents are small."""
    return pb.RunCell(
        cell_id=cell,
        code=content(code.encode()),
        inputs=[pb.NamedContent(name=key, value=content(data)) for key, data in inputs.items()],
        mode=invocation_pb2.INVOCATION_MODE_PROGRAM,
        invocation_id="inv_1",
        depth=1,
        max_depth=4,
    )


def done(cell: str = "cell_1", **changes: Any) -> dict[str, Any]:
    """A `done` frame of a cell that ran to its end."""
    frame: dict[str, Any] = {
        "type": "done",
        "cell": cell,
        "outcome": "completed",
        "value": None,
        "failure": None,
        "stdout_bytes": 0,
        "stderr_bytes": 0,
        "killed": 0,
        "background": 0,
        "state_lost": False,
        "output_cut": False,
        "errno": None,
        "exit_code": None,
        "signal": None,
        "text": None,
    }
    return {**frame, **changes}


def failure(**changes: Any) -> dict[str, str]:
    """A `failure` object of a frame."""
    keys = "type_name message traceback invocation_id ending reason path expected got"
    return {**dict.fromkeys(keys.split(), ""), **changes}


@contextlib.asynccontextmanager
async def host(
    driver: Driver | None = None, *, clock: Clock | None = None, **settings: Any
) -> AsyncIterator[HostUnderTest]:
    """Serves a host with one driver while the block runs."""
    driver = driver or ScriptedDriver()
    settings = {"capacity": 8, "pool_size": 0, "exit_drain_seconds": 1.0, **settings}
    settings = {"destroy_retry_seconds": 0.01, **settings}
    with tempfile.TemporaryDirectory(prefix="host-") as folder:
        state = Path(folder)
        options = HostOptions(
            state=state,
            socket=state / "h.sock",
            config=HostConfig(driver=driver.name, **settings),
        )
        identity = Identity(host_id="hst_test", generation=GENERATION)
        try:
            offer = Offer(driver=driver, statement=await driver.prepare())
            async with contextlib.AsyncExitStack() as stack:
                it = await stack.enter_async_context(
                    serving(options, identity, {driver.name: offer}, clock or MonotonicClock())
                )
                async with grpc.aio.insecure_channel(f"unix:{options.socket}") as channel:
                    stub: Any = host_service_pb2_grpc.HostServiceStub(channel)
                    yield HostUnderTest(
                        running=it, stub=stub, channel=channel, state=state, stop=stack.aclose
                    )
        finally:
            await driver.close()


@contextlib.asynccontextmanager
async def refusal(reason: str, **metadata: str) -> AsyncIterator[None]:
    """The block must be refused with that reason and metadata."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield
    status = grpc_status.rpc_status.from_call(caught.value)  # type: ignore[arg-type]
    assert status is not None, caught.value
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.domain, info.reason) == ("hutch.v1", reason), info
    assert {key: info.metadata[key] for key in metadata} == metadata


async def until(condition: Callable[[], bool]) -> None:
    """Waits until something is so, which the loop brings about."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def started(
    it: HostUnderTest, driver: ScriptedDriver, sandbox_id: str = "sbx_1"
) -> tuple[Conversation, ScriptedContainer]:
    """Starts a sandbox and reads on to `ready`."""
    talk = it.attach(sandbox_id)
    assert (await talk.greeting()).started
    container = await driver.next()
    await container.say(READY)
    await talk.next("ready")
    return talk, container
