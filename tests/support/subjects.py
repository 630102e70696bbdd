"""The drivers under test: which there are, how each is made, and what a test asks of one.

Called by the conformance suite and its fixtures.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from sandbox.drivers import NAMES, cgroups, procfs
from sandbox.drivers.bubblewrap import BubblewrapDriver
from sandbox.drivers.docker import DockerDriver
from sandbox.drivers.docker_container import DockerContainer
from sandbox.drivers.docker_settings import RUNTIMES
from sandbox.drivers.driver import (
    Container,
    Driver,
    Enforcement,
    Isolation,
    Level,
    Statement,
)
from sandbox.drivers.fake import FakeDriver
from tests.support import docker
from tests.support.sandboxes import LIMITS, Speaker, request

ROOT = os.geteuid() == 0
WITHOUT_ZYGOTE = "bubblewrap-without-zygote"
WITHOUT_CGROUPS = "bubblewrap-without-cgroups"
# For an ordinary user that is what bubblewrap is anyway, or a scope of systemd.
KINDS = (*NAMES, WITHOUT_ZYGOTE, *((WITHOUT_CGROUPS,) if ROOT else ()))

PARAMETERS = [
    pytest.param(kind, marks=pytest.mark.docker) if kind in RUNTIMES else kind for kind in KINDS
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One driver under test, prepared."""

    kind: str
    driver: Driver
    statement: Statement

    async def start(self, **limits: int) -> tuple[Container, Speaker]:
        """Makes a sandbox and waits until it is ready."""
        container = await self.driver.create(request(limits=dataclasses.replace(LIMITS, **limits)))
        speaker = Speaker(container)
        await speaker.ready()
        return container, speaker

    @property
    def has_own_root(self) -> bool:
        """Whether its root file system is an image's, and nothing of this machine's."""
        return self.kind in RUNTIMES

    def has_gap(self, gap: str) -> bool:
        """Whether the driver's statement says that it does not hold something."""
        return gap in self.statement.gaps

    @property
    def has_own_kernel(self) -> bool:
        """Whether its processes are another kernel's, which this machine does not see."""
        return self.statement.isolation is Isolation.KERNEL

    def outside(self, container: Container) -> list[int]:
        """The processes of this machine that make up a sandbox, as far as they name it."""
        named = set(processes_with(container.sandbox_id))
        if isinstance(container, DockerContainer):
            named |= set(processes_with(container.engine_id))
        return sorted(pid for pid in named if b"containerd-shim" not in procfs.read(pid, "cmdline"))

    def needs_container(self) -> None:
        """Skips what a driver without isolation cannot show."""
        if self.statement.isolation is Isolation.PROCESS:
            pytest.skip(f"{self.driver.name} isolates nothing")

    def level(self, limit: str) -> Level:
        """At which level a limit is held here."""
        return next(entry.level for entry in self.statement.enforcement if entry.limit == limit)


def make_driver(kind: str, owner: str, folder: Path) -> Driver:
    """Makes a driver of a kind, with all it writes below a folder but its cgroups and locks."""
    if kind == "fake":
        return FakeDriver(owner, folder / "state")
    if kind in RUNTIMES:
        return DockerDriver(kind, owner, folder / "state", docker.settings(kind))
    return BubblewrapDriver(
        owner,
        folder / "state",
        shared=folder / "shared",
        cgroup_root=folder / "absent" if kind == WITHOUT_CGROUPS else cgroups.ROOT,
        uses_zygote=kind != WITHOUT_ZYGOTE,
    )


def processes_with(text: str) -> list[int]:
    """Running processes outside whose command line holds a text."""
    sought = text.encode()
    return [
        pid
        for pid in procfs.pids()
        if pid != os.getpid() and sought in procfs.read(pid, "cmdline") and procfs.alive(pid)
    ]


def mechanism(enforcement: object, limit: str) -> str:
    """What holds a limit."""
    assert isinstance(enforcement, tuple)
    return next(
        entry.mechanism
        for entry in enforcement
        if isinstance(entry, Enforcement) and entry.limit == limit
    )
