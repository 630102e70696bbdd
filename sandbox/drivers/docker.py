"""The docker drivers: a container of an engine for each sandbox, run by runc or by gVisor's runsc.

Called by `sandbox.host` through `sandbox.drivers.make`, once for each runtime; calls the modules
beside it: `docker_engine` (the only one that speaks to the engine), `docker_spec` (what a container
is), `docker_container` (how it is measured and ends), `docker_channel` (its frames) and
`docker_runtimes` (which runtimes have known escapes).

The engine is slow and blocks, so every call to it is made in threads of this driver's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from sandbox import packing
from sandbox.drivers import arguments, cgroups, docker_runtimes, docker_spec, gaps
from sandbox.drivers.docker_channel import AttachedSocket, Hangups
from sandbox.drivers.docker_container import Begun, DockerContainer, begin, remove
from sandbox.drivers.docker_engine import (
    DRIVER_LABEL,
    GENERATION_LABEL,
    OWNER_LABEL,
    SANDBOX_LABEL,
    Engine,
    EngineProblem,
    Facts,
)
from sandbox.drivers.docker_settings import RUNTIMES, DockerSettings, absence
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

_T = TypeVar("_T")
_THREADS = 8
_TRIAL = "trial"  # where a sandbox's id stands otherwise
_TRIAL_SECONDS = 60
_TRIAL_LIMITS = Limits(
    memory_limit_bytes=512 * 1024 * 1024,
    pids_limit=64,
    cpu_limit_millis=1000,
    tmpfs_limit_bytes=16 * 1024 * 1024,
    open_files_limit=256,
)
_READ_BYTES = 65_536
_ISOLATION = {"runc": Isolation.CONTAINER, "runsc": Isolation.KERNEL}
# What gVisor's own kernel needs of the processes and of the memory that its cgroup counts.
_KERNEL_THREADS = {"runc": 0, "runsc": 64}
_GAPS = {
    "runc": (gaps.SHARED_KERNEL, gaps.SHARED_UIDS, gaps.COUNTERS_END),
    "runsc": (
        gaps.ENDS_WHOLE,
        gaps.FILTER_IGNORED,
        gaps.COUNTERS_END,
        gaps.UNSEEN_DISK,
        gaps.OPEN_PROC,
    ),
}
_UNUSABLE = (EngineProblem, StartFailed, packing.PackingFailed, OSError)


class DockerDriver:
    """Makes sandboxes as containers of an engine.

    Args:
        name: The driver's name, which says the runtime: a key of `docker_settings.RUNTIMES`.
        owner: Whose sandboxes these are: a label of its containers.
        state: A folder of this owner alone.
        settings: Where the engine is, and what the templates are made from.
        cgroup_root: Where cgroups are mounted.
    """

    def __init__(
        self,
        name: str,
        owner: str,
        state: Path,
        settings: DockerSettings,
        *,
        cgroup_root: Path = cgroups.ROOT,
    ) -> None:
        self._name = name
        self._runtime = RUNTIMES[name]
        self._settings = settings
        self._labels = {OWNER_LABEL: owner, DRIVER_LABEL: name}
        self._prefix = f"{cgroups.owner_name(f'{name} {owner}')}"
        self._folder = state.absolute() / name
        self._archives = state.absolute() / "archives"
        self._cgroup_root = cgroup_root
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix=name)
        self._engine: Engine | None = None
        self._hangups: Hangups | None = None
        self._images: dict[str, str] = {}  # by template: the image's id
        self._enforcement: tuple[Enforcement, ...] = ()
        self._containers: dict[str, DockerContainer] = {}
        self._starting: set[str] = set()

    @property
    def name(self) -> str:
        """The driver's name."""
        return self._name

    async def prepare(self) -> Statement:
        """Looks at the engine, removes an earlier host's containers and builds the archives."""
        try:
            statement = await self._in_thread(self._prepare)
        except _UNUSABLE as error:
            return self._unusable(str(error))
        if statement.usable:
            self._hangups = Hangups()
        return statement

    def _prepare(self) -> Statement:
        references = self._settings.images(self._name)
        if not references and not self._folder.exists():
            return self._unusable(self._without_images())
        if problem := absence(self._settings.engine):
            return self._unusable(problem)
        self._engine = engine = Engine(self._settings.engine)
        self._remove_leftovers(engine)
        if not references:
            shutil.rmtree(self._folder, ignore_errors=True)
            return self._unusable(self._without_images())
        facts = engine.facts()
        if problem := self._runtime_problem(facts):
            return self._unusable(problem)
        self._write_files()
        for template, reference in references.items():
            self._images[template] = self._check_image(engine, template, reference)
        for image in sorted(set(self._images.values())):
            self._build_archive(engine, image)
        self._enforcement = _levels(facts)
        return Statement(
            driver=self._name,
            isolation=_ISOLATION[self._runtime],
            enforcement=self._enforcement,
            gaps=(*_GAPS[self._runtime], *self._allowed_escapes(facts)),
        )

    def _unusable(self, problem: str) -> Statement:
        return Statement(
            driver=self._name,
            isolation=_ISOLATION[self._runtime],
            enforcement=(),
            usable=False,
            problem=problem,
        )

    def _without_images(self) -> str:
        return (
            f"no template names an image for {self._runtime}: give the host's configuration a "
            f'table [templates.NAME] with image = "sha256:..." and runtime = "{self._runtime}"'
        )

    def _runtime_problem(self, facts: Facts) -> str:
        if self._runtime not in facts.runtimes:
            return (
                f"the engine has no runtime {self._runtime}: install it (Debian: apt install "
                f"{self._runtime}) and name it under `runtimes` in the engine's daemon.json"
            )
        known = docker_runtimes.known_escapes(self._runtime, facts.version_of(self._runtime))
        named = self._named(facts)
        if known and named not in self._settings.allow_known_escapes:
            return (
                f"{named} has known escapes ({known}): install 1.2.8, 1.3.3 or newer, or, if its "
                "distribution has mended them, allow it by name: allow_known_escapes = "
                f'["{named}"] in [docker]'
            )
        return ""

    def _named(self, facts: Facts) -> str:
        return f"{self._runtime} {facts.version_of(self._runtime)}".strip()

    def _allowed_escapes(self, facts: Facts) -> tuple[str, ...]:
        known = docker_runtimes.known_escapes(self._runtime, facts.version_of(self._runtime))
        if not known:
            return ()
        return (gaps.KNOWN_ESCAPES.replace("…", "{}").format(self._named(facts), known),)

    def _remove_leftovers(self, engine: Engine) -> None:
        """Ends what an earlier host of this owner left behind, and nobody else's."""
        with ThreadPoolExecutor(_THREADS) as pool:
            left = [pool.submit(remove, engine, found) for found in engine.owned(self._labels)]
        for done in left:
            done.result()
        if still := engine.owned(self._labels):
            raise EngineProblem(f"containers of an earlier host are left: {sorted(still)}")

    def _write_files(self) -> None:
        self._folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        for number in range(1, (os.cpu_count() or 1) + 1):
            text = f"0-{number - 1}\n" if number > 1 else "0\n"
            self._cpus(number).write_text(text, encoding="ascii")

    def _cpus(self, number: int) -> Path:
        return self._folder / f"cpus-{number}"

    def _check_image(self, engine: Engine, template: str, reference: str) -> str:
        try:
            found = engine.image(reference)
        except EngineProblem as problem:
            raise StartFailed(
                f"the image of template {template} is not there: {problem}; build it (make images) "
                "or pull it"
            ) from problem
        volumes = (found.get("Config") or {}).get("Volumes")
        if volumes:
            raise StartFailed(
                f"the image of template {template} declares volumes ({', '.join(volumes)}), which "
                "would be writable and without a limit: build it without them"
            )
        return str(found["Id"])

    def _archive(self, image: str) -> Path:
        return self._archives / f"{image.replace(':', '-')}.bundle"

    def _build_archive(self, engine: Engine, image: str) -> None:
        """Has the archive compiled by an image's own interpreter, in a container without user code.

        What an image answers is kept: its id says what is in it.
        """
        self._archives.mkdir(mode=0o700, parents=True, exist_ok=True)

        def run(command: Sequence[str], given: bytes) -> bytes:
            digest = hashlib.sha256(repr((image, self._runtime, list(command))).encode() + given)
            kept = self._archives / f"answer-{digest.hexdigest()}"
            if not kept.is_file():
                answer = self._run(engine, image, command, given)
                part = kept.with_suffix(".part")
                part.write_bytes(answer)
                part.replace(kept)
            return kept.read_bytes()

        packing.build_archive(docker_spec.PYTHON, self._archive(image), run)

    def _run(self, engine: Engine, image: str, command: Sequence[str], given: bytes) -> bytes:
        """Runs a command in a container of an image, and answers with what it printed."""
        config = docker_spec.build(
            image=image,
            runtime=self._runtime,
            labels={**self._labels, SANDBOX_LABEL: _TRIAL},
            limits=_TRIAL_LIMITS,
            more_processes=_KERNEL_THREADS[self._runtime],
            tmpfs_bytes=_TRIAL_LIMITS.tmpfs_limit_bytes,
            command=command,
            mounts=(),
        )
        engine_id = engine.create(f"{self._prefix}-{_TRIAL}", config)
        try:
            with engine.attach(engine_id) as channel:
                channel.settimeout(_TRIAL_SECONDS)
                engine.start(engine_id)
                channel.sendall(given)
                channel.shutdown(1)
                answer = b"".join(iter(lambda: channel.recv(_READ_BYTES), b""))
                state = engine.state(engine_id)
                while state is not None and state.running:
                    state = engine.state(engine_id)
                if state is None or state.exit_code:
                    raise packing.PackingFailed(f"{command[0]}: {channel.diagnostics[-2000:]}")
                return answer
        finally:
            remove(engine, engine_id)

    async def create(self, request: SandboxRequest) -> DockerContainer:
        """Starts one sandbox.

        Raises:
            StartFailed: It could not be made; nothing of it is left.
        """
        engine, hangups, sandbox_id = self._engine, self._hangups, request.sandbox_id
        if engine is None or hangups is None:
            raise StartFailed(f"the {self._name} driver is not usable: see its statement")
        check_name(sandbox_id)
        if sandbox_id in self._containers or sandbox_id in self._starting:
            raise StartFailed(f"sandbox {sandbox_id} exists")
        image = self._images.get(request.template)
        if image is None:
            raise StartFailed(f"template {request.template!r} names no image for {self._runtime}")
        try:
            tmpfs = arguments.tmpfs_bytes(request.limits, charged=True)
        except ValueError as error:
            raise StartFailed(str(error)) from error
        self._starting.add(sandbox_id)
        try:
            config = self._config(request, image, tmpfs)
            begun = await self._undisturbed(lambda: self._begin(engine, sandbox_id, config))
        except (EngineProblem, OSError) as error:
            raise StartFailed(f"cannot start sandbox {sandbox_id}: {error}") from error
        finally:
            self._starting.discard(sandbox_id)
        container = DockerContainer(
            sandbox_id=sandbox_id,
            begun=begun,
            engine=engine,
            threads=self._threads,
            hangups=hangups,
            tmpfs_bytes=tmpfs,
            enforcement=_stated(self._enforcement, tmpfs, request.limits),
            on_gone=lambda: self._containers.pop(sandbox_id, None),
        )
        self._containers[sandbox_id] = container
        return container

    def _preload(self, template: str) -> list[str]:
        modules = self._settings.preload.get(template)
        return ["--preload", ",".join(modules)] if modules else []

    def _config(self, request: SandboxRequest, image: str, tmpfs: int) -> dict[str, object]:
        limits = request.limits
        # With the sandbox's name, so that the command line of its first process says whose it is.
        archive = arguments.archive_path(f"/run/{self._prefix}/", request.sandbox_id)
        return docker_spec.build(
            image=image,
            runtime=self._runtime,
            labels={
                **self._labels,
                SANDBOX_LABEL: request.sandbox_id,
                GENERATION_LABEL: str(self._settings.generation),
            },
            limits=limits,
            more_processes=_KERNEL_THREADS[self._runtime],
            tmpfs_bytes=tmpfs,
            command=[
                docker_spec.PYTHON,
                *packing.start_arguments(archive),
                *("--open-files", str(limits.open_files_limit)),
                *("--repl-uid", str(docker_spec.REPL_UID)),
                *self._preload(request.template),
            ],
            mounts=(
                docker_spec.Mount(source=self._archive(image), target=archive),
                docker_spec.cpu_mount(self._cpus(arguments.visible_cpus(limits))),
            ),
        )

    def _begin(self, engine: Engine, sandbox_id: str, config: dict[str, object]) -> Begun:
        engine_id = ""
        channel: AttachedSocket | None = None
        try:
            engine_id = engine.create(f"{self._prefix}-{sandbox_id}", config)
            channel = engine.attach(engine_id)
            channel.setblocking(False)
            return begin(engine, engine_id, channel, self._cgroup_root)
        except BaseException:
            if channel is not None:
                channel.close()
            if engine_id:
                remove(engine, engine_id)
            raise

    async def _undisturbed(self, call: Callable[[], Begun]) -> Begun:
        """Waits for a thread that makes a container; if the caller leaves, it is removed again."""
        making: Future[Begun] = self._threads.submit(call)
        try:
            return await asyncio.shield(asyncio.wrap_future(making))
        except asyncio.CancelledError:
            making.add_done_callback(self._unmake)
            raise

    def _unmake(self, making: Future[Begun]) -> None:
        if making.cancelled() or making.exception() is not None or self._engine is None:
            return
        begun = making.result()
        begun.channel.close()
        with contextlib.suppress(EngineProblem):
            remove(self._engine, begun.engine_id)

    def _in_thread(self, call: Callable[[], _T]) -> asyncio.Future[_T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def list(self) -> Sequence[str]:
        """The sandboxes of this owner that the engine has, or that are not destroyed."""
        engine = self._engine
        found = await self._in_thread(lambda: engine.owned(self._labels) if engine else {})
        return sorted({*self._containers, *found.values()} - {_TRIAL, ""})

    async def close(self) -> None:
        """Destroys what is left and removes the driver's own folder."""
        try:
            for container in list(self._containers.values()):
                await container.destroy()
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        finally:
            if self._hangups is not None:
                self._hangups.close()
            await asyncio.to_thread(self._threads.shutdown)
            if self._engine is not None:
                self._engine.close()
                self._engine = None


def _levels(facts: Facts) -> tuple[Enforcement, ...]:
    held = f"cgroup v{facts.cgroup_version}"
    sandbox = Level.SANDBOX
    return (
        *(
            Enforcement(limit=name, level=sandbox, mechanism=held)
            if name in facts.limits
            else Enforcement(limit=name, level=Level.NONE, mechanism="")
            for name in ("memory", "pids", "cpu")
        ),
        Enforcement(limit="tmpfs", level=sandbox, mechanism="tmpfs size"),
        Enforcement(limit="open_files", level=Level.PROCESS, mechanism="RLIMIT_NOFILE"),
    )


def _stated(
    entries: tuple[Enforcement, ...], tmpfs: int, limits: Limits
) -> tuple[Enforcement, ...]:
    if tmpfs == limits.tmpfs_limit_bytes:
        return entries
    shrunk = f"tmpfs size, {tmpfs} bytes each so that all fit into the memory limit"
    smaller = Enforcement(limit="tmpfs", level=Level.SANDBOX, mechanism=shrunk)
    return tuple(smaller if entry.limit == "tmpfs" else entry for entry in entries)
