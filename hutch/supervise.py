"""`hutch up`: one controller and one host, started or adopted, and restarted when they die.

Called by `hutch.cli.up`; calls `hutch.local` and the operating system. Controller and host have
sessions of their own and outlive this process; whatever of them lives is adopted by the next `up`.
Processes are ended by descriptor (pidfd), so that a process id that was given to another process is
never hit.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from hutch import local
from hutch.errors import HutchError

_READY_SECONDS = 90.0
_ADOPT_SECONDS = 10.0
_TURN_SECONDS = 30.0
_CONTROLLER_END_SECONDS = 30.0
_HOST_END_SECONDS = 20.0
_BACKOFF_FIRST_SECONDS = 0.2
_BACKOFF_MOST_SECONDS = 10.0
_STEADY_SECONDS = 30.0
_EPHEMERAL_RESTARTS = 5
_IDLE_SECONDS = 2
_UNWATCHED_SECONDS = 5


class UpRefused(HutchError):
    """`up` cannot serve this state directory; the message has the reason and the mend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """What `hutch up` was asked for; empty means the default.

    Attributes:
        listen: `127.0.0.1:PORT`, beside the unix socket.
        driver: The host's driver.
        capacity: How many sandboxes the host holds; 0 lets it count.
        config: A file with the tables `[controller]` and `[host]`.
        reflection: Whether the controller answers gRPC reflection.
        ephemeral: Whether everything ends by itself once it is idle.
    """

    listen: str = ""
    driver: str = ""
    capacity: int = 0
    config: str = ""
    reflection: bool = False
    ephemeral: bool = False


@dataclass(slots=True, kw_only=True)
class _Running:
    """A process that lives: our child, or one that was adopted."""

    pidfd: int
    found: local.LiveProcess
    child: subprocess.Popen[bytes] | None
    since: float
    facts: Mapping[str, object] = field(default_factory=dict)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, number: signal.Signals) -> None:
        """Signals exactly this process, if it still is."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)


class _Unit:
    """The controller or the host."""

    def __init__(self, name: str, command: list[str], about: Path, log: Path) -> None:
        self.name = name
        self.running: _Running | None = None
        self._command = command
        self._about = about
        self._log = log

    async def start(self) -> _Running:
        """Adopts the live one, else starts one and waits until it is ready.

        Raises:
            UpRefused: It did not become ready; the message is its own.
        """
        running = await self._adopt() or await self._spawn()
        self.running = running
        asyncio.get_running_loop().add_reader(running.pidfd, self._ended, running)
        return running

    def _ended(self, running: _Running) -> None:
        asyncio.get_running_loop().remove_reader(running.pidfd)
        if running.child is not None:
            running.child.wait()
        os.close(running.pidfd)
        self.running = None
        running.gone.set()

    async def _adopt(self) -> _Running | None:
        """The one that lives already; one that is just ending is waited for.

        Raises:
            UpRefused: It lives and does not answer.
        """
        deadline = time.monotonic() + _ADOPT_SECONDS
        while True:
            found = local.read_process(self._about)
            if found is None or not found.alive():
                return None
            if await asyncio.to_thread(found.answers):
                with suppress(ProcessLookupError):
                    pidfd = os.pidfd_open(found.pid)
                    if found.alive():
                        return _Running(
                            pidfd=pidfd, found=found, child=None, since=time.monotonic()
                        )
                    os.close(pidfd)
            if time.monotonic() > deadline:
                raise UpRefused(
                    f"the {self.name} of this state directory, process {found.pid}, lives but does "
                    f"not answer: end it (kill {found.pid}) and try again"
                )
            await asyncio.sleep(0.1)

    async def _spawn(self) -> _Running:
        with local.open_log(self._log) as log:
            child, reader = local.spawn_ready(self._command, log)
        pidfd = os.pidfd_open(child.pid)
        try:
            ready = await asyncio.to_thread(
                local.wait_ready, reader, time.monotonic() + _READY_SECONDS
            )
        except BaseException:
            await _end_child(child)
            os.close(pidfd)
            raise
        finally:
            os.close(reader)
        if ready.get("ready") is not True:
            code = await _end_child(child)
            os.close(pidfd)
            why = ready.get("problem") or f"it ended with code {code}; see {str(self._log)!r}"
            raise UpRefused(f"the {self.name} did not start: {why}")
        found = local.read_process(self._about) or local.LiveProcess(
            pid=child.pid, start_time=local.process_start_time(child.pid) or "", socket=""
        )
        return _Running(pidfd=pidfd, found=found, child=child, since=time.monotonic(), facts=ready)

    async def end(self, seconds: float) -> None:
        """Ends it gracefully, and by force when it takes longer than `seconds`."""
        running = self.running
        if running is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            running.send(number)
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await running.gone.wait()
                    return
        raise UpRefused(f"the {self.name}, process {running.found.pid}, cannot be ended")


async def _end_child(child: subprocess.Popen[bytes]) -> int:
    """Ends a child that never became ready."""
    if child.poll() is None:
        child.terminate()
    try:
        return await asyncio.to_thread(child.wait, 10)
    except subprocess.TimeoutExpired:
        child.kill()
        return await asyncio.to_thread(child.wait)


class Supervisor:
    """One `hutch up`."""

    def __init__(
        self,
        paths: local.LocalPaths,
        options: UpOptions,
        *,
        announce: Callable[[dict[str, object]], None],
        warn: Callable[[str], None],
    ) -> None:
        """A supervisor that has started nothing yet.

        Args:
            paths: The state directory's paths.
            options: What was asked for.
            announce: Called once, when everything is ready.
            warn: Called with a sentence for a person whenever something dies.
        """
        self._paths = paths
        self._options = options
        self._announce = announce
        self._warn = warn
        self._stop = asyncio.Event()
        self._lock: IO[bytes] | None = None
        self._controller = _Unit(
            "controller",
            _controller_command(paths, options),
            paths.controller_file,
            paths.logs / "controller.log",
        )
        self._host = _Unit(
            "host", _host_command(paths, options), paths.host_file, paths.logs / "host.log"
        )

    async def run(self) -> int:
        """Serves until a signal, or until the controller ends by itself; the exit code.

        Raises:
            UpRefused: It cannot serve; nothing is left running that it started.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        self._lock = await self._own()
        if self._lock is None:
            return 0  # somebody else serves it already, and that was all that was wanted
        with self._lock:
            # The one before us may have removed the sockets' folder as its last act.
            await asyncio.to_thread(local.prepare, self._paths.state)
            self._paths.logs.mkdir(mode=0o700, exist_ok=True)
            try:
                await self._start()
                await self._serve()
            finally:
                await self._end_all()
            with suppress(OSError):
                self._paths.runtime.rmdir()  # only when nobody uses it
        return 0

    def _on_signal(self) -> None:
        if self._stop.is_set():  # asked twice: do not wait any longer
            for unit in (self._controller, self._host):
                if unit.running is not None:
                    unit.running.send(signal.SIGKILL)
        self._stop.set()

    async def _own(self) -> IO[bytes] | None:
        """Takes the supervisor's lock; None when an ephemeral one is not needed any more."""
        deadline = time.monotonic() + _TURN_SECONDS
        while True:
            lock = local.lock_file(self._paths.up_lock)
            if lock is not None:
                lock.truncate(0)
                lock.write(str(os.getpid()).encode())
                lock.flush()
                return lock
            if not self._options.ephemeral or time.monotonic() > deadline:
                raise UpRefused(self._owner_problem())
            live = await asyncio.to_thread(local.find_live, self._paths.controller_file)
            if live is not None:
                self._announce({"socket": live.socket, "pid": live.pid})
                return None
            await asyncio.sleep(0.05)

    def _owner_problem(self) -> str:
        try:
            owner = self._paths.up_lock.read_text(encoding="ascii", errors="replace").strip()
        except OSError:
            owner = ""
        who = f"hutch up, process {owner}" if owner.isdigit() else "another hutch up"
        return (
            f"the state directory {str(self._paths.state)!r} is served by {who}: use it as it is, "
            "end it first, or name another directory with --state"
        )

    async def _unless_stopped(self, *works: Coroutine[Any, Any, object]) -> bool:
        """Runs all until done, one fails or the signal to stop comes; whether all are done."""
        tasks = [asyncio.create_task(work) for work in works]
        stopped = asyncio.create_task(self._stop.wait())
        open_tasks: set[asyncio.Task[Any]] = set(tasks)
        try:
            while open_tasks and not self._stop.is_set():
                done, _ = await asyncio.wait(
                    {*open_tasks, stopped}, return_when=asyncio.FIRST_COMPLETED
                )
                open_tasks -= done
                for task in done:
                    await task
            return not self._stop.is_set()
        finally:
            for task in (*tasks, stopped):
                task.cancel()
            await asyncio.wait([*tasks, stopped])
            for task in tasks:
                if not task.cancelled():
                    task.exception()  # of several failures one is told

    async def _start(self) -> None:
        """Starts both at once; the controller waits for its host by itself."""
        if await self._unless_stopped(self._host.start(), self._controller.start()):
            self._check_adopted()
            self._announce(self._facts())

    def _check_adopted(self) -> None:
        controller = self._controller.running
        wanted = self._options.listen
        if controller is None or not wanted or controller.child is not None:
            return
        if controller.found.listen != wanted:
            pid = controller.found.pid
            self._controller.running = self._host.running = None  # they were there before us
            raise UpRefused(
                f"a controller, process {pid}, owns this state directory and listens on "
                f"{controller.found.listen or 'its unix socket only'}, not on {wanted}: end it "
                f"first (kill {pid}), or leave --listen out"
            )

    def _facts(self) -> dict[str, object]:
        controller, host = self._controller.running, self._host.running
        facts: dict[str, object] = {"state": str(self._paths.state)}
        if controller is not None:
            facts |= {
                "socket": controller.found.socket,
                "listen": controller.found.listen,
                "controller_pid": controller.found.pid,
                "adopted": controller.child is None,
            }
        if host is not None:
            facts |= {"host_pid": host.found.pid, "host_adopted": host.child is None}
        return facts

    async def _serve(self) -> None:
        """Restarts what dies until it is told to stop or the controller ended on purpose."""
        await self._unless_stopped(self._keep(self._controller), self._keep(self._host))

    async def _keep(self, unit: _Unit) -> None:
        failures = 0
        while not self._stop.is_set():
            running = unit.running
            if running is not None:
                await running.gone.wait()
                if self._on_purpose(unit, running):
                    break
                failures = 0 if time.monotonic() - running.since > _STEADY_SECONDS else failures + 1
                self._warn(f"the {unit.name}, process {running.found.pid}, died; starting another")
            if self._options.ephemeral and failures > _EPHEMERAL_RESTARTS:
                self._warn(f"the {unit.name} dies again and again; giving up")
                break
            await asyncio.sleep(_backoff(failures))
            try:
                await unit.start()
            except UpRefused as problem:
                failures += 1
                self._warn(str(problem))
        self._stop.set()

    def _on_purpose(self, unit: _Unit, running: _Running) -> bool:
        """Whether the controller has ended as it should; the host never ends before it."""
        if unit is not self._controller:
            return False
        if running.child is None:  # adopted: nobody can tell its exit code
            return self._options.ephemeral
        return running.child.returncode == 0

    async def _end_all(self) -> None:
        """Ends the controller, then the host, which by then has nothing left to do."""
        try:
            await self._controller.end(_CONTROLLER_END_SECONDS)
        finally:
            await self._host.end(_HOST_END_SECONDS)


def _backoff(failures: int) -> float:
    if failures == 0:
        return 0.0
    most = min(_BACKOFF_MOST_SECONDS, _BACKOFF_FIRST_SECONDS * float(2 ** min(failures, 10)))
    return most / 2 + most / 2 * secrets.randbelow(1000) / 1000


def _controller_command(paths: local.LocalPaths, options: UpOptions) -> list[str]:
    command = [sys.executable, "-I", "-m", "controller", "--state", str(paths.state)]
    command += ["--socket", str(paths.controller_socket), "--host-socket", str(paths.host_socket)]
    if options.listen:
        command += ["--listen", options.listen]
    if options.config:
        command += ["--config", options.config]
    if options.reflection:
        command += ["--reflection"]
    if options.ephemeral:
        command += ["--exit-when-idle", str(_IDLE_SECONDS)]
    return command


def _host_command(paths: local.LocalPaths, options: UpOptions) -> list[str]:
    command = [sys.executable, "-I", "-m", "sandbox.host", "--state", str(paths.host_state)]
    command += ["--socket", str(paths.host_socket)]
    if options.driver:
        command += ["--driver", options.driver]
    if options.capacity:
        command += ["--capacity", str(options.capacity)]
    if options.config:
        command += ["--config", options.config]
    if options.ephemeral:
        command += ["--exit-when-unwatched", str(_UNWATCHED_SECONDS)]
    return command
