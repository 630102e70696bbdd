"""What passes beside the cells of a live sandbox: tool calls, standard input, files.

Made by `hosts.attachment` for each sandbox, which sends and hands over what comes back. A stream
that is cut loses nothing of a tool call; who writes standard input or works on a file tries again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from controller import convert
from controller.core.errors import Reason, Refused
from controller.core.ids import ArtifactId, ToolCallId
from controller.engine import commands as cmd
from controller.engine import events as ev
from controller.hosts.blobs import InboundBlobs, OutboundContents
from controller.hosts.calls import Calls
from controller.hosts.services import Services
from controller.store.ports import ArtifactNotFound
from hutch.v1 import host_service_pb2 as hs
from hutch.v1 import sandbox_file_pb2 as sf

STDIN_WINDOW_BYTES = 256 * 1024
STDIN_PIECE_BYTES = 64 * 1024
FILE_OPERATIONS = 256

Send = Callable[[hs.AttachSandboxRequest], Awaitable[None]]
Post = Callable[[hs.AttachSandboxRequest], None]


class ToolDeliveries:
    """The calls of tools that this sandbox's code owns."""

    def __init__(
        self,
        services: Services,
        command: cmd.StartSandbox,
        calls: Calls,
        blobs: InboundBlobs,
        outbound: OutboundContents,
    ) -> None:
        self._services = services
        self._owner = command.invocation_id
        self._calls = calls
        self._blobs = blobs
        self._outbound = outbound
        self._open: dict[ToolCallId, cmd.CallTool] = {}

    def add(self, command: cmd.CallTool) -> None:
        """Keeps a call, to be sent on this stream and on every later one."""
        self._open[command.tool_call_id] = command

    def remove(self, command: cmd.EndToolCall) -> None:
        """Forgets a call that is over."""
        self._open.pop(command.tool_call_id, None)

    def open(self) -> list[cmd.CallTool]:
        """The calls without an outcome."""
        return list(self._open.values())

    async def send(self, command: cmd.CallTool, send: Send) -> None:
        """Sends a call, unless it is over."""
        if command.tool_call_id not in self._open:
            return
        try:
            arguments = await self._outbound.of_value(command.arguments, send)
        except ArtifactNotFound as problem:
            refused = Refused(Reason.ARTIFACT_NOT_FOUND, str(problem))
            self._services.loop.post(
                ev.ToolReturned(
                    owner=self._owner,
                    tool_call_id=command.tool_call_id,
                    value=None,
                    failure=convert.failure_of(refused),
                )
            )
            return
        delivery = hs.ToolDelivery(
            call_id=command.tool_call_id,
            tool_id=command.tool_id,
            method=command.method,
            arguments=arguments,
        )
        await send(hs.AttachSandboxRequest(tool=delivery))

    async def result(self, result: hs.ToolResult) -> asyncio.Future[None]:
        """Takes an outcome.

        Raises:
            BlobRefused: it names a content that is not there.
        """
        value, failure = None, None
        named: tuple[ArtifactId, ...] = ()
        try:
            if result.WhichOneof("outcome") == "value":
                value, named = await self._calls.named_value("value", result.value)
            else:
                failure = convert.failure_in(result.failure)
        except Refused as refused:
            failure = convert.failure_of(refused)
        finally:
            await self._blobs.discard([result.value])
        return self._services.loop.post(
            ev.ToolReturned(
                owner=self._owner,
                tool_call_id=ToolCallId(result.call_id),
                value=value,
                failure=failure,
                artifact_ids=named,
            )
        )


class StdinWriter:
    """Standard input of the code, by offset, with at most a window on its way."""

    def __init__(self) -> None:
        self._offset = 0  # what was sent ends here
        self._taken = 0
        self._closed = False
        self._moved = asyncio.Event()
        self._guard = asyncio.Lock()  # pieces of one write stay together and in order
        self._epoch = 0  # rises with every cut

    def attached(self, offset: int) -> None:
        """Notes how far the host has come."""
        self._offset = self._taken = offset

    def taken(self, offset: int) -> None:
        """Notes what the code's pipe has taken."""
        self._taken = max(self._taken, offset)
        self._moved.set()

    def cut(self) -> None:
        """The stream is over: what waits is refused."""
        self._epoch += 1
        self._moved.set()

    async def write(self, offset: int, data: bytes, post: Post, *, close: bool) -> int:
        """Sends bytes as the window allows; the offset up to which they were sent.

        Raises:
            Refused: FIELD_INVALID for a gap or after the end; HOST_UNAVAILABLE after a cut.
        """
        async with self._guard:
            epoch = self._epoch
            if offset > self._offset:
                message = f"offset: standard input has come to {self._offset}"
                raise Refused(Reason.FIELD_INVALID, message, field="offset")
            rest = data[self._offset - offset :]
            if rest and self._closed:
                raise Refused(Reason.FIELD_INVALID, "standard input was closed", field="data")
            while rest:
                room = self._taken + STDIN_WINDOW_BYTES - self._offset
                if room <= 0:
                    self._moved.clear()
                    await self._moved.wait()
                    if self._epoch != epoch:
                        message = "the sandbox's stream was cut; ask how far it has come"
                        raise Refused(Reason.HOST_UNAVAILABLE, message)
                    continue
                piece, rest = (
                    rest[: min(room, STDIN_PIECE_BYTES)],
                    rest[min(room, STDIN_PIECE_BYTES) :],
                )
                chunk = hs.StdinChunk(offset=self._offset, data=piece)
                post(hs.AttachSandboxRequest(stdin=chunk))
                self._offset += len(piece)
            if close and not self._closed:
                chunk = hs.StdinChunk(offset=self._offset, close=True)
                post(hs.AttachSandboxRequest(stdin=chunk))
                self._closed = True
            return self._offset


class FileOperations:
    """The file operations that wait for their outcome."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[sf.FileOutcome]] = {}

    async def run(self, operation: sf.FileOperation, post: Post) -> sf.FileOutcome:
        """Sends one and waits for its outcome.

        Raises:
            Refused: QUOTA_EXCEEDED; HOST_UNAVAILABLE when the stream was cut meanwhile.
        """
        if len(self._waiting) >= FILE_OPERATIONS:
            raise Refused(Reason.QUOTA_EXCEEDED, f"more than {FILE_OPERATIONS} file operations")
        done: asyncio.Future[sf.FileOutcome] = asyncio.get_running_loop().create_future()
        self._waiting[operation.operation_id] = done
        try:
            post(hs.AttachSandboxRequest(file_operation=operation))
            return await done
        finally:
            self._waiting.pop(operation.operation_id, None)

    def outcome(self, outcome: sf.FileOutcome) -> None:
        """Takes an outcome; one that nobody waits for is dropped."""
        done = self._waiting.get(outcome.operation_id)
        if done is not None and not done.done():
            done.set_result(outcome)

    def cut(self) -> None:
        """The stream is over: whether what waits was done is not known."""
        for done in self._waiting.values():
            if not done.done():
                message = "the sandbox's stream was cut; look whether it was done"
                done.set_exception(Refused(Reason.HOST_UNAVAILABLE, message))
