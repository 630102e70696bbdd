"""The clients that serve tools: who is there, which calls they have, and what they answer.

Made by `controller.app`. The executor hands over the calls of a client's tools and says when they
are over; the invocation servicer brings the streams. A call is kept until it is over and sent again
on every new stream; its server has died once it is away for longer than the grace.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import structlog

from controller import convert
from controller.checks import Checker
from controller.config import ControllerConfig
from controller.core.clock import now_us
from controller.core.errors import Reason, Refused
from controller.core.ids import LOCAL_TENANT, ArtifactId, ToolCallId, ToolServerId
from controller.core.model import NamedValue
from controller.engine import commands as cmd
from controller.engine import events as ev
from controller.loop import Loop
from hutch.v1 import invocation_service_pb2 as isv

log = structlog.get_logger(__name__)

_SERVER_ID = re.compile(r"[0-9A-Za-z]{16,64}")
Requests = AsyncIterator[isv.ServeToolsRequest]
Response = isv.ServeToolsResponse


@dataclass(slots=True, eq=False)
class _Server:
    calls: dict[ToolCallId, cmd.CallTool] = field(default_factory=dict)
    sent: set[ToolCallId] = field(default_factory=set)
    outbox: deque[Response] = field(default_factory=deque)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    stream: object | None = None  # the one that serves
    timer: asyncio.TimerHandle | None = None


class ToolServers:
    """All of them."""

    def __init__(self, config: ControllerConfig, loop: Loop, checker: Checker) -> None:
        self._config = config
        self._loop = loop
        self._checker = checker
        self._servers: dict[ToolServerId, _Server] = {}

    # What the engine says.

    def call(self, command: cmd.CallTool) -> None:
        """Has a client run a tool."""
        server_id = ToolServerId(command.owner)
        server = self._servers.setdefault(server_id, _Server())
        server.calls[command.tool_call_id] = command
        if server.stream is not None:
            self._send(server, command)
        elif server.timer is None:
            self._expect(server_id, server)

    def end(self, command: cmd.EndToolCall) -> None:
        """Tells a client that a call is over."""
        server = self._servers.get(ToolServerId(command.owner))
        if server is None or server.calls.pop(command.tool_call_id, None) is None:
            return
        server.sent.discard(command.tool_call_id)
        if server.stream is None:
            return
        call_id = command.tool_call_id
        if command.cancel:
            over = Response(cancelled=isv.ToolCallCancelled(call_id=call_id))
        else:
            over = Response(acknowledged=isv.ToolCallAcknowledged(call_id=call_id))
        server.outbox.append(over)
        server.changed.set()

    # What the client says.

    async def serve(
        self, start: isv.ToolServerStart, requests: Requests
    ) -> AsyncIterator[Response]:
        """What one stream of a client is told, until it is cut or another takes over.

        Raises:
            Refused: FIELD_INVALID; CONTROLLER_DRAINING.
        """
        if not _SERVER_ID.fullmatch(start.server_id):
            message = "server_id: 16 to 64 ASCII letters and digits"
            raise Refused(Reason.FIELD_INVALID, message, field="server_id")
        server_id = ToolServerId(start.server_id)
        server = self._servers.setdefault(server_id, _Server())
        stream = server.stream = object()
        self._stop_timer(server)
        server.outbox.clear()
        for command in server.calls.values():
            self._send(server, command)
        server.changed.set()
        reader = asyncio.create_task(self._read(server_id, server, requests), name="tools-read")
        try:
            grace = convert.duration(self._config.session_grace_seconds)
            yield Response(started=isv.ToolServerStarted(disconnect_grace=grace))
            while server.stream is stream and not reader.done():
                while server.outbox and server.stream is stream:
                    yield server.outbox.popleft()
                if self._loop.draining:
                    raise Refused(Reason.CONTROLLER_DRAINING, "the controller is shutting down")
                try:
                    async with asyncio.timeout(self._config.heartbeat_seconds):
                        await server.changed.wait()
                except TimeoutError:
                    yield Response(heartbeat=isv.Heartbeat())
                server.changed.clear()
        finally:
            reader.cancel()
            await asyncio.wait({reader})
            if server.stream is stream:
                server.stream = None
                self._expect(server_id, server)
        if not reader.cancelled():
            reader.result()

    async def _read(self, server_id: ToolServerId, server: _Server, requests: Requests) -> None:
        try:
            async for request in requests:
                if request.WhichOneof("message") != "outcome":
                    raise Refused(Reason.FIELD_INVALID, "`start` comes once, first")
                await self._take(server_id, server, request.outcome)
        finally:
            server.changed.set()

    async def _take(
        self, server_id: ToolServerId, server: _Server, outcome: isv.ToolCallOutcome
    ) -> None:
        call_id = ToolCallId(outcome.call_id)
        if call_id not in server.calls:  # over already
            acknowledged = isv.ToolCallAcknowledged(call_id=call_id[:64])
            server.outbox.append(Response(acknowledged=acknowledged))
            server.changed.set()
            return
        value, failure = None, None
        named: tuple[ArtifactId, ...] = ()
        try:
            if outcome.WhichOneof("outcome") == "value":
                value = convert.value_in(outcome.value)
                item = NamedValue(name="value", value=value)
                named = await self._checker.check_inputs(LOCAL_TENANT, [item])
            else:
                failure = convert.failure_in(outcome.failure)
        except Refused as refused:
            value, failure = None, convert.failure_of(refused)
        self._loop.post(
            ev.ToolReturned(
                owner=server_id,
                tool_call_id=call_id,
                value=value,
                failure=failure,
                artifact_ids=named,
            )
        )

    def _send(self, server: _Server, command: cmd.CallTool) -> None:
        server.sent.add(command.tool_call_id)
        seconds = max(0.0, (command.deadline_us - now_us()) / 1_000_000)
        call = isv.ToolCall(
            call_id=command.tool_call_id,
            tool_id=command.tool_id,
            method=command.method,
            arguments=convert.value_out(command.arguments),
            timeout=convert.duration(seconds),
            invocation_id=command.invocation_id,
        )
        server.outbox.append(Response(call=call))
        server.changed.set()

    # Who is away.

    def _expect(self, server_id: ToolServerId, server: _Server) -> None:
        self._stop_timer(server)
        server.timer = asyncio.get_running_loop().call_later(
            self._config.session_grace_seconds, self._lost, server_id, server
        )

    def _lost(self, server_id: ToolServerId, server: _Server) -> None:
        server.timer = None
        if self._servers.get(server_id) is not server or server.stream is not None:
            return
        del self._servers[server_id]
        if server.calls:
            log.info("tool_server_lost", server_id=server_id, calls=len(server.calls))
            unsent = frozenset(server.calls.keys() - server.sent)
            self._loop.post(ev.ToolServerLost(server_id=server_id, unsent=unsent))

    @staticmethod
    def _stop_timer(server: _Server) -> None:
        if server.timer is not None:
            server.timer.cancel()
            server.timer = None

    def wake(self) -> None:
        """Lets every stream look again, because the controller ends."""
        for server in self._servers.values():
            server.changed.set()

    def close(self) -> None:
        """Forgets the timers."""
        for server in self._servers.values():
            self._stop_timer(server)
