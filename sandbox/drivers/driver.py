"""What a container technology must do to hold sandboxes.

Called by `sandbox.host`; implemented by one module per technology in this package. A driver never
reads what a sandbox says: it starts processes, limits them, measures them and proves them gone.
"""

from __future__ import annotations

import enum
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Level(enum.Enum):
    """How a limit is held: by the kernel for the whole sandbox, for each process, or not at all."""

    SANDBOX = "sandbox"
    PROCESS = "process"
    NONE = "none"


class Isolation(enum.Enum):
    """What stands between a sandbox and the machine."""

    PROCESS = "process"
    CONTAINER = "container"
    KERNEL = "kernel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Enforcement:
    """At which level one limit is held, and by what."""

    limit: str  # memory, pids, cpu, tmpfs, open_files
    level: Level
    mechanism: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """What one driver can enforce on this machine; the result of its self-check."""

    driver: str
    isolation: Isolation
    enforcement: tuple[Enforcement, ...]
    gaps: tuple[str, ...] = ()
    usable: bool = True
    problem: str = ""  # one or more sentences with the exact mend, when not usable


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """A sandbox's limits, all resolved."""

    memory_limit_bytes: int
    pids_limit: int
    cpu_limit_millis: int
    tmpfs_limit_bytes: int
    open_files_limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRequest:
    """What the host asks a driver to make."""

    sandbox_id: str
    template: str
    limits: Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What a driver measured of a sandbox; None where it cannot."""

    exit_code: int | None = None  # of the supervisor
    signal: int | None = None
    oom_kill_count: int | None = None
    memory_peak_bytes: int | None = None
    pids_limit_hits: int | None = None
    disk_full_hits: int | None = None  # how many writable file systems are full at this moment
    cpu_seconds: float | None = None
    detail: str = ""


class StartFailed(Exception):
    """A sandbox could not be made; the text says why, with the mend where there is one."""


class Container(Protocol):
    """One live sandbox."""

    @property
    def sandbox_id(self) -> str:
        """The id it was made for."""

    @property
    def channel(self) -> socket.socket:
        """The host's end of the frame channel: a connected, non-blocking stream socket. The
        container's end is the supervisor's standard input and output."""

    @property
    def enforcement(self) -> Sequence[Enforcement]:
        """At which level each limit is held for this one."""

    async def measure(self) -> Measurement:
        """Measures now, without ending anything."""

    async def wait(self) -> Measurement:
        """Waits until the supervisor has exited (other processes may still be there)."""

    async def destroy(self) -> Measurement:
        """Ends every process of the sandbox, proves them gone, removes all it had on the machine
        (cgroup, folders, mounts). Idempotent, and safe to call while another call waits.

        Raises:
            RuntimeError: a process survived; the text names it.
        """


class Driver(Protocol):
    """One container technology."""

    @property
    def name(self) -> str:
        """The driver's name, for example `bubblewrap`."""

    async def prepare(self) -> Statement:
        """Runs the self-check, removes what an earlier host with the same owner left behind
        (processes, cgroups, folders), builds the runtime archive. Called once, before `create`."""

    async def create(self, request: SandboxRequest) -> Container:
        """Makes one sandbox and starts its supervisor. It does not wait for the `ready` frame.

        Raises:
            StartFailed: nothing of it is left.
        """

    async def list(self) -> Sequence[str]:
        """The ids of the sandboxes of this owner that exist on the machine."""

    async def close(self) -> None:
        """Destroys what is left and frees the driver's own resources."""
