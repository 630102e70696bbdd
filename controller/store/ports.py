"""What the controller asks of its store: the ports, their values and their errors.

Called by the loop, the wire and the tests, which know these names only. Implemented by the other
modules of this package; `controller.store.open` names the concrete parts.

Errors, all typed::

    StoreError
    ├── StoreDamaged       the database is not ours to use; it names the file and was not touched
    ├── StoreFull          no space; nothing was written, later calls work once there is space
    ├── StoreUnavailable   the store does not answer; after a failed sync it stays so
    ├── StoreConflict      a key exists already: a broken invariant of the caller
    ├── CursorInvalid      a page cursor that this store did not make
    ├── NameInvalid        an id that cannot name a file
    ├── ArtifactNotFound   no such artifact in the tenant
    ├── ArtifactTooLarge   more bytes than the stage was opened for
    └── OutputGap          output that begins after the end of what is there
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

CHUNK_BYTES = 256 * 1024  # the most that one step of `open_read` gives
REFUSALS_MAX = 256  # the most refusals kept for one invocation
STREAMS = ("stdout", "stderr")

_ID = re.compile(r"[a-z]+_[0-9a-z]+")
_TENANT = re.compile(r"[a-z][0-9a-z_-]*")
_NAME_CHARACTERS_MAX = 128


class StoreError(Exception):
    """What a store call raises when it could not do what was asked."""


class StoreDamaged(StoreError):
    """The database is not one, is malformed, fails its check, or is of a newer version."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}; it was left as it is")
        self.path = path
        self.problem = problem


class StoreFull(StoreError):
    """There is no space. Nothing of the call was kept; later calls work once there is space."""


class StoreUnavailable(StoreError):
    """The store does not answer. After a write whose fate is unknown all later writes fail too."""


class StoreConflict(StoreError):
    """A record, request or artifact with this key exists. Nothing of the call was kept."""


class CursorInvalid(StoreError):
    """The cursor was not made by this store for this kind of list."""


class NameInvalid(StoreError):
    """A tenant or invocation id that may not become part of a path."""


class ArtifactNotFound(StoreError):
    """The tenant has no such artifact."""


class ArtifactTooLarge(StoreError):
    """More bytes were written than the stage was opened for."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(f"more than {max_bytes} bytes")
        self.max_bytes = max_bytes


class OutputGap(StoreError):
    """Output begins after the end of what is there, so bytes in between are missing."""

    def __init__(self, *, expected: int, offset: int) -> None:
        super().__init__(f"output at {offset}, but the next byte is {expected}")
        self.expected = expected
        self.offset = offset


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRecord:
    """One record of a tree's journal. `sequence` rises within its tree and is unique there."""

    tenant_id: str
    tree_id: str
    sequence: int
    kind: str
    invocation_id: str
    time_us: int
    engine_version: int
    payload: bytes  # JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class InvocationRow:
    """An invocation as it stands, for get and list; the newest row of an id replaces the others.

    A row whose `value` is empty leaves the value that stands.
    """

    tenant_id: str
    invocation_id: str
    tree_id: str
    parent_id: str
    depth: int
    state: str
    label: str
    create_time_us: int
    end_time_us: int  # 0 while it is live
    ordinal: int  # the order of creation in its tree
    snapshot: bytes  # a serialized hutch.v1 Invocation
    value: bytes = b""  # a serialized hutch.v1 Value kept apart, so that lists need not read it


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """What a mutating request was answered with."""

    tenant_id: str
    request_id: str
    content_digest: str
    answer_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What becomes durable together."""

    records: tuple[StoredRecord, ...] = ()
    rows: tuple[InvocationRow, ...] = ()
    requests: tuple[RequestRow, ...] = ()
    # (tenant, tree) of trees whose records recovery no longer needs.
    ended_trees: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactRow:
    """One published artifact; `invocation_id` is empty for bytes that a client put."""

    tenant_id: str
    artifact_id: str
    name: str
    sha256: str
    size_bytes: int
    media_type: str
    invocation_id: str
    create_time_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AlreadyPublished:
    """The invocation has an artifact of this name, which stays; what was staged is gone."""

    row: ArtifactRow


class Journal(Protocol):
    """The durable records, the read model over them, and durable counters."""

    async def append(self, batch: Batch) -> None:
        """Makes a batch durable: when it returns, the batch survives a loss of power.

        Batches become durable in the order of the calls; those that wait share one commit. A call
        that fails takes with it every call that waits behind it, so no record is durable without
        the ones before it. Cancelling the call does not take the batch back. On a full disk it
        waits until there is room; nothing of it is kept before.

        Raises:
            StoreFull: the journal was closed while it waited for room.
            StoreConflict: a sequence or request id exists; nothing of it was kept.
            StoreUnavailable: the write failed.
        """

    def begin(self, batch: Batch) -> asyncio.Future[None]:
        """As `append`, without waiting: the future is done once the batch is durable, or has the
        error. It never raises."""

    async def read_tree(
        self, tenant_id: str, tree_id: str, after_sequence: int = 0, limit: int = 1000
    ) -> list[StoredRecord]:
        """Records of one tree after a sequence, in order."""

    async def live_records(self) -> list[StoredRecord]:
        """All records of all trees that have not ended, by tenant, tree and sequence."""

    async def get_invocation(self, tenant_id: str, invocation_id: str) -> InvocationRow | None:
        """One invocation with its value, or None."""

    async def list_invocations(
        self,
        tenant_id: str,
        *,
        tree_id: str = "",
        state: str = "",
        roots_only: bool = False,
        after: str = "",
        limit: int = 100,
    ) -> list[InvocationRow]:
        """Invocations without their `value`: newest first, or with `tree_id` by ordinal.

        Args:
            tenant_id: Whose.
            tree_id: Only this tree.
            state: Only in this state.
            roots_only: Only roots.
            after: `cursor_of` the last row of the page before.
            limit: At most so many.

        Raises:
            CursorInvalid: `after` is not a cursor of this kind of list.
        """

    async def get_request(self, tenant_id: str, request_id: str) -> RequestRow | None:
        """What a request was answered with, or None."""

    async def counter_next(self, name: str) -> int:
        """The next number of a durable counter, from 1; no number is given twice."""

    async def close(self) -> None:
        """Finishes what waits and closes the database. Idempotent."""


class StagedFile(Protocol):
    """Bytes on their way into the artifact store. One task at a time may use it."""

    @property
    def size(self) -> int:
        """How many bytes were written so far."""

    async def write(self, data: bytes) -> None:
        """Adds bytes.

        Raises:
            ArtifactTooLarge: beyond the limit; the stage is aborted.
            StoreFull: no space; the stage is aborted.
        """

    async def finish(self) -> tuple[str, int]:
        """Makes the bytes durable. Returns their hexadecimal SHA-256 and their number."""

    async def abort(self) -> None:
        """Removes what was staged, unless it was published. Idempotent."""


class ArtifactStore(Protocol):
    """Immutable bytes, addressed by content inside their tenant, and what is known of them."""

    async def stage(self, max_bytes: int | None = None) -> StagedFile:
        """Opens a stage for at most `max_bytes` (the store's own limit by default)."""

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
        """Publishes a finished stage, durably; the stage is used up.

        The first publication of a name by an invocation stays. The same bytes published again under
        the same artifact id gives the row that stands.

        Raises:
            StoreConflict: the artifact id names other bytes.
            StoreFull, StoreUnavailable: nothing was published.
        """

    async def get(self, tenant_id: str, artifact_id: str) -> ArtifactRow | None:
        """What is known of an artifact, or None."""

    async def stat(self, tenant_id: str, artifact_id: str) -> ArtifactRow:
        """As `get`.

        Raises:
            ArtifactNotFound: there is none.
        """

    async def list(
        self, tenant_id: str, invocation_id: str, after_name: str = "", limit: int = 100
    ) -> Sequence[ArtifactRow]:
        """What an invocation published, by name, after a name."""

    def open_read(
        self, tenant_id: str, artifact_id: str, offset: int = 0
    ) -> AsyncGenerator[bytes, None]:
        """Its bytes from an offset, in pieces of at most 256 KiB.

        Raises:
            ArtifactNotFound: at the first step.
        """

    def path_of(self, row: ArtifactRow) -> Path:
        """The file that holds the bytes, for a reader in another process. Never write to it."""

    async def add_refusals(
        self, tenant_id: str, invocation_id: str, refusals: Sequence[tuple[str, str]]
    ) -> None:
        """Keeps (name, reason) of files that were not captured: the first reason of each name, at
        most 256 names an invocation."""

    async def list_refusals(self, tenant_id: str, invocation_id: str) -> Sequence[tuple[str, str]]:
        """(name, reason) by name."""


class OutputLog(Protocol):
    """What cells printed, by byte offset. `stream` is `stdout` or `stderr`; an output begins with
    its first byte and may go on for as long as there is somebody who appends."""

    async def append(
        self, tenant_id: str, output_id: str, stream: str, offset: int, data: bytes
    ) -> asyncio.Future[None]:
        """Takes bytes at an offset; those that are there already are ignored. Waits while much
        waits to be written: a disk that takes nothing holds back whoever prints, and is tried
        again until it does.

        Returns:
            A future that is done once the bytes survive the controller (`sync` makes them survive
            the machine) and can be read; cancelled when the log was closed before.

        Raises:
            OutputGap: bytes before `offset` are missing.
            StoreUnavailable: the log is closed.
        """

    async def size(self, tenant_id: str, output_id: str, stream: str) -> int:
        """How many bytes the stream holds; 0 for one that nobody wrote."""

    async def read(
        self, tenant_id: str, output_id: str, stream: str, offset: int, max_bytes: int
    ) -> bytes:
        """At most `max_bytes` (and at most 1 MiB) from an offset; empty at the end."""

    async def changed(self, tenant_id: str, output_id: str, stream: str, offset: int) -> int:
        """Waits until the stream holds more than `offset` bytes or `wake` is called; its size."""

    def wake(self, tenant_id: str, output_id: str) -> None:
        """Ends the waits of all who follow an output, because something else has changed."""

    async def sync(
        self, tenant_id: str, output_id: str, streams: Sequence[str] = STREAMS
    ) -> tuple[int, ...]:
        """Makes streams durable, with all that was taken so far, and returns their sizes. Costs
        nothing where nothing was written."""

    async def close(self) -> None:
        """Ends all waits and finishes what is being written. Idempotent."""


async def tree_records(
    journal: Journal, tenant_id: str, tree_id: str, after_sequence: int = 0
) -> AsyncGenerator[StoredRecord, None]:
    """All records of one tree after a sequence, in order, a page at a time in memory."""
    while stored := await journal.read_tree(tenant_id, tree_id, after_sequence=after_sequence):
        for item in stored:
            yield item
        after_sequence = stored[-1].sequence


def cursor_of(row: InvocationRow, *, tree_id: str = "") -> str:
    """The cursor after which the page behind `row` begins, for the same kind of list."""
    if tree_id:
        return f"t.{row.ordinal}.{row.invocation_id}"
    return f"n.{row.create_time_us}.{row.invocation_id}"


def parse_cursor(cursor: str, *, tree_id: str = "") -> tuple[int, str]:
    """Takes a cursor apart: (ordinal or creation time, invocation id).

    Raises:
        CursorInvalid: it was not made for this kind of list.
    """
    kind, _, rest = cursor.partition(".")
    number, _, invocation_id = rest.partition(".")
    fits = kind == ("t" if tree_id else "n") and number.isascii() and number.isdigit()
    if not fits or len(number) > 18 or not _ID.fullmatch(invocation_id):
        raise CursorInvalid("the cursor does not belong to this list")
    return int(number), invocation_id


def checked_tenant(tenant_id: str) -> str:
    """The tenant id, if it may name a folder.

    Raises:
        NameInvalid: it may not.
    """
    if len(tenant_id) > _NAME_CHARACTERS_MAX or not _TENANT.fullmatch(tenant_id):
        raise NameInvalid("not a tenant id")
    return tenant_id


def checked_id(value: str) -> str:
    """The id, if it may name a folder.

    Raises:
        NameInvalid: it may not.
    """
    if len(value) > _NAME_CHARACTERS_MAX or not _ID.fullmatch(value):
        raise NameInvalid("not an id")
    return value


def checked_stream(stream: str) -> str:
    """The stream's name, if it is one.

    Raises:
        NameInvalid: it is not.
    """
    if stream not in STREAMS:
        raise NameInvalid("not a stream")
    return stream
