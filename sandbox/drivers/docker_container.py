"""One live container: what is measured of it, how its end is noticed, and how it is proved gone.

Made by the docker driver only; calls the engine, and reads the container's cgroup where this host
can find it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sandbox.drivers import cgroups, disks, procfs
from sandbox.drivers.arguments import WRITABLE
from sandbox.drivers.cgroups import Cgroup, Counters
from sandbox.drivers.docker_channel import AttachedSocket, Hangups
from sandbox.drivers.docker_engine import Engine, EngineProblem, State
from sandbox.drivers.driver import Enforcement, Measurement

_T = TypeVar("_T")
_GONE_SECONDS = 20.0
_FIRST_PAUSE_SECONDS = 0.01
_LONGEST_PAUSE_SECONDS = 1.0
_SIGNAL_BASE = 128  # an engine answers a command that died of a signal like a shell does
_NANOSECONDS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A container that was started, with what is known of it then."""

    engine_id: str
    channel: AttachedSocket
    pid: int  # of its first process as this host sees it; 0 where it does not
    start_time: str
    group: Cgroup | None


def begin(engine: Engine, engine_id: str, channel: AttachedSocket, root: Path) -> Begun:
    """Starts a container and finds its first process and its cgroup."""
    engine.start(engine_id)
    state = engine.state(engine_id)
    pid = state.pid if state is not None else 0
    group = find_group(pid, engine_id, root) if pid else None
    process = procfs.process(pid) if group is not None else None
    return Begun(
        engine_id=engine_id,
        channel=channel,
        pid=pid if process is not None else 0,
        start_time=process.start_time if process is not None else "",
        group=group,
    )


def find_group(pid: int, engine_id: str, root: Path = cgroups.ROOT) -> Cgroup | None:
    """The cgroup of a container's first process; None where this host does not see that process.

    The engine may run in another pid namespace: only a process in a cgroup that is named after the
    container is it.
    """
    folders: dict[str, Path] = {}
    version = 2 if (root / "cgroup.controllers").is_file() else 1
    for line in procfs.read(pid, "cgroup").decode("utf-8", "replace").splitlines():
        _, controllers, path = line.split(":", 2)
        if engine_id not in path:
            continue
        if version == 2 and not controllers:
            folders["unified"] = root / path.lstrip("/")
        for name in controllers.split(",") if version == 1 else ():
            folders[name] = root / name / path.lstrip("/")
    found = {name: folder for name, folder in folders.items() if folder.is_dir()}
    wanted = ("unified",) if version == 2 else ("memory", "pids", "cpuacct")
    if not all(name in found for name in wanted):
        return None
    return Cgroup(version=version, folders={name: found[name] for name in wanted})


class DockerContainer:
    """One live sandbox; made by the driver only."""

    def __init__(
        self,
        *,
        sandbox_id: str,
        begun: Begun,
        engine: Engine,
        threads: ThreadPoolExecutor,
        hangups: Hangups,
        tmpfs_bytes: int,
        enforcement: Sequence[Enforcement],
        on_gone: Callable[[], object],
    ) -> None:
        self._sandbox_id = sandbox_id
        self._begun = begun
        self._engine = engine
        self._threads = threads
        self._hangups = hangups
        self._tmpfs = tmpfs_bytes
        self._enforcement = tuple(enforcement)
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[State | None] = self._loop.create_future()
        self._leaving = threading.Event()
        self._last = Counters()
        self._destroying = asyncio.Lock()  # one pass at a time; a second one finds nothing to do
        self._final: Measurement | None = None
        hangups.watch(begun.channel, self._hung_up)

    @property
    def sandbox_id(self) -> str:
        """The id it was made for."""
        return self._sandbox_id

    @property
    def engine_id(self) -> str:
        """The engine's own id of the container."""
        return self._begun.engine_id

    @property
    def channel(self) -> AttachedSocket:
        """The host's end of the frame channel."""
        return self._begun.channel

    @property
    def enforcement(self) -> Sequence[Enforcement]:
        """At which level each limit is held for this one."""
        return self._enforcement

    async def measure(self) -> Measurement:
        """Measures now."""
        if self._final is not None:
            return self._final
        if self._begun.group is not None:
            self._look_at_group()
        elif not self._ended.done():
            await self._in_thread(self._ask_for_usage)
        return self._measurement(self._ended.result() if self._ended.done() else None)

    async def wait(self) -> Measurement:
        """Waits until the supervisor has exited."""
        await asyncio.shield(self._ended)
        return await self.measure()

    async def destroy(self) -> Measurement:
        """Removes the container and proves it gone.

        Raises:
            RuntimeError: The engine does not answer, or a process survived.
        """
        async with self._destroying:
            if self._final is None:
                final = await self.measure()  # an end that is ours is no evidence
                self._leaving.set()  # so that no thread waits for its end meanwhile
                await self._in_thread(self._remove)
                self._hangups.forget(self.channel)
                self.channel.close()
                self._final = final
                if not self._ended.done():
                    self._ended.set_result(None)
                self._on_gone()
            return self._final

    def _in_thread(self, call: Callable[[], _T]) -> Awaitable[_T]:
        return self._loop.run_in_executor(self._threads, call)

    def _hung_up(self) -> None:
        """The engine has closed the channel: most often because the container has ended."""
        self._look_at_group()  # before the engine removes it
        with contextlib.suppress(RuntimeError):  # the driver was closed
            self._threads.submit(self._find_end)

    def _find_end(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while not self._leaving.is_set():
            with contextlib.suppress(EngineProblem):
                state = self._engine.state(self.engine_id)
                if state is None or not state.running:
                    self._loop.call_soon_threadsafe(self._end, state)
                    return
            self._leaving.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _end(self, state: State | None) -> None:
        if not self._ended.done():
            self._ended.set_result(state)

    def _look_at_group(self) -> None:
        if self._begun.group is not None:
            found = self._begun.group.counters()
            if found.memory_peak_bytes is not None:
                self._last = found

    def _ask_for_usage(self) -> None:
        with contextlib.suppress(EngineProblem):
            found = self._engine.usage(self.engine_id)
            peak = (found.get("memory_stats") or {}).get("max_usage")
            spent = ((found.get("cpu_stats") or {}).get("cpu_usage") or {}).get("total_usage")
            self._last = Counters(
                memory_peak_bytes=peak, cpu_seconds=spent / _NANOSECONDS if spent else None
            )

    def _measurement(self, state: State | None) -> Measurement:
        code = state.exit_code if state is not None else None
        signal = code - _SIGNAL_BASE if code is not None and code > _SIGNAL_BASE else None
        kills = self._last.oom_kill_count
        if state is not None and state.oom_killed:
            kills = max(1, kills or 0)
        said = self.channel.diagnostics
        full = None
        if self._begun.pid and not self._ended.done():
            full = disks.count_full(self._begun.pid, WRITABLE, self._tmpfs)
        return Measurement(
            exit_code=code if signal is None else None,
            signal=signal,
            oom_kill_count=kills,
            memory_peak_bytes=self._last.memory_peak_bytes,
            pids_limit_hits=self._last.pids_limit_hits,
            disk_full_hits=full,
            cpu_seconds=self._last.cpu_seconds,
            detail=said or (state.problem if state is not None else ""),
        )

    def _remove(self) -> None:
        try:
            remove(self._engine, self.engine_id)
        except EngineProblem as problem:
            raise RuntimeError(f"{self._sandbox_id} was not removed: {problem}") from problem
        if self._begun.pid and procfs.same(self._begun.pid, self._begun.start_time):
            raise RuntimeError(f"process {self._begun.pid} of {self._sandbox_id} survived")
        if self._begun.group is not None and (left := self._begun.group.pids()):
            raise RuntimeError(f"processes of {self._sandbox_id} survived: {sorted(left)}")


def remove(engine: Engine, engine_id: str) -> None:
    """Removes a container and waits until the engine knows no such one; call it in a thread.

    Raises:
        EngineProblem: It could not be removed, or not in time.
    """
    deadline = time.monotonic() + _GONE_SECONDS
    pause = _FIRST_PAUSE_SECONDS
    while True:
        engine.remove(engine_id)
        if engine.state(engine_id) is None:
            return
        if time.monotonic() > deadline:
            raise EngineProblem(f"the engine still has {engine_id}")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
