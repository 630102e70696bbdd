"""A controller that plays a script, on a unix socket: what the SDK and the CLI say on the wire.

Called by the tests of SDK and CLI. It keeps what it was sent, answers as told, and can lose
answers, cut streams and refuse with any reason. It runs no code.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import code_pb2, error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from hutch.v1 import artifact_pb2, ending_pb2, event_pb2, invocation_pb2
from hutch.v1 import artifact_service_pb2 as artifacts_pb
from hutch.v1 import artifact_service_pb2_grpc as artifacts_grpc
from hutch.v1 import invocation_service_pb2 as pb
from hutch.v1 import invocation_service_pb2_grpc as grpc_services

Finish = Callable[[pb.CreateInvocationRequest, invocation_pb2.Invocation], None]


def refusal(code: int, reason: str, message: str, **details: str) -> grpc.Status:
    """A status with one `ErrorInfo`, as the controller sends it."""
    info = AnyMessage()
    info.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="hutch.v1", metadata=details))
    return rpc_status.to_status(status_pb2.Status(code=code, message=message, details=[info]))


def returned(value: bytes) -> Finish:
    """The invocation returns this value."""

    def finish(request: pb.CreateInvocationRequest, invocation: invocation_pb2.Invocation) -> None:
        invocation.ending.kind = ending_pb2.ENDING_KIND_RETURNED
        invocation.value.json = value

    return finish


def ended(kind: str, **failure: Any) -> Finish:
    """The invocation ends in another way."""

    def finish(request: pb.CreateInvocationRequest, invocation: invocation_pb2.Invocation) -> None:
        invocation.ending.kind = ending_pb2.EndingKind.Value(f"ENDING_KIND_{kind.upper()}")
        invocation.ending.message = f"it ended {kind}"
        if failure:
            invocation.ending.failure.CopyFrom(ending_pb2.Failure(**failure))

    return finish


class ToolStreams:
    """What `ServeTools` streams said, and what they are told."""

    def __init__(self) -> None:
        self.server_ids: list[str] = []
        self.outcomes: dict[str, pb.ToolCallOutcome] = {}
        self._changed = asyncio.Condition()
        self._said: asyncio.Queue[pb.ServeToolsResponse | None] | None = None

    async def say(self, **message: Any) -> None:
        """Tells the stream that is open, or the next one."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._said is not None)
            assert self._said is not None
            self._said.put_nowait(pb.ServeToolsResponse(**message))

    async def cut(self) -> None:
        """Ends the stream that is open."""
        async with self._changed:
            assert self._said is not None
            self._said.put_nowait(None)
            self._said = None

    async def outcome(self, call_id: str) -> pb.ToolCallOutcome:
        """Waits for the outcome of a call."""
        async with asyncio.timeout(20), self._changed:
            await self._changed.wait_for(lambda: call_id in self.outcomes)
        return self.outcomes[call_id]

    async def serve(
        self, requests: AsyncIterator[pb.ServeToolsRequest]
    ) -> AsyncIterator[pb.ServeToolsResponse]:
        """One stream."""
        first = await anext(requests)
        said: asyncio.Queue[pb.ServeToolsResponse | None] = asyncio.Queue()
        async with self._changed:
            self.server_ids.append(first.start.server_id)
            self._said = said
            self._changed.notify_all()
        reader = asyncio.create_task(self._read(requests))
        try:
            yield pb.ServeToolsResponse(started=pb.ToolServerStarted())
            while (response := await said.get()) is not None:
                yield response
        finally:
            reader.cancel()
            await asyncio.wait({reader})

    async def _read(self, requests: AsyncIterator[pb.ServeToolsRequest]) -> None:
        async for request in requests:
            async with self._changed:
                self.outcomes[request.outcome.call_id] = request.outcome
                self._changed.notify_all()


class ScriptedController(
    grpc_services.InvocationServiceServicer, artifacts_grpc.ArtifactServiceServicer
):
    """The services; everything that a test looks at is an attribute."""

    def __init__(self) -> None:
        self.finish: Finish | None = returned(b"null")
        self.created: dict[str, pb.CreateInvocationRequest] = {}
        self.invocations: dict[str, invocation_pb2.Invocation] = {}
        self.events: list[event_pb2.InvocationEvent] = []
        self.output: dict[int, bytes] = {}
        self.stored: dict[str, tuple[artifact_pb2.Artifact, bytes]] = {}
        self.calls: Counter[str] = Counter()
        self.faults: dict[str, deque[Any]] = {}
        self.lose_answer: Counter[str] = Counter()
        self.sessions: list[str] = []
        self.open_sessions: set[str] = set()
        self.cancelled: list[str] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.cut_after = 0
        self.changed = asyncio.Condition()
        self.tools = ToolStreams()

    async def _enter(self, name: str, context: Any) -> None:
        self.calls[name] += 1
        self.metadata.append(dict(context.invocation_metadata()))
        queue = self.faults.get(name)
        if queue:
            fault = queue.popleft()
            if isinstance(fault, grpc.StatusCode):
                await context.abort(fault, f"{name} fails")
            await context.abort_with_status(fault)

    async def _leave(self, name: str, context: Any) -> None:
        """Loses an answer after its effect."""
        if self.lose_answer[name] > 0:
            self.lose_answer[name] -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the answer was lost")

    async def _find(self, invocation_id: str, context: Any) -> invocation_pb2.Invocation:
        if invocation_id not in self.invocations:
            await context.abort_with_status(
                refusal(code_pb2.NOT_FOUND, "INVOCATION_NOT_FOUND", "there is no such invocation")
            )
        return self.invocations[invocation_id]

    async def end(self, invocation_id: str, finish: Finish) -> None:
        """Ends an invocation that is still running."""
        async with self.changed:
            self._end(self.created[invocation_id], self.invocations[invocation_id], finish)
            self.changed.notify_all()

    def _end(self, request: Any, invocation: invocation_pb2.Invocation, finish: Finish) -> None:
        finish(request, invocation)
        invocation.state = invocation_pb2.INVOCATION_STATE_ENDED

    # --- InvocationService ---------------------------------------------------------------------

    async def OpenSession(
        self, request: pb.OpenSessionRequest, context: Any
    ) -> AsyncIterator[pb.OpenSessionResponse]:
        await self._enter("OpenSession", context)
        self.sessions.append(request.session_id)
        self.open_sessions.add(request.session_id)
        try:
            yield pb.OpenSessionResponse(controller_version="0.1.0", drivers=["fake"], capacity=4)
            if self.faults.get("session-end"):
                self.faults["session-end"].popleft()
                return
            await asyncio.Event().wait()
        finally:
            self.open_sessions.discard(request.session_id)

    async def CreateInvocation(
        self, request: pb.CreateInvocationRequest, context: Any
    ) -> pb.CreateInvocationResponse:
        await self._enter("CreateInvocation", context)
        known = next(
            (key for key, old in self.created.items() if old.request_id == request.request_id), None
        )
        if known is None:
            known = f"inv_{len(self.created) + 1}"
            self.created[known] = request
            self.invocations[known] = invocation_pb2.Invocation(
                invocation_id=known,
                depth=1,
                state=invocation_pb2.INVOCATION_STATE_RUNNING,
                mode=invocation_pb2.INVOCATION_MODE_PROGRAM,
                label=request.spec.label,
            )
            if self.finish is not None:
                self._end(request, self.invocations[known], self.finish)
            async with self.changed:
                self.changed.notify_all()
        await self._leave("CreateInvocation", context)
        return pb.CreateInvocationResponse(invocation=self.invocations[known])

    async def ServeTools(
        self, request_iterator: AsyncIterator[pb.ServeToolsRequest], context: Any
    ) -> AsyncIterator[pb.ServeToolsResponse]:
        await self._enter("ServeTools", context)
        async for response in self.tools.serve(request_iterator):
            yield response

    async def GetInvocation(
        self, request: pb.GetInvocationRequest, context: Any
    ) -> pb.GetInvocationResponse:
        await self._enter("GetInvocation", context)
        return pb.GetInvocationResponse(invocation=await self._find(request.invocation_id, context))

    async def ListInvocations(
        self, request: pb.ListInvocationsRequest, context: Any
    ) -> pb.ListInvocationsResponse:
        await self._enter("ListInvocations", context)
        ids = sorted(self.invocations)
        start = int(request.page_token or 0)
        size = request.page_size or 100
        found = [self.invocations[key] for key in ids[start : start + size]]
        token = str(start + size) if start + size < len(ids) else ""
        return pb.ListInvocationsResponse(invocations=found, next_page_token=token)

    async def WaitInvocation(
        self, request: pb.WaitInvocationRequest, context: Any
    ) -> pb.WaitInvocationResponse:
        await self._enter("WaitInvocation", context)
        invocation = await self._find(request.invocation_id, context)
        try:
            async with asyncio.timeout(request.timeout.ToTimedelta().total_seconds()):
                async with self.changed:
                    await self.changed.wait_for(
                        lambda: invocation.state == invocation_pb2.INVOCATION_STATE_ENDED
                    )
        except TimeoutError:
            pass
        return pb.WaitInvocationResponse(invocation=invocation)

    async def WatchInvocation(
        self, request: pb.WatchInvocationRequest, context: Any
    ) -> AsyncIterator[pb.WatchInvocationResponse]:
        await self._enter("WatchInvocation", context)
        await self._find(request.invocation_id, context)
        sent = 0
        for event in self.events:
            if event.sequence <= request.after_sequence:
                continue
            yield pb.WatchInvocationResponse(event=event)
            sent += 1
            if self.cut_after and sent == self.cut_after:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
        invocation = self.invocations[request.invocation_id]
        async with self.changed:
            await self.changed.wait_for(
                lambda: invocation.state == invocation_pb2.INVOCATION_STATE_ENDED
            )

    async def ReadOutput(
        self, request: pb.ReadOutputRequest, context: Any
    ) -> AsyncIterator[pb.ReadOutputResponse]:
        await self._enter("ReadOutput", context)
        await self._find(request.invocation_id, context)
        data = self.output.get(request.stream, b"")
        end = min(len(data), request.offset + request.max_bytes) if request.max_bytes else len(data)
        step = self.cut_after or 4096
        for start in range(request.offset, end, step):
            yield pb.ReadOutputResponse(offset=start, data=data[start : min(end, start + step)])
            if self.cut_after:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")

    async def CancelInvocation(
        self, request: pb.CancelInvocationRequest, context: Any
    ) -> pb.CancelInvocationResponse:
        await self._enter("CancelInvocation", context)
        invocation = await self._find(request.invocation_id, context)
        self.cancelled.append(request.invocation_id)
        if invocation.state != invocation_pb2.INVOCATION_STATE_ENDED:
            await self.end(request.invocation_id, ended("cancelled"))
        await self._leave("CancelInvocation", context)
        return pb.CancelInvocationResponse(invocation=invocation)

    # It plays no boxes and no views.

    async def ListEvents(
        self, request: pb.ListEventsRequest, context: Any
    ) -> pb.ListEventsResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "ListEvents")
        raise AssertionError

    async def WriteStdin(
        self, request: pb.WriteStdinRequest, context: Any
    ) -> pb.WriteStdinResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "WriteStdin")
        raise AssertionError

    async def AttachInvocation(
        self, request_iterator: AsyncIterator[pb.AttachInvocationRequest], context: Any
    ) -> AsyncIterator[pb.AttachInvocationResponse]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "AttachInvocation")
        yield pb.AttachInvocationResponse()

    # --- ArtifactService -----------------------------------------------------------------------

    def publish(
        self, name: str, content: bytes, *, invocation_id: str = "", media_type: str = ""
    ) -> artifact_pb2.Artifact:
        """Stores bytes as an artifact."""
        artifact = artifact_pb2.Artifact(
            artifact_id=f"art_{len(self.stored) + 1}",
            name=name,
            sha256=hashlib.sha256(content).hexdigest(),
            size_bytes=len(content),
            invocation_id=invocation_id,
            media_type=media_type,
        )
        self.stored[artifact.artifact_id] = (artifact, content)
        return artifact

    async def PutArtifact(
        self, request_iterator: AsyncIterator[artifacts_pb.PutArtifactRequest], context: Any
    ) -> artifacts_pb.PutArtifactResponse:
        await self._enter("PutArtifact", context)
        header: artifacts_pb.PutArtifactHeader | None = None
        data = b""
        async for request in request_iterator:
            if request.WhichOneof("part") == "header":
                header = request.header
            else:
                data += request.chunk
        assert header is not None
        assert hashlib.sha256(data).hexdigest() == header.sha256
        artifact = self.publish(header.name, data, media_type=header.media_type)
        await self._leave("PutArtifact", context)
        return artifacts_pb.PutArtifactResponse(artifact=artifact)

    async def GetArtifact(
        self, request: artifacts_pb.GetArtifactRequest, context: Any
    ) -> AsyncIterator[artifacts_pb.GetArtifactResponse]:
        await self._enter("GetArtifact", context)
        if request.artifact_id not in self.stored:
            await context.abort_with_status(
                refusal(code_pb2.NOT_FOUND, "ARTIFACT_NOT_FOUND", "there is no such artifact")
            )
        artifact, data = self.stored[request.artifact_id]
        yield artifacts_pb.GetArtifactResponse(artifact=artifact, offset=request.offset)
        step = self.cut_after or 256 * 1024
        for start in range(request.offset, len(data), step):
            yield artifacts_pb.GetArtifactResponse(offset=start, data=data[start : start + step])
            if self.cut_after:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")

    async def StatArtifact(
        self, request: artifacts_pb.StatArtifactRequest, context: Any
    ) -> artifacts_pb.StatArtifactResponse:
        await self._enter("StatArtifact", context)
        return artifacts_pb.StatArtifactResponse(artifact=self.stored[request.artifact_id][0])

    async def ListArtifacts(
        self, request: artifacts_pb.ListArtifactsRequest, context: Any
    ) -> artifacts_pb.ListArtifactsResponse:
        await self._enter("ListArtifacts", context)
        await self._find(request.invocation_id, context)
        found = [a for a, _ in self.stored.values() if a.invocation_id == request.invocation_id]
        start = int(request.page_token or 0)
        size = request.page_size or 2
        token = str(start + size) if start + size < len(found) else ""
        return artifacts_pb.ListArtifactsResponse(
            artifacts=found[start : start + size], next_page_token=token
        )


async def serve(script: ScriptedController, target: str) -> grpc.aio.Server:
    """Starts a server at a target."""
    server = grpc.aio.server()
    grpc_services.add_InvocationServiceServicer_to_server(script, server)
    artifacts_grpc.add_ArtifactServiceServicer_to_server(script, server)
    assert server.add_insecure_port(target) != 0
    await server.start()
    return server


class Served:
    """A scripted controller in a thread of its own, for blocking clients."""

    def __init__(self, target: str, loop: asyncio.AbstractEventLoop) -> None:
        self.target = target
        self.loop = loop
        self.script = ScriptedController()

    def run(self, work: Any) -> Any:
        """Runs a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)


@contextmanager
def serve_in_thread(folder: Path) -> Iterator[Served]:
    """Serves a script on `folder`/c.sock until the block ends."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="scripted-controller")
    thread.start()
    served = Served(f"unix:{folder}/c.sock", loop)
    server = served.run(serve(served.script, served.target))
    try:
        yield served
    finally:
        served.run(server.stop(None))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
