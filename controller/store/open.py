"""Opens everything that the controller keeps in its state directory.

Called by `controller.app` and the tests; the only module of the package that names concrete parts.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from controller.store import database
from controller.store.artifacts import DirectoryArtifactStore
from controller.store.files import FileThreads
from controller.store.journal import SqliteJournal
from controller.store.output import DirectoryOutputLog
from controller.store.ports import ArtifactStore, Journal, OutputLog
from controller.store.space import Space
from controller.store.writer import Readers, Writer

DATABASE_NAME = "journal.sqlite3"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Limits of the store."""

    artifact_max_bytes: int = 4 * 1024 * 1024 * 1024  # the largest single artifact
    # A database up to this size is checked page by page at the start; larger ones by `hutch fsck`.
    check_max_bytes: int = 64 * 1024 * 1024
    # Below so many free bytes no new work is taken; 0: 256 MiB, or a hundredth of a smaller disk.
    reserve_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """What is open; the caller closes it."""

    journal: Journal
    artifacts: ArtifactStore
    outputs: OutputLog
    threads: FileThreads
    space: Space

    async def close(self) -> None:
        """Finishes what is being written and closes everything. Idempotent."""
        await self.outputs.close()
        await self.journal.close()
        await self.threads.close()


async def open_stores(state: Path, config: StoreConfig | None = None) -> Stores:
    """Opens, and makes where they are missing, the journal, the artifacts and the output log.

    The caller owns the state directory (its lock) and the directory exists.

    Raises:
        StoreDamaged: the database is not ours to use; nothing was changed.
        StoreFull, StoreUnavailable: the folders or the database could not be made.
    """
    config = config or StoreConfig()
    path = state / DATABASE_NAME
    await asyncio.to_thread(database.prepare, path, check_bytes_max=config.check_max_bytes)
    space = Space(state, config.reserve_bytes)
    writer, readers, threads = Writer(path, space), Readers(path), FileThreads(state)
    journal = SqliteJournal(writer, readers)
    artifacts = DirectoryArtifactStore(
        state / "artifacts", writer, readers, threads, config.artifact_max_bytes
    )
    outputs = DirectoryOutputLog(state / "output", threads)
    stores = Stores(
        journal=journal, artifacts=artifacts, outputs=outputs, threads=threads, space=space
    )
    try:
        await artifacts.open()
        await outputs.open()
    except BaseException:
        await stores.close()
        raise
    return stores
