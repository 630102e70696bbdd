"""The bubblewrap driver: namespaces, a system call filter, cgroups where the host may write them.

Called by `sandbox.host` through `sandbox.drivers.make`; calls bwrap and the modules beside it:
`selfcheck`, `interpreter` and `trial` (what this machine has), `layout` (what a sandbox sees),
`users` (its uids), `cgroups`, `scope` and `rlimits` (its limits), `arguments`, and `zygotes` with
`forks`, or `launch` (how it starts), `container` (how it ends).

Everything that can be found out once is found out in `prepare`; `create` sets the limits of a
cgroup and tells a process that the zygote forked what it is to be. Where there can be no zygote,
it starts bwrap.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from sandbox import packing
from sandbox.drivers import (
    arguments,
    cgroups,
    gaps,
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
from sandbox.drivers.forks import Forks
from sandbox.drivers.process import SandboxProcess, check_name, spawn
from sandbox.drivers.users import Slot, Users
from sandbox.drivers.zygotes import Zygote

_SHARED = Path("/var/lib/hutch")
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
        uses_zygote: Whether sandboxes are forked from one interpreter where that can be.
        preload: The modules that sandboxes of a template find imported, by template.
        roots: The root file systems of templates that do not show this machine's, by template.
    """

    def __init__(
        self,
        owner: str,
        state: Path,
        *,
        cgroup_root: Path = cgroups.ROOT,
        shared: Path = _SHARED,
        uses_zygote: bool = True,
        preload: Mapping[str, tuple[str, ...]] | None = None,
        roots: Mapping[str, Path] | None = None,
    ) -> None:
        self._owner = owner
        self._uses_zygote = uses_zygote
        self._preload = preload or {}
        self._roots = roots or {}
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
        self._others: dict[Path, arguments.Machine | str] = {}  # by root; or what is wrong with it
        self._forks: dict[tuple[Path | None, tuple[str, ...]], Forks] = {}  # by root and modules
        self._forking = False
        self._numbers = itertools.count(1)
        self._starting: set[str] = set()
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
        if not statement.usable or self._scopes is not None or not self._uses_zygote:
            return statement  # a scope has its limits from the beginning
        problem = await self._open_zygote()
        gap = gaps.OWN_INTERPRETER.replace("…", problem) if problem else gaps.ONE_LAYOUT
        return dataclasses.replace(statement, gaps=(*statement.gaps, gap))

    async def _open_zygote(self) -> str:
        """Has sandboxes forked from now on, and tries one; answers why that cannot be."""
        # Not in a thread: its end would be taken for this process's.
        self._forking = True
        try:
            await trial.start_one(self)
        except StartFailed as error:
            self._forking = False
            await self._close_forks()
            return str(error)
        return ""

    def _forks_of(self, template: str) -> Forks:
        key = (self._roots.get(template), self._preload.get(template, ()))
        if key not in self._forks:
            start = functools.partial(self._start_zygote, self._machine_of(template), key[1])
            self._forks[key] = Forks(start, self._users, self._hierarchy, self._numbers)
        return self._forks[key]

    def _machine_of(self, template: str) -> arguments.Machine:
        """What a template's sandboxes are made from.

        Raises:
            StartFailed: It cannot be used.
        """
        root = self._roots.get(template)
        found = self._machine if root is None else self._others.get(root)
        if found is None:
            raise StartFailed("the bubblewrap driver is not usable: see its statement")
        if isinstance(found, str):
            raise StartFailed(f"the root file system of template {template!r}: {found}")
        return found

    async def _close_forks(self) -> None:
        while self._forks:
            _, forks = self._forks.popitem()
            await forks.close()

    def _start_zygote(self, machine: arguments.Machine, modules: tuple[str, ...]) -> Zygote:
        namespace = uid = None
        if self._users is not None:
            uid, namespace = self._users.zygote_uid, self._users.zygote_namespace()
        try:
            argv = arguments.zygote(machine, user_namespace=namespace, modules=modules)
            argv = launch.wrap(argv, open_files=rlimits.most_files(), uid=uid)
            return Zygote.start(argv, pass_fds=() if namespace is None else (namespace,))
        finally:
            if namespace is not None:
                os.close(namespace)

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
                self._users.open()
            except StartFailed as error:
                return self._unusable(selfcheck.explain(str(error), bwrap))
            if interpreter.obstacle(bwrap, self._users.first_uid):
                bwrap = layout.copy_wheel_binary(bwrap, self._folder)
        self._machine, problem = trial.choose(bwrap, files, self._users, self._mark)
        if self._machine is None:
            return self._unusable(problem)
        self._build_archive(self._machine, "")
        for number, root in enumerate(dict.fromkeys(self._roots.values())):
            try:
                self._others[root] = self._open_root(bwrap, root, number)
            except _UNUSABLE as error:
                self._others[root] = str(error)
        self._enforcement = self._levels()
        return Statement(
            driver=self.name,
            isolation=Isolation.CONTAINER,
            enforcement=self._enforcement,
            gaps=self._gaps(without_cgroups),
        )

    def _open_root(self, bwrap: Path, root: Path, number: int) -> arguments.Machine | str:
        """Tries a root file system; answers with what is wrong with it if it cannot be used."""
        if not (root / "usr").is_dir():
            return f"{root} has no folder usr"
        files = layout.build(self._other(number), root)
        files.archive.touch(mode=0o644)
        machine, problem = trial.choose(bwrap, files, self._users, self._mark, root)
        if machine is None:
            return problem
        self._build_archive(machine, f"-{number}")
        return machine

    def _other(self, number: int) -> Path:
        return self._folder.with_name(f"{self._folder.name}-{number}")

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

    def _build_archive(self, machine: arguments.Machine, suffix: str) -> None:
        """Has the archive compiled inside a sandbox, by the interpreter that will run it."""

        def run(command: Sequence[str], given: bytes) -> bytes:
            done = trial.run(machine, self._users, command, given)
            if done.returncode != 0:
                said = done.stderr.decode("utf-8", "replace")[-2000:]
                raise packing.PackingFailed(f"{command[0]} exited {done.returncode}: {said}")
            return done.stdout

        self._archives.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept = self._archives / f"{self.name}{suffix}.bundle"
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
        found = [gaps.SHARED_KERNEL]
        if not self._root_host:
            found.append(
                "This host is an ordinary user: supervisor and REPL of all its sandboxes share one "
                "uid, so it is for one tenant."
            )
        if self._hierarchy is None and self._scopes is None:
            found.append(f"No cgroups: {without_cgroups}, so memory is held for each process only.")
        elif self._scopes is not None:
            found.append("The counters of a systemd scope are gone when its last process is.")
        return tuple(found)

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
        limits, sandbox_id = request.limits, request.sandbox_id
        machine = self._machine_of(request.template)
        check_name(sandbox_id)
        if sandbox_id in self._containers or sandbox_id in self._starting:
            raise StartFailed(f"sandbox {sandbox_id} exists")
        rlimits.check_files(limits)
        charged = self._hierarchy is not None or self._scopes is not None
        try:
            tmpfs = arguments.tmpfs_bytes(limits, charged=charged)
        except ValueError as error:
            raise StartFailed(str(error)) from error
        self._starting.add(sandbox_id)
        try:
            if self._forking:
                container = await self._fork(self._forks_of(request.template), request, tmpfs)
            else:
                container = self._spawn(machine, request, tmpfs)
        except (OSError, StartFailed) as error:
            raise StartFailed(f"cannot start sandbox {sandbox_id}: {error}") from error
        finally:
            self._starting.discard(sandbox_id)
        self._containers[sandbox_id] = container
        try:
            await container.admit()
        except BaseException:
            await container.destroy()
            raise
        return container

    async def _fork(self, forks: Forks, request: SandboxRequest, tmpfs: int) -> BubblewrapContainer:
        limits = request.limits
        fork = await forks.take()
        asyncio.get_running_loop().call_soon(forks.refill)
        bounds = {"RLIMIT_NOFILE": rlimits.supervisor_files(limits)}
        if fork.group is None:
            bounds["RLIMIT_AS"] = rlimits.address_space_bytes(limits)
            if rlimits.pids_supported():
                bounds["RLIMIT_NPROC"] = limits.pids_limit
        try:
            if fork.group is not None:
                fork.group.limit(limits)
            fork.child.order(
                {
                    "name": f"{self._mark}{request.sandbox_id}/",
                    "writable": arguments.WRITABLE,
                    "tmpfs": tmpfs,
                    "cpus": arguments.visible_cpus(limits),
                    "folder": arguments.FOLDER,
                    "limits": bounds,
                    "arguments": arguments.runtime_options(
                        open_files=limits.open_files_limit, two_uids=fork.slot is not None
                    ),
                }
            )
        except BaseException:
            await forks.drop(fork)
            raise
        return self._contain(request, fork.child, fork.group, fork.slot, None, tmpfs)

    def _spawn(
        self, machine: arguments.Machine, request: SandboxRequest, tmpfs: int
    ) -> BubblewrapContainer:
        limits, sandbox_id = request.limits, request.sandbox_id
        group: cgroups.Cgroup | scope.ScopeGroup | None = None
        slot: Slot | None = None
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as after:
            gate = rlimits.Gate(limits) if self._needs_gate() else None
            if gate is not None:
                undo.callback(gate.close)
            namespace = None
            if self._users is not None:
                slot = self._users.take()
                undo.callback(self._users.give_back, slot)
                namespace = self._users.namespace(slot)
            join: Sequence[Path] = ()
            if self._hierarchy is not None:
                group = self._hierarchy.create(str(next(self._numbers)))
                undo.callback(group.remove)
                group.limit(limits, beside=1)  # bwrap
                join = group.join_files()
            seccomp = os.open(machine.layout.seccomp, os.O_RDONLY | os.O_CLOEXEC)
            after.callback(os.close, seccomp)
            argv = arguments.build(
                machine,
                sandbox_id=sandbox_id,
                cpus=arguments.visible_cpus(limits),
                tmpfs=tmpfs,
                user_namespace=namespace,
                seccomp=seccomp,
                more=gate.options if gate else (),
            )
            argv += arguments.runtime_command(
                machine,
                sandbox_id=sandbox_id,
                open_files=limits.open_files_limit,
                two_uids=slot is not None,
            )
            held = group is not None or self._scopes is not None
            argv = launch.wrap(
                argv,
                open_files=rlimits.supervisor_files(limits),
                uid=slot.uid if slot else None,
                join=join,
                address_space_bytes=None if held else rlimits.address_space_bytes(limits),
            )
            env: Mapping[str, str] = {}
            if self._scopes is not None:
                argv = [*self._scopes.prefix(self._owner, sandbox_id, limits), *argv]
                env = self._scopes.environment
            more = gate.theirs if gate else ()
            kept = [seccomp, *more, *(() if namespace is None else (namespace,))]
            child = spawn(argv, env=env, pass_fds=kept)
            undo.pop_all()
        if self._scopes is not None:
            unit = f"{cgroups.owner_name(self._owner)}-{sandbox_id}.scope"
            group = scope.ScopeGroup(pid=child.pid, unit=unit, root=self._cgroup_root)
        return self._contain(request, child, group, slot, gate, tmpfs)

    def _contain(
        self,
        request: SandboxRequest,
        child: SandboxProcess,
        group: cgroups.Cgroup | scope.ScopeGroup | None,
        slot: Slot | None,
        gate: rlimits.Gate | None,
        tmpfs: int,
    ) -> BubblewrapContainer:
        return BubblewrapContainer(
            sandbox_id=request.sandbox_id,
            child=child,
            group=group,
            uids=slot.uids if slot else frozenset(),
            mark=f"{self._mark}{request.sandbox_id}/",
            gate=gate,
            tmpfs=tmpfs,
            enforcement=self._stated(tmpfs, request.limits),
            on_gone=lambda: self._forget(request.sandbox_id, slot),
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
        named = {name for name in processes_of(self._mark).values() if name.strip("-")}
        return sorted({*self._containers, *named} - {trial.NAME})

    async def close(self) -> None:
        """Destroys what is left and removes the driver's own folder, cgroups and locks."""
        for container in list(self._containers.values()):
            await container.destroy()
        await self._close_forks()
        if self._hierarchy is not None:
            self._hierarchy.remove()
        if self._users is not None:
            self._users.close()
        for folder in (self._folder, *(self._other(at) for at in range(len(self._others)))):
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        self._machine = None
