"""The artifact store in a directory: bytes by content, rows in the database.

Called by the wire (put, get, list) and by the capture. Calls the writer, the readers and the file
threads of this package.

Layout: `<root>/<tenant>/<first two digits>/<sha256>`, and `<root>/.staging/` for what is on its
way. A tenant's id cannot begin with a dot. Bytes and their folder are durable before the row is,
so a row without bytes cannot be; bytes without a row can, after a crash, and harm nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import os
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy
from sqlalchemy.dialects import sqlite

from controller.store import schema
from controller.store.files import FileThreads, make_folders, sync_folders, write_all
from controller.store.ports import (
    CHUNK_BYTES,
    REFUSALS_MAX,
    AlreadyPublished,
    ArtifactNotFound,
    ArtifactRow,
    ArtifactTooLarge,
    StagedFile,
    StoreConflict,
    StoreError,
    StoreUnavailable,
    checked_tenant,
)
from controller.store.writer import Readers, Writer

_FIELDS = tuple(field.name for field in dataclasses.fields(ArtifactRow))
_INSERT = schema.artifacts.insert()
_INSERT_REFUSAL = sqlite.insert(schema.refusals).on_conflict_do_nothing()
_DIGEST_CHARACTERS = 64

# One refused file: tenant, invocation, name, reason.
_Refusals = tuple[str, str, tuple[tuple[str, str], ...]]


class DirectoryStagedFile:
    """Implements `controller.store.ports.StagedFile`. Small writes are gathered."""

    def __init__(self, path: Path, threads: FileThreads, max_bytes: int) -> None:
        self.path = path
        self._threads = threads
        self._max_bytes = max_bytes
        self._hash = hashlib.sha256()
        self._buffer = bytearray()
        self._size = 0
        self._written = 0
        self._digest = ""
        self._over = False
        self._descriptor = -1  # opened by the first write
        # Guards the descriptor: a write whose caller was cancelled may still run during `abort`.
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """How many bytes were written so far."""
        return self._size

    @property
    def digest(self) -> str:
        """The hexadecimal SHA-256, once finished; empty before and after an abort."""
        return self._digest

    async def write(self, data: bytes) -> None:
        """Adds bytes (see the port)."""
        if self._size + len(data) > self._max_bytes:
            await self.abort()
            raise ArtifactTooLarge(self._max_bytes)
        self._size += len(data)
        self._buffer += data
        if len(self._buffer) >= CHUNK_BYTES:
            await self._flush()

    async def finish(self) -> tuple[str, int]:
        """Makes the bytes durable (see the port)."""
        if not self._digest:
            await self._flush()
            await self._guarded(self._seal)
            self._digest = self._hash.hexdigest()
        return self._digest, self._size

    async def abort(self) -> None:
        """Removes what was staged. Idempotent."""
        self._digest = ""
        self._buffer.clear()
        await self._threads.run(self._remove)

    async def _flush(self) -> None:
        data = bytes(self._buffer)
        self._buffer.clear()
        await self._guarded(lambda: self._write(data))

    async def _guarded(self, work: Callable[[], None]) -> None:
        def locked() -> None:
            with self._lock:
                if self._over:
                    raise StoreUnavailable("the stage is over")
                work()

        try:
            await self._threads.run(locked)
        except StoreError:
            await self.abort()
            raise

    def _write(self, data: bytes) -> None:
        if self._descriptor < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            self._descriptor = os.open(self.path, flags, 0o600)
        self._hash.update(data)
        done, error = write_all(self._descriptor, data, self._written)
        self._written += done
        if error is not None:
            raise error

    def _seal(self) -> None:
        os.fsync(self._descriptor)
        self._close()

    def _remove(self) -> None:
        with self._lock:
            self._over = True
            self._close()
            self.path.unlink(missing_ok=True)

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class DirectoryArtifactStore:
    """Implements `controller.store.ports.ArtifactStore`."""

    def __init__(
        self, root: Path, writer: Writer, readers: Readers, threads: FileThreads, max_bytes: int
    ) -> None:
        self._root = root
        self._staging = root / ".staging"
        self._writer = writer
        self._readers = readers
        self._threads = threads
        self._max_bytes = max_bytes
        self._numbers = itertools.count()
        self._durable: set[Path] = set()  # folders whose own entries are durable

    async def open(self) -> None:
        """Makes the folders and removes what an earlier controller had staged."""

        def work() -> None:
            make_folders(self._root, self._root)
            make_folders(self._staging, self._root)
            for entry in os.scandir(self._staging):
                os.unlink(entry.path)

        await self._threads.run(work)

    async def stage(self, max_bytes: int | None = None) -> DirectoryStagedFile:
        """Opens a stage (see the port)."""
        limit = self._max_bytes if max_bytes is None else min(max_bytes, self._max_bytes)
        return DirectoryStagedFile(self._staging / str(next(self._numbers)), self._threads, limit)

    async def publish(
        self,
        tenant_id: str,
        artifact_id: str,
        name: str,
        staged: StagedFile,
        media_type: str,
        invocation_id: str,
        time_us: int,
    ) -> ArtifactRow | AlreadyPublished:
        """Publishes a finished stage (see the port)."""
        if not isinstance(staged, DirectoryStagedFile) or not staged.digest:
            raise StoreUnavailable("only a finished stage of this store can be published")
        row = ArtifactRow(
            tenant_id=checked_tenant(tenant_id),
            artifact_id=artifact_id,
            name=name,
            sha256=staged.digest,
            size_bytes=staged.size,
            media_type=media_type,
            invocation_id=invocation_id,
            create_time_us=time_us,
        )
        target = self.path_of(row)
        try:
            await self._threads.run(lambda: self._place(staged.path, target))
            standing = await self._writer.submit(_apply_artifacts, row)
        finally:
            await staged.abort()
        if standing.artifact_id != artifact_id:
            return AlreadyPublished(row=standing)
        if standing.sha256 != row.sha256:
            raise StoreConflict(f"{artifact_id} names other bytes")
        return standing

    def _place(self, staged: Path, target: Path) -> None:
        make_folders(target.parent, self._root)
        if not target.exists():
            os.rename(staged, target)
        # The folder's own entry above it is new once only.
        known = target.parent in self._durable
        sync_folders(target.parent, target.parent if known else self._root)
        self._durable.add(target.parent)

    async def get(self, tenant_id: str, artifact_id: str) -> ArtifactRow | None:
        """What is known of an artifact, or None."""
        table = schema.artifacts
        query = _select().where(table.c.tenant_id == tenant_id, table.c.artifact_id == artifact_id)
        row = await self._readers.run(lambda connection: connection.execute(query).first())
        return None if row is None else ArtifactRow(**row._mapping)

    async def stat(self, tenant_id: str, artifact_id: str) -> ArtifactRow:
        """What is known of an artifact; raises ArtifactNotFound."""
        row = await self.get(tenant_id, artifact_id)
        if row is None:
            raise ArtifactNotFound("no such artifact")
        return row

    async def list(
        self, tenant_id: str, invocation_id: str, after_name: str = "", limit: int = 100
    ) -> Sequence[ArtifactRow]:
        """What an invocation published, by name (see the port)."""
        table = schema.artifacts
        query = (
            _select()
            # Said again, because the index is only over these.
            .where(table.c.tenant_id == tenant_id, sqlalchemy.text("invocation_id != ''"))
            .where(table.c.invocation_id == invocation_id, table.c.name > after_name)
            .order_by(table.c.name)
            .limit(limit)
        )
        return await self._readers.run(
            lambda connection: [ArtifactRow(**row._mapping) for row in connection.execute(query)]
        )

    async def open_read(
        self, tenant_id: str, artifact_id: str, offset: int = 0
    ) -> AsyncGenerator[bytes, None]:
        """Its bytes from an offset, in pieces of at most 256 KiB (see the port)."""
        path = self.path_of(await self.stat(tenant_id, artifact_id))
        while data := await self._threads.run(functools.partial(_read_piece, path, offset)):
            yield data
            offset += len(data)

    def path_of(self, row: ArtifactRow) -> Path:
        """The file that holds the bytes."""
        digest = row.sha256
        if len(digest) != _DIGEST_CHARACTERS or set(digest) - set("0123456789abcdef"):
            raise StoreUnavailable("a digest that is not one")
        return self._root / checked_tenant(row.tenant_id) / digest[:2] / digest

    async def add_refusals(
        self, tenant_id: str, invocation_id: str, refusals: Sequence[tuple[str, str]]
    ) -> None:
        """Keeps (name, reason) of files that were not captured (see the port)."""
        if refusals:
            await self._writer.submit(_apply_refusals, (tenant_id, invocation_id, tuple(refusals)))

    async def list_refusals(self, tenant_id: str, invocation_id: str) -> Sequence[tuple[str, str]]:
        """(name, reason) by name."""
        table = schema.refusals
        query = (
            sqlalchemy.select(table.c.name, table.c.reason)
            .where(table.c.tenant_id == tenant_id, table.c.invocation_id == invocation_id)
            .order_by(table.c.name)
        )
        return await self._readers.run(
            lambda connection: [(row.name, row.reason) for row in connection.execute(query)]
        )


def _read_piece(path: Path, offset: int) -> bytes:
    # Opened for each piece: a reader that goes away leaves no descriptor behind.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if offset >= os.fstat(descriptor).st_size:  # the system refuses offsets near 2^63
            return b""
        return os.pread(descriptor, CHUNK_BYTES, offset)
    finally:
        os.close(descriptor)


def _select() -> sqlalchemy.Select[Any]:
    return sqlalchemy.select(*(schema.artifacts.c[name] for name in _FIELDS))


def _apply_artifacts(
    connection: sqlalchemy.Connection, rows: Sequence[ArtifactRow]
) -> list[ArtifactRow]:
    """Inserts rows; gives for each the row that stands under its id or name."""
    return [_insert_artifact(connection, row) for row in rows]


def _insert_artifact(connection: sqlalchemy.Connection, row: ArtifactRow) -> ArtifactRow:
    table = schema.artifacts
    same_id = table.c.artifact_id == row.artifact_id
    same_name = (table.c.invocation_id == row.invocation_id) & (table.c.name == row.name)
    query = _select().where(
        table.c.tenant_id == row.tenant_id,
        sqlalchemy.or_(same_id, same_name) if row.invocation_id else same_id,
    )
    # A row of the same id comes first: it is this very publication, or a conflict.
    standing = connection.execute(query.order_by(same_id.desc())).first()
    if standing is not None:
        return ArtifactRow(**standing._mapping)
    connection.execute(_INSERT, {name: getattr(row, name) for name in _FIELDS})
    return row


def _apply_refusals(connection: sqlalchemy.Connection, payloads: Sequence[_Refusals]) -> list[None]:
    for tenant_id, invocation_id, refusals in payloads:
        table = schema.refusals
        count = sqlalchemy.select(sqlalchemy.func.count()).where(
            table.c.tenant_id == tenant_id, table.c.invocation_id == invocation_id
        )
        room = REFUSALS_MAX - connection.execute(count).scalar_one()
        rows = [
            {
                "tenant_id": tenant_id,
                "invocation_id": invocation_id,
                "name": name,
                "reason": reason,
            }
            for name, reason in refusals[: max(room, 0)]
        ]
        if rows:
            connection.execute(_INSERT_REFUSAL, rows)
    return [None] * len(payloads)
