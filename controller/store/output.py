"""The output log in a directory: what cells printed, by byte offset.

Called by the host client (append, sync) and the wire (read, follow). Calls the file threads of this
package.

Layout: `<root>/<tenant>/<two digits>/<output id>.{stdout,stderr}`, where the digits are of the id's
SHA-256: a small output costs one small file, made by its first byte. A file is opened for each
piece of work and closed again, so the number of open descriptors is that of the threads. Bytes that
come while a write to their stream is under way are written together. Bytes that the disk does not
take are kept and tried again; meanwhile `append` waits, and with it whoever prints.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import hashlib
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from controller.store.database import translate_os
from controller.store.files import FileThreads, make_folders, sync_folders, write_parts
from controller.store.ports import (
    STREAMS,
    OutputGap,
    StoreError,
    StoreUnavailable,
    checked_id,
    checked_stream,
    checked_tenant,
)

log = structlog.get_logger(__name__)

_READ_MAX = 1024 * 1024
_STREAMS_KEPT = 1024  # how many idle streams' sizes are remembered
_SMALL_BYTES = 4 * 1024  # of a stream that is kept in memory whole: who follows reads no file
_WAITING_MAX = 2 * 1024 * 1024  # bytes of one stream that wait to be written; above, append waits
_ALL_WAITING_MAX = 16 * 1024 * 1024  # of all streams; above, each may have one piece waiting
_PARTS_MAX = 512  # pieces of one write; the system takes 1024
_RETRY_FIRST_SECONDS = 0.1
_RETRY_LAST_SECONDS = 2.0


@dataclass(slots=True, kw_only=True, eq=False)
class _Stream:
    """What is known of one stream. `accepted` is ahead of `written` by what waits."""

    path: Path
    accepted: int = -1  # not yet known
    written: int = 0
    # Held while the size is read for the first time: calls go on in the order in which they came.
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: collections.deque[bytes] = field(default_factory=collections.deque)
    promises: collections.deque[tuple[int, asyncio.Future[None]]] = field(
        default_factory=collections.deque
    )
    whole: bytes = b""  # all of it, as long as it is small
    writing: bool = False
    retry: asyncio.TimerHandle | None = None  # the disk did not take it
    delay: float = _RETRY_FIRST_SECONDS
    users: int = 0  # calls under way; a stream in use is not forgotten
    synced: int = 0
    wakes: int = 0
    waiters: set[asyncio.Future[None]] = field(default_factory=set)

    @property
    def busy(self) -> bool:
        """Whether something waits to be written, or is being written."""
        return self.writing or bool(self.waiting) or self.users > 0


_Key = tuple[str, str, str]


class DirectoryOutputLog:
    """Implements `controller.store.ports.OutputLog`."""

    def __init__(self, root: Path, threads: FileThreads) -> None:
        self._root = root
        self._threads = threads
        self._streams: collections.OrderedDict[_Key, _Stream] = collections.OrderedDict()
        self._waiting_bytes = 0  # of all streams
        self._durable: set[Path] = set()  # folders whose own entries are durable
        self._closed = False

    async def open(self) -> None:
        """Makes the folder."""
        await self._threads.run(lambda: self._root.mkdir(mode=0o700, parents=True, exist_ok=True))

    async def append(
        self, tenant_id: str, output_id: str, stream: str, offset: int, data: bytes
    ) -> asyncio.Future[None]:
        """Takes bytes at an offset (see the port)."""
        async with self._use(tenant_id, output_id, stream) as known:
            while not self._closed and not self._has_room(known):
                await _wait(known)
            if self._closed:
                raise StoreUnavailable(f"{self._root}: closed")
            if offset > known.accepted:
                raise OutputGap(expected=known.accepted, offset=offset)
            fresh = data[known.accepted - offset :] if known.accepted > offset else data
            promise: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            if offset + len(data) <= known.written:
                promise.set_result(None)
                return promise
            known.promises.append((offset + len(data), promise))
            if fresh:
                known.waiting.append(fresh)
                known.accepted += len(fresh)
                self._waiting_bytes += len(fresh)
                self._write(known)
            return promise

    async def size(self, tenant_id: str, output_id: str, stream: str) -> int:
        """How many bytes the stream holds; 0 for one that nobody wrote."""
        async with self._use(tenant_id, output_id, stream) as known:
            return known.written

    async def read(
        self, tenant_id: str, output_id: str, stream: str, offset: int, max_bytes: int
    ) -> bytes:
        """Bytes from an offset (see the port)."""
        known = self._streams.get((tenant_id, output_id, stream))
        count = max(0, min(max_bytes, _READ_MAX))
        if known is not None and 0 < known.written == len(known.whole):
            return known.whole[offset : offset + count]
        path = self._path((tenant_id, output_id, stream))
        return await self._threads.run(lambda: _read(path, offset, count))

    async def changed(self, tenant_id: str, output_id: str, stream: str, offset: int) -> int:
        """Waits for more than `offset` bytes or for `wake` (see the port)."""
        async with self._use(tenant_id, output_id, stream) as known:
            wakes = known.wakes
            while known.written <= offset and known.wakes == wakes and not self._closed:
                await _wait(known)
            return known.written

    def wake(self, tenant_id: str, output_id: str) -> None:
        """Ends the waits of all who follow an output."""
        for stream in STREAMS:
            known = self._streams.get((tenant_id, output_id, stream))
            if known is not None:
                known.wakes += 1
                _notify(known)

    async def sync(
        self, tenant_id: str, output_id: str, streams: Sequence[str] = STREAMS
    ) -> tuple[int, ...]:
        """Makes streams durable and returns their sizes (see the port)."""
        return tuple([await self._sync(tenant_id, output_id, stream) for stream in streams])

    async def close(self) -> None:
        """Ends all waits and finishes what is being written. Idempotent."""
        self._closed = True
        for known in list(self._streams.values()):
            _notify(known)
            if known.retry is not None:
                known.retry.cancel()
                known.waiting.clear()
            while known.writing:
                await _wait(known)
            for _, promise in known.promises:
                promise.cancel()

    def _has_room(self, known: _Stream) -> bool:
        if not known.waiting:
            return True
        of_stream = known.accepted - known.written
        return of_stream < _WAITING_MAX and self._waiting_bytes < _ALL_WAITING_MAX

    async def _sync(self, tenant_id: str, output_id: str, stream: str) -> int:
        async with self._use(tenant_id, output_id, stream) as known:
            while known.written < known.accepted:
                if self._closed:
                    raise StoreUnavailable(f"{self._root}: closed")
                await _wait(known)
            size = known.written
            if known.synced < size:
                await self._threads.run(lambda: self._sync_file(known.path))
                known.synced = max(known.synced, size)
            return size

    def _sync_file(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        # The folder's own entry above it is new once only.
        folder = path.parent
        sync_folders(folder, folder if folder in self._durable else self._root)
        self._durable.add(folder)

    def _write(self, known: _Stream) -> None:
        """Begins to write what waits, unless a write is under way: it will go on with that."""
        if known.writing or not known.waiting or known.retry is not None:
            return
        parts = [known.waiting.popleft() for _ in range(min(len(known.waiting), _PARTS_MAX))]
        place = known.written
        known.writing = True
        # No task owns the write, so that cancelling one call harms no other.
        try:
            future = self._threads.start(lambda: _write(known.path, self._root, parts, place))
        except StoreUnavailable:
            known.writing = False
            known.waiting.extendleft(reversed(parts))
            raise
        future.add_done_callback(lambda done: self._wrote(known, parts, done))

    def _wrote(
        self, known: _Stream, parts: list[bytes], done: asyncio.Future[tuple[int, OSError | None]]
    ) -> None:
        known.writing = False
        problem: StoreError | None = None
        try:
            count, error = done.result()
            problem = None if error is None else translate_os(error, known.path)
        except StoreError as refused:
            count, problem = 0, refused
        if known.written + count > _SMALL_BYTES:
            known.whole = b""
        elif len(known.whole) == known.written:
            known.whole += b"".join(parts)[:count]
        known.written += count
        self._waiting_bytes -= count
        while known.promises and known.promises[0][0] <= known.written:
            promise = known.promises.popleft()[1]
            if not promise.done():
                promise.set_result(None)
        if problem is None:
            known.delay = _RETRY_FIRST_SECONDS
            self._write(known)
        else:
            known.waiting.extendleft(reversed(_behind(parts, count)))
            self._try_later(known, problem)
        _notify(known)
        self._forget_idle()

    def _try_later(self, known: _Stream, problem: StoreError) -> None:
        if self._closed:  # it is not acknowledged, and will be sent again
            known.waiting.clear()
            return
        log.warning("output_waits", problem=str(problem), retry_seconds=known.delay)

        def again() -> None:
            known.retry = None
            self._write(known)

        known.retry = asyncio.get_running_loop().call_later(known.delay, again)
        known.delay = min(2 * known.delay, _RETRY_LAST_SECONDS)

    @contextlib.asynccontextmanager
    async def _use(self, tenant_id: str, output_id: str, stream: str) -> AsyncIterator[_Stream]:
        """The stream's state, which is not forgotten meanwhile."""
        key = (tenant_id, output_id, stream)
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
        idle = [key for key, known in self._streams.items() if not known.busy]
        for key in idle[:excess]:
            del self._streams[key]

    def _path(self, key: _Key) -> Path:
        tenant_id, output_id, stream = key
        digits = hashlib.sha256(checked_id(output_id).encode()).hexdigest()[:2]
        name = f"{output_id}.{checked_stream(stream)}"
        return self._root / checked_tenant(tenant_id) / digits / name


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


def _behind(parts: list[bytes], count: int) -> list[bytes]:
    """What of some pieces lies behind their first `count` bytes."""
    left: list[bytes] = []
    for part in parts:
        if count < len(part):
            left.append(part[count:])
        count = max(0, count - len(part))
    return left


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


def _write(path: Path, root: Path, parts: list[bytes], offset: int) -> tuple[int, OSError | None]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileNotFoundError:
        make_folders(path.parent, root)
        descriptor = os.open(path, flags, 0o600)
    try:
        return write_parts(descriptor, parts, offset)
    finally:
        os.close(descriptor)
