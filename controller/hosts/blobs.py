"""Contents larger than a message: taken apart on the way out, put together on the way in.

Called by `hosts.attachment`. What comes in from a sandbox is bounded: so many blobs at once, so
many bytes each, in memory only up to 1 MiB, then on disk in the artifact store's staging.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field

from controller.convert import INLINE_VALUE_BYTES, VALUE_BYTES
from controller.core.errors import Reason, Refused
from controller.core.ids import ArtifactId, TenantId, new_artifact_id
from controller.core.model import ArtifactReference, ShownData, Value
from controller.hosts.services import Services
from controller.store.ports import (
    AlreadyPublished,
    ArtifactNotFound,
    StagedFile,
    StoreFull,
)
from hutch.v1 import host_service_pb2 as hs

CHUNK_BYTES = 192 * 1024
OPEN_BLOBS = 16
SHOWN_BYTES = 64 * 1024

Send = Callable[[hs.AttachSandboxRequest], Awaitable[None]]


class BlobRefused(Exception):
    """A sandbox's blob breaks the rules of the stream."""


@dataclass(slots=True)
class _Blob:
    data: bytearray = field(default_factory=bytearray)
    staged: StagedFile | None = None
    size: int = 0
    whole: bool = False
    problem: Refused | None = None


class InboundBlobs:
    """The contents that one sandbox has sent and not used yet."""

    def __init__(self, services: Services, tenant_id: TenantId) -> None:
        self._services = services
        self._tenant_id = tenant_id
        self._blobs: dict[str, _Blob] = {}
        self._taken: list[str] = []
        self._stored_bytes = 0

    async def add(self, chunk: hs.BlobChunk) -> None:
        """Takes one chunk.

        Raises:
            BlobRefused: too many blobs, a chunk out of order, or too many bytes.
        """
        blob = self._blobs.get(chunk.blob_id) or _Blob()
        if chunk.blob_id not in self._blobs and len(self._blobs) >= OPEN_BLOBS:
            raise BlobRefused("too many blobs at once")
        if blob.whole or chunk.offset != blob.size:
            raise BlobRefused("a blob's chunk is out of order")
        if not chunk.data and not chunk.last:
            raise BlobRefused("a blob's chunk is empty and not the last")
        if blob.size + len(chunk.data) > VALUE_BYTES:
            raise BlobRefused(f"a blob of more than {VALUE_BYTES} bytes")
        self._blobs[chunk.blob_id] = blob
        blob.size += len(chunk.data)
        blob.whole = chunk.last
        if blob.problem is None:
            try:
                await self._keep(blob, chunk.data)
            except StoreFull as problem:
                blob.problem = Refused(Reason.STORE_FULL, str(problem))
                blob.staged = None
                blob.data.clear()

    async def _keep(self, blob: _Blob, data: bytes) -> None:
        if blob.staged is None and blob.size <= INLINE_VALUE_BYTES:
            blob.data += data
            return
        if blob.staged is None:
            blob.staged = await self._services.artifacts.stage(VALUE_BYTES)
            await blob.staged.write(bytes(blob.data))
            blob.data.clear()
        await blob.staged.write(data)

    def _take(self, content: hs.Content) -> _Blob:
        blob = self._blobs.get(content.blob_id)
        if blob is None or not blob.whole:
            raise BlobRefused("a content names a blob that is not there")
        if content.size_bytes != blob.size:
            raise BlobRefused("a content has not the size of its blob")
        del self._blobs[content.blob_id]
        self._taken.append(content.blob_id)
        if blob.problem is not None:
            raise blob.problem
        return blob

    def taken(self) -> list[str]:
        """The blobs that were used since the last call."""
        taken, self._taken = self._taken, []
        return taken

    async def discard(self, contents: Iterable[hs.Content]) -> None:
        """Forgets those contents that were not used: their call has had its answer."""
        for content in contents:
            blob = self._blobs.pop(content.blob_id, None)
            if blob is not None:
                self._taken.append(content.blob_id)
                if blob.staged is not None:
                    await blob.staged.abort()

    async def small(self, content: hs.Content, limit: int) -> bytes:
        """The bytes of a content that must fit into memory.

        Raises:
            Refused: PAYLOAD_TOO_LARGE.
            BlobRefused: the blob is not there.
        """
        if content.WhichOneof("body") != "blob_id":
            data = content.data
        else:
            blob = self._take(content)
            if blob.staged is not None:
                await blob.staged.abort()
                raise _too_large(blob.size, limit)
            data = bytes(blob.data)
        if len(data) > limit:
            raise _too_large(len(data), limit)
        return data

    async def shown(self, media_type: str, content: hs.Content) -> ShownData:
        """One media type of a display; over 64 KiB its bytes become an artifact without a producer.

        Raises:
            Refused: PAYLOAD_TOO_LARGE, QUOTA_EXCEEDED, STORE_FULL.
            BlobRefused: the blob is not there.
        """
        if content.WhichOneof("body") != "blob_id" and len(content.data) <= SHOWN_BYTES:
            return ShownData(media_type=media_type, data=content.data)
        limits = self._services.config.limits
        with _full_is_refused():
            staged = await self.staged(content, limits.artifact_bytes)
            reference = await self._store(staged, staged.size, "display", media_type)
        return ShownData(media_type=media_type, artifact=reference)

    async def value(self, content: hs.Content) -> Value:
        """The value of a content; over 1 MiB it becomes an artifact without a producer.

        Raises:
            Refused: PAYLOAD_TOO_LARGE, QUOTA_EXCEEDED, STORE_FULL.
            BlobRefused: the blob is not there.
        """
        if content.WhichOneof("body") != "blob_id":
            return Value(json=content.data)
        blob = self._take(content)
        if blob.staged is None:
            return Value(json=bytes(blob.data))
        with _full_is_refused():
            await blob.staged.finish()
            reference = await self._store(blob.staged, blob.size, "value.json", "application/json")
        return Value(artifact=reference)

    async def _store(
        self, staged: StagedFile, size: int, name: str, media_type: str
    ) -> ArtifactReference:
        limit = self._services.config.limits.stored_bytes
        if self._stored_bytes + size > limit:  # a refused spawn's inputs are stored as well
            await staged.abort()
            raise Refused(
                Reason.QUOTA_EXCEEDED, f"more than {limit} bytes of large values", limit=str(limit)
            )
        self._stored_bytes += size
        row = await self._services.artifacts.publish(
            self._tenant_id,
            new_artifact_id(),
            name,
            staged,
            media_type,
            "",
            self._services.now_us(),
        )
        if isinstance(row, AlreadyPublished):
            row = row.row
        return ArtifactReference(
            artifact_id=ArtifactId(row.artifact_id), sha256=row.sha256, size_bytes=row.size_bytes
        )

    async def staged(self, content: hs.Content, limit: int) -> StagedFile:
        """The bytes of a content as a finished stage.

        Raises:
            Refused: PAYLOAD_TOO_LARGE, STORE_FULL.
            BlobRefused: the blob is not there.
        """
        if content.WhichOneof("body") == "blob_id":
            blob = self._take(content)
            if blob.size > limit:
                if blob.staged is not None:
                    await blob.staged.abort()
                raise _too_large(blob.size, limit)
            if blob.staged is not None:
                await blob.staged.finish()
                return blob.staged
            data = bytes(blob.data)
        else:
            data = content.data
        if len(data) > limit:
            raise _too_large(len(data), limit)
        stage = await self._services.artifacts.stage(limit)
        await stage.write(data)
        await stage.finish()
        return stage

    async def close(self) -> None:
        """Removes what was not used."""
        for blob in self._blobs.values():
            if blob.staged is not None:
                await blob.staged.abort()
        self._blobs.clear()


@contextlib.contextmanager
def _full_is_refused() -> Iterator[None]:
    try:
        yield
    except StoreFull as problem:
        raise Refused(Reason.STORE_FULL, "the disk under the store is full") from problem


def _too_large(size: int, limit: int) -> Refused:
    return Refused(
        Reason.PAYLOAD_TOO_LARGE, f"it has {size} bytes, the limit is {limit}", limit=str(limit)
    )


class OutboundContents:
    """Turns values into contents of one stream, sending their blobs first."""

    def __init__(self, services: Services, tenant_id: TenantId) -> None:
        self._services = services
        self._tenant_id = tenant_id
        self._next = 0

    async def of_bytes(self, data: bytes, send: Send) -> hs.Content:
        """The content for bytes in memory."""
        if len(data) <= CHUNK_BYTES:
            return hs.Content(data=data, size_bytes=len(data))
        blob_id = self._new_id()
        for offset in range(0, len(data), CHUNK_BYTES):
            part = data[offset : offset + CHUNK_BYTES]
            last = offset + len(part) == len(data)
            await send(_chunk(blob_id, offset, part, last=last))
        return hs.Content(blob_id=blob_id, size_bytes=len(data))

    async def of_value(self, value: Value, send: Send) -> hs.Content:
        """The content for a value, from the artifact store when it is large.

        Raises:
            ArtifactNotFound: the artifact is gone.
        """
        if value.artifact is None:
            return await self.of_bytes(value.json or b"null", send)
        reference = value.artifact
        blob_id = self._new_id()
        offset = 0
        chunks = self._services.artifacts.open_read(self._tenant_id, reference.artifact_id)
        async for chunk in chunks:
            for start in range(0, len(chunk), CHUNK_BYTES):
                part = chunk[start : start + CHUNK_BYTES]
                last = offset + len(part) == reference.size_bytes
                await send(_chunk(blob_id, offset, part, last=last))
                offset += len(part)
        if offset != reference.size_bytes:
            raise ArtifactNotFound(f"{reference.artifact_id} is not whole")
        return hs.Content(blob_id=blob_id, size_bytes=offset)

    def _new_id(self) -> str:
        self._next += 1
        return f"b{self._next}"


def _chunk(blob_id: str, offset: int, data: bytes, *, last: bool) -> hs.AttachSandboxRequest:
    return hs.AttachSandboxRequest(
        blob=hs.BlobChunk(blob_id=blob_id, offset=offset, data=data, last=last)
    )
