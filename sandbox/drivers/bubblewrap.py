"""The bubblewrap driver: namespaces, a system call filter, cgroups where the host may write them.

Called by `sandbox.host` through `sandbox.drivers.make`; calls bwrap and the modules beside it:
`selfcheck`, `interpreter` and `trial` (what this machine has), `layout` (what a sandbox sees),
`users` (its uids), `cgroups`, `scope` and `rlimits` (its limits), `starts`, `launch` and
`arguments` (how it starts), `container` (how it ends).

Everything that can be found out once is found out in `prepare`; `create` sets the limits of a
cgroup and has a waiting process become bwrap.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from sandbox import packing
from sandbox.drivers import (
    arguments,
    cgroups,
    interpreter,
    launch,
    layout,
    procfs,
    rlimits,
    scope,
    selfcheck,
    trial,
)
from sandbox.drivers.container import BubblewrapContainer, processes_of
from sandbox.drivers.driver import (
    Enforcement,
    Isolation,
    Level,
    Limits,
    SandboxRequest,
    StartFailed,
    Statement,
)
from sandbox.drivers.process import check_name
from sandbox.drivers.starts import Start, Starts
from sandbox.drivers.users import Slot, Users

_SHARED = Path("/var/lib/hutch")
_READY_NAMESPACES = 8
_LEFTOVER_SECONDS = 10.0
_UNUSABLE = (
    StartFailed,
    packing.PackingFailed,
    OSError,
    LookupError,
    subprocess.SubprocessError,
)


class BubblewrapDriver:
    """Makes sandboxes with bwrap.

    Args:
        owner: Whose sandboxes these are: names its cgroups and marks its processes.
        state: A folder of this owner alone.
        cgroup_root: Where cgroups are mounted.
        shared: A folder for what other uids must read; used by a root host only.
    """

    def __init__(
        self,
        owner: str,
        state: Path,
        *,
        cgroup_root: Path = cgroups.ROOT,
        shared: Path = _SHARED,
    ) -> None:
        self._owner = owner
        self._root_host = os.geteuid() == 0
        self._cgroup_root = cgroup_root
        name = cgroups.owner_name(owner)
        self._folder = (shared if self._root_host else state.absolute() / "bubblewrap") / name
        self._mark = f"/run/{name}/"
        self._archives = state.absolute() / "archives"
        self._users = Users() if self._root_host else None
        self._hierarchy: cgroups.Hierarchy | None = None
        self._scopes: scope.Scopes | None = None
        self._machine: arguments.Machine | None = None
        self._starts: Starts | None = None
        self._enforcement: tuple[Enforcement, ...] = ()
        self._containers: dict[str, BubblewrapContainer] = {}

    @property
    def name(self) -> str:
        """The driver's name."""
        return "bubblewrap"

    async def prepare(self) -> Statement:
        """Runs the self-check, removes an earlier host's leftovers and builds the archive."""
        try:
            statement = await asyncio.to_thread(self._prepare)
        except _UNUSABLE as error:
            return self._unusable(str(error))
        self._refill()  # not in that thread: its end would be taken for this process's
        return statement

    def _prepare(self) -> Statement:
        self._hierarchy, without_cgroups = cgroups.find(self._owner, self._cgroup_root)
        self._remove_leftovers()
        bwrap, problem = selfcheck.choose_bwrap(selfcheck.bwrap_candidates())
        if bwrap is None:
            return self._unusable(problem)
        if problem := selfcheck.namespace_problem(bwrap):
            return self._unusable(problem)
        if self._hierarchy is None and not self._root_host:
            self._scopes = scope.find(self._cgroup_root)
        if self._root_host:
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            self._folder.parent.chmod(0o755)  # whatever the umask: other uids pass through it
        files = layout.build(self._folder)
        files.archive.touch(mode=0o644)  # for the trial; the archive is built by what it chooses
        if self._users is not None:
            try:
                self._users.open(ready=_READY_NAMESPACES)
            except StartFailed as error:
                return self._unusable(selfcheck.explain(str(error), bwrap))
            if interpreter.obstacle(bwrap, self._users.first_uid):
                bwrap = layout.copy_wheel_binary(bwrap, self._folder)
        self._machine, problem = trial.choose(bwrap, files, self._users, self._mark)
        if self._machine is None:
            return self._unusable(problem)
        self._build_archive(self._machine)
        self._starts = Starts(self._users, self._hierarchy, files.seccomp)
        self._enforcement = self._levels()
        return Statement(
            driver=self.name,
            isolation=Isolation.CONTAINER,
            enforcement=self._enforcement,
            gaps=self._gaps(without_cgroups),
        )

    def _unusable(self, problem: str) -> Statement:
        return Statement(
            driver=self.name,
            isolation=Isolation.CONTAINER,
            enforcement=(),
            usable=False,
            problem=problem,
        )

    def command(self, program: Sequence[str]) -> trial.Command:
        """The command line that runs a program as a sandbox's supervisor is run, without a cgroup:
        what a cold start is compared with. Give it to `release` when it has ended.

        Raises:
            StartFailed: The driver was not prepared, or no uid is free.
        """
        if self._machine is None:
            raise StartFailed("the bubblewrap driver is not prepared")
        return trial.command(self._machine, self._users, program)

    def release(self, command: trial.Command) -> None:
        """Frees what `command` took."""
        trial.release(command, self._users)

    def _build_archive(self, machine: arguments.Machine) -> None:
        """Has the archive compiled inside a sandbox, by the interpreter that will run it."""

        def run(command: Sequence[str], given: bytes) -> bytes:
            done = trial.run(machine, self._users, command, given)
            if done.returncode != 0:
                said = done.stderr.decode("utf-8", "replace")[-2000:]
                raise packing.PackingFailed(f"{command[0]} exited {done.returncode}: {said}")
            return done.stdout

        self._archives.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept = self._archives / f"{self.name}.bundle"
        packing.build_archive(str(machine.interpreter.executable), kept, run)
        shutil.copyfile(kept, machine.layout.archive)
        machine.layout.archive.chmod(0o644)

    def _levels(self) -> tuple[Enforcement, ...]:
        held = self._hierarchy or self._scopes
        found = {entry.limit: entry for entry in (held.enforcement if held else ())}
        rest = (
            Enforcement(limit="memory", level=Level.PROCESS, mechanism="RLIMIT_AS"),
            rlimits.PIDS if rlimits.pids_supported() else rlimits.NO_PIDS,
            Enforcement(limit="cpu", level=Level.NONE, mechanism=""),
            Enforcement(limit="tmpfs", level=Level.SANDBOX, mechanism="tmpfs size"),
            Enforcement(limit="open_files", level=Level.PROCESS, mechanism="RLIMIT_NOFILE"),
        )
        return tuple(found.get(entry.limit, entry) for entry in rest)

    def _gaps(self, without_cgroups: str) -> tuple[str, ...]:
        gaps = ["Sandboxes share this machine's kernel."]
        if not self._root_host:
            gaps.append(
                "This host is an ordinary user: supervisor and REPL of all its sandboxes share one "
                "uid, so it is for one tenant."
            )
        if self._hierarchy is None and self._scopes is None:
            gaps.append(f"No cgroups: {without_cgroups}, so memory is held for each process only.")
        elif self._scopes is not None:
            gaps.append("The counters of a systemd scope are gone when its last process is.")
        return tuple(gaps)

    def _remove_leftovers(self) -> None:
        """Ends what an earlier host of this owner left behind, and nobody else's.

        Raises:
            StartFailed: A process survived.
        """

        def members() -> set[int]:
            found = set(processes_of(self._mark))
            if self._hierarchy is not None:
                for name in self._hierarchy.names():
                    found |= self._hierarchy.of(name).pids()
            return found

        survivors = procfs.end_all(members, within_seconds=_LEFTOVER_SECONDS)
        if survivors:
            raise StartFailed(f"processes of an earlier host survived SIGKILL: {survivors}")
        if self._hierarchy is not None:
            for name in self._hierarchy.names():
                self._hierarchy.of(name).remove()

    async def create(self, request: SandboxRequest) -> BubblewrapContainer:
        """Starts one sandbox.

        Raises:
            StartFailed: It could not be made; nothing of it is left.
        """
        machine, limits, sandbox_id = self._machine, request.limits, request.sandbox_id
        if machine is None or self._starts is None:
            raise StartFailed("the bubblewrap driver is not usable: see its statement")
        check_name(sandbox_id)
        if sandbox_id in self._containers:
            raise StartFailed(f"sandbox {sandbox_id} exists")
        rlimits.check_files(limits)
        charged = self._hierarchy is not None or self._scopes is not None
        try:
            tmpfs = arguments.tmpfs_bytes(limits, charged=charged)
        except ValueError as error:
            raise StartFailed(str(error)) from error
        try:
            container = self._start(machine, self._starts, request, tmpfs)
        except (OSError, StartFailed) as error:
            raise StartFailed(f"cannot start sandbox {sandbox_id}: {error}") from error
        self._containers[sandbox_id] = container
        asyncio.get_running_loop().call_soon(self._refill)
        try:
            await container.admit()
        except BaseException:
            await container.destroy()
            raise
        return container

    def _refill(self) -> None:
        # A scope has its limits from the beginning, and a gate is one sandbox's own.
        if self._starts is not None and self._scopes is None and not self._needs_gate():
            self._starts.refill()

    def _start(
        self, machine: arguments.Machine, starts: Starts, request: SandboxRequest, tmpfs: int
    ) -> BubblewrapContainer:
        limits, sandbox_id = request.limits, request.sandbox_id
        gate = rlimits.Gate(limits) if self._needs_gate() else None
        start: Start | None = None
        try:
            if self._scopes is not None:
                prefix = self._scopes.prefix(self._owner, sandbox_id, limits)
                start = starts.make(prefix=prefix, env=self._scopes.environment)
            elif gate is not None:
                start = starts.make(pass_fds=gate.theirs)
            else:
                start = starts.take()
            if start.group is not None:
                start.group.limit(limits)
            child = start.go(self._line(machine, request, tmpfs, start, gate))
        except BaseException:
            if start is not None:
                starts.drop(start)
            if gate is not None:
                gate.close()
            raise
        slot = start.slot
        scoped = None
        if self._scopes is not None:
            unit = f"{cgroups.owner_name(self._owner)}-{sandbox_id}.scope"
            scoped = scope.ScopeGroup(pid=child.pid, unit=unit, root=self._cgroup_root)
        return BubblewrapContainer(
            sandbox_id=sandbox_id,
            child=child,
            group=start.group or scoped,
            uids=slot.uids if slot else frozenset(),
            mark=f"{self._mark}{sandbox_id}/",
            gate=gate,
            tmpfs=tmpfs,
            enforcement=self._stated(tmpfs, limits),
            on_gone=lambda: self._forget(sandbox_id, slot),
        )

    def _line(
        self,
        machine: arguments.Machine,
        request: SandboxRequest,
        tmpfs: int,
        start: Start,
        gate: rlimits.Gate | None,
    ) -> bytes:
        limits, slot = request.limits, start.slot
        argv = arguments.build(
            machine,
            sandbox_id=request.sandbox_id,
            cpus=arguments.visible_cpus(limits),
            tmpfs=tmpfs,
            user_namespace=slot.user_namespace if slot else None,
            seccomp=start.seccomp,
            more=gate.options if gate else (),
        )
        argv += arguments.runtime_command(
            machine,
            sandbox_id=request.sandbox_id,
            open_files=limits.open_files_limit,
            two_uids=slot is not None,
        )
        held = start.group is not None or self._scopes is not None
        return launch.line(
            argv,
            open_files=rlimits.supervisor_files(limits),
            address_space_bytes=None if held else rlimits.address_space_bytes(limits),
        )

    def _needs_gate(self) -> bool:
        return self._hierarchy is None and self._scopes is None and rlimits.pids_supported()

    def _stated(self, tmpfs: int, limits: Limits) -> tuple[Enforcement, ...]:
        if tmpfs == limits.tmpfs_limit_bytes:
            return self._enforcement
        shrunk = f"tmpfs size, {tmpfs} bytes each so that all fit into the memory limit"
        smaller = Enforcement(limit="tmpfs", level=Level.SANDBOX, mechanism=shrunk)
        return tuple(smaller if entry.limit == "tmpfs" else entry for entry in self._enforcement)

    def _forget(self, sandbox_id: str, slot: Slot | None) -> None:
        self._containers.pop(sandbox_id, None)
        if slot is not None and self._users is not None:
            self._users.give_back(slot)

    async def list(self) -> Sequence[str]:
        """The sandboxes of this owner that have a process on the machine or are not destroyed."""
        return await asyncio.to_thread(self._existing)

    def _existing(self) -> Sequence[str]:
        return sorted({*self._containers, *processes_of(self._mark).values()} - {trial.NAME})

    async def close(self) -> None:
        """Destroys what is left and removes the driver's own folder, cgroups and locks."""
        for container in list(self._containers.values()):
            await container.destroy()
        if self._starts is not None:
            self._starts.close()
        if self._hierarchy is not None:
            self._hierarchy.remove()
        if self._users is not None:
            self._users.close()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        self._machine = None
