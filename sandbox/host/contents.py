"""Bytes that come out of a sandbox: parts of frames, and blobs.

Called by `inbound` and `calls`. Blobs are not put together here: their chunks become events at
once, under ids that the host gives, and only their order, sizes and single use are checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hutch.v1 import host_service_pb2 as pb
from sandbox.host.fields import Fields, ProtocolBreach
from sandbox.runtime import frames

MAX_UNUSED_BLOBS = 1_024
MAX_UNUSED_BYTES = 512 * 1024 * 1024


@dataclass(slots=True, kw_only=True)
class _Blob:
    wire_id: str
    size: int = 0
    complete: bool = False


@dataclass(slots=True, kw_only=True)
class SandboxBlobs:
    """The blobs of one sandbox that were begun and not used yet."""

    _open: dict[str, _Blob] = field(default_factory=dict)
    _count: int = 0
    _unused_bytes: int = 0

    def chunk(self, fields: Fields, payload: bytes) -> Iterator[pb.AttachSandboxResponse]:
        """Checks one `blob` frame and returns its events.

        Raises:
            ProtocolBreach: it is out of order, too large, or one too many.
        """
        name = fields.identifier("blob")
        offset, last = fields.number("offset"), fields.flag("last")
        fields.end()
        blob = self._open.get(name)
        if blob is None:
            unfinished = sum(not other.complete for other in self._open.values())
            if unfinished >= frames.MAX_OPEN_BLOBS or len(self._open) >= MAX_UNUSED_BLOBS:
                raise ProtocolBreach("blob: too many are open")
            blob = self._open[name] = _Blob(wire_id=self._next_id())
        if blob.complete or offset != blob.size:
            raise ProtocolBreach("blob.offset: a chunk out of order")
        if not payload and not last:
            raise ProtocolBreach("blob: an empty chunk that is not the last")
        blob.size += len(payload)
        self._unused_bytes += len(payload)
        if self._unused_bytes > MAX_UNUSED_BYTES:
            raise ProtocolBreach("blob: too much that nothing names")
        if blob.size > frames.MAX_BLOB_BYTES:
            raise ProtocolBreach(f"blob: more than {frames.MAX_BLOB_BYTES} bytes")
        blob.complete = last
        yield from _chunk_events(blob.wire_id, offset, payload, last)

    def use(self, name: str, size: int) -> pb.Content:
        """Names a complete blob as a content, once.

        Raises:
            ProtocolBreach: there is no such blob, or it has another size.
        """
        blob = self._open.pop(name, None)
        if blob is None or not blob.complete:
            raise ProtocolBreach("part.blob: no complete blob of that id")
        if blob.size != size:
            raise ProtocolBreach("part.n: not the size of the blob")
        self._unused_bytes -= size
        return pb.Content(blob_id=blob.wire_id, size_bytes=size)

    def own(self, data: bytes) -> tuple[pb.Content, list[pb.AttachSandboxResponse]]:
        """Makes a blob of bytes that came inline but are too many for one content."""
        wire_id = self._next_id()
        events = list(_chunk_events(wire_id, 0, data, True))
        return pb.Content(blob_id=wire_id, size_bytes=len(data)), events

    def _next_id(self) -> str:
        self._count += 1
        return f"blob_{self._count}"


def _chunk_events(
    wire_id: str, offset: int, data: bytes, last: bool
) -> Iterator[pb.AttachSandboxResponse]:
    for piece, at, is_last in pieces(data, last):
        chunk = pb.BlobChunk(blob_id=wire_id, offset=offset + at, data=piece, last=is_last)
        yield pb.AttachSandboxResponse(blob=chunk)


def pieces(data: bytes, last: bool = True) -> Iterator[tuple[bytes, int, bool]]:
    """Cuts bytes into chunks that a message may carry: (bytes, offset, whether it is the last)."""
    size = frames.CHUNK_BYTES
    if len(data) <= size:
        yield data, 0, last
        return
    for at in range(0, len(data), size):
        yield data[at : at + size], at, last and at + size >= len(data)


class PartReader:
    """Turns the parts that one frame names into contents.

    The parts of a frame may not name more bytes than its payload has: a frame is never a way to
    make the host send more than it got.
    """

    def __init__(self, blobs: SandboxBlobs, payload: bytes) -> None:
        """Reads parts of one frame."""
        self._blobs = blobs
        self._payload = payload
        self._left = len(payload)
        self.events: list[pb.AttachSandboxResponse] = []

    def content(self, part: object) -> pb.Content:
        """Reads one part; blob events that must come first are added to `events`."""
        fields = Fields(part, "part")
        size = fields.number("n")
        if fields.has("blob"):
            name = fields.identifier("blob")
            fields.end()
            return self._blobs.use(name, size)
        data = self._inline(fields, size)
        if len(data) <= frames.CHUNK_BYTES:
            return pb.Content(data=data, size_bytes=size)
        content, events = self._blobs.own(data)
        self.events.extend(events)
        return content

    def data(self, part: object) -> bytes:
        """Reads a part that must be inline."""
        fields = Fields(part, "part")
        return self._inline(fields, fields.number("n"))

    def _inline(self, fields: Fields, size: int) -> bytes:
        start = fields.number("at")
        fields.end()
        if start + size > len(self._payload):
            raise ProtocolBreach("part: outside of the payload")
        self._left -= size
        if self._left < 0:
            raise ProtocolBreach("part: the payload is named more than once")
        return self._payload[start : start + size]

    def end(self) -> None:
        """Says that all parts were read.

        Raises:
            ProtocolBreach: bytes of the payload belong to nothing.
        """
        if self._left:
            raise ProtocolBreach("payload: bytes that no part names")
