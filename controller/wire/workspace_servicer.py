"""`WorkspaceService`: files of a live sandbox, read and written by its own side.

Made by `controller.app`; each request becomes operations on the sandbox's stream, piece by piece,
so that memory is bounded by one piece whatever the file's size. What comes back is hostile data.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

import grpc.aio
from google.protobuf import timestamp_pb2

from controller.core.errors import Reason, Refused
from controller.core.ids import LOCAL_TENANT, InvocationId, SandboxId
from controller.core.model import State
from controller.loop import Loop
from controller.store.ports import Journal
from controller.wire.errors import streaming, unary
from hutch.v1 import sandbox_file_pb2 as sf
from hutch.v1 import workspace_service_pb2 as ws
from hutch.v1.workspace_service_pb2_grpc import WorkspaceServiceServicer

PIECE_BYTES = 192 * 1024
PATH_BYTES = 4096
PAGE = 500
FILE_BYTES = 16 * 1024**3
MAX_OFFSET = 2**63 - 1
_KINDS = {
    "file": ws.WORKSPACE_FILE_KIND_FILE,
    "folder": ws.WORKSPACE_FILE_KIND_FOLDER,
    "link": ws.WORKSPACE_FILE_KIND_LINK,
}
_PROBLEMS = {
    "not_found": Reason.FILE_NOT_FOUND,
    "full": Reason.PAYLOAD_TOO_LARGE,  # of the sandbox's disk: to wait makes no room
    "busy": Reason.QUOTA_EXCEEDED,
    "failed": Reason.HOST_UNAVAILABLE,
}

Context = grpc.aio.ServicerContext[Any, Any]


class SandboxFiles(Protocol):
    """Works on files of a live sandbox."""

    async def file_operation(
        self, sandbox_id: SandboxId, operation: sf.FileOperation
    ) -> sf.FileOutcome:
        """Does one thing, once.

        Raises:
            Refused: INVOCATION_ENDED; HOST_UNAVAILABLE when its outcome was lost.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceParts:
    """What the servicer calls."""

    loop: Loop
    journal: Journal
    files: SandboxFiles


class WorkspaceServicer(WorkspaceServiceServicer):
    """One method per RPC; see `proto/hutch/v1/workspace_service.proto`."""

    def __init__(self, parts: WorkspaceParts) -> None:
        self._parts = parts

    @streaming
    async def ReadFile(
        self, request: ws.ReadFileRequest, context: Context
    ) -> AsyncIterator[ws.ReadFileResponse]:
        """Streams a regular file from any byte."""
        sandbox_id = await self._sandbox(request.invocation_id)
        path = _path(request.path)
        if request.offset > MAX_OFFSET:
            raise Refused(Reason.FIELD_INVALID, f"at most {MAX_OFFSET}", field="offset")
        offset, digest = request.offset, hashlib.sha256()
        left = request.max_bytes or None
        while left is None or left > 0:
            wanted = PIECE_BYTES if left is None else min(PIECE_BYTES, left)
            read = sf.FileRead(offset=offset, max_bytes=wanted)
            outcome = await self._do(sandbox_id, sf.FileOperation(path=path, read=read))
            data = outcome.data[:wanted]
            digest.update(data)
            if data:
                yield ws.ReadFileResponse(offset=offset, data=data)
            offset += len(data)
            left = None if left is None else left - len(data)
            if outcome.end or not data:
                break
        yield ws.ReadFileResponse(offset=offset, sha256=digest.hexdigest())

    @unary
    async def WriteFile(
        self, request_iterator: AsyncIterator[ws.WriteFileRequest], context: Context
    ) -> ws.WriteFileResponse:
        """Makes a file, whole or not at all."""
        first = await anext(request_iterator, None)
        if first is None or first.WhichOneof("message") != "start":
            raise Refused(Reason.FIELD_INVALID, "`start` must come first", field="start")
        start = first.start
        path = _path(start.path)
        if start.size_bytes > FILE_BYTES:
            raise Refused(
                Reason.PAYLOAD_TOO_LARGE, f"over {FILE_BYTES} bytes", limit=str(FILE_BYTES)
            )
        upload = _Upload(
            self, await self._sandbox(start.invocation_id), path, executable=start.executable
        )
        try:
            async for request in request_iterator:
                if request.WhichOneof("message") != "data":
                    raise Refused(Reason.FIELD_INVALID, "`start` comes once", field="start")
                if upload.size + len(request.data) > start.size_bytes:
                    raise Refused(Reason.FIELD_INVALID, "more bytes than were announced")
                await upload.add(request.data)
            digest = upload.digest.hexdigest()
            if upload.size != start.size_bytes:
                message = f"{upload.size} bytes came, {start.size_bytes} were announced"
                raise Refused(Reason.FIELD_INVALID, message, field="size_bytes")
            if start.sha256 and start.sha256 != digest:
                raise Refused(Reason.FIELD_INVALID, f"the digest is {digest}", field="sha256")
            outcome = await upload.finish()
        except BaseException:
            await upload.abandon()
            raise
        return ws.WriteFileResponse(file=_file(path, outcome), sha256=digest)

    @unary
    async def ListFiles(
        self, request: ws.ListFilesRequest, context: Context
    ) -> ws.ListFilesResponse:
        """Lists a folder."""
        if request.page_size > PAGE:
            raise Refused(Reason.FIELD_INVALID, f"at most {PAGE}", field="page_size")
        if len(request.page_token.encode()) > PATH_BYTES:
            raise Refused(Reason.FIELD_INVALID, f"at most {PATH_BYTES} bytes", field="page_token")
        sandbox_id = await self._sandbox(request.invocation_id)
        folder = _path(request.path or ".")
        listing = sf.FileList(after=request.page_token, max_entries=request.page_size or PAGE)
        outcome = await self._do(sandbox_id, sf.FileOperation(path=folder, list=listing))
        files = [
            _entry(item.name if not request.path else f"{folder.rstrip('/')}/{item.name}", item)
            for item in outcome.entries
        ]
        token = outcome.entries[-1].name if outcome.more and outcome.entries else ""
        return ws.ListFilesResponse(files=files, next_page_token=token)

    @unary
    async def StatFile(self, request: ws.StatFileRequest, context: Context) -> ws.StatFileResponse:
        """Looks at one file or folder."""
        sandbox_id = await self._sandbox(request.invocation_id)
        path = _path(request.path)
        outcome = await self._do(sandbox_id, sf.FileOperation(path=path, stat=sf.FileStat()))
        return ws.StatFileResponse(file=_file(path, outcome))

    async def _sandbox(self, invocation_id: str) -> SandboxId:
        node = self._parts.loop.state.live(InvocationId(invocation_id))
        if node is None or node.tenant_id != LOCAL_TENANT:
            if await self._parts.journal.get_invocation(LOCAL_TENANT, invocation_id) is None:
                raise Refused(Reason.INVOCATION_NOT_FOUND, "no such invocation")
            raise Refused(Reason.INVOCATION_ENDED, "its sandbox is gone")
        changed = self._parts.loop.watchers.subscribe(node.tree_id)
        try:
            while node.state in (State.QUEUED, State.STARTING) and not self._parts.loop.draining:
                changed.clear()
                await changed.wait()
        finally:
            self._parts.loop.watchers.unsubscribe(node.tree_id, changed)
        if node.state is not State.RUNNING or node.capturing or node.ending is not None:
            raise Refused(Reason.INVOCATION_ENDED, "its sandbox is being ended")
        return node.sandbox_id

    async def _do(self, sandbox_id: SandboxId, operation: sf.FileOperation) -> sf.FileOutcome:
        operation.operation_id = f"f{secrets.token_hex(8)}"
        outcome = await self._parts.files.file_operation(sandbox_id, operation)
        if outcome.problem:
            reason = _PROBLEMS.get(outcome.problem, Reason.FIELD_INVALID)
            text = f"{operation.path[:200]}: {outcome.message[:500] or outcome.problem[:50]}"
            raise Refused(reason, text, field="path")
        return outcome


class _Upload:
    """One file on its way in, cut into pieces."""

    def __init__(
        self, servicer: WorkspaceServicer, sandbox_id: SandboxId, path: str, *, executable: bool
    ) -> None:
        self._servicer = servicer
        self.sandbox_id = sandbox_id
        self._path = path
        self._executable = executable
        self._upload_id = secrets.token_hex(16)
        self._rest = bytearray()
        self._sent = 0
        self.size = 0
        self.digest = hashlib.sha256()

    async def add(self, data: bytes) -> None:
        self.size += len(data)
        self.digest.update(data)
        self._rest += data
        while len(self._rest) > PIECE_BYTES:
            await self._send(bytes(self._rest[:PIECE_BYTES]), last=False)
            del self._rest[:PIECE_BYTES]

    async def finish(self) -> sf.FileOutcome:
        return await self._send(bytes(self._rest), last=True)

    async def _send(self, data: bytes, *, last: bool) -> sf.FileOutcome:
        write = sf.FileWrite(
            upload_id=self._upload_id,
            offset=self._sent,
            data=data,
            last=last,
            executable=self._executable,
        )
        self._sent += len(data)
        operation = sf.FileOperation(path=self._path, write=write)
        return await self._servicer._do(self.sandbox_id, operation)

    async def abandon(self) -> None:
        if not self._sent:
            return
        write = sf.FileWrite(upload_id=self._upload_id, abandon=True)
        try:
            await self._servicer._do(
                self.sandbox_id, sf.FileOperation(path=self._path, write=write)
            )
        except Refused:
            return  # the sandbox is gone, and the piece with it


def _path(path: str) -> str:
    if not path or "\0" in path or len(path.encode()) > PATH_BYTES:
        message = f"path: 1 to {PATH_BYTES} bytes without null bytes"
        raise Refused(Reason.FIELD_INVALID, message, field="path")
    return path


def _file(path: str, outcome: sf.FileOutcome) -> ws.WorkspaceFile:
    if len(outcome.entries) != 1:
        raise Refused(Reason.FIELD_INVALID, "the sandbox does not say what it is", field="path")
    return _entry(path, outcome.entries[0])


def _entry(path: str, item: sf.FileEntry) -> ws.WorkspaceFile:
    micros = item.modify_time_us
    return ws.WorkspaceFile(
        path=path,
        kind=_KINDS.get(item.kind, ws.WORKSPACE_FILE_KIND_OTHER),
        size_bytes=item.size_bytes,
        modify_time=timestamp_pb2.Timestamp(
            seconds=micros // 1_000_000, nanos=micros % 1_000_000 * 1000
        ),
        mode=item.mode,
    )
