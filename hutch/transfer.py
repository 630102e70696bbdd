"""Artifacts in and out: streamed, resumed, digest checked.

Called by `hutch.aio`; calls `hutch.transport`. An upload is sent again from its beginning under the
same `request_id`; a download goes on from where it was cut.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from hutch import convert, types
from hutch.errors import InternalError, ValueTooLargeError
from hutch.transport import Transport
from hutch.v1 import artifact_service_pb2 as pb

INLINE_VALUE_BYTES = 1024 * 1024
INLINE_TOTAL_BYTES = 2 * 1024 * 1024  # of all inputs of one request, well below gRPC's 4 MiB
VALUE_LIMIT_BYTES = 64 * 1024 * 1024
_CHUNK_BYTES = 256 * 1024
_REMEMBERED_UPLOADS = 256


class Uploads:
    """What this client has stored, so that a large input of many calls is sent once."""

    def __init__(self) -> None:
        """Nothing is stored yet."""
        self._known: OrderedDict[str, types.Artifact] = OrderedDict()
        # Guards that a digest is looked up and stored in one step, so that it is sent once.
        self._lock = asyncio.Lock()

    async def store_inputs(
        self, transport: Transport, inputs: Sequence[types.NamedInput]
    ) -> dict[str, types.Artifact]:
        """Stores the inputs that do not fit into a request; their artifacts by input name."""
        stored: dict[str, types.Artifact] = {}
        inline = sum(len(item.json) for item in inputs)
        for item in sorted(inputs, key=lambda one: len(one.json), reverse=True):
            if len(item.json) <= INLINE_VALUE_BYTES and inline <= INLINE_TOTAL_BYTES:
                break
            inline -= len(item.json)
            stored[item.name] = await self._store(transport, item)
        return stored

    async def _store(self, transport: Transport, item: types.NamedInput) -> types.Artifact:
        digest = await asyncio.to_thread(_digest, item.json)
        async with self._lock:
            known = self._known.get(digest)
            if known is None:
                known = await self.put(
                    transport, item.json, name=item.name, media_type="application/json"
                )
                self._known[digest] = known
                if len(self._known) > _REMEMBERED_UPLOADS:
                    self._known.popitem(last=False)
            return known

    async def put(
        self, transport: Transport, content: bytes | Path, *, name: str, media_type: str
    ) -> types.Artifact:
        """Stores bytes or a file."""
        digest = await asyncio.to_thread(_digest, content)
        size = await asyncio.to_thread(_size, content)
        header = pb.PutArtifactHeader(
            request_id=secrets.token_hex(16),
            sha256=digest,
            size_bytes=size,
            media_type=media_type,
            name=name,
        )
        answer = await transport.call(
            transport.artifacts.PutArtifact,
            lambda: _parts(header, content),
            seconds=None,
            long=True,
        )
        return convert.artifact(answer.artifact)


def _size(content: bytes | Path) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def _digest(content: bytes | Path) -> str:
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    with content.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


async def _parts(
    header: pb.PutArtifactHeader, content: bytes | Path
) -> AsyncIterator[pb.PutArtifactRequest]:
    yield pb.PutArtifactRequest(header=header)
    if isinstance(content, bytes):
        for start in range(0, len(content), _CHUNK_BYTES):
            yield pb.PutArtifactRequest(chunk=content[start : start + _CHUNK_BYTES])
        return
    source = await asyncio.to_thread(os.open, content, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while chunk := await asyncio.to_thread(os.read, source, _CHUNK_BYTES):
            yield pb.PutArtifactRequest(chunk=chunk)
    finally:
        os.close(source)


async def download(transport: Transport, artifact_id: str, offset: int = 0) -> AsyncIterator[bytes]:
    """Yields an artifact's bytes from an offset.

    Raises:
        InternalError: Bytes are missing or, from offset 0, do not have the artifact's digest.
    """
    position = offset
    described: types.Artifact | None = None
    digest = hashlib.sha256() if offset == 0 else None

    def request() -> pb.GetArtifactRequest:
        return pb.GetArtifactRequest(artifact_id=artifact_id, offset=position)

    async for answer in transport.stream(transport.artifacts.GetArtifact, request):
        if answer.HasField("artifact"):
            described = convert.artifact(answer.artifact)
        if not answer.data:
            continue
        if answer.offset != position:
            raise InternalError(
                f"{artifact_id}: bytes from {answer.offset} came instead of {position}", "INTERNAL"
            )
        position += len(answer.data)
        if digest is not None:
            digest.update(answer.data)
        yield answer.data
    if described is None or position != described.size_bytes:
        raise InternalError(f"{artifact_id}: the transfer ended early, at {position}", "INTERNAL")
    if digest is not None and digest.hexdigest() != described.sha256:
        raise InternalError(f"{artifact_id}: the bytes do not have its digest", "INTERNAL")


async def fetch(transport: Transport, value: types.Value) -> bytes:
    """The bytes of a value that is stored as an artifact.

    Raises:
        ValueTooLargeError: It is over the limit of values.
        InternalError: The bytes are not those that the value names.
    """
    if value.size_bytes > VALUE_LIMIT_BYTES:
        raise ValueTooLargeError(
            f"the value has {value.size_bytes} bytes; the limit is {VALUE_LIMIT_BYTES}",
            f"{VALUE_LIMIT_BYTES} bytes",
        )
    data = bytearray()
    async for chunk in download(transport, value.artifact_id):
        data += chunk
        if len(data) > VALUE_LIMIT_BYTES:
            raise ValueTooLargeError(
                f"the value is over {VALUE_LIMIT_BYTES} bytes", f"{VALUE_LIMIT_BYTES} bytes"
            )
    if value.sha256 and hashlib.sha256(data).hexdigest() != value.sha256:
        raise InternalError(f"{value.artifact_id}: not the value's bytes", "INTERNAL")
    return bytes(data)


async def stat(transport: Transport, artifact_id: str) -> types.Artifact:
    """Describes one artifact."""
    request = pb.StatArtifactRequest(artifact_id=artifact_id)
    answer = await transport.call(transport.artifacts.StatArtifact, lambda: request)
    return convert.artifact(answer.artifact)


async def listing(
    transport: Transport, invocation_id: str, page_size: int, page_token: str
) -> types.ArtifactPage:
    """One page of what an invocation published."""
    request = pb.ListArtifactsRequest(
        invocation_id=invocation_id, page_size=page_size, page_token=page_token
    )
    answer = await transport.call(transport.artifacts.ListArtifacts, lambda: request)
    return convert.artifact_page(answer)
