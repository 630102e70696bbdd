"""The application: the only module that names concrete parts.

Called by `python -m controller`. It owns the state directory, opens the stores, recovers, connects
the host, listens, and ends in the reverse order.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import secrets
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from controller.checks import Checker
from controller.config import ControllerConfig
from controller.contracts import CheckerUnavailable, ContractChecker
from controller.convert import output_id
from controller.core.clock import now_us
from controller.engine import commands as cmd
from controller.engine import events as ev
from controller.engine.state import Node
from controller.hosts.pool import HostPool
from controller.hosts.services import Services
from controller.loop import Loop
from controller.nursery import Nursery
from controller.rows import Rows
from controller.store.open import StoreConfig, Stores, open_stores
from controller.store.ports import StoreError
from controller.wire.artifact_servicer import ArtifactServicer
from controller.wire.auth import KeyInterceptor
from controller.wire.invocation_servicer import InvocationParts, InvocationServicer
from controller.wire.sessions import Sessions
from controller.wire.template_servicer import TemplateServicer
from controller.wire.tool_servers import ToolServers
from controller.wire.workspace_servicer import WorkspaceParts, WorkspaceServicer
from hutch.v1 import (
    artifact_service_pb2,
    invocation_service_pb2,
    template_service_pb2,
    workspace_service_pb2,
)
from hutch.v1.artifact_service_pb2_grpc import add_ArtifactServiceServicer_to_server
from hutch.v1.invocation_service_pb2_grpc import add_InvocationServiceServicer_to_server
from hutch.v1.template_service_pb2_grpc import add_TemplateServiceServicer_to_server
from hutch.v1.workspace_service_pb2_grpc import add_WorkspaceServiceServicer_to_server

log = structlog.get_logger(__name__)

HOST_WAIT_SECONDS = 30.0
STOP_SECONDS = 2.0
SOCKET_PATH_CHARACTERS = 107
SERVICES = (
    invocation_service_pb2.DESCRIPTOR.services_by_name["InvocationService"].full_name,
    artifact_service_pb2.DESCRIPTOR.services_by_name["ArtifactService"].full_name,
    workspace_service_pb2.DESCRIPTOR.services_by_name["WorkspaceService"].full_name,
    template_service_pb2.DESCRIPTOR.services_by_name["TemplateService"].full_name,
)


class StartFailed(Exception):
    """The controller cannot start; the text says why, for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the command line says."""

    state: Path
    socket: Path
    host_socket: Path
    listen: str = ""
    exit_when_idle_seconds: float | None = None
    reflection: bool = False


class Timers:
    """Events that are to come at a time of the wall clock, by name."""

    def __init__(self, post: Callable[[ev.Event], object]) -> None:
        self._post = post
        self._due: dict[tuple[str, str], tuple[int, ev.Event]] = {}  # at 0: not for now
        self._handles: dict[tuple[str, str], tuple[int, asyncio.TimerHandle]] = {}

    def set(self, name: tuple[str, str], at_us: int, event: ev.Event) -> None:
        """Sets a timer in place of the one with this name; at 0 nothing is due, until it is set
        again. One that is put off stays as it is and looks again when it is over: an idle timer is
        put off with every cell."""
        self._due[name] = (at_us, event)
        waits = self._handles.get(name)
        if at_us and (waits is None or at_us < waits[0]):
            self._wait(name, at_us)

    def _wait(self, name: tuple[str, str], at_us: int) -> None:
        if (waits := self._handles.pop(name, None)) is not None:
            waits[1].cancel()
        seconds = max(0.0, (at_us - now_us()) / 1_000_000) + 0.001
        handle = asyncio.get_running_loop().call_later(seconds, self._passed, name)
        self._handles[name] = (at_us, handle)

    def _passed(self, name: tuple[str, str]) -> None:
        del self._handles[name]
        at_us, event = self._due[name]
        if not at_us:
            return
        if now_us() < at_us:  # it was put off, or the wall clock was set back meanwhile
            self._wait(name, at_us)
            return
        del self._due[name]
        self._post(event)

    def drop(self, name: tuple[str, str]) -> None:
        """Forgets a timer."""
        self._due.pop(name, None)
        if (waits := self._handles.pop(name, None)) is not None:
            waits[1].cancel()

    def close(self) -> None:
        """Forgets all."""
        for _, handle in self._handles.values():
            handle.cancel()


class Executor:
    """Routes commands to the parts that carry them out."""

    def __init__(
        self, loop: Loop, pool: HostPool, tools: ToolServers, checker: Checker, nursery: Nursery
    ) -> None:
        self._loop = loop
        self._pool = pool
        self._checker = checker
        self._nursery = nursery
        self._tools = tools
        self._timers = Timers(loop.post)

    def issue(self, command: cmd.Command) -> None:
        """Begins to carry out a command and returns at once."""
        match command:
            case cmd.CheckContract():
                self._nursery.start(self._check(command), name="check-contract")
            case cmd.SetDeadline(invocation_id=invocation_id, at_us=at_us):
                passed = ev.DeadlinePassed(invocation_id=invocation_id)
                self._timers.set(("deadline", invocation_id), at_us, passed)
            case cmd.DropDeadline(invocation_id=invocation_id):
                self._timers.drop(("deadline", invocation_id))
            case cmd.SetIdleTimer(invocation_id=invocation_id, at_us=at_us):
                idle = ev.IdlePassed(invocation_id=invocation_id)
                self._timers.set(("idle", invocation_id), at_us, idle)
            case cmd.CallTool(tool_call_id=tool_call_id, deadline_us=at_us):
                late = ev.ToolTimeout(tool_call_id=tool_call_id)
                self._timers.set(("tool", tool_call_id), at_us, late)
                (self._pool.issue if command.sandbox_id else self._tools.call)(command)
            case cmd.EndToolCall(tool_call_id=tool_call_id):
                self._timers.drop(("tool", tool_call_id))
                (self._pool.issue if command.sandbox_id else self._tools.end)(command)
            case _:
                self._pool.issue(command)

    async def _check(self, command: cmd.CheckContract) -> None:
        try:
            verdict = await self._checker.check_value(command)
        except (CheckerUnavailable, StoreError) as problem:
            if self._loop.draining:
                return  # the next controller checks
            verdict = ev.ContractChecked(
                invocation_id=command.invocation_id, accepted=False, problem=str(problem)
            )
        self._loop.post(verdict)

    def close(self) -> None:
        """Forgets the timers."""
        self._timers.close()


class Controller:
    """One running controller."""

    def __init__(self, settings: Settings, config: ControllerConfig) -> None:
        self._settings = settings
        self._config = config
        self._version = metadata.version("hutch")
        self._stop = asyncio.Event()
        self._changed = asyncio.Event()
        self._loop: Loop
        self._sessions: Sessions
        self._pool: HostPool
        self._checker: Checker
        self._stores: Stores
        self._tools: ToolServers

    def stop(self) -> None:
        """Asks for a graceful end."""
        self._stop.set()

    async def run(self, ready: Any) -> None:
        """Runs until it is stopped, idle for long enough, or its journal fails.

        Args:
            ready: Called once, when clients are answered.

        Raises:
            StartFailed: it cannot start.
            StoreError: the stores cannot be opened, or the journal failed.
        """
        async with AsyncExitStack() as stack:
            _own(self._settings.state, stack)
            await self._open(stack)
            server = await self._listen(stack)
            await self._until_host()
            self._publish(stack)
            ready()
            try:
                await self._until_done()
            finally:
                self._loop.draining = True
                self._loop.flush()
                self._loop.watchers.notify_all()
                self._tools.wake()
                await server.stop(STOP_SECONDS)

    async def _open(self, stack: AsyncExitStack) -> None:
        self._stores = await open_stores(
            self._settings.state, StoreConfig(reserve_bytes=self._config.store_reserve_bytes)
        )
        stack.push_async_callback(self._stores.close)
        nursery = Nursery()
        contracts = ContractChecker()
        stack.push_async_callback(contracts.close)
        stack.push_async_callback(nursery.close)
        self._checker = Checker(contracts, self._stores.artifacts)
        self._loop = Loop(
            config=self._config,
            journal=self._stores.journal,
            project=Rows(),
            now_us=now_us,
            ended=self._ended,
            changed=self._changed.set,
            short_of_room=self._stores.space.short,
        )
        await self._loop.recover()
        services = Services(
            config=self._config,
            loop=self._loop,
            journal=self._stores.journal,
            artifacts=self._stores.artifacts,
            output=self._stores.outputs,
            checker=self._checker,
            nursery=nursery,
            now_us=now_us,
            owner_epoch=await self._stores.journal.counter_next("owner_epoch"),
        )
        self._pool = HostPool(services, f"unix:{self._settings.host_socket}")
        stack.push_async_callback(self._pool.close)
        self._tools = ToolServers(self._config, self._loop, self._checker)
        stack.callback(self._tools.close)
        executor = Executor(self._loop, self._pool, self._tools, self._checker, nursery)
        stack.callback(executor.close)
        self._sessions = Sessions(self._loop, self._config.session_grace_seconds, self._changed.set)
        stack.callback(self._sessions.close)
        self._loop.start(executor)
        self._sessions.expect(
            node.session_id for node in self._loop.state.nodes.values() if node.cancel_on_disconnect
        )
        self._pool.start()

    def _ended(self, node: Node) -> None:
        kept = output_id(node.invocation_id, node.attempt)
        self._stores.outputs.wake(node.tenant_id, kept)

    async def _listen(self, stack: AsyncExitStack) -> grpc.aio.Server:
        socket = self._settings.socket
        if len(str(socket)) > SOCKET_PATH_CHARACTERS:
            raise StartFailed(
                f"the socket's path has over {SOCKET_PATH_CHARACTERS} characters: {socket};"
                " set XDG_RUNTIME_DIR to a shorter folder"
            )
        socket.unlink(missing_ok=True)
        server = self._server(())
        server.add_insecure_port(f"unix:{socket}")
        await server.start()
        stack.callback(socket.unlink, missing_ok=True)
        os.chmod(socket, 0o600)  # its folder is private from before
        if self._settings.listen:
            keyed = self._server((KeyInterceptor(_key(self._settings.state)),))
            host, _, port = self._settings.listen.rpartition(":")
            if host not in ("127.0.0.1", "localhost", "[::1]") or not port.isdigit():
                raise StartFailed(
                    f"--listen {self._settings.listen}: only a loopback address may be used"
                    " without TLS, for example 127.0.0.1:7300"
                )
            try:
                bound = keyed.add_insecure_port(self._settings.listen)
            except RuntimeError as problem:
                bound = 0
                log.info("listen_failed", problem=str(problem))
            if not bound:
                raise StartFailed(f"--listen {self._settings.listen}: the port is in use")
            await keyed.start()
            stack.push_async_callback(keyed.stop, STOP_SECONDS)
        return server

    def _server(self, interceptors: tuple[grpc.aio.ServerInterceptor, ...]) -> grpc.aio.Server:
        server = grpc.aio.server(
            interceptors=interceptors,
            options=(
                ("grpc.max_receive_message_length", self._config.message_limit_bytes),
                ("grpc.max_send_message_length", self._config.message_limit_bytes),
                ("grpc.max_concurrent_streams", self._config.concurrent_calls),
                ("grpc.so_reuseport", 0),
            ),
        )
        parts = InvocationParts(
            config=self._config,
            version=self._version,
            loop=self._loop,
            journal=self._stores.journal,
            artifacts=self._stores.artifacts,
            output=self._stores.outputs,
            checker=self._checker,
            sessions=self._sessions,
            tool_servers=self._tools,
            stdin=self._pool,
        )
        add_InvocationServiceServicer_to_server(InvocationServicer(parts), server)
        artifact_servicer = ArtifactServicer(
            config=self._config,
            journal=self._stores.journal,
            artifacts=self._stores.artifacts,
            space=self._stores.space,
            now_us=now_us,
        )
        add_ArtifactServiceServicer_to_server(artifact_servicer, server)
        workspace = WorkspaceServicer(
            WorkspaceParts(loop=self._loop, journal=self._stores.journal, files=self._pool)
        )
        add_WorkspaceServiceServicer_to_server(workspace, server)
        templates = TemplateServicer(self._config, self._loop, self._pool.link)
        add_TemplateServiceServicer_to_server(templates, server)
        status = health.HealthServicer()
        for name in ("", *SERVICES):
            status.set(name, health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(status, server)
        if self._settings.reflection:
            names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        return server

    async def _until_host(self) -> None:
        try:
            async with asyncio.timeout(HOST_WAIT_SECONDS):
                await self._pool.link.joined.wait()
        except TimeoutError:
            raise StartFailed(
                f"no sandbox host answers at {self._settings.host_socket}:"
                f" {self._pool.link.problem or 'nothing listens'}"
            ) from None

    def _publish(self, stack: AsyncExitStack) -> None:
        """Writes who is here, for those who look for a live controller."""
        path = self._settings.state / "controller.json"
        content = {
            "pid": os.getpid(),
            "start_time": Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19],
            "socket": str(self._settings.socket),
            "listen": self._settings.listen,
            "version": self._version,
        }
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(content))
        temporary.replace(path)
        stack.callback(path.unlink, missing_ok=True)

    async def _until_done(self) -> None:
        tasks = {
            asyncio.create_task(self._stop.wait(), name="stop"),
            asyncio.create_task(self._until_idle(), name="idle"),
            asyncio.create_task(self._until_failed(), name="failed"),
        }
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if self._loop.failed.done():
            self._loop.failed.result()

    async def _until_failed(self) -> None:
        await asyncio.wait([self._loop.failed])

    async def _until_idle(self) -> None:
        """Returns when no client and nothing live has been there for the idle time."""
        seconds = self._settings.exit_when_idle_seconds
        if seconds is None:
            await asyncio.Event().wait()
            return
        clock = asyncio.get_running_loop().time
        idle_since: float | None = None
        while True:
            self._changed.clear()
            if self._sessions.count or self._loop.state.trees:
                idle_since = None
                await self._changed.wait()
                continue
            idle_since = clock() if idle_since is None else idle_since
            try:
                async with asyncio.timeout_at(idle_since + seconds):
                    await self._changed.wait()
            except TimeoutError:
                self._loop.draining = True
                return


def _own(state: Path, stack: AsyncExitStack) -> None:
    """Takes the state directory.

    Raises:
        StartFailed: another live controller has it.
    """
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(state / "controller.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    stack.callback(os.close, lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StartFailed(f"a live controller owns the state directory {state}") from None


def _key(state: Path) -> str:
    """The key of the TCP listener, made at the first need."""
    path = state / "client.key"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_text().strip()
    key = secrets.token_hex(32)
    with os.fdopen(descriptor, "w") as file:
        file.write(key + "\n")
    return key
