"""The host as a process: its lock, its parts, its life.

Called by `sandbox.host.__main__`; puts the parts together and serves until it is told to end, or
until nobody needs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import grpc
from google.protobuf.timestamp_pb2 import Timestamp
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from hutch.v1 import host_pb2, host_service_pb2_grpc
from sandbox.drivers.driver import Driver, Isolation, Limits
from sandbox.host import config as settings
from sandbox.host import evidence
from sandbox.host.builders import Builders
from sandbox.host.config import HostConfig
from sandbox.host.fence import Fence
from sandbox.host.identity import (
    Identity,
    next_identity,
    start_time_of_this_process,
    version,
    write_json,
)
from sandbox.host.lease import Clock, Lease, MonotonicClock
from sandbox.host.nursery import Nursery
from sandbox.host.offers import prepare_offers
from sandbox.host.pool import Pool, Shape
from sandbox.host.servicer import HostServicer
from sandbox.host.table import Offer, SandboxTable
from sandbox.host.workshop import Workshop
from sandbox.runtime import frames

MAX_SOCKET_PATH = 107
SERVICE = "hutch.v1.HostService"
_STREAMS_BESIDE_SANDBOXES = 64


class HostProblem(Exception):
    """The host cannot start; the text says why, with the mend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """What one start of the host is told."""

    state: Path
    socket: Path
    config: HostConfig
    exit_when_unwatched_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningHost:
    """A host that serves."""

    identity: Identity
    table: SandboxTable
    lease: Lease
    socket: Path


@contextlib.contextmanager
def owned_state(state: Path) -> Iterator[None]:
    """Owns a state folder while the block runs.

    Raises:
        HostProblem: a live host owns it, or it cannot be used.
    """
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        state.chmod(0o700)
        descriptor = os.open(state / "host.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise HostProblem(f"the state folder {state} cannot be used: {error}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HostProblem(f"a live host owns the state folder {state}") from None
        yield
    finally:
        os.close(descriptor)


async def run(options: HostOptions, on_ready: Callable[[dict[str, object]], None]) -> None:
    """Runs a host until SIGTERM, SIGINT, or until nobody needs it.

    Args:
        options: What to run.
        on_ready: Called once with what a starter wants to know.

    Raises:
        HostProblem: the folder or the socket cannot be used.
        DriverProblem: the default driver cannot be used.
        StateDamaged: the state folder is not what a host wrote.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    with owned_state(options.state):
        identity = next_identity(options.state)
        offers = await prepare_offers(
            options.config.driver,
            identity.host_id,
            options.state,
            options.config.prepare_timeout_seconds,
            options.config.docker_settings(identity.generation),
        )
        try:
            async with serving(options, identity, offers, MonotonicClock()) as host:
                on_ready(_announce(options, host))
                async with Nursery() as nursery:
                    if options.exit_when_unwatched_seconds is not None:
                        watch = host.lease.run_exit_watch(
                            options.exit_when_unwatched_seconds,
                            lambda: host.table.live_count() == 0,
                            stop.set,
                        )
                        nursery.start(watch, "exit when unwatched")
                    await stop.wait()
        finally:
            for offer in offers.values():
                await offer.driver.close()
            (options.state / "host.json").unlink(missing_ok=True)


def _announce(options: HostOptions, host: RunningHost) -> dict[str, object]:
    document: dict[str, object] = {
        "pid": os.getpid(),
        "start_time": start_time_of_this_process(),
        "socket": str(host.socket),
        "host_id": host.identity.host_id,
        "host_generation": host.identity.generation,
        "version": version(),
    }
    write_json(options.state / "host.json", document)
    return document


@contextlib.asynccontextmanager
async def serving(
    options: HostOptions, identity: Identity, offers: Mapping[str, Offer], clock: Clock
) -> AsyncIterator[RunningHost]:
    """Serves while the block runs; at its end all sandboxes are destroyed and proved gone."""
    config = options.config
    lease, fence = Lease(clock), Fence(identity.generation)
    async with Nursery() as nursery:
        workshop = Workshop(
            config=config,
            clock=clock,
            nursery=nursery,
            spill_directory=_empty_folder(options.state / "spill"),
            builders=Builders(config.builders or settings.cores()),
            destroyers=asyncio.Semaphore(1),
        )
        table = SandboxTable(
            workshop=workshop,
            offers=offers,
            capacity=config.capacity or settings.default_capacity(),
            pool=Pool(_shapes(config, offers), workshop),
        )
        describe = _describer(config, identity, offers, table.capacity)
        servicer = HostServicer(describe=describe, table=table, fence=fence, lease=lease)
        health = health_aio.HealthServicer()
        server = _server(config, servicer, health, table.capacity)
        _bind(server, options.socket)
        await server.start()
        await health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
        limit = config.lease_seconds + config.orphan_grace_seconds
        orphans = lease.run_orphan_watch(
            limit, lambda: table.destroy_all("its owner's lease lapsed")
        )
        nursery.start(orphans, "orphan watch")
        nursery.start(table.pool.run(), "pool")
        try:
            yield RunningHost(identity=identity, table=table, lease=lease, socket=options.socket)
        finally:
            await health.enter_graceful_shutdown()
            left = await table.shut_down(config.shutdown_seconds)
            await server.stop(1.0)
            table.close()
            options.socket.unlink(missing_ok=True)
            if left:
                raise HostProblem(f"sandboxes could not be ended: {', '.join(left)}")


def _shapes(config: HostConfig, offers: Mapping[str, Offer]) -> dict[Shape, Driver]:
    """What the pool keeps ready: a sandbox of each template as a controller grants them."""
    if not config.pool_size:
        return {}
    limits = Limits(
        memory_limit_bytes=config.pool_memory_limit_bytes,
        pids_limit=config.pool_pids_limit,
        cpu_limit_millis=config.pool_cpu_limit_millis,
        tmpfs_limit_bytes=config.pool_tmpfs_limit_bytes,
        open_files_limit=config.pool_open_files_limit,
    )
    shapes: dict[Shape, Driver] = {}
    for template in config.templates:
        offer = offers[config.driver_of(template) or next(iter(offers))]
        if offer.statement.usable:
            name = offer.driver.name
            shapes[Shape(driver=name, template=template, limits=limits)] = offer.driver
    return shapes


def _describer(
    config: HostConfig, identity: Identity, offers: Mapping[str, Offer], capacity: int
) -> Callable[[], host_pb2.Host]:
    started = Timestamp()
    started.FromDatetime(datetime.now(UTC))
    host = host_pb2.Host(
        host_id=identity.host_id,
        host_generation=identity.generation,
        version=version(),
        frame_version=frames.FRAME_VERSION,
        drivers=[evidence.statement(offer.statement) for offer in offers.values()],
        templates=evidence.templates(config, next(iter(offers))),
        capacity=capacity,
        start_time=started,
        # No wall between tenants: an ordinary user's sandboxes share its uid.
        development_only=os.geteuid() != 0 or not _isolates(offers),
    )
    return lambda: host


def _isolates(offers: Mapping[str, Offer]) -> bool:
    return all(offer.statement.isolation != Isolation.PROCESS for offer in offers.values())


def _server(
    config: HostConfig, servicer: HostServicer, health: health_aio.HealthServicer, capacity: int
) -> grpc.aio.Server:
    server = grpc.aio.server(
        options=(
            ("grpc.max_receive_message_length", config.message_limit_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_concurrent_streams", 4 * capacity + _STREAMS_BESIDE_SANDBOXES),
            ("grpc.so_reuseport", 0),
        )
    )
    host_service_pb2_grpc.add_HostServiceServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    return server


def _bind(server: grpc.aio.Server, socket: Path) -> None:
    if len(os.fsencode(socket)) > MAX_SOCKET_PATH:
        raise HostProblem(
            f"the socket path {socket} has over {MAX_SOCKET_PATH} bytes; choose a shorter one "
            "(XDG_RUNTIME_DIR, or --socket)"
        )
    # The lock is held, so a socket that is there was left by an earlier host.
    socket.unlink(missing_ok=True)
    mask = os.umask(0o177)
    try:
        server.add_insecure_port(f"unix:{socket}")
    except RuntimeError as error:
        raise HostProblem(f"cannot listen on {socket}: {error}") from error
    finally:
        os.umask(mask)


def _empty_folder(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    return folder
