"""One sandbox's stream: commands down, events up, attached again after every cut.

Made by `hosts.pool` for each attempt. What was said on a stream that broke is said again on the
next one: the cell (its id never runs twice), the capture, and the replies to the calls that the
host says are open. Events are acknowledged once what followed from them is durable.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

import grpc
import grpc.aio
import structlog

from controller import convert, convert_cells
from controller.core.errors import Reason, Refused
from controller.core.ids import CallId, CellId
from controller.core.model import (
    NONE_VALUE,
    CellOutcome,
    Evidence,
    Failure,
    GoneCause,
    ShownData,
)
from controller.engine import commands as cmd
from controller.engine import events as ev
from controller.engine.implied import answer
from controller.engine.state import Node
from controller.hosts.acknowledgements import Acknowledgements
from controller.hosts.blobs import BlobRefused, InboundBlobs, OutboundContents
from controller.hosts.calls import Calls
from controller.hosts.files import FileCapture
from controller.hosts.live import FileOperations, StdinWriter, ToolDeliveries
from controller.hosts.services import Services
from controller.store.ports import ArtifactNotFound, OutputGap
from hutch.v1 import host_pb2, invocation_pb2
from hutch.v1 import host_service_pb2 as hs
from hutch.v1 import invocation_service_pb2 as isv
from hutch.v1 import sandbox_file_pb2 as sf

log = structlog.get_logger(__name__)

TEXT_CHARACTERS = 64 * 1024
CROWDED_BYTES_A_SECOND = 32_000_000  # of one sandbox: who prints for ever slows nobody else
ANSWERED = 64
HANG_UP_SECONDS = 5.0
REPLY_BYTES = 4 * 1024 * 1024  # of answers that wait; above it no call is heard
REPLY_OVERHEAD_BYTES = 512
Item = Callable[[], Awaitable[None]]
Stream = grpc.aio.StreamStreamCall[hs.AttachSandboxRequest, hs.AttachSandboxResponse]


class StreamEnded(Exception):
    """The stream is over without the sandbox being gone; attach again."""


class SandboxDenied(Exception):
    """The sandbox broke the rules of the stream in a way that only the controller sees."""


class Attachment:
    """The controller's side of one sandbox."""

    def __init__(
        self,
        services: Services,
        command: cmd.StartSandbox,
        node: Node,
        is_crowded: Callable[[], bool],
    ) -> None:
        self._services = services
        self._command = command
        self._invocation_id = command.invocation_id
        self._is_crowded = is_crowded  # whether there are other sandboxes
        self._tree_id = node.tree_id
        self._is_box = node.interactive
        self._output_id = convert.output_id(command.invocation_id, node.attempt)
        if node.attempt > 1:  # who follows the attempt before goes on with this one
            before = convert.output_id(command.invocation_id, node.attempt - 1)
            services.output.wake(command.tenant_id, before)
        self._blobs = InboundBlobs(services, command.tenant_id)
        self._outbound = OutboundContents(services, command.tenant_id)
        self._calls = Calls(services, node, self._blobs)
        self._files = FileCapture(services, command.tenant_id, command.invocation_id)
        self._queue: deque[Item] = deque()
        self._replies: deque[cmd.Reply] = deque()
        self._reply_bytes = 0
        self._room = asyncio.Event()  # code that does not take its answers is not heard
        self._room.set()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()  # all that was due has been written
        self._sequence = 0  # the last event handled
        self._acks = Acknowledgements(self._ack_is_due)
        self._stream: Stream | None = None
        self._answered: dict[CallId, cmd.Reply] = {}
        self._answered_bytes = 0
        self._resume: hs.SandboxAttached | None = None
        self._captures_itself = False  # the cell's end began the capture
        self._boxed: cmd.RunCell | None = None  # of a box: the one that runs
        self._tools = ToolDeliveries(services, command, self._calls, self._blobs, self._outbound)
        self.stdin = StdinWriter()
        self.files = FileOperations()
        self.capture: cmd.CaptureArtifacts | None = None
        self.gone = asyncio.Event()

    # Down.

    def reply(self, command: cmd.Reply) -> None:
        """Gives an answer to the code."""
        if self._stream is not None and self.capture is None:
            self._replies.append(command)
            self._count_reply(_reply_bytes(command))
            self._wake.set()

    def capture_files(self, command: cmd.CaptureArtifacts) -> None:
        """Asks for the files; asked again on a new stream."""
        self.capture = command
        self._forget_replies()  # the code that waits for them is being ended
        if not self._captures_itself:
            self._put(self._send_capture)

    def destroy(self) -> bool:
        """Has the sandbox ended on its stream; whether there is one. `gone` is set afterwards, also
        when the stream is cut for good."""
        if self._stream is None:
            return False
        self._put(lambda: self._send(hs.AttachSandboxRequest(destroy=hs.SandboxDestroy())))
        return True

    def run_cell(self, command: cmd.RunCell) -> None:
        """Gives a box its next cell."""
        self._boxed = command
        self._put(self._send_cell)

    def interrupt(self, command: cmd.InterruptCell) -> None:
        """Interrupts the cell that runs."""
        interrupt = hs.CellInterrupt(cell_id=command.cell_id)
        self._put(lambda: self._send(hs.AttachSandboxRequest(interrupt=interrupt)))

    def call_tool(self, command: cmd.CallTool) -> None:
        """Has the sandbox's code run a tool of its own."""
        self._tools.add(command)
        self._put(lambda: self._tools.send(command, self._send))

    def end_tool_call(self, command: cmd.EndToolCall) -> None:
        """Forgets a tool call that is over."""
        self._tools.remove(command)
        if command.cancel:
            cancel = hs.ToolCancel(call_id=command.tool_call_id)
            self._put(lambda: self._send(hs.AttachSandboxRequest(tool_cancel=cancel)))

    async def write_stdin(self, offset: int, data: bytes, *, close: bool) -> int:
        """Gives the code standard input; the offset up to which it has come.

        Raises:
            Refused: FIELD_INVALID for a gap; HOST_UNAVAILABLE when the stream was cut meanwhile.
        """
        return await self.stdin.write(offset, data, self._post, close=close)

    async def file_operation(self, operation: sf.FileOperation) -> sf.FileOutcome:
        """Works on a file of the sandbox.

        Raises:
            Refused: HOST_UNAVAILABLE when the stream was cut before the outcome came.
        """
        return await self.files.run(operation, self._post)

    def _post(self, request: hs.AttachSandboxRequest) -> None:
        if self._stream is None:
            raise Refused(Reason.HOST_UNAVAILABLE, "the sandbox's stream is cut; try again")
        self._put(lambda: self._send(request))

    def _put(self, item: Item) -> None:
        if self._stream is not None:
            self._queue.append(item)
            self._wake.set()

    def _count_reply(self, size: int) -> None:
        self._reply_bytes += size
        if self._reply_bytes > REPLY_BYTES:
            self._room.clear()
        else:
            self._room.set()

    def _forget_replies(self) -> None:
        self._replies.clear()
        self._count_reply(-self._reply_bytes)

    async def _send(self, request: hs.AttachSandboxRequest) -> None:
        assert self._stream is not None
        await self._stream.write(request)

    async def _send_cell(self) -> None:
        command, boxed = self._command, self._boxed
        inputs = [
            hs.NamedContent(
                name=item.name, value=await self._outbound.of_value(item.value, self._send)
            )
            for item in (command if boxed is None else boxed).inputs
        ]
        code = command.program if boxed is None else boxed.code
        cell = hs.RunCell(
            cell_id=command.cell_id if boxed is None else boxed.cell_id,
            code=await self._outbound.of_bytes(code.encode(), self._send),
            inputs=inputs,
            mode=invocation_pb2.InvocationMode.Value(f"INVOCATION_MODE_{command.mode.upper()}"),
            invocation_id=command.invocation_id,
            depth=command.depth,
            max_depth=command.granted.spawn.max_depth,
            tools=[convert.tool_out(tool) for tool in command.granted.tools],
            stdin=command.attach_stdin,
        )
        if boxed is None:
            capture = self._capture_request(command.granted.artifact_patterns)
            cell.capture.CopyFrom(capture)
        elif boxed.timeout_seconds is not None:
            cell.timeout.CopyFrom(convert.duration(boxed.timeout_seconds))
        await self._send(hs.AttachSandboxRequest(run_cell=cell))

    async def _send_reply(self, command: cmd.Reply) -> None:
        reply = hs.CallReply(call_id=command.call_id)
        if command.failure is not None:
            reply.failure.CopyFrom(convert.failure_out(command.failure))
        else:
            assert command.value is not None
            try:
                content = await self._outbound.of_value(command.value, self._send)
            except ArtifactNotFound as problem:
                failure = Failure(reason="ARTIFACT_NOT_FOUND", message=str(problem))
                reply.failure.CopyFrom(convert.failure_out(failure))
            else:
                reply.value.CopyFrom(content)
        await self._send(hs.AttachSandboxRequest(reply=reply))

    async def _send_capture(self) -> None:
        assert self.capture is not None
        capture = self._capture_request(self.capture.patterns)
        await self._send(hs.AttachSandboxRequest(capture=capture))

    def _capture_request(self, patterns: Iterable[str]) -> hs.FileCapture:
        limits = self._services.config.limits
        return hs.FileCapture(
            patterns=patterns, max_files=limits.artifact_files, max_bytes=limits.artifact_bytes
        )

    async def _write(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._idle.clear()
            while self._queue or self._replies or self._acks.waiting:
                if self._acks.waiting:
                    ack = hs.EventAcknowledgement(sequence=self._acks.take())
                    await self._send(hs.AttachSandboxRequest(acknowledge=ack))
                if self._queue:
                    await self._queue.popleft()()
                elif self._replies:
                    command = self._replies.popleft()
                    self._count_reply(-_reply_bytes(command))
                    await self._send_reply(command)
            self._idle.set()

    # Up.

    async def converse(self, stream: Stream, attach: hs.SandboxAttach) -> None:
        """Runs the conversation on one stream until the sandbox is gone.

        Raises:
            StreamEnded: the stream ended first.
            grpc.aio.AioRpcError: the host refused, or the connection broke.
        """
        self._stream = stream
        self._queue.clear()
        self._forget_replies()
        self._acks.restart()
        attach.after_sequence = self._sequence
        attach.spec.CopyFrom(self._spec())
        self._queue.append(lambda: self._send(hs.AttachSandboxRequest(attach=attach)))
        if self._command.run or self._boxed is not None:
            self._queue.append(self._send_cell)
        for delivery in self._tools.open():
            self._queue.append(functools.partial(self._tools.send, delivery, self._send))
        if self.capture is not None:
            self._queue.append(self._send_capture)
        self._wake.set()
        writer = asyncio.create_task(self._write(), name="attachment-write")
        reader = asyncio.create_task(self._read(stream), name="attachment-read")
        try:
            await asyncio.wait({writer, reader}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done() and not reader.done():
                stream.cancel()
                self._forget_replies()  # a reader that waits for room goes on
            await reader
        finally:
            self._stream = None
            self.stdin.cut()
            self.files.cut()
            for task in (writer, reader):
                task.cancel()
            await asyncio.wait({writer, reader})
            for task in (writer, reader):
                if not task.cancelled():
                    task.exception()  # the reader's was raised above; a writer's only repeats it

    def _spec(self) -> host_pb2.SandboxSpec:
        granted = self._command.granted
        spec = host_pb2.SandboxSpec(
            invocation_id=self._invocation_id,
            driver=granted.driver,
            template=granted.template,
            demanded_limits=granted.demanded_limits,
            output_limit_bytes=granted.output_limit_bytes,
        )
        for field in spec.resources.DESCRIPTOR.fields:
            setattr(spec.resources, field.name, getattr(granted.resources, field.name))
        return spec

    async def _read(self, stream: Stream) -> None:
        while True:
            response = await stream.read()
            if response is grpc.aio.EOF:
                if (code := await stream.code()) != grpc.StatusCode.OK:
                    raise StreamEnded(str(code))
                raise StreamEnded("the host closed the stream")
            assert isinstance(response, hs.AttachSandboxResponse)
            try:
                done = await self._handle(response)
                self._reply_again(max(self._sequence, response.sequence))
            except (BlobRefused, OutputGap) as problem:
                raise SandboxDenied(str(problem)) from problem
            if not response.sequence:
                continue
            self._sequence = response.sequence
            kind = response.WhichOneof("event")
            if kind == "blob":
                done = self._acks.hold(response.blob.blob_id)
            elif kind == "file":
                done = self._acks.hold("")
            else:
                files = [""] if kind == "capture_completed" else []
                self._acks.release(self._blobs.taken() + files, done)
            self._acks.add(response.sequence, done)
            if kind == "gone":
                self._acks.release_all()
                self._forget_replies()
                if done is not None:
                    await done
                self._acks.advance(urgent=True)
                await self._idle.wait()
                self.gone.set()
                await self._hang_up(stream)
                return

    async def _hang_up(self, stream: Stream) -> None:
        """Waits until the host has heard the last acknowledgement: to cancel would drop it."""
        self._stream = None
        with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError):
            async with asyncio.timeout(HANG_UP_SECONDS):
                await stream.done_writing()
                while await stream.read() is not grpc.aio.EOF:
                    pass

    def _ack_is_due(self) -> None:
        self._idle.clear()
        self._wake.set()

    async def _handle(self, response: hs.AttachSandboxResponse) -> asyncio.Future[None] | None:
        loop = self._services.loop
        match response.WhichOneof("event"):
            case "attached":
                self._resume = response.attached
                self.stdin.attached(response.attached.stdin_offset)
            case "ready":
                return loop.post(
                    ev.SandboxStarted(
                        invocation_id=self._invocation_id,
                        sandbox_id=self._command.sandbox_id,
                        enforcement=convert.enforcement_in(response.ready.enforcement),
                        driver=response.ready.driver,
                    )
                )
            case "output":
                return await self._output(response.output)
            case "blob":
                await self._blobs.add(response.blob)
            case "call":
                return await self._call(response.call)
            case "cell_completed":
                return await self._cell(response.cell_completed)
            case "display":
                return await self._shown(response.display)
            case "tool_result":
                return await self._tools.result(response.tool_result)
            case "stdin_taken":
                self.stdin.taken(response.stdin_taken.offset)
            case "file_outcome":
                self._acks.count(len(response.file_outcome.data))
                self.files.outcome(response.file_outcome)
            case "file":
                await self._files.add(response.file)
            case "capture_completed":
                await self._files.finish(response.capture_completed)
                return self._captured("")
            case "gone":
                return self._gone(response.gone)
        return None

    def _reply_again(self, sequence: int) -> None:
        """Answers the calls that were open when the stream was attached, once the events that the
        host had by then are handled: a call among them may be one that was never heard."""
        resume = self._resume
        node = self._services.loop.state.live(self._invocation_id)
        if resume is None or sequence < resume.last_sequence or node is None:
            return
        self._resume = None
        known: list[cmd.Reply] = []
        for open_id in resume.open_call_ids:
            call_id = CallId(open_id)
            if call_id in self._answered:
                self.reply(self._answered[call_id])
            elif call_id in node.calls:
                known.extend(answer(self._services.loop.state, node, call_id))
            else:
                failure = Failure(
                    reason="STORE_UNAVAILABLE", message="the answer was lost; ask again"
                )
                self.reply(
                    cmd.Reply(
                        tenant_id=self._command.tenant_id,
                        sandbox_id=self._command.sandbox_id,
                        call_id=call_id,
                        failure=failure,
                    )
                )
        if known:
            self._services.nursery.start(self._reply_durably(known), name="reply-again")

    async def _reply_durably(self, replies: list[cmd.Reply]) -> None:
        """Gives answers that the engine has, once the journal has them too."""
        with contextlib.suppress(Refused):  # the journal failed, and the controller ends
            await self._services.loop.settled()
            for reply in replies:
                self.reply(reply)

    async def _call(self, call: hs.SandboxCall) -> asyncio.Future[None] | None:
        await self._room.wait()
        result = await self._calls.handle(call)
        if isinstance(result, cmd.Reply):
            self._remember(result)
            self.reply(result)
            return None
        return result

    def _remember(self, reply: cmd.Reply) -> None:
        """Keeps the latest answers of which the journal knows nothing, for the next stream."""
        self._answered[reply.call_id] = reply
        self._answered_bytes += _reply_bytes(reply)
        while len(self._answered) > ANSWERED or self._answered_bytes > REPLY_BYTES:
            oldest = self._answered.pop(next(iter(self._answered)))
            self._answered_bytes -= _reply_bytes(oldest)

    async def _output(self, chunk: hs.OutputChunk) -> asyncio.Future[None] | None:
        if not self._is_box and chunk.cell_id != self._command.cell_id:
            return None
        name = "stderr" if chunk.stream == isv.OUTPUT_STREAM_STDERR else "stdout"
        written = await self._services.output.append(
            self._command.tenant_id, self._kept(chunk.cell_id), name, chunk.offset, chunk.data
        )
        self._acks.count(len(chunk.data))
        if self._is_crowded():
            await asyncio.sleep(len(chunk.data) / CROWDED_BYTES_A_SECOND)
        if self._is_box:
            written.add_done_callback(lambda _: self._printed(chunk.cell_id, name))
        return written

    def _printed(self, cell_id: str, stream: str) -> None:
        self._services.loop.watchers.printed(self._tree_id, CellId(cell_id), stream)

    def _kept(self, cell_id: str) -> str:
        """The name under which a cell's output is kept."""
        if self._is_box:
            return convert_cells.cell_output_id(self._invocation_id, cell_id)
        return self._output_id

    async def _shown(self, display: hs.DisplayShown) -> asyncio.Future[None]:
        """Takes what a cell shows; what cannot be kept is left out."""
        data: list[ShownData] = []
        for item in display.data:
            try:
                data.append(await self._blobs.shown(item.media_type, item.content))
            except Refused as refused:
                log.info("display_refused", invocation_id=self._invocation_id, why=refused.message)
        return self._services.loop.post(
            ev.CellShown(
                invocation_id=self._invocation_id,
                sandbox_id=self._command.sandbox_id,
                cell_id=CellId(display.cell_id),
                index=display.index,
                is_result=display.is_result,
                data=tuple(data),
            )
        )

    async def _cell(self, cell: hs.CellCompleted) -> asyncio.Future[None]:
        tenant_id = self._command.tenant_id
        self._captures_itself = self._command.run
        if self._boxed is not None and self._boxed.cell_id == cell.cell_id:
            self._boxed = None
        if streams := convert_cells.streams_of(cell):
            await self._services.output.sync(tenant_id, self._kept(cell.cell_id), streams)
        failure = convert.failure_in(cell.failure) if cell.HasField("failure") else None
        outcome = convert_cells.outcome_in(cell.outcome)
        value = None
        if outcome in (CellOutcome.RETURNED, CellOutcome.COMPLETED):
            value = NONE_VALUE
            if cell.HasField("value"):
                try:
                    value = await self._blobs.value(cell.value)
                except Refused as refused:
                    outcome, value = CellOutcome.ERRORED, None
                    full = refused.reason is Reason.STORE_FULL
                    failure = Failure(
                        type_name="UnavailableError" if full else "ValueTooLargeError",
                        message=refused.message,
                        reason=refused.reason.value,
                    )
        checked = None
        ends = not self._is_box or outcome is CellOutcome.RETURNED  # its invocation
        if value is not None and ends and not self._command.has_contract:
            checked = self._services.checker.check_small(self._invocation_id, value)
        return self._services.loop.post(
            ev.CellEnded(
                invocation_id=self._invocation_id,
                sandbox_id=self._command.sandbox_id,
                cell_id=CellId(cell.cell_id),
                checked=checked,
                outcome=outcome,
                value=value,
                failure=failure,
                stdout_bytes=cell.stdout_bytes,
                stderr_bytes=cell.stderr_bytes,
                evidence=convert.evidence_in(cell.evidence, levels=ends or cell.output_cut),
                output_cut=cell.output_cut,
                failure_errno=cell.failure_errno if cell.HasField("failure_errno") else None,
                text=cell.text[:TEXT_CHARACTERS],
                killed_processes=cell.killed_processes,
                background_processes=cell.background_processes,
                state_lost=cell.state_lost,
            )
        )

    def _captured(self, problem: str) -> asyncio.Future[None]:
        return self._services.loop.post(
            ev.FilesCaptured(
                invocation_id=self._invocation_id,
                sandbox_id=self._command.sandbox_id,
                artifacts=tuple(self._files.artifacts),
                refused_count=len(self._files.refusals),
                problem=problem,
            )
        )

    async def give_up_capture(self, problem: str) -> None:
        """Ends a capture that cannot be finished; what was published stays."""
        try:
            await self._files.finish(None)
        finally:  # whatever the store says, the invocation's end waits for this
            await self._captured(problem)

    def _gone(self, gone: hs.SandboxGone) -> asyncio.Future[None]:
        cause = GoneCause(hs.GoneCause.Name(gone.cause).removeprefix("GONE_CAUSE_").lower())
        return self.lost(cause, gone.message, convert.evidence_in(gone.evidence))

    def lost(self, cause: GoneCause, message: str, evidence: Evidence) -> asyncio.Future[None]:
        """Says that the sandbox is no more."""
        return self._services.loop.post(
            ev.SandboxGone(
                invocation_id=self._invocation_id,
                sandbox_id=self._command.sandbox_id,
                cause=cause,
                message=message,
                evidence=evidence,
            )
        )

    async def close(self) -> None:
        """Frees what is half received."""
        await self._blobs.close()


def _reply_bytes(reply: cmd.Reply) -> int:
    """What an answer holds in memory, by estimate; a large value is in the store."""
    held = len(reply.value.json or b"") if reply.value is not None else 0
    return held + REPLY_OVERHEAD_BYTES
