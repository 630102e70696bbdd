"""One `AttachSandbox` stream: a reader for what the owner says, one writer for events.

Called by the servicer. The stream ends when a newer one has taken its place, or when its owner
knows that the sandbox is gone.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from hutch.v1 import host_service_pb2 as pb
from sandbox.host.errors import field_invalid
from sandbox.host.fence import Fence
from sandbox.host.hosted import Attachment, HostedSandbox
from sandbox.host.outbound import StreamContents
from sandbox.host.table import SandboxTable


class Stream(Protocol):
    """Both directions of a stream."""

    async def read(self) -> pb.AttachSandboxRequest | None:
        """The next request; None once the other side has finished sending."""

    async def write(self, event: pb.AttachSandboxResponse) -> None:
        """Sends one event; only one call at a time."""


class AttachedStream:
    """The conversation about one sandbox."""

    def __init__(self, table: SandboxTable, fence: Fence, stream: Stream) -> None:
        """Serves one stream; `run` does the work."""
        self._table = table
        self._fence = fence
        self._stream = stream
        self._half_closed = False

    async def run(self) -> None:
        """Runs until the conversation is over.

        Raises:
            HostError: the first request, or a later one, is refused.
        """
        request = await self._stream.read()
        if request is None or request.WhichOneof("message") != "attach":
            raise field_invalid("attach", "must come first")
        attach = request.attach
        self._fence.check(attach.owner_epoch, attach.host_generation)
        sandbox, started = self._table.attach(attach)
        place = sandbox.attach(attach.after_sequence)
        last = sandbox.log.last_sequence
        follows = last > max(place.after_sequence, sandbox.log.acknowledged)
        attached = pb.SandboxAttached(
            started=started,
            last_sequence=last if follows else 0,
            open_call_ids=sandbox.open_calls,
            stdin_offset=sandbox.stdin_offset,
        )
        try:
            async with asyncio.TaskGroup() as group:
                reader = group.create_task(self._read(sandbox, place, attach.owner_epoch))
                await self._stream.write(pb.AttachSandboxResponse(attached=attached))
                await self._write(sandbox, place)
                reader.cancel()
        except ExceptionGroup as group:
            raise _first(group) from group

    async def _write(self, sandbox: HostedSandbox, place: Attachment) -> None:
        log, cursor = sandbox.log, place.after_sequence
        while not place.superseded:
            cursor = max(cursor, log.acknowledged)
            if cursor < log.last_sequence:
                event, cursor = log.read_joined(cursor + 1)
                await self._stream.write(event)
            elif sandbox.gone.is_set() and self._no_more_is_wanted(sandbox):
                return
            else:
                await log.wait_past(cursor)

    def _no_more_is_wanted(self, sandbox: HostedSandbox) -> bool:
        return sandbox.settled or self._half_closed or self._table.closing.is_set()

    async def _read(self, sandbox: HostedSandbox, place: Attachment, epoch: int) -> None:
        config = self._table.workshop.config
        contents = StreamContents(
            self._table.workshop.spill_directory,
            content_bytes=config.content_limit_bytes,
            total_bytes=config.contents_limit_bytes,
        )
        try:
            while (request := await self._stream.read()) is not None:
                self._fence.check(epoch, self._fence.generation)
                if place.superseded:
                    return
                if sandbox.ending and request.WhichOneof("message") != "acknowledge":
                    continue
                try:
                    _handle(sandbox, request, contents)
                except OSError as error:  # what was said is not here, and nobody says it again
                    sandbox.channel_failed(str(error))
                await sandbox.room()
        finally:
            contents.close()
            self._half_closed = True
            sandbox.log.wake()


def _handle(
    sandbox: HostedSandbox, request: pb.AttachSandboxRequest, contents: StreamContents
) -> None:
    match request.WhichOneof("message"):
        case "acknowledge":
            sandbox.acknowledge(request.acknowledge.sequence)
            sandbox.log.wake()
        case "reply":
            sandbox.reply(request.reply, contents)
        case "run_cell":
            sandbox.run_cell(request.run_cell, contents)
        case "blob":
            contents.chunk(request.blob)
        case "interrupt":
            sandbox.interrupt(request.interrupt.cell_id)
        case "capture":
            sandbox.capture(request.capture)
        case "stdin":
            sandbox.feed(request.stdin)
        case "tool":
            sandbox.call_tool(request.tool, contents)
        case "tool_cancel":
            sandbox.cancel_tool(request.tool_cancel.call_id)
        case "file_operation":
            sandbox.operate(request.file_operation)
        case "destroy":
            sandbox.end(pb.GONE_CAUSE_DESTROYED, "its owner destroyed it")
        case "attach":
            raise field_invalid("attach", "comes once, first")
        case _:
            raise field_invalid("message", "must be set")


def _first(group: ExceptionGroup) -> Exception:
    """What went wrong first: reader and writer end each other."""
    error: Exception = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
