"""Files of a live sandbox, in and out: streamed, resumed, digest checked, in bounded memory.

Called by `hutch.aio` and `hutch.aio_boxes`; calls `hutch.transport`. What comes out of a sandbox is
hostile data: a caller names the place that it is written to, the sandbox never does.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import tempfile
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import IO, TYPE_CHECKING

from hutch import convert, types
from hutch.errors import InternalError
from hutch.transport import Transport
from hutch.v1 import workspace_service_pb2 as pb

if TYPE_CHECKING:
    from hutch.aio import AsyncClient

_CHUNK_BYTES = 256 * 1024
_WRITE_SECONDS_EACH = 120.0

Content = bytes | str | Path | IO[bytes]


async def read(
    transport: Transport, invocation_id: str, path: str, *, offset: int = 0, max_bytes: int = 0
) -> AsyncIterator[bytes]:
    """Yields a file's bytes from an offset; goes on where it was cut.

    Raises:
        NotFoundError: There is no such file.
        InternalError: Bytes are missing, or do not have the digest that was said.
    """
    position = offset
    end = offset + max_bytes if max_bytes else None
    digest = hashlib.sha256()
    said = ""

    def request() -> pb.ReadFileRequest:
        nonlocal digest
        digest = hashlib.sha256()  # it is of one answer's bytes
        left = end - position if end is not None else 0
        return pb.ReadFileRequest(
            invocation_id=invocation_id, path=path, offset=position, max_bytes=left
        )

    async for answer in transport.stream(transport.workspaces.ReadFile, request):
        if answer.data:
            if answer.offset != position:
                raise InternalError(
                    f"{path}: bytes from {answer.offset} came instead of {position}", "INTERNAL"
                )
            position += len(answer.data)
            digest.update(answer.data)
            yield answer.data
        said = answer.sha256 or said
        if said or (end is not None and position >= end):
            break
    if said and said != digest.hexdigest():
        raise InternalError(f"{path}: the bytes do not have their digest", "INTERNAL")


async def write(
    transport: Transport, invocation_id: str, path: str, content: Content, *, executable: bool
) -> types.WorkspaceFile:
    """Makes a file, or replaces one; it appears whole or not at all.

    Raises:
        FieldInvalidError: The path cannot be written.
        InternalError: The sandbox has other bytes than were sent.
    """
    source = await asyncio.to_thread(_open, content)
    with closing(source):
        size, sha256 = await asyncio.to_thread(_measure, source)
        start = pb.WriteFileStart(
            invocation_id=invocation_id,
            path=path,
            size_bytes=size,
            sha256=sha256,
            executable=executable,
        )
        answer = await transport.call(
            transport.workspaces.WriteFile,
            lambda: _parts(start, source),
            seconds=None,
            long=True,
        )
    if answer.sha256 != sha256:
        raise InternalError(f"{path}: the sandbox has other bytes than were sent", "INTERNAL")
    return convert.workspace_file(answer.file)


class _Borrowed(io.RawIOBase):
    """A caller's file from where it stands, which is not closed here."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self._file = file
        self._begin = file.tell()

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        return self._file.read(size)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_SET
        return self._file.seek(self._begin + offset) - self._begin


def _open(content: Content) -> IO[bytes] | io.RawIOBase:
    """The content as a file that can be read more than once."""
    if isinstance(content, str):
        return io.BytesIO(content.encode())
    if isinstance(content, bytes):
        return io.BytesIO(content)
    if isinstance(content, Path):
        return content.open("rb")
    if content.seekable():
        return _Borrowed(content)
    kept = tempfile.TemporaryFile()  # a pipe gives its bytes once, and they may be sent twice
    try:
        while chunk := content.read(_CHUNK_BYTES):
            kept.write(chunk)
    except BaseException:
        kept.close()
        raise
    return kept


def _measure(source: IO[bytes] | io.RawIOBase) -> tuple[int, str]:
    source.seek(0)
    size, digest = 0, hashlib.sha256()
    while chunk := source.read(_CHUNK_BYTES):
        size += len(chunk)
        digest.update(chunk)
    return size, digest.hexdigest()


async def _parts(
    start: pb.WriteFileStart, source: IO[bytes] | io.RawIOBase
) -> AsyncIterator[pb.WriteFileRequest]:
    yield pb.WriteFileRequest(start=start)
    await asyncio.to_thread(source.seek, 0)
    while chunk := await asyncio.to_thread(source.read, _CHUNK_BYTES):
        yield pb.WriteFileRequest(data=chunk)


async def listing(
    transport: Transport, invocation_id: str, path: str, page_size: int, page_token: str
) -> types.WorkspacePage:
    """One page of a folder, sorted by name."""
    request = pb.ListFilesRequest(
        invocation_id=invocation_id, path=path, page_size=page_size, page_token=page_token
    )
    answer = await transport.call(
        transport.workspaces.ListFiles, lambda: request, seconds=_WRITE_SECONDS_EACH
    )
    return types.WorkspacePage(
        files=tuple(convert.workspace_file(item) for item in answer.files),
        next_page_token=answer.next_page_token,
    )


async def stat(transport: Transport, invocation_id: str, path: str) -> types.WorkspaceFile:
    """Looks at one file or folder, without following a link."""
    request = pb.StatFileRequest(invocation_id=invocation_id, path=path)
    answer = await transport.call(
        transport.workspaces.StatFile, lambda: request, seconds=_WRITE_SECONDS_EACH
    )
    return convert.workspace_file(answer.file)


class AsyncFiles:
    """Files of one live sandbox. A path is relative to the workspace, or absolute inside."""

    def __init__(self, client: AsyncClient, invocation_id: str) -> None:
        """Files of an invocation's sandbox."""
        self._client = client
        self._id = invocation_id

    async def read(self, path: str, *, offset: int = 0, max_bytes: int = 0) -> bytes:
        """A file's bytes, all in memory; `stream` and `download` take files of any size."""
        data = bytearray()
        async for piece in self.stream(path, offset=offset, max_bytes=max_bytes):
            data += piece
        return bytes(data)

    def stream(self, path: str, *, offset: int = 0, max_bytes: int = 0) -> AsyncIterator[bytes]:
        """Yields a file's bytes piece by piece."""
        return self._client.read_file(self._id, path, offset=offset, max_bytes=max_bytes)

    async def download(self, path: str, to: Path | str | IO[bytes]) -> int:
        """Copies a file out, to a path or into an open file, and says how many bytes it has.

        A path appears whole or not at all.
        """
        if isinstance(to, str):
            to = Path(to)
        if not isinstance(to, Path):
            return await self._copy(path, to)
        draft = to.with_name(f".{to.name}.hutch-part")
        try:
            with await asyncio.to_thread(draft.open, "wb") as file:
                size = await self._copy(path, file)
            await asyncio.to_thread(draft.replace, to)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        return size

    async def _copy(self, path: str, file: IO[bytes]) -> int:
        size = 0
        async for piece in self.stream(path):
            await asyncio.to_thread(file.write, piece)
            size += len(piece)
        return size

    async def write(
        self, path: str, content: Content, *, executable: bool = False
    ) -> types.WorkspaceFile:
        """Makes a file, or replaces one, with its folders; it appears whole or not at all.

        Args:
            path: Where.
            content: Bytes, a text (as UTF-8), the path of a file here, or an open binary file.
            executable: Whether it may be executed.
        """
        return await self._client.write_file(self._id, path, content, executable=executable)

    async def list(self, path: str = "") -> list[types.WorkspaceFile]:
        """All that is in a folder, sorted by name."""
        found: list[types.WorkspaceFile] = []
        token = ""
        while True:
            page = await self._client.list_files(self._id, path, page_token=token)
            found.extend(page.files)
            token = page.next_page_token
            if not token:
                return found

    async def stat(self, path: str) -> types.WorkspaceFile:
        """Looks at one file or folder, without following a link."""
        return await self._client.stat_file(self._id, path)
