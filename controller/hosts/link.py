"""The connection to one host: who it is, its lease, and what it holds.

Made by `hosts.pool`. It dials, tells the engine that the host joined, keeps `WatchHost` open, and
begins again when that breaks. A host that stays away for longer than the grace is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from importlib import metadata
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import structlog

from controller.convert import enforcement_in
from controller.core.ids import HostId, SandboxId
from controller.core.model import Statement
from controller.engine import events as ev
from controller.hosts.services import Services
from hutch.v1 import host_pb2, template_pb2
from hutch.v1 import host_service_pb2 as hs
from hutch.v1.host_service_pb2_grpc import HostServiceStub

if TYPE_CHECKING:  # the generated module has the asynchronous stub's type only in its .pyi
    from hutch.v1.host_service_pb2_grpc import HostServiceAsyncStub

log = structlog.get_logger(__name__)

FIRST_RETRY_SECONDS = 0.05
LAST_RETRY_SECONDS = 2.0
CALL_SECONDS = 20.0
SPARE_SECONDS = 0.005
Stream = grpc.aio.StreamStreamCall[hs.AttachSandboxRequest, hs.AttachSandboxResponse]
MESSAGE_BYTES = 8 * 1024 * 1024
OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
)


class HostLink:
    """One host, from dialling to the end of the controller."""

    def __init__(self, services: Services, target: str) -> None:
        self._services = services
        self._channel = grpc.aio.insecure_channel(target, options=OPTIONS)
        self.stub: HostServiceAsyncStub = HostServiceStub(self._channel)
        self.host_id = HostId("")
        self.host_generation = 0
        self.host: host_pb2.Host | None = None  # as it described itself when it joined
        self.connected = asyncio.Event()
        self.joined = asyncio.Event()  # set for good at the first time
        self.problem = ""
        self._spare: Stream | None = None
        self._opening: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Keeps the connection until it is cancelled."""
        grace = self._services.config.host_grace_seconds
        delay = FIRST_RETRY_SECONDS
        away_since = asyncio.get_running_loop().time()
        while True:
            try:
                await self._join()
                delay = FIRST_RETRY_SECONDS
                await self._watch()
            except grpc.aio.AioRpcError as problem:
                self.problem = f"{problem.code().name}: {problem.details()}"
                log.info("host_away", problem=self.problem)
            now = asyncio.get_running_loop().time()
            self._drop_spare()
            if self.connected.is_set():
                self.connected.clear()
                away_since = now
            elif self.host_id and now - away_since > grace:
                self._services.loop.post(ev.HostLost(host_id=self.host_id))
                away_since = now
            await asyncio.sleep(delay)
            delay = min(delay * 2, LAST_RETRY_SECONDS)

    async def _join(self) -> None:
        version = metadata.version("hutch")
        request = hs.GetHostRequest(controller_version=version)
        host = (await self.stub.GetHost(request, timeout=CALL_SECONDS, wait_for_ready=True)).host
        held = await self.stub.ListSandboxes(hs.ListSandboxesRequest(), timeout=CALL_SECONDS)
        self.host_id = HostId(host.host_id)
        self.host_generation = host.host_generation
        self.host = host
        sandboxes = tuple(SandboxId(item.sandbox_id) for item in held.sandboxes)
        await self._destroy_strays(sandboxes)  # or they would hold slots that the engine gives out
        await self._services.loop.post(
            ev.HostJoined(
                host_id=self.host_id,
                host_generation=host.host_generation,
                capacity=host.capacity,
                statements=tuple(_statement(item, host.templates) for item in host.drivers),
            )
        )
        self.problem = ""
        self.connected.set()
        self.joined.set()

    async def _destroy_strays(self, sandboxes: tuple[SandboxId, ...]) -> None:
        """Ends the sandboxes that no live invocation has."""
        state = self._services.loop.state
        current = {node.sandbox_id for node in state.nodes.values() if node.slot is not None}
        for sandbox_id in sandboxes:
            if sandbox_id not in current:
                await self.destroy(sandbox_id)

    def new_stream(self) -> Stream:
        """A stream for one sandbox. One is opened ahead in a quiet moment: a new stream costs more
        than all that a short life says on it."""
        spare, self._spare = self._spare, None
        loop = asyncio.get_running_loop()
        if self._opening is None:
            self._opening = loop.call_later(SPARE_SECONDS, self._open_spare)
        if spare is not None and not spare.done():
            return spare
        return self.stub.AttachSandbox()

    def _open_spare(self) -> None:
        self._opening = None
        if self._spare is None and self.connected.is_set():
            self._spare = self.stub.AttachSandbox()

    def _drop_spare(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
        if self._spare is not None:
            self._spare.cancel()
            self._spare = None

    async def destroy(self, sandbox_id: SandboxId) -> hs.DestroySandboxResponse:
        """Ends a sandbox.

        Raises:
            grpc.aio.AioRpcError: the host refused or does not answer.
        """
        return await self.stub.DestroySandbox(
            hs.DestroySandboxRequest(
                sandbox_id=sandbox_id,
                owner_epoch=self._services.owner_epoch,
                host_generation=self.host_generation,
            ),
            timeout=60.0,
        )

    async def _watch(self) -> None:
        request = hs.WatchHostRequest(
            owner_epoch=self._services.owner_epoch, host_generation=self.host_generation
        )
        async for _ in self.stub.WatchHost(request):
            pass

    async def close(self) -> None:
        """Hangs up."""
        self._drop_spare()
        await self._channel.close()


def _statement(
    statement: host_pb2.DriverStatement, templates: Iterable[template_pb2.Template]
) -> Statement:
    isolation = host_pb2.IsolationLevel.Name(statement.isolation)
    return Statement(
        driver=statement.driver,
        isolation=isolation.removeprefix("ISOLATION_LEVEL_").lower(),
        levels=enforcement_in(statement.enforcement),
        usable=statement.usable,
        problem=statement.problem,
        templates=tuple(item.name for item in templates if item.driver == statement.driver),
    )
