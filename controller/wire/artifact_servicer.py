"""`ArtifactService`: stores and gives out immutable bytes, inside the caller's tenant only.

Made by `controller.app`; calls the artifact store.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio

from controller import convert
from controller.config import ControllerConfig
from controller.core.errors import Reason, Refused
from controller.core.ids import LOCAL_TENANT, ArtifactId, is_id
from controller.files import media_type_of
from controller.store.ports import (
    AlreadyPublished,
    ArtifactRow,
    ArtifactStore,
    Journal,
    StoreConflict,
)
from controller.store.space import Space
from controller.wire.errors import streaming, unary
from hutch.v1 import artifact_pb2
from hutch.v1 import artifact_service_pb2 as asv
from hutch.v1.artifact_service_pb2_grpc import ArtifactServiceServicer

PAGE_SIZE = 100
PAGE_MAXIMUM = 1000
NAME_BYTES = 512

Context = grpc.aio.ServicerContext[Any, Any]


class ArtifactServicer(ArtifactServiceServicer):
    """One method per RPC; see `proto/hutch/v1/artifact_service.proto`."""

    def __init__(
        self,
        *,
        config: ControllerConfig,
        journal: Journal,
        artifacts: ArtifactStore,
        space: Space,
        now_us: Callable[[], int],
    ) -> None:
        self._config = config
        self._journal = journal
        self._artifacts = artifacts
        self._space = space
        self._now_us = now_us

    @unary
    async def PutArtifact(
        self, request_iterator: AsyncIterator[asv.PutArtifactRequest], context: Context
    ) -> asv.PutArtifactResponse:
        """Stores an upload whose digest is right."""
        header: asv.PutArtifactHeader | None = None
        staged = None
        try:
            async for request in request_iterator:
                if header is None:
                    header = self._header(request)
                    if self._space.short():
                        raise Refused(Reason.STORE_FULL, "the disk under the store is nearly full")
                    staged = await self._artifacts.stage(header.size_bytes)
                    continue
                if request.WhichOneof("part") != "chunk":
                    raise Refused(Reason.FIELD_INVALID, "the header comes once", field="header")
                assert staged is not None
                await staged.write(request.chunk)
            if header is None or staged is None:
                raise Refused(Reason.FIELD_INVALID, "the header is missing", field="header")
            digest, size = await staged.finish()
            if digest != header.sha256 or size != header.size_bytes:
                raise Refused(
                    Reason.FIELD_INVALID,
                    f"the bytes have the digest {digest} and the size {size}",
                    field="sha256",
                )
            row = await self._artifacts.publish(
                LOCAL_TENANT,
                _put_id(header),
                header.name,
                staged,
                media_type_of(header.name, header.media_type),
                "",
                self._now_us(),
            )
        except StoreConflict:
            raise Refused(Reason.REQUEST_ID_REUSED, "the request id has other content") from None
        finally:
            if staged is not None:
                await staged.abort()
        found = row.row if isinstance(row, AlreadyPublished) else row
        return asv.PutArtifactResponse(artifact=convert.artifact_of_row(found))

    def _header(self, request: asv.PutArtifactRequest) -> asv.PutArtifactHeader:
        if request.WhichOneof("part") != "header":
            raise Refused(Reason.FIELD_INVALID, "the header comes first", field="header")
        header = request.header
        if not 1 <= len(header.request_id) <= 128 or not header.request_id.isascii():
            raise Refused(
                Reason.FIELD_INVALID, "1 to 128 visible ASCII characters", field="request_id"
            )
        if len(header.sha256) != 64:
            raise Refused(Reason.FIELD_INVALID, "64 hexadecimal digits", field="sha256")
        if len(header.name.encode()) > NAME_BYTES:
            raise Refused(Reason.FIELD_INVALID, f"at most {NAME_BYTES} bytes", field="name")
        limit = self._config.limits.artifact_bytes
        if header.size_bytes > limit:
            raise Refused(
                Reason.PAYLOAD_TOO_LARGE,
                f"it has {header.size_bytes} bytes, the limit is {limit}",
                limit=str(limit),
            )
        return header

    @streaming
    async def GetArtifact(
        self, request: asv.GetArtifactRequest, context: Context
    ) -> AsyncIterator[asv.GetArtifactResponse]:
        """Streams the bytes from an offset."""
        row = await self._row(request.artifact_id)
        if request.offset > row.size_bytes:
            raise Refused(Reason.FIELD_INVALID, f"it has {row.size_bytes} bytes", field="offset")
        first: artifact_pb2.Artifact | None = convert.artifact_of_row(row)
        offset = request.offset
        chunks = self._artifacts.open_read(LOCAL_TENANT, row.artifact_id, offset)
        try:
            async for chunk in chunks:
                yield asv.GetArtifactResponse(artifact=first, offset=offset, data=chunk)
                first = None
                offset += len(chunk)
            if first is not None:
                yield asv.GetArtifactResponse(artifact=first, offset=offset)
        finally:
            await chunks.aclose()

    async def _row(self, artifact_id: str) -> ArtifactRow:
        if not is_id(artifact_id, "art"):
            raise Refused(Reason.ARTIFACT_NOT_FOUND, "no such artifact")
        return await self._artifacts.stat(LOCAL_TENANT, artifact_id)

    @unary
    async def StatArtifact(
        self, request: asv.StatArtifactRequest, context: Context
    ) -> asv.StatArtifactResponse:
        """Describes one artifact."""
        row = await self._row(request.artifact_id)
        return asv.StatArtifactResponse(artifact=convert.artifact_of_row(row))

    @unary
    async def ListArtifacts(
        self, request: asv.ListArtifactsRequest, context: Context
    ) -> asv.ListArtifactsResponse:
        """Lists what an invocation published and what was refused."""
        invocation_id = request.invocation_id
        if (
            not is_id(invocation_id, "inv")
            or await self._journal.get_invocation(LOCAL_TENANT, invocation_id) is None
        ):
            raise Refused(Reason.INVOCATION_NOT_FOUND, "no such invocation")
        if request.page_size > PAGE_MAXIMUM:
            raise Refused(Reason.FIELD_INVALID, f"at most {PAGE_MAXIMUM}", field="page_size")
        limit = request.page_size or PAGE_SIZE
        rows = await self._artifacts.list(
            LOCAL_TENANT, invocation_id, after_name=request.page_token, limit=limit
        )
        found = asv.ListArtifactsResponse(
            artifacts=[convert.artifact_of_row(row) for row in rows],
            next_page_token=rows[-1].name if len(rows) == limit else "",
        )
        if not request.page_token:
            for name, reason in await self._artifacts.list_refusals(LOCAL_TENANT, invocation_id):
                found.refusals.add(name=name, reason=reason)
        return found


def _put_id(header: asv.PutArtifactHeader) -> ArtifactId:
    """The same request gives the same artifact; other content under it is a conflict."""
    digest = hashlib.sha256(f"put\0{header.request_id}".encode()).hexdigest()
    return ArtifactId(f"art_{digest[:32]}")
