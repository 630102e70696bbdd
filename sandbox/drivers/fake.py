"""The driver of tests: each sandbox is a plain process of this machine, with no isolation at all.

Called by `sandbox.host` only when it is named; never a default. It speaks the same frames, runs the
same runtime archive and proves its processes gone, so everything above a driver can be tested on a
machine that has no containers.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from sandbox import packing
from sandbox.drivers import procfs, rlimits
from sandbox.drivers.driver import (
    Enforcement,
    Isolation,
    Level,
    Measurement,
    SandboxRequest,
    StartFailed,
    Statement,
)
from sandbox.drivers.process import SpawnedProcess, check_name, spawn

_DESTROY_SECONDS = 10.0
_UNHELD = (
    Enforcement(limit="pids", level=Level.NONE, mechanism=""),
    Enforcement(limit="cpu", level=Level.NONE, mechanism=""),
    Enforcement(limit="tmpfs", level=Level.NONE, mechanism=""),
)


def _members(folder: Path) -> list[int]:
    """Finds the processes of a sandbox: those that name its folder, and all they started.

    The supervisor and what it forked have the folder in their command line, which stays readable
    when they are not dumpable; programs they started have it in their environment.
    """
    mark = os.fsencode(f"{folder}/")
    table = {found.pid: found for pid in procfs.pids() if (found := procfs.process(pid))}
    inside = {
        pid
        for pid, found in table.items()
        if not found.zombie
        and (mark in procfs.read(pid, "cmdline") or mark in procfs.read(pid, "environ"))
    }
    grown = True
    while grown:
        sessions = {table[pid].session for pid in inside}
        more = {
            pid
            for pid, found in table.items()
            if pid not in inside
            and not found.zombie
            and (found.parent in inside or found.session in sessions)
        }
        inside |= more
        grown = bool(more)
    return sorted(inside - {os.getpid()})


def _remove(folder: Path) -> None:
    """Ends what runs from a sandbox's folder and removes it; call it off the event loop.

    Raises:
        RuntimeError: A process survived.
    """
    survivors = procfs.end_all(lambda: _members(folder), within_seconds=_DESTROY_SECONDS)
    if survivors:
        raise RuntimeError(f"processes of sandbox {folder.name} survived SIGKILL: {survivors}")
    shutil.rmtree(folder, ignore_errors=True)


class FakeContainer:
    """One sandbox that is a plain process."""

    def __init__(
        self,
        sandbox_id: str,
        folder: Path,
        child: SpawnedProcess,
        enforcement: Sequence[Enforcement],
        forget: Callable[[str], object],
    ) -> None:
        self._forget = forget
        self._sandbox_id = sandbox_id
        self._folder = folder
        self._child = child
        self._enforcement = tuple(enforcement)
        self._destroying = asyncio.Lock()  # one pass at a time; a second one finds nothing to do
        self._final: Measurement | None = None

    @property
    def sandbox_id(self) -> str:
        """The id it was made for."""
        return self._sandbox_id

    @property
    def channel(self) -> socket.socket:
        """The host's end of the frame channel."""
        return self._child.channel

    @property
    def enforcement(self) -> Sequence[Enforcement]:
        """At which level each limit is held."""
        return self._enforcement

    async def measure(self) -> Measurement:
        """Measures now; only the supervisor's end is known."""
        code = self._child.return_code
        return Measurement(
            exit_code=code if code is not None and code >= 0 else None,
            signal=-code if code is not None and code < 0 else None,
            detail=self._child.diagnostics,
        )

    async def wait(self) -> Measurement:
        """Waits until the supervisor has exited."""
        await self._child.wait()
        return await self.measure()

    async def destroy(self) -> Measurement:
        """Ends every process of the sandbox and removes its folder.

        Raises:
            RuntimeError: A process survived.
        """
        async with self._destroying:
            if self._final is None:
                final = await self.measure()
                self._child.kill()
                await self._child.wait()
                await asyncio.to_thread(_remove, self._folder)
                self._child.close()
                self._forget(self._sandbox_id)
                self._final = final
            return self._final


class FakeDriver:
    """Starts the runtime archive as plain processes of this machine.

    Args:
        owner: Whose sandboxes these are; part of nothing on the machine but the state folder.
        state: A folder of this owner alone.
    """

    def __init__(self, owner: str, state: Path) -> None:
        self._owner = owner
        self._root = state.absolute() / "fake"
        self._archives = state.absolute() / "archives"
        self._archive: Path | None = None
        self._python = getattr(sys, "_base_executable", "") or sys.executable
        self._containers: dict[str, FakeContainer] = {}

    @property
    def name(self) -> str:
        """The driver's name."""
        return "fake"

    async def prepare(self) -> Statement:
        """Removes what an earlier host of this owner left behind and builds the archive."""
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        for folder in sorted(self._root.iterdir()):
            if folder.is_dir():
                await asyncio.to_thread(_remove, folder)
        self._archive = await asyncio.to_thread(self._build)
        return Statement(
            driver=self.name,
            isolation=Isolation.PROCESS,
            enforcement=(
                Enforcement(limit="memory", level=Level.PROCESS, mechanism="RLIMIT_AS"),
                Enforcement(limit="open_files", level=Level.PROCESS, mechanism="RLIMIT_NOFILE"),
                *_UNHELD,
            ),
            gaps=("Sandboxes are plain processes of this machine: nothing is isolated.",),
        )

    async def create(self, request: SandboxRequest) -> FakeContainer:
        """Starts one supervisor.

        Raises:
            StartFailed: The process could not be started.
        """
        if self._archive is None:
            raise StartFailed("the fake driver was not prepared")
        check_name(request.sandbox_id)
        rlimits.check_files(request.limits)
        if request.sandbox_id in self._containers:
            raise StartFailed(f"sandbox {request.sandbox_id} exists")
        folder = self._root / request.sandbox_id
        workspace = folder / "workspace"
        workspace.mkdir(parents=True)
        runtime = folder / "runtime.bundle"
        runtime.symlink_to(self._archive)
        limits = request.limits
        argv = [self._python, *packing.start_arguments(str(runtime))]
        argv += ["--workspace", str(workspace)]
        argv += ["--open-files", str(limits.open_files_limit)]
        try:
            child = spawn(argv, env=_environment(workspace), cwd=str(workspace))
        except StartFailed:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        held = (rlimits.memory(child.pid, limits), rlimits.open_files(child.pid, limits))
        rlimits.no_core_dumps(child.pid)
        container = FakeContainer(
            request.sandbox_id, folder, child, (*held, *_UNHELD), self._forget
        )
        self._containers[request.sandbox_id] = container
        return container

    async def list(self) -> Sequence[str]:
        """The sandboxes of this owner, by their folders."""
        if not self._root.is_dir():
            return []
        return sorted(entry.name for entry in self._root.iterdir() if entry.is_dir())

    async def close(self) -> None:
        """Destroys what is left."""
        for container in list(self._containers.values()):
            await container.destroy()
        if self._root.is_dir() and not await self.list():
            shutil.rmtree(self._root, ignore_errors=True)

    def _forget(self, sandbox_id: str) -> None:
        self._containers.pop(sandbox_id, None)

    def _build(self) -> Path:
        self._archives.mkdir(mode=0o700, parents=True, exist_ok=True)
        return packing.build_archive(self._python, self._archives / f"{self.name}.bundle")


def _environment(workspace: Path) -> dict[str, str]:
    return {
        "HOME": str(workspace),
        "LANG": "C.UTF-8",
        "MPLBACKEND": "Agg",
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(workspace),
    }
