"""Durable file work in a few threads, off the event loop.

Called by the artifact store and the output log.

Durability: a file is durable after `fsync` of itself *and* of every folder that got a new entry on
the way to it; the helpers here do both.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from controller.store import database
from controller.store.ports import StoreUnavailable

R = TypeVar("R")

_THREADS = 4


class FileThreads:
    """Runs blocking file work in a few threads; what the system refuses becomes a typed error."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="store-files")

    def start(self, work: Callable[[], R]) -> asyncio.Future[R]:
        """Begins `work`. Once begun it runs to its end, whoever is cancelled.

        Raises:
            StoreUnavailable: closed. The future has StoreFull or StoreUnavailable from an OSError.
        """

        def guarded() -> R:
            try:
                return work()
            except OSError as error:
                raise database.translate_os(error, self._folder) from error

        try:
            return asyncio.get_running_loop().run_in_executor(self._pool, guarded)
        except RuntimeError as error:  # the pool was shut down
            raise StoreUnavailable(f"{self._folder}: closed") from error

    async def run(self, work: Callable[[], R]) -> R:
        """Runs `work` as `start` does and waits for its result."""
        return await self.start(work)

    async def close(self) -> None:
        """Finishes what was begun and ends the threads. Idempotent."""
        await asyncio.to_thread(self._pool.shutdown)


def make_folders(folder: Path, top: Path) -> None:
    """Makes a folder below `top`, and those on the way, for their owner only."""
    if folder != top and not folder.exists():
        make_folders(folder.parent, top)
    folder.mkdir(mode=0o700, exist_ok=True)


def sync_folder(folder: Path) -> None:
    """Makes the entries of a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folders(folder: Path, top: Path) -> None:
    """Makes the entries of a folder durable, and those of all above it up to `top`."""
    sync_folder(folder)
    while folder != top:
        folder = folder.parent
        sync_folder(folder)


def write_all(descriptor: int, data: bytes, offset: int) -> tuple[int, OSError | None]:
    """Writes bytes at an offset; returns how many were written, and what ended it early."""
    view = memoryview(data)
    done = 0
    while done < len(view):
        try:
            done += os.pwrite(descriptor, view[done:], offset + done)
        except OSError as error:
            return done, error
    return done, None


def write_parts(descriptor: int, parts: Sequence[bytes], offset: int) -> tuple[int, OSError | None]:
    """Writes pieces one behind the other, at most 1024; returns as `write_all` does."""
    try:
        done = os.pwritev(descriptor, parts, offset)
    except OSError as error:
        return 0, error
    if done == sum(len(part) for part in parts):
        return done, None
    # A short write: the rest says why.
    more, problem = write_all(descriptor, b"".join(parts)[done:], offset + done)
    return done + more, problem
