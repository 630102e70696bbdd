"""What the parts of the host client share.

Made by `controller.app`; called by the other modules of this package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from controller.checks import Checker
from controller.config import ControllerConfig
from controller.loop import Loop
from controller.nursery import Nursery
from controller.store.ports import ArtifactStore, Journal, OutputLog


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The controller's parts that the host client calls."""

    config: ControllerConfig
    loop: Loop
    journal: Journal
    artifacts: ArtifactStore
    output: OutputLog
    checker: Checker
    nursery: Nursery
    now_us: Callable[[], int]
    owner_epoch: int
