"""What a controller says to a sandbox, turned into frames.

Called by `sandbox.host.hosted`. Contents that are too many bytes for one frame become blobs under
ids of the host; a content that came as chunks is kept on the disk until the message that names it
is here, so that a sandbox never gets half of one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from google.protobuf.duration_pb2 import Duration

from hutch.v1 import host_service_pb2 as pb
from hutch.v1 import invocation_pb2, tool_pb2
from sandbox.host import failures
from sandbox.host.errors import HostError, field_invalid, payload_too_large
from sandbox.runtime import frames

INLINE_BYTES = frames.MAX_FRAME_BYTES - frames.MAX_HEADER_BYTES - frames.PREFIX_BYTES
MEMORY_BYTES = 1024 * 1024
_MAX_MS = 2**53
_MODES: dict[int, str] = {
    invocation_pb2.INVOCATION_MODE_PROGRAM: "program",
    invocation_pb2.INVOCATION_MODE_AGENT: "agent",
    invocation_pb2.INVOCATION_MODE_INTERACTIVE: "interactive",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Frames to send, made as they are needed."""

    frames: Iterator[bytes]
    size: int
    sources: Sequence[Source] = ()

    def close(self) -> None:
        """Gives up what was not sent."""
        for source in self.sources:
            source.close()


class StreamContents:
    """The contents that one stream has brought in chunks and not used yet."""

    def __init__(self, directory: Path, *, content_bytes: int, total_bytes: int) -> None:
        """Starts empty; what is large is kept in unnamed files in `directory`."""
        self._directory = directory
        self._content_limit = content_bytes
        self._total_limit = total_bytes
        self._files: dict[str, IO[bytes]] = {}
        self._complete: set[str] = set()
        self._total = 0

    def chunk(self, chunk: pb.BlobChunk) -> None:
        """Takes the next chunk of a content.

        Raises:
            HostError: FIELD_INVALID out of order; PAYLOAD_TOO_LARGE.
        """
        name = chunk.blob_id
        if not name or len(name) > 200:
            raise field_invalid("blob.blob_id", "must have 1 to 200 characters")
        file = self._files.get(name)
        if file is None:
            file = self._files[name] = _spool(self._directory)
        if name in self._complete or chunk.offset != file.tell():
            raise field_invalid("blob.offset", "the chunk is out of order")
        if chunk.offset + len(chunk.data) > self._content_limit:
            raise payload_too_large("blob", self._content_limit)
        self._total += len(chunk.data)
        if self._total > self._total_limit:
            raise payload_too_large("the stream's contents", self._total_limit)
        file.write(chunk.data)
        if chunk.last:
            self._complete.add(name)

    def use(self, content: pb.Content, field: str) -> Source:
        """Finds the bytes of a content, once.

        Raises:
            HostError: FIELD_INVALID, its bytes are not here or not as many as it says.
        """
        if content.WhichOneof("body") != "blob_id":
            if content.size_bytes != len(content.data):
                raise field_invalid(field, "size_bytes is not the number of bytes")
            return Source(data=content.data, file=None, size=len(content.data))
        name = content.blob_id
        if name not in self._complete:
            raise field_invalid(field, "its blob did not come completely before")
        file = self._files.pop(name)
        self._complete.remove(name)
        size = file.tell()
        self._total -= size
        if content.size_bytes != size:
            file.close()
            raise field_invalid(field, "size_bytes is not the size of the blob")
        return Source(data=b"", file=file, size=size)

    def discard(self, contents: Sequence[pb.Content]) -> None:
        """Forgets the contents of a message that does nothing."""
        for content in contents:
            file = self._files.pop(content.blob_id, None)
            if file is not None:
                self._total -= file.tell()
                self._complete.discard(content.blob_id)
                file.close()

    def close(self) -> None:
        """Forgets all."""
        for file in self._files.values():
            file.close()
        self._files.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The bytes of one content: at hand, or in a file that is closed once it was read."""

    data: bytes
    file: IO[bytes] | None
    size: int

    def close(self) -> None:
        """Gives up the file, if there is one."""
        if self.file is not None:
            self.file.close()

    def whole(self) -> bytes:
        """All bytes at once."""
        if self.file is None:
            return self.data
        with self.file as file:
            file.seek(0)
            return file.read()

    def chunks(self) -> Iterator[bytes]:
        """The bytes in pieces that fit into a frame; at least one piece."""
        if self.file is None:
            for at in range(0, max(1, self.size), frames.CHUNK_BYTES):
                yield self.data[at : at + frames.CHUNK_BYTES]
            return
        with self.file as file:
            file.seek(0)
            for _ in range(0, max(1, self.size), frames.CHUNK_BYTES):
                yield file.read(frames.CHUNK_BYTES)


class Outbound:
    """Makes the frames of one sandbox and numbers its blobs."""

    def __init__(self, output_limit_bytes: int) -> None:
        """Takes the limit that every cell is told."""
        self._output_limit = output_limit_bytes
        self._blob_count = 0

    def cell(self, run: pb.RunCell, contents: StreamContents) -> Message:
        """Makes the frames that run one cell.

        Raises:
            HostError: FIELD_INVALID or PAYLOAD_TOO_LARGE.
        """
        if run.mode not in _MODES:
            raise field_invalid("run_cell.mode", "must be set")
        named = [(run.code, "run_cell.code")]
        named += [(item.value, f"input {item.name!r}") for item in run.inputs]
        with _sources(named, contents) as sources:
            parts, layout = self._lay_out(sources)
            return layout.message(self._cell_header(run, parts), "run_cell")

    def _cell_header(self, run: pb.RunCell, parts: list[dict[str, object]]) -> dict[str, object]:
        return {
            "type": "cell",
            "cell": run.cell_id,
            "code": parts[0],
            "inputs": [
                {"name": item.name, "value": part}
                for item, part in zip(run.inputs, parts[1:], strict=True)
            ],
            "mode": _MODES[run.mode],
            "invocation": run.invocation_id,
            "depth": run.depth,
            "max_depth": run.max_depth,
            "timeout_ms": _milliseconds(run.timeout) if run.HasField("timeout") else 0,
            "output_limit": self._output_limit,
            "tools": [_tool(tool) for tool in run.tools],
            "stdin": run.stdin,
            "final": run.HasField("capture"),
        }

    def reply(self, reply: pb.CallReply, contents: StreamContents) -> Message:
        """Makes the frames that answer one call.

        Raises:
            HostError: FIELD_INVALID or PAYLOAD_TOO_LARGE.
        """
        header: dict[str, object] = {"type": "reply", "call": reply.call_id}
        if reply.WhichOneof("outcome") == "failure":
            frame = _failure_frame(header, failures.to_frame(reply.failure))
            return whole(frame)
        if reply.WhichOneof("outcome") is None:
            raise field_invalid("reply.outcome", "must be set")
        with _sources([(reply.value, "reply.value")], contents) as sources:
            parts, layout = self._lay_out(sources)
            return layout.message({**header, "value": parts[0]}, "reply")

    def tool_call(self, delivery: pb.ToolDelivery, contents: StreamContents) -> Message:
        """Makes the frames that call a tool of the sandbox's code.

        Raises:
            HostError: FIELD_INVALID or PAYLOAD_TOO_LARGE.
        """
        header: dict[str, object] = {
            "type": "tool_call",
            "call": delivery.call_id,
            "tool": delivery.tool_id,
            "method": delivery.method,
        }
        with _sources([(delivery.arguments, "tool.arguments")], contents) as sources:
            parts, layout = self._lay_out(sources)
            return layout.message({**header, "arguments": parts[0]}, "tool")

    def _lay_out(self, sources: list[Source]) -> tuple[list[dict[str, object]], _Layout]:
        parts: list[dict[str, object]] = [{}] * len(sources)
        inline: list[Source] = []
        blobs: list[tuple[str, Source]] = []
        used = 0
        # The smallest first: as many as fit go with the frame itself.
        for index in sorted(range(len(sources)), key=lambda index: sources[index].size):
            source = sources[index]
            if used + source.size <= INLINE_BYTES:
                parts[index] = {"at": used, "n": source.size}
                inline.append(source)
                used += source.size
            else:
                self._blob_count += 1
                blob = f"host_{self._blob_count}"
                parts[index] = {"blob": blob, "n": source.size}
                blobs.append((blob, source))
        return parts, _Layout(inline=inline, blobs=blobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    inline: list[Source]
    blobs: list[tuple[str, Source]]

    def message(self, header: dict[str, object], field: str) -> Message:
        size = sum(source.size for source in self.inline)
        size += sum(source.size for _, source in self.blobs)
        try:
            frame = frames.encode(header, b"".join(source.whole() for source in self.inline))
        except frames.FrameError as error:
            raise field_invalid(field, str(error)) from error
        sources = [source for _, source in self.blobs]
        return Message(frames=self._frames(frame), size=size + len(frame), sources=sources)

    def _frames(self, frame: bytes) -> Iterator[bytes]:
        for blob, source in self.blobs:
            offset = 0
            for chunk in source.chunks():
                last = offset + len(chunk) >= source.size
                header = {"type": "blob", "blob": blob, "offset": offset, "last": last}
                yield frames.encode(header, chunk)
                offset += len(chunk)
        yield frame


@contextmanager
def _sources(
    named: Sequence[tuple[pb.Content, str]], contents: StreamContents
) -> Iterator[list[Source]]:
    """Takes the contents of one message; a message that is refused keeps none of them."""
    sources: list[Source] = []
    try:
        for content, field in named:
            sources.append(contents.use(content, field))
        yield sources
    except HostError:
        for source in sources:
            source.close()
        raise


def _spool(directory: Path) -> IO[bytes]:
    return tempfile.SpooledTemporaryFile(max_size=MEMORY_BYTES, mode="w+b", dir=str(directory))


def whole(frame: bytes) -> Message:
    """A message of one frame, in its turn."""
    return Message(frames=iter((frame,)), size=len(frame))


def control(kind: str, **keys: object) -> bytes:
    """Makes one small frame."""
    return frames.encode({"type": kind, **keys})


def capture(request: pb.FileCapture) -> bytes:
    """Makes the frame that asks for files.

    Raises:
        HostError: FIELD_INVALID, its patterns are too long.
    """
    try:
        return control(
            "capture",
            patterns=list(request.patterns),
            max_files=request.max_files,
            max_bytes=min(request.max_bytes, frames.MAX_INTEGER),
        )
    except frames.FrameError as error:
        raise field_invalid("capture.patterns", str(error)) from error


def _failure_frame(header: dict[str, object], failure: dict[str, str]) -> bytes:
    while True:
        try:
            return frames.encode({**header, "failure": failure})
        except frames.FrameError as error:
            # Many bytes a character: the longest text gives way until the header fits.
            longest = max(failure, key=lambda key: len(failure[key].encode()))
            if not failure[longest]:
                raise HostError("FIELD_INVALID", f"reply.failure: {error}") from error
            failure = {**failure, longest: failure[longest][: len(failure[longest]) // 2]}


def _tool(tool: tool_pb2.ToolGrant) -> dict[str, object]:
    return {
        "tool": tool.tool_id,
        "name": tool.name,
        "description": tool.description,
        "signature": tool.signature,
        "methods": [
            {
                "name": method.name,
                "signature": method.signature,
                "description": method.description,
            }
            for method in tool.methods
        ],
        "delegable": tool.delegable,
        "timeout_ms": _milliseconds(tool.timeout) if tool.HasField("timeout") else 0,
    }


def _milliseconds(duration: Duration) -> int:
    exact = duration.seconds * 1_000 + -(-duration.nanos // 1_000_000)
    return min(max(1, exact), _MAX_MS)
