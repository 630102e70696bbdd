"""The one thread that writes to the database, with group commit; and the threads that read from it.

Called by the journal and the artifact store. Calls `controller.store.database`.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy
import structlog

from controller.store import database
from controller.store.ports import StoreConflict, StoreError, StoreFull, StoreUnavailable
from controller.store.space import Space

log = structlog.get_logger(__name__)

P = TypeVar("P")
R = TypeVar("R")

# Runs a number of payloads of the same kind in the open transaction, one result for each.
Apply = Callable[[sqlalchemy.Connection, Sequence[P]], Sequence[R]]

_GROUP_MAX = 512
_READERS = 3
_RETRY_FIRST_SECONDS = 0.1
_RETRY_LAST_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Job:
    apply: Apply[Any, Any]
    payload: Any
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    patient: bool


class Writer:
    """Runs jobs in their order, as many as wait in one transaction, and answers after the commit.

    When a transaction fails, every job that waited behind it fails with it. Only a job that breaks
    a rule of the database fails alone; the rest of its group is then run one by one. On a full disk
    patient jobs keep their places, and are tried again until there is room.
    """

    def __init__(self, path: Path, space: Space) -> None:
        self._path = path
        self._space = space
        self._engine = database.writer_engine(path)
        self._jobs: collections.deque[_Job] = collections.deque()
        # Guards `_jobs` and `_closing`: a job is either seen by the thread or refused.
        self._changed = threading.Condition()
        self._closing = False
        self._broken: StoreError | None = None
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    def submit(self, apply: Apply[P, R], payload: P, *, patient: bool = False) -> asyncio.Future[R]:
        """Runs `apply` on the payload in a transaction; gives its result once it is durable. No
        coroutine, so that who need not wait needs no task to begin one.

        Args:
            apply: What to run.
            payload: On what.
            patient: Whether to wait on a full disk until there is room.

        Raises:
            StoreError: it was not kept (see the ports for which).
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        job = _Job(apply=apply, payload=payload, loop=loop, future=future, patient=patient)
        with self._changed:
            if self._closing:
                future.set_exception(StoreUnavailable(f"{self._path}: closed"))
                return future
            self._jobs.append(job)
            self._changed.notify()
        return future

    async def close(self) -> None:
        """Runs what waits, then ends the thread. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)
        self._engine.dispose()

    def _run(self) -> None:
        delay = _RETRY_FIRST_SECONDS
        while jobs := self._next_group():
            try:
                error = self._run_group(jobs)
            except Exception as problem:  # a bug in an `apply`: those who wait must hear of it
                self._fail(jobs, problem)
                continue
            self._space.stalled = isinstance(error, StoreFull) and bool(self._jobs)
            if not self._space.stalled:
                delay = _RETRY_FIRST_SECONDS
                continue
            log.warning("journal_waits", problem=str(error), retry_seconds=delay)
            with self._changed:
                self._changed.wait_for(lambda: self._closing, delay)
            delay = min(2 * delay, _RETRY_LAST_SECONDS)

    def _next_group(self) -> list[_Job]:
        """The jobs of the next transaction; empty when the writer is closed and idle."""
        with self._changed:
            while not self._jobs and not self._closing:
                self._changed.wait()
            return [self._jobs.popleft() for _ in range(min(len(self._jobs), _GROUP_MAX))]

    def _run_group(self, jobs: Sequence[_Job], rest: Sequence[_Job] = ()) -> StoreError | None:
        """Runs jobs in one transaction. Returns the error, if it concerns all who wait, among them
        the rest of their group."""
        if self._broken is not None:
            self._fail([*jobs, *rest], self._broken)
            return self._broken
        try:
            results = self._transact(jobs)
        except StoreConflict as error:
            if len(jobs) == 1:
                self._fail(jobs, error)
                return None
            return self._run_singly(jobs)
        except StoreError as error:
            if isinstance(error, database.CommitUnknown):
                self._broken = error
            self._refuse([*jobs, *rest], error)
            return error
        _answer(jobs, results)
        return None

    def _run_singly(self, jobs: Sequence[_Job]) -> StoreError | None:
        for index, job in enumerate(jobs):
            error = self._run_group([job], jobs[index + 1 :])
            if error is not None:
                return error
        return None

    def _refuse(self, jobs: Sequence[_Job], error: StoreError) -> None:
        """Fails jobs and all that wait behind them, but for those that wait for room."""
        with self._changed:
            jobs = [*jobs, *self._jobs]
            self._jobs.clear()
            wait = isinstance(error, StoreFull) and not self._closing
            self._jobs.extend(job for job in jobs if wait and job.patient)
        self._fail([job for job in jobs if not (wait and job.patient)], error)

    def _transact(self, jobs: Sequence[_Job]) -> list[Any]:
        results: list[Any] = []
        try:
            with self._engine.begin() as connection:
                for apply, group in itertools.groupby(jobs, key=lambda job: job.apply):
                    results += apply(connection, [job.payload for job in group])
        except (sqlalchemy.exc.SQLAlchemyError, sqlite3.Error, OSError) as error:
            raise database.translate(error, self._path) from error
        return results

    def _fail(self, jobs: Sequence[_Job], error: Exception) -> None:
        _answer(jobs, [error] * len(jobs))


class Readers:
    """A few threads that read, each with a connection that cannot write."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._engine = database.reader_engine(path)
        self._pool = ThreadPoolExecutor(_READERS, thread_name_prefix="store-reader")

    async def run(self, query: Callable[[sqlalchemy.Connection], R]) -> R:
        """Runs a query in a snapshot of its own.

        Raises:
            StoreDamaged, StoreUnavailable: the database cannot be read.
        """

        def read() -> R:
            try:
                with self._engine.begin() as connection:
                    return query(connection)
            except sqlalchemy.exc.SQLAlchemyError as error:
                raise database.translate(error, self._path) from error

        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, read)
        except RuntimeError as error:  # the pool was shut down
            raise StoreUnavailable(f"{self._path}: closed") from error

    async def close(self) -> None:
        """Ends the threads. Idempotent."""
        await asyncio.to_thread(self._pool.shutdown)
        self._engine.dispose()


def _answer(jobs: Sequence[_Job], results: Sequence[Any]) -> None:
    """Hands results to their loops; those of one loop in a single wake-up."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = {}
    for job, result in zip(jobs, results, strict=True):
        by_loop.setdefault(job.loop, []).append((job.future, result))
    for loop, answers in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_resolve, answers)


def _resolve(answers: Sequence[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, result in answers:
        if future.done():
            continue  # cancelled meanwhile
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
