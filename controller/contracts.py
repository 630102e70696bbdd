"""Checks values and contracts in worker processes that may be killed.

Called by the loop (`CheckContract`) and the wire (schemas and inputs as they enter). Starts
`controller.contract_worker` and talks to it over its standard input and output. No byte of a
tenant's JSON is parsed in this process.

A request is three big-endian 32-bit lengths, then a JSON header, the schema and the value. An
answer is one such length and a JSON object; a check of a value has two, the first when the value
was read.

Each worker does one check at a time. Time is measured for reading (which grows with the size) and
for checking (which does not); a worker that is out of time is killed and replaced. One owner never
has all workers, so a slow check costs nobody else anything.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import enum
import json
import os
import signal
import struct
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_ANSWER_BYTES_MAX = 512 * 1024
_MIB = 1024 * 1024
_STARVED_ROUNDS = 5
_END_SECONDS = 2.0
# What a worker process may need to start on a busy machine; not part of any check's time.
_START_SECONDS = 30.0


class ContractInvalid(Exception):
    """The schema may not be a contract; the text says why."""


class CheckerUnavailable(Exception):
    """No worker can be started, or the checker is closed."""


class Outcome(enum.Enum):
    """How a check came out."""

    ACCEPTED = "accepted"
    MISMATCH = "mismatch"  # well formed, but not what the contract asks for
    VALUE_INVALID = "value_invalid"  # not an encoded value, or over a limit of values
    TIMED_OUT = "timed_out"
    EXHAUSTED = "exhausted"  # out of memory, or it ended its worker twice


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Where and how a value differs from its contract; each text at most 2,000 characters."""

    path: str  # in Python's terms, for example `result["rows"][3]`
    expected: str
    got: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of one check."""

    outcome: Outcome
    mismatch: Mismatch | None = None  # for MISMATCH
    problem: str = ""  # one sentence, for VALUE_INVALID, TIMED_OUT and EXHAUSTED
    limit: str = ""  # the limit that a VALUE_INVALID value is over, empty if it is malformed
    artifact_ids: tuple[str, ...] = ()  # the artifacts that the value names, to be resolved
    tool_ids: tuple[str, ...] = ()  # the tools that the value names, to be resolved

    @property
    def accepted(self) -> bool:
        """Whether the value fits."""
        return self.outcome is Outcome.ACCEPTED


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckerConfig:
    """Limits of the checker."""

    workers: int = 2  # worker processes at most; they start when they are needed
    check_seconds: float = 2.0  # time to compile a schema, and again to check one value
    read_seconds_per_mib: float = 0.5  # added for reading a value
    memory_limit_bytes: int = 2 * 1024 * _MIB  # address space of one worker
    large_value_bytes: int = 8 * _MIB  # a worker that read more is replaced, to free its memory


class _WorkerDied(Exception):
    """The worker ended in the middle of a check."""


class _OutOfTime(Exception):
    """The worker took too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    schema: bytes | None
    value: bytes | Path | None

    def size(self) -> int:
        """How many bytes the value has."""
        if isinstance(self.value, Path):
            return self.value.stat().st_size
        return len(self.value or b"")


class ContractChecker:
    """A small pool of worker processes. Use it as an asynchronous context, or call `close`."""

    def __init__(self, config: CheckerConfig | None = None) -> None:
        self._config = config or CheckerConfig()
        self._share = max(1, self._config.workers - 1)
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._active: collections.Counter[object] = collections.Counter()
        self._waiting: collections.deque[tuple[object, asyncio.Future[None]]] = collections.deque()
        self._closed = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Starts one worker ahead of the first check. Optional.

        Raises:
            CheckerUnavailable: it could not be started.
        """
        async with self._worker(object()):
            pass

    async def validate_schema(self, schema: bytes, *, owner: object = None) -> None:
        """Finds out whether a schema may be a contract.

        Args:
            schema: JSON.
            owner: Whose schema it is: all but one of the workers at most serve one owner.

        Raises:
            ContractInvalid: it may not; the text says why.
            CheckerUnavailable: no worker can be started.
        """
        answer = await self._ask(_Request(schema=schema, value=None), owner)
        if answer["outcome"] != Outcome.ACCEPTED.value:
            raise ContractInvalid(answer["problem"])

    async def check(self, schema: bytes, value: bytes | Path, *, owner: object = None) -> Verdict:
        """Checks a value, given as its encoded JSON or as a file that holds it.

        Raises:
            ContractInvalid: the schema may not be a contract.
            CheckerUnavailable: no worker can be started.
        """
        return _verdict(await self._ask(_Request(schema=schema, value=value), owner))

    async def check_value(self, value: bytes | Path, *, owner: object = None) -> Verdict:
        """Checks that a value is well formed and within the limits of values.

        Raises:
            CheckerUnavailable: no worker can be started.
        """
        return _verdict(await self._ask(_Request(schema=None, value=value), owner))

    async def close(self) -> None:
        """Kills the workers; checks under way raise CheckerUnavailable. Idempotent."""
        self._closed = True
        for _, future in self._waiting:
            if not future.done():
                future.set_exception(CheckerUnavailable("the checker is closed"))
        self._waiting.clear()
        for worker in list(self._all):
            await self._discard(worker)

    async def _ask(self, request: _Request, owner: object) -> dict[str, Any]:
        # Without an owner a check is its own.
        key = object() if owner is None else owner
        for _ in range(2):  # a worker may also die of something outside: the check is tried again
            async with self._worker(key) as worker:
                try:
                    return await worker.ask(request)
                except _OutOfTime:
                    return {
                        "outcome": Outcome.TIMED_OUT.value,
                        "problem": "the check did not end in time",
                    }
                except _WorkerDied:
                    if self._closed:
                        raise CheckerUnavailable("the checker is closed") from None
        return {"outcome": Outcome.EXHAUSTED.value, "problem": "the check ended its process twice"}

    @contextlib.asynccontextmanager
    async def _worker(self, owner: object) -> AsyncIterator[_Worker]:
        """A worker for one check; afterwards it is kept if it may serve again."""
        await self._admit(owner)
        worker: _Worker | None = None
        try:
            worker = self._idle.pop() if self._idle else await self._spawn()
            yield worker
        finally:
            try:
                if worker is not None:
                    if worker.reusable and not self._closed:
                        self._idle.append(worker)
                    else:
                        await self._discard(worker)
            finally:
                self._active[owner] -= 1
                self._active += collections.Counter()  # drops those at zero
                self._admit_next()

    async def _admit(self, owner: object) -> None:
        if self._closed:
            raise CheckerUnavailable("the checker is closed")
        future = asyncio.get_running_loop().create_future()
        entry = (owner, future)
        self._waiting.append(entry)
        self._admit_next()
        try:
            await future
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
            elif not future.cancelled() and future.exception() is None:
                self._active[owner] -= 1
                self._admit_next()
            raise

    def _admit_next(self) -> None:
        for entry in list(self._waiting):
            owner, future = entry
            if self._active.total() >= self._config.workers:
                return
            if self._active[owner] < self._share and not future.done():
                self._waiting.remove(entry)
                self._active[owner] += 1
                future.set_result(None)

    async def _spawn(self) -> _Worker:
        worker = await _Worker.start(self._config)
        self._all.add(worker)
        if self._closed:
            await self._discard(worker)
            raise CheckerUnavailable("the checker is closed")
        return worker

    async def _discard(self, worker: _Worker) -> None:
        await worker.kill()
        self._all.discard(worker)
        if worker in self._idle:
            self._idle.remove(worker)


class _Worker:
    """One worker process."""

    def __init__(self, process: asyncio.subprocess.Process, config: CheckerConfig) -> None:
        self._process = process
        self._config = config
        self.reusable = True

    @classmethod
    async def start(cls, config: CheckerConfig) -> _Worker:
        """Starts a process and waits until it listens.

        Raises:
            CheckerUnavailable: it did not start.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-m",
                "controller.contract_worker",
                str(os.getpid()),
                str(config.memory_limit_bytes),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                cwd="/",
                env={"LC_ALL": "C.UTF-8"},
                start_new_session=True,
            )
        except OSError as error:
            raise CheckerUnavailable(f"no worker can be started: {error}") from error
        worker = cls(process, config)
        try:
            async with asyncio.timeout(_START_SECONDS):
                await worker._answer()
        except (_WorkerDied, TimeoutError) as error:
            await worker.kill()
            raise CheckerUnavailable("the worker did not start") from error
        except BaseException:
            await worker.kill()
            raise
        return worker

    async def ask(self, request: _Request) -> dict[str, Any]:
        """Does one check. The worker is no longer reusable unless that went well.

        Raises:
            _OutOfTime, _WorkerDied: accordingly.
        """
        self.reusable = False
        size = request.size()
        check, read = self._config.check_seconds, self._config.read_seconds_per_mib * size / _MIB
        try:
            async with asyncio.timeout(check + read):
                await self._send(request, cpu_seconds=2 * check + read)
        except TimeoutError:
            raise _OutOfTime from None
        answer = await self._answer_within(check + read)
        if answer["outcome"] == "decoded":
            answer = await self._answer_within(check)
        exhausted = answer["outcome"] == Outcome.EXHAUSTED.value
        self.reusable = not exhausted and size < self._config.large_value_bytes
        return answer

    async def kill(self) -> None:
        """Ends the process and waits for its end. Idempotent."""
        self.reusable = False
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        stdin = self._process.stdin
        if stdin is not None:
            stdin.close()
            with contextlib.suppress(ConnectionError):
                await stdin.wait_closed()

    async def _send(self, request: _Request, *, cpu_seconds: float) -> None:
        header = json.dumps(
            {
                "has_schema": request.schema is not None,
                "has_value": request.value is not None,
                "path": str(request.value) if isinstance(request.value, Path) else "",
                "cpu_seconds": cpu_seconds,
            }
        ).encode()
        schema = request.schema or b""
        value = request.value if isinstance(request.value, bytes) else b""
        stdin = self._process.stdin
        if stdin is None:
            raise _WorkerDied
        try:
            stdin.write(struct.pack(">III", len(header), len(schema), len(value)) + header)
            stdin.write(schema)
            stdin.write(value)
            await stdin.drain()
        except ConnectionError:
            raise _WorkerDied from None

    async def _answer_within(self, seconds: float) -> dict[str, Any]:
        """Waits for an answer. A worker that the machine did not let run gets more time."""
        began = self._cpu_seconds()
        for _ in range(_STARVED_ROUNDS):
            try:
                async with asyncio.timeout(seconds):
                    return await self._answer()
            except TimeoutError:
                if self._cpu_seconds() - began > seconds / 2:
                    break
        raise _OutOfTime

    async def _answer(self) -> dict[str, Any]:
        stdout = self._process.stdout
        if stdout is None:
            raise _WorkerDied
        try:
            (size,) = struct.unpack(">I", await stdout.readexactly(4))
            if size > _ANSWER_BYTES_MAX:
                raise _WorkerDied
            answer = json.loads(await stdout.readexactly(size))
        except asyncio.IncompleteReadError:
            if await self._process.wait() == -signal.SIGXCPU:
                raise _OutOfTime from None
            raise _WorkerDied from None
        if not isinstance(answer, dict):
            raise _WorkerDied
        return answer

    def _cpu_seconds(self) -> float:
        """The CPU time the worker has had; 0 when it has ended."""
        try:
            text = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return 0.0
        fields = text.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _verdict(answer: dict[str, Any]) -> Verdict:
    if answer["outcome"] == "schema_invalid":
        raise ContractInvalid(answer["problem"])
    outcome = Outcome(answer["outcome"])
    mismatch = None
    if outcome is Outcome.MISMATCH:
        mismatch = Mismatch(path=answer["path"], expected=answer["expected"], got=answer["got"])
    return Verdict(
        outcome=outcome,
        mismatch=mismatch,
        problem=answer.get("problem", ""),
        limit=answer.get("limit", ""),
        artifact_ids=tuple(answer.get("artifact_ids", ())),
        tool_ids=tuple(answer.get("tool_ids", ())),
    )
