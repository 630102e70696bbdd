"""The records of one decision while it is made, each folded at once.

Called by the modules of `controller.engine`. A refusal is raised before the first record.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from controller.config import ControllerConfig
from controller.engine.apply import apply
from controller.engine.records import Record
from controller.engine.scheduler import Rules
from controller.engine.state import EngineState


@dataclass(slots=True, kw_only=True)
class Draft:
    """One decision: the state it folds into, its time and its records so far."""

    state: EngineState
    now_us: int
    config: ControllerConfig
    rules: Rules
    records: list[Record] = field(default_factory=list)

    def add(self, record: Record) -> None:
        """Takes a record and folds it."""
        apply(self.state, record)
        self.records.append(record)
