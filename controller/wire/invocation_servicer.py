"""`InvocationService`: accepts, shows and ends invocations, inside the caller's tenant only.

Made by `controller.app`; calls the loop for everything that changes, the read model for everything
that is shown.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import grpc.aio

from controller import convert, convert_events
from controller.checks import Checker
from controller.config import ControllerConfig
from controller.core.errors import Reason, Refused
from controller.core.ids import (
    LOCAL_TENANT,
    InvocationId,
    SandboxId,
    SessionId,
    TenantId,
    ToolCallId,
    is_id,
    new_invocation_id,
)
from controller.core.model import Cause, InvocationSpec, State
from controller.engine import events as ev
from controller.loop import Loop
from controller.store.ports import ArtifactStore, InvocationRow, Journal, OutputLog, cursor_of
from controller.wire.box_output import BoxOutput, limited
from controller.wire.boxes import BoxStream, is_box
from controller.wire.cut_cells import CutCells
from controller.wire.errors import streaming, unary
from controller.wire.outputs import STREAMS, read_output
from controller.wire.sessions import Sessions
from controller.wire.tool_servers import ToolServers
from hutch.v1 import invocation_pb2
from hutch.v1 import invocation_service_pb2 as isv
from hutch.v1.invocation_service_pb2_grpc import InvocationServiceServicer

PAGE_SIZE = 100
PAGE_MAXIMUM = 1000
WAIT_MAXIMUM_SECONDS = 60.0
STDIN_BYTES = 1024 * 1024

Context = grpc.aio.ServicerContext[Any, Any]


class Stdin(Protocol):
    """Brings standard input to a live sandbox."""

    async def write_stdin(
        self, sandbox_id: SandboxId, offset: int, data: bytes, *, close: bool
    ) -> int:
        """Gives bytes; the offset up to which it has come.

        Raises:
            Refused: INVOCATION_ENDED; FIELD_INVALID for a gap; HOST_UNAVAILABLE.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class InvocationParts:
    """What the servicer calls."""

    config: ControllerConfig
    version: str
    loop: Loop
    journal: Journal
    artifacts: ArtifactStore
    output: OutputLog
    checker: Checker
    sessions: Sessions
    tool_servers: ToolServers
    stdin: Stdin


class InvocationServicer(InvocationServiceServicer):
    """One method per RPC; see `proto/hutch/v1/invocation_service.proto`."""

    def __init__(self, parts: InvocationParts) -> None:
        self._parts = parts
        self._codec = parts.loop.codec
        self._cut_cells = CutCells(parts.loop, parts.config.cell_grace_seconds)

    @streaming
    async def OpenSession(
        self, request: isv.OpenSessionRequest, context: Context
    ) -> AsyncIterator[isv.OpenSessionResponse]:
        """Keeps a client present for as long as the stream is open."""
        _visible("session_id", request.session_id, at_least=16)
        _refuse_if_draining(self._parts.loop)
        session_id = SessionId(request.session_id)
        sessions = self._parts.sessions
        sessions.opened(session_id)
        try:
            while True:
                yield self._greeting()
                await asyncio.sleep(self._parts.config.heartbeat_seconds)
        finally:
            sessions.closed(session_id)

    def _greeting(self) -> isv.OpenSessionResponse:
        state = self._parts.loop.state
        drivers = {item.driver: None for host in state.hosts.values() for item in host.statements}
        return isv.OpenSessionResponse(
            controller_version=self._parts.version,
            disconnect_grace=convert.duration(self._parts.config.session_grace_seconds),
            drivers=list(drivers),
            capacity=state.capacity,
        )

    @unary
    async def CreateInvocation(
        self, request: isv.CreateInvocationRequest, context: Context
    ) -> isv.CreateInvocationResponse:
        """Accepts a root, durably."""
        tenant_id = LOCAL_TENANT
        _visible("request_id", request.request_id)
        _refuse_if_draining(self._parts.loop)
        digest = hashlib.sha256(
            request.spec.SerializeToString(deterministic=True) + request.tool_call_id.encode()
        ).hexdigest()
        known = await self._parts.journal.get_request(tenant_id, request.request_id)
        if known is not None:
            if known.content_digest != digest:
                raise Refused(Reason.REQUEST_ID_REUSED, "the request id has other content")
            return await self._created(tenant_id, known.answer_id)
        spec = await self._checked_spec(tenant_id, request.spec)
        session_id = SessionId(request.session_id)
        if request.cancel_on_disconnect:
            if not session_id:
                message = "cancel_on_disconnect needs a session"
                raise Refused(Reason.FIELD_INVALID, message, field="session_id")
            # One of a controller that has died is not open again yet; it gets the usual grace.
            self._parts.sessions.expect([session_id])
        _refuse_if_draining(self._parts.loop)
        done = self._parts.loop.post(
            ev.InvocationRequested(
                tenant_id=tenant_id,
                invocation_id=new_invocation_id(),
                spec=spec,
                request_id=request.request_id,
                content_digest=digest,
                session_id=session_id,
                cancel_on_disconnect=request.cancel_on_disconnect,
                tool_call_id=ToolCallId(request.tool_call_id) if request.tool_call_id else None,
            )
        )
        state = self._parts.loop.state
        _, answer_id = state.requests[(tenant_id, request.request_id)]
        node = state.live(answer_id)
        accepted = convert.invocation_out(node) if node is not None else None
        await done
        if accepted is None:
            return await self._created(tenant_id, answer_id)
        return isv.CreateInvocationResponse(invocation=accepted)

    async def _checked_spec(
        self, tenant_id: TenantId, message: invocation_pb2.InvocationSpec
    ) -> InvocationSpec:
        spec = convert.spec_in(message)
        checker = self._parts.checker
        if spec.contract is not None:
            await checker.check_schema(spec.contract.schema_json)
        readable = await checker.check_inputs(tenant_id, spec.inputs, spec.tools)
        return replace(spec, readable_artifacts=readable)

    async def _created(
        self, tenant_id: TenantId, invocation_id: str
    ) -> isv.CreateInvocationResponse:
        row = await self._row(tenant_id, invocation_id)
        return isv.CreateInvocationResponse(invocation=convert.invocation_of_row(row))

    async def _row(self, tenant_id: TenantId, invocation_id: str) -> InvocationRow:
        row = self._parts.loop.recent.get(invocation_id)
        if row is not None and row.tenant_id == tenant_id:
            return row
        if is_id(invocation_id, "inv"):
            row = await self._parts.journal.get_invocation(tenant_id, invocation_id)
        if row is None:
            raise Refused(Reason.INVOCATION_NOT_FOUND, "no such invocation")
        return row

    @unary
    async def GetInvocation(
        self, request: isv.GetInvocationRequest, context: Context
    ) -> isv.GetInvocationResponse:
        """Shows one invocation with its value."""
        row = await self._row(LOCAL_TENANT, request.invocation_id)
        found = convert.invocation_of_row(row)
        if row.state != State.ENDED:
            output = self._parts.output
            kept = convert.output_id(found.invocation_id, found.attempt)
            found.stdout_bytes = await output.size(LOCAL_TENANT, kept, "stdout")
            found.stderr_bytes = await output.size(LOCAL_TENANT, kept, "stderr")
        return isv.GetInvocationResponse(invocation=found)

    @unary
    async def ListInvocations(
        self, request: isv.ListInvocationsRequest, context: Context
    ) -> isv.ListInvocationsResponse:
        """Lists invocations, or one tree."""
        tree_id = ""
        if request.tree_of:
            tree_id = (await self._row(LOCAL_TENANT, request.tree_of)).tree_id
        limit = _page_size(request.page_size)
        state = ""
        if request.state not in invocation_pb2.InvocationState.values():
            raise Refused(Reason.FIELD_INVALID, "no state of an invocation", field="state")
        if request.state:
            name = invocation_pb2.InvocationState.Name(request.state)
            state = name.removeprefix("INVOCATION_STATE_").lower()
        rows = await self._parts.journal.list_invocations(
            LOCAL_TENANT,
            tree_id=tree_id,
            state=state,
            roots_only=request.roots_only,
            after=request.page_token,
            limit=limit,
        )
        token = cursor_of(rows[-1], tree_id=tree_id) if len(rows) == limit else ""
        return isv.ListInvocationsResponse(
            invocations=[convert.invocation_of_row(row) for row in rows], next_page_token=token
        )

    @unary
    async def WaitInvocation(
        self, request: isv.WaitInvocationRequest, context: Context
    ) -> isv.WaitInvocationResponse:
        """Answers when it has ended, or when the time is over."""
        seconds = WAIT_MAXIMUM_SECONDS
        if request.HasField("timeout"):
            seconds = min(convert.seconds_of(request.timeout), WAIT_MAXIMUM_SECONDS)
            if seconds < 0:
                raise Refused(Reason.FIELD_INVALID, "it is negative", field="timeout")
        row = await self._row(LOCAL_TENANT, request.invocation_id)
        tree_id = InvocationId(row.tree_id)
        changed = self._parts.loop.watchers.subscribe(tree_id)
        try:
            async with asyncio.timeout(seconds):
                while not self._parts.loop.draining:
                    changed.clear()
                    node = self._parts.loop.state.live(InvocationId(request.invocation_id))
                    if node is None or node.ended:  # perhaps not durably: the row says
                        row = await self._row(LOCAL_TENANT, request.invocation_id)
                        if row.state == State.ENDED:
                            break
                    await changed.wait()
        except TimeoutError:
            row = await self._row(LOCAL_TENANT, request.invocation_id)
        finally:
            self._parts.loop.watchers.unsubscribe(tree_id, changed)
        return isv.WaitInvocationResponse(invocation=convert.invocation_of_row(row))

    @streaming
    async def WatchInvocation(
        self, request: isv.WatchInvocationRequest, context: Context
    ) -> AsyncIterator[isv.WatchInvocationResponse]:
        """Streams events until the invocation's `ended`."""
        row = await self._row(LOCAL_TENANT, request.invocation_id)
        tree_id = InvocationId(row.tree_id)
        changed = self._parts.loop.watchers.subscribe(tree_id)
        maker = convert_events.EventMaker(self._codec)
        members = {request.invocation_id}
        sequence = 0
        try:
            while True:
                changed.clear()
                stored = await self._parts.journal.read_tree(
                    LOCAL_TENANT, tree_id, after_sequence=sequence
                )
                for item in stored:
                    sequence = item.sequence
                    event = maker.event_of(item)
                    if event is None:
                        continue
                    convert_events.grow(members, event, tree=request.tree)
                    if event.invocation_id not in members:
                        continue
                    if sequence > request.after_sequence:
                        yield isv.WatchInvocationResponse(event=event)
                    if event.HasField("ended") and event.invocation_id == request.invocation_id:
                        return
                if not stored:
                    if self._parts.loop.draining:
                        raise Refused(Reason.CONTROLLER_DRAINING, "the controller is shutting down")
                    await changed.wait()
        finally:
            self._parts.loop.watchers.unsubscribe(tree_id, changed)

    @unary
    async def ListEvents(
        self, request: isv.ListEventsRequest, context: Context
    ) -> isv.ListEventsResponse:
        """Shows the last events, shortened."""
        row = await self._row(LOCAL_TENANT, request.invocation_id)
        journal = self._parts.journal
        return await convert_events.view(journal, self._codec, LOCAL_TENANT, row.tree_id, request)

    @streaming
    async def ReadOutput(
        self, request: isv.ReadOutputRequest, context: Context
    ) -> AsyncIterator[isv.ReadOutputResponse]:
        """Streams what was printed, exactly, from any byte."""
        parts = self._parts
        row = await self._row(LOCAL_TENANT, request.invocation_id)
        if is_box(row) and not request.cell_id and request.stream in STREAMS:
            whole = BoxOutput(
                loop=parts.loop,
                journal=parts.journal,
                output=parts.output,
                codec=self._codec,
                row=row,
                stream=STREAMS[request.stream],
                offset=request.offset,
            )
            async for at, data in limited(whole.read(follow=request.follow), request.max_bytes):
                yield isv.ReadOutputResponse(offset=at, data=data)
            return
        async for response in read_output(
            request,
            parts.loop,
            parts.output,
            lambda: self._row(LOCAL_TENANT, request.invocation_id),
        ):
            yield response

    @streaming
    async def AttachInvocation(
        self, request_iterator: AsyncIterator[isv.AttachInvocationRequest], context: Context
    ) -> AsyncIterator[isv.AttachInvocationResponse]:
        """Feeds an interactive box."""
        first = await anext(request_iterator, None)
        if first is None or first.WhichOneof("message") != "attach":
            raise Refused(Reason.FIELD_INVALID, "`attach` must come first", field="attach")
        row = await self._row(LOCAL_TENANT, first.attach.invocation_id)
        if not is_box(row):
            raise Refused(Reason.FIELD_INVALID, "it takes no cells: it is not interactive")
        parts = self._parts
        stream = BoxStream(
            config=parts.config,
            loop=parts.loop,
            journal=parts.journal,
            output=parts.output,
            checker=parts.checker,
            codec=self._codec,
            cut_cells=self._cut_cells,
            tenant_id=LOCAL_TENANT,
            row=row,
            attach=first.attach,
        )
        async for message in stream.run(request_iterator):
            yield message

    @unary
    async def WriteStdin(
        self, request: isv.WriteStdinRequest, context: Context
    ) -> isv.WriteStdinResponse:
        """Gives the code standard input."""
        if len(request.data) > STDIN_BYTES:
            raise Refused(
                Reason.PAYLOAD_TOO_LARGE, f"at most {STDIN_BYTES} bytes", limit=str(STDIN_BYTES)
            )
        row = await self._row(LOCAL_TENANT, request.invocation_id)
        loop, tree_id = self._parts.loop, InvocationId(row.tree_id)
        changed = loop.watchers.subscribe(tree_id)
        try:
            while True:
                changed.clear()
                node = loop.state.live(InvocationId(request.invocation_id))
                if node is None or node.ending is not None:
                    raise Refused(Reason.INVOCATION_ENDED, "it has ended")
                if not node.spec.attach_stdin:
                    message = "it was made without standard input"
                    raise Refused(Reason.FIELD_INVALID, message, field="invocation_id")
                if node.state is State.RUNNING:
                    break
                await changed.wait()
                _refuse_if_draining(loop)
        finally:
            loop.watchers.unsubscribe(tree_id, changed)
        offset = await self._parts.stdin.write_stdin(
            node.sandbox_id, request.offset, request.data, close=request.close
        )
        return isv.WriteStdinResponse(offset=offset)

    @streaming
    async def ServeTools(
        self, request_iterator: AsyncIterator[isv.ServeToolsRequest], context: Context
    ) -> AsyncIterator[isv.ServeToolsResponse]:
        """Has a client's tools called."""
        _refuse_if_draining(self._parts.loop)
        first = await anext(request_iterator, None)
        if first is None or first.WhichOneof("message") != "start":
            raise Refused(Reason.FIELD_INVALID, "`start` must come first", field="start")
        async for message in self._parts.tool_servers.serve(first.start, request_iterator):
            yield message

    @unary
    async def CancelInvocation(
        self, request: isv.CancelInvocationRequest, context: Context
    ) -> isv.CancelInvocationResponse:
        """Ends a subtree and answers when all its sandboxes are proved gone."""
        _visible("request_id", request.request_id)
        row = await self._row(LOCAL_TENANT, request.invocation_id)
        loop = self._parts.loop
        invocation_id = InvocationId(request.invocation_id)
        tree_id = InvocationId(row.tree_id)
        changed = loop.watchers.subscribe(tree_id)
        try:
            await loop.post(ev.CancelRequested(invocation_id=invocation_id, cause=Cause.CLIENT))
            while (node := loop.state.live(invocation_id)) is not None and not node.gone:
                changed.clear()
                await changed.wait()
                if loop.draining:
                    raise Refused(Reason.CONTROLLER_DRAINING, "the controller is shutting down")
            await loop.settled()
        finally:
            loop.watchers.unsubscribe(tree_id, changed)
        row = await self._row(LOCAL_TENANT, request.invocation_id)
        return isv.CancelInvocationResponse(invocation=convert.invocation_of_row(row))


def _visible(field: str, text: str, *, at_least: int = 1) -> None:
    if not at_least <= len(text) <= 128 or not all("!" <= character <= "~" for character in text):
        raise Refused(
            Reason.FIELD_INVALID,
            f"{field}: {at_least} to 128 visible ASCII characters",
            field=field,
        )


def _page_size(asked: int) -> int:
    if asked > PAGE_MAXIMUM:
        raise Refused(Reason.FIELD_INVALID, f"at most {PAGE_MAXIMUM}", field="page_size")
    return asked or PAGE_SIZE


def _refuse_if_draining(loop: Loop) -> None:
    if loop.draining:
        raise Refused(Reason.CONTROLLER_DRAINING, "the controller is shutting down")
