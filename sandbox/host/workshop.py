"""What all sandboxes of a host share, and what one is made from.

Filled by the daemon and the table; read by each hosted sandbox.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from sandbox.drivers.driver import Driver, Limits, Statement
from sandbox.host.builders import Builders
from sandbox.host.config import HostConfig
from sandbox.host.lease import Clock
from sandbox.host.nursery import Nursery


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """What all sandboxes of a host share."""

    config: HostConfig
    clock: Clock
    nursery: Nursery
    spill_directory: Path
    builders: Builders  # as many sandboxes are made at once as there are cores
    destroyers: asyncio.Semaphore  # one at a time: ending a sandbox must not slow the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A checked specification."""

    sandbox_id: str
    owner_epoch: int
    invocation_id: str
    template: str
    limits: Limits
    output_limit_bytes: int
    driver: Driver
    statement: Statement
