"""Drivers: one module for each technology that can hold a sandbox.

Called by `sandbox.host`; each driver is imported only when it is asked for.
"""

from __future__ import annotations

from pathlib import Path

from sandbox.drivers.docker_settings import RUNTIMES, DockerSettings
from sandbox.drivers.driver import Driver

NAMES = ("bubblewrap", *RUNTIMES, "fake")


def make(name: str, owner: str, state: Path, docker: DockerSettings | None = None) -> Driver:
    """Makes the driver of that name; it does nothing until its `prepare` is called.

    Args:
        name: One of `NAMES`.
        owner: Whose sandboxes it holds: two hosts on one machine must give different owners.
        state: A folder of this owner alone, for what the driver keeps between starts.
        docker: What the docker drivers are told.

    Raises:
        ValueError: There is no such driver.
    """
    match name:
        case "bubblewrap":
            from sandbox.drivers.bubblewrap import BubblewrapDriver

            docker = docker or DockerSettings()
            return BubblewrapDriver(owner, state, preload=docker.preload, roots=docker.roots)
        case _ if name in RUNTIMES:
            from sandbox.drivers.docker import DockerDriver

            return DockerDriver(name, owner, state, docker or DockerSettings())
        case "fake":
            from sandbox.drivers.fake import FakeDriver

            return FakeDriver(owner, state)
    raise ValueError(f"no driver is named {name!r}; there are {', '.join(NAMES)}")
