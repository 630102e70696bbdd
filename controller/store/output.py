"""The output log in a directory: what invocations printed, by byte offset.

Called by the loop (append, sync) and the wire (read, follow). Calls the file threads of this
package.

Layout: `<root>/<tenant>/<invocation>/{stdout,stderr}`. A file is opened for each piece of work and
closed again, so the number of open descriptors is that of the threads. Writes to one stream that
come while another is under way are written together.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from controller.store.database import translate_os
from controller.store.files import FileThreads, make_folders, sync_folders, write_all
from controller.store.ports import (
    STREAMS,
    OutputGap,
    StoreError,
    StoreUnavailable,
    checked_id,
    checked_stream,
    checked_tenant,
)

_READ_MAX = 1024 * 1024
_STREAMS_KEPT = 1024  # how many idle streams' sizes are remembered


@dataclass(slots=True, kw_only=True, eq=False)
class _Stream:
    """What is known of one stream. `accepted` is ahead of `written` while a write is under way."""

    path: Path
    accepted: int = -1  # not yet known
    written: int = 0
    # Held while the size is read for the first time: calls go on in the order in which they came.
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    pending: list[bytes] = field(default_factory=list)
    writing: bool = False
    users: int = 0  # calls under way; a stream in use is not forgotten
    synced: int = 0
    wakes: int = 0
    error: StoreError | None = None
    waiters: set[asyncio.Future[None]] = field(default_factory=set)


_Key = tuple[str, str, str]


class DirectoryOutputLog:
    """Implements `controller.store.ports.OutputLog`."""

    def __init__(self, root: Path, threads: FileThreads) -> None:
        self._root = root
        self._threads = threads
        self._streams: collections.OrderedDict[_Key, _Stream] = collections.OrderedDict()
        self._closed = False

    async def open(self) -> None:
        """Makes the folder."""
        await self._threads.run(lambda: self._root.mkdir(mode=0o700, parents=True, exist_ok=True))

    async def append(
        self, tenant_id: str, invocation_id: str, stream: str, offset: int, data: bytes
    ) -> int:
        """Adds bytes at an offset (see the port)."""
        async with self._use(tenant_id, invocation_id, stream) as known:
            if self._closed:
                raise StoreUnavailable(f"{self._root}: closed")
            if offset > known.accepted:
                raise OutputGap(expected=known.accepted, offset=offset)
            fresh = data[known.accepted - offset :]
            if fresh:
                known.pending.append(fresh)
                known.accepted += len(fresh)
                self._kick(known)
            while known.written < offset + len(data):
                if known.accepted < offset + len(data):
                    raise known.error or StoreUnavailable("the output could not be written")
                await _wait(known)
            return known.written

    async def size(self, tenant_id: str, invocation_id: str, stream: str) -> int:
        """How many bytes the stream holds; 0 for one that nobody wrote."""
        async with self._use(tenant_id, invocation_id, stream) as known:
            return known.written

    async def read(
        self, tenant_id: str, invocation_id: str, stream: str, offset: int, max_bytes: int
    ) -> bytes:
        """Bytes from an offset (see the port)."""
        path = self._path((tenant_id, invocation_id, stream))
        count = max(0, min(max_bytes, _READ_MAX))
        return await self._threads.run(lambda: _read(path, offset, count))

    async def changed(self, tenant_id: str, invocation_id: str, stream: str, offset: int) -> int:
        """Waits for more than `offset` bytes or for `wake` (see the port)."""
        async with self._use(tenant_id, invocation_id, stream) as known:
            wakes = known.wakes
            while known.written <= offset and known.wakes == wakes and not self._closed:
                await _wait(known)
            return known.written

    def wake(self, tenant_id: str, invocation_id: str) -> None:
        """Ends the waits of all who follow an invocation."""
        for stream in STREAMS:
            known = self._streams.get((tenant_id, invocation_id, stream))
            if known is not None:
                known.wakes += 1
                _notify(known)

    async def sync(self, tenant_id: str, invocation_id: str) -> tuple[int, int]:
        """Makes both streams durable and returns their sizes (see the port)."""
        sizes = [await self._sync(tenant_id, invocation_id, stream) for stream in STREAMS]
        return sizes[0], sizes[1]

    async def close(self) -> None:
        """Ends all waits and finishes what is being written. Idempotent."""
        self._closed = True
        for known in list(self._streams.values()):
            _notify(known)
            while known.writing:
                await _wait(known)

    async def _sync(self, tenant_id: str, invocation_id: str, stream: str) -> int:
        async with self._use(tenant_id, invocation_id, stream) as known:
            while known.written < known.accepted:
                await _wait(known)
            size = known.written
            if known.synced < size:
                await self._threads.run(lambda: _sync_file(known.path, self._root))
                known.synced = max(known.synced, size)
            return size

    def _kick(self, known: _Stream) -> None:
        """Begins to write what is pending, unless a write is under way: it will go on with that."""
        if known.writing or not known.pending:
            return
        data, place = b"".join(known.pending), known.written
        known.pending.clear()
        known.writing = True
        # No task owns the write, so that cancelling one call harms no other.
        future = self._threads.start(lambda: _write(known.path, self._root, data, place))
        future.add_done_callback(lambda done: self._wrote(known, len(data), done))

    def _wrote(
        self, known: _Stream, count: int, done: asyncio.Future[tuple[int, OSError | None]]
    ) -> None:
        known.writing = False
        try:
            written, problem = done.result()
            known.error = None if problem is None else translate_os(problem, known.path)
        except StoreError as error:
            written, known.error = 0, error
        known.written += written
        if written < count:
            # What came behind the lost bytes cannot be kept either; it will be sent again.
            known.pending.clear()
            known.accepted = known.written
        _notify(known)
        self._kick(known)

    @contextlib.asynccontextmanager
    async def _use(self, tenant_id: str, invocation_id: str, stream: str) -> AsyncIterator[_Stream]:
        """The stream's state, which is not forgotten meanwhile."""
        key = (tenant_id, invocation_id, stream)
        known = self._streams.get(key)
        if known is None:
            known = self._streams[key] = _Stream(path=self._path(key))
        self._streams.move_to_end(key)
        known.users += 1
        try:
            async with known.loading:
                if known.accepted < 0:
                    size = await self._threads.run(functools.partial(_size, known.path))
                    known.accepted = known.written = size
            yield known
        finally:
            known.users -= 1
            self._forget_idle()

    def _forget_idle(self) -> None:
        excess = len(self._streams) - _STREAMS_KEPT
        if excess <= 0:
            return
        idle = [k for k, known in self._streams.items() if not (known.users or known.writing)]
        for key in idle[:excess]:
            del self._streams[key]

    def _path(self, key: _Key) -> Path:
        tenant_id, invocation_id, stream = key
        folder = self._root / checked_tenant(tenant_id) / checked_id(invocation_id)
        return folder / checked_stream(stream)


async def _wait(known: _Stream) -> None:
    """Waits for the next change of a stream."""
    waiter = asyncio.get_running_loop().create_future()
    known.waiters.add(waiter)
    try:
        await waiter
    finally:
        known.waiters.discard(waiter)


def _notify(known: _Stream) -> None:
    for waiter in known.waiters:
        if not waiter.done():
            waiter.set_result(None)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _read(path: Path, offset: int, count: int) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return b""
    try:
        if offset >= os.fstat(descriptor).st_size:  # the system refuses offsets near 2^63
            return b""
        return os.pread(descriptor, count, offset)
    finally:
        os.close(descriptor)


def _write(path: Path, root: Path, data: bytes, offset: int) -> tuple[int, OSError | None]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileNotFoundError:
        make_folders(path.parent, root)
        descriptor = os.open(path, flags, 0o600)
    try:
        return write_all(descriptor, data, offset)
    finally:
        os.close(descriptor)


def _sync_file(path: Path, root: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync_folders(path.parent, root)
