"""The client's tools: given with inputs, served over `ServeTools`, acknowledged.

Made by `hutch.aio`; calls `hutch.serving`, which runs the tools in threads, and `hutch.transport`.
The stream is opened when the first tool is given and made anew, under the same server id, whenever
it is cut or silent. An outcome is kept and sent on each new stream until the controller says that
it has it; a call that comes again meanwhile is the same call.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc

from hutch import ambient, convert, serving, tools, transfer, types, wire_errors
from hutch.errors import Failure, HutchError
from hutch.transport import Link, Transport, backoff_seconds
from hutch.v1 import invocation_service_pb2 as pb

if TYPE_CHECKING:
    from hutch.aio import AsyncClient
    from hutch.client import Client

SILENCE_SECONDS = 30.0  # three of the controller's heartbeats


class Given:
    """The functions and objects that one call gives: what `values.encode` asks for ids.

    Which client the call goes to, and so what the ids are, is known later: until then random ones
    stand in their places.
    """

    def __init__(self) -> None:
        """Begins without any."""
        self._owner = tools.Owner(secrets.token_hex(16))
        self._given: dict[str, types.GivenTool] = {}
        self._grants: dict[str, tools.Grant] = {}

    def __call__(self, target: Any) -> str:
        """The id that stands for a function, or for what `hutch.tool` made.

        Raises:
            ValueEncodeError: It cannot be a tool; the text is the reason.
        """
        grant = self._owner.grant(target)
        self._grants[grant.tool_id] = grant
        self._given[grant.tool_id] = types.GivenTool(tool_id=grant.tool_id, target=target)
        return grant.tool_id

    def all(self) -> tuple[types.GivenTool, ...]:
        """All of them.

        Raises:
            PayloadTooLargeError: There is too much to be told of them.
        """
        if self._grants:
            tools.check_size(self._grants.values())
        return tuple(self._given.values())


class ClientTools:
    """The tools of one client; its server is started with the first of them.

    Attributes:
        front: The client that bare calls of a tool's code go to: a blocking one, where there is
            one before the asynchronous.
    """

    def __init__(self, client: AsyncClient) -> None:
        """Nothing is opened yet."""
        self._client = client
        self.front: Client | AsyncClient = client
        self._server: ToolServer | None = None

    async def bind(
        self, transport: Transport, spec: types.Spec
    ) -> tuple[types.Spec, list[tools.Grant]]:
        """Gives the tools of a spec their ids; the spec with them, and what is told of each.

        Raises:
            HutchError: The controller refuses to be served, or cannot be reached.
        """
        if not spec.tools:
            return spec, []
        if self._server is None:
            self._server = ToolServer(transport, self.front)
        server = self._server
        try:
            await server.ready()
        except HutchError:
            if self._server is server:
                self._server = None  # the next call tries afresh
                await server.close()
            raise
        # A blocking client's loop is no user's: coroutines of tools then have one of their own.
        is_users = self.front is self._client
        loop = asyncio.get_running_loop() if is_users else None
        inputs, grants = list(spec.inputs), []
        for item in spec.tools:
            grant = server.owner.grant(item.target, loop)
            grants.append(grant)
            old, new = f'"{item.tool_id}"'.encode(), f'"{grant.tool_id}"'.encode()
            inputs = [dataclasses.replace(one, json=one.json.replace(old, new)) for one in inputs]
        return dataclasses.replace(spec, inputs=tuple(inputs)), grants

    def current_call(self) -> str:
        """The open call of one of these tools that the caller's code serves; empty when none."""
        call = tools.current.get()
        if call is None or self._server is None or call.owner is not self._server.owner:
            return ""
        return call.call_id if call.is_open else ""

    async def close(self) -> None:
        """Stops serving."""
        server, self._server = self._server, None
        if server is not None:
            await server.close()


class ToolServer:
    """Serves the tools of one client to one controller. It belongs to the client's loop."""

    def __init__(self, transport: Transport, front: Client | AsyncClient) -> None:
        """Begins to serve.

        Args:
            transport: The way to the controller.
            front: The client that bare calls of a tool's code go to.
        """
        self.server_id = secrets.token_hex(16)
        self.owner = tools.Owner(self.server_id)
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._runner = serving.Server(
            self.owner, self._take_outcome, context=ambient.context_of(front)
        )
        self._open: set[str] = set()  # calls that the controller waits for
        self._kept: dict[str, pb.ToolCallOutcome] = {}  # outcomes that it has not acknowledged
        self._outgoing: deque[pb.ServeToolsRequest] = deque()
        self._more = asyncio.Event()
        self._greeted = asyncio.Event()  # or failed
        self._problem: HutchError | None = None
        self._moving: set[asyncio.Task[None]] = set()  # transfers of large values
        self._task = asyncio.create_task(self._serve(), name="hutch-tools")

    async def ready(self) -> None:
        """Waits until the controller knows the server.

        Raises:
            HutchError: It refuses, or cannot be reached.
        """
        await self._greeted.wait()
        if self._problem is not None:
            raise self._problem

    async def close(self) -> None:
        """Ends the stream. Threads that run tools end with them; nobody gets their outcomes."""
        await asyncio.to_thread(self._runner.close)
        tasks = {self._task, *self._moving}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    # --- the stream ----------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Keeps a stream open, for as long as there is a client."""
        patience = self._transport.patience()
        attempt = 0
        while True:
            link = self._transport.link()
            try:
                if await self._converse(link):
                    patience.progress()
                    attempt = 0
            except grpc.aio.AioRpcError as error:
                if not await self._bear(error, patience):
                    return
            finally:
                await link.close()
            await asyncio.sleep(backoff_seconds(attempt))
            attempt += 1
            with suppress(HutchError):
                await self._transport.revive()

    async def _bear(self, error: grpc.aio.AioRpcError, patience: Any) -> bool:
        """Whether to go on after a failure. Once greeted, a lost controller is waited for."""
        refusal = wire_errors.read(error)
        if refusal.may_retry and self._greeted.is_set():
            return True
        try:
            await patience.after(error)
        except HutchError as problem:
            self._problem = problem
            self._greeted.set()
            return False
        return True

    async def _converse(self, link: Link) -> bool:
        """One stream, to its end; whether the controller greeted."""
        call = link.invocations.ServeTools(metadata=link.metadata)
        start = pb.ToolServerStart(server_id=self.server_id)
        self._outgoing = deque([pb.ServeToolsRequest(start=start)])
        self._outgoing.extend(pb.ServeToolsRequest(outcome=one) for one in self._kept.values())
        self._more.set()
        writer = asyncio.create_task(self._write(call), name="hutch-tools-write")
        greeted = False
        try:
            while True:
                try:
                    async with asyncio.timeout(SILENCE_SECONDS):
                        response = await call.read()
                except TimeoutError:
                    return greeted
                if not isinstance(response, pb.ServeToolsResponse):
                    return greeted
                greeted = True
                self._take(response)
        finally:
            call.cancel()
            writer.cancel()
            await asyncio.wait({writer})

    async def _write(self, call: Any) -> None:
        try:
            while True:
                while self._outgoing:
                    await call.write(self._outgoing.popleft())
                self._more.clear()
                await self._more.wait()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader learns why

    # --- what comes down -----------------------------------------------------------------------

    def _take(self, response: pb.ServeToolsResponse) -> None:
        match response.WhichOneof("message"):
            case "started":
                self._greeted.set()
            case "call":
                self._begin(response.call)
            case "cancelled":
                self._forget(response.cancelled.call_id)
                self._runner.cancel(response.cancelled.call_id)
            case "acknowledged":
                self._forget(response.acknowledged.call_id)

    def _forget(self, call_id: str) -> None:
        self._open.discard(call_id)
        self._kept.pop(call_id, None)

    def _begin(self, call: pb.ToolCall) -> None:
        if call.call_id in self._open:
            return  # it runs, or its outcome was sent on this stream
        self._open.add(call.call_id)
        arguments = convert.value(call.arguments)
        if arguments.json is None:
            self._move(self._fetch(call, arguments), call.call_id)
        else:
            self._runner.call(call.call_id, call.tool_id, call.method, arguments.json)

    async def _fetch(self, call: pb.ToolCall, arguments: types.Value) -> None:
        data = await transfer.fetch(self._transport, arguments)
        self._runner.call(call.call_id, call.tool_id, call.method, data)

    def _move(self, work: Any, call_id: str) -> None:
        """Moves a large value beside the stream; what goes wrong is the call's failure."""

        async def move() -> None:
            try:
                await work
            except HutchError as error:
                self._keep(call_id, failure=serving.describe_failure(error))

        task = asyncio.create_task(move(), name="hutch-tools-move")
        self._moving.add(task)
        task.add_done_callback(self._moving.discard)

    # --- what goes up --------------------------------------------------------------------------

    def _take_outcome(self, call_id: str, value: bytes | None, failure: Failure | None) -> None:
        """Called by the runner, on any thread."""
        action: Callable[[], None]
        if value is not None and len(value) > transfer.INLINE_VALUE_BYTES:
            action = lambda: self._move(self._store(call_id, value), call_id)  # noqa: E731
        else:
            action = lambda: self._keep(call_id, value=value, failure=failure)  # noqa: E731
        with suppress(RuntimeError):  # the client's loop has ended
            self._loop.call_soon_threadsafe(action)

    async def _store(self, call_id: str, value: bytes) -> None:
        if call_id not in self._open:
            return
        stored = await transfer.Uploads().put(
            self._transport, value, name="value", media_type="application/json"
        )
        outcome = pb.ToolCallOutcome(call_id=call_id)
        outcome.value.artifact.artifact_id = stored.artifact_id
        outcome.value.artifact.sha256 = stored.sha256
        outcome.value.artifact.size_bytes = stored.size_bytes
        self._send(outcome)

    def _keep(
        self, call_id: str, *, value: bytes | None = None, failure: Failure | None = None
    ) -> None:
        outcome = pb.ToolCallOutcome(call_id=call_id)
        if failure is not None:
            outcome.failure.type_name = failure.type_name
            outcome.failure.message = failure.message
            outcome.failure.traceback = failure.traceback
            outcome.failure.reason = failure.reason
        else:
            outcome.value.json = value or b"null"
        self._send(outcome)

    def _send(self, outcome: pb.ToolCallOutcome) -> None:
        if outcome.call_id not in self._open:
            return  # nobody waits for it any more
        self._kept[outcome.call_id] = outcome
        self._outgoing.append(pb.ServeToolsRequest(outcome=outcome))
        self._more.set()
