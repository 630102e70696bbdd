"""One running cell as the supervisor sees it: its processes, its clock, and how it is stopped.

Called by the supervisor's loop; calls `processes`. It decides when to signal whom; the loop tells
it the time and what the REPL said.
"""

from __future__ import annotations

from .processes import SIGINT, SIGKILL, SIGTERM, Sweep, look, scan, signal_all, signal_one

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .outputs import Outputs
    from .processes import Process

# What each step of stopping a cell sends to the REPL and to the cell's other processes. While the
# others are being ended the REPL is left alone, so that code which waits for them can go on.
NOTHING = 0
STEPS = (
    (SIGINT, SIGINT),
    (NOTHING, SIGTERM),
    (NOTHING, SIGKILL),
    (SIGINT, SIGKILL),
    (SIGKILL, SIGKILL),
)


class CellRun:
    """The state of one cell between its frame and its `done`."""

    __slots__ = (
        "_before",
        "_deadline",
        "_grace",
        "_next_step",
        "_step",
        "draining",
        "id",
        "outputs",
        "reason",
        "repl_pid",
        "report",
        "state_lost",
        "sweep",
    )

    def __init__(
        self, cell: str, outputs: Outputs, repl_pid: int, deadline: float, grace: float
    ) -> None:
        """Begins: every process that is there now is none of this cell's."""
        self.id = cell
        self.outputs = outputs
        self.repl_pid = repl_pid
        self.reason = ""  # interrupted, timed_out: why it is being stopped
        self.report: tuple[dict[str, Any], bytes] | None = None
        self.state_lost = False
        self.sweep: Sweep | None = None
        self.draining = False
        self._before = {process.key for process in scan()}
        repl = look(repl_pid)
        if repl is not None:
            self._before.add(repl.key)  # a sweep spares it: its namespace survives
        self._deadline = deadline
        self._grace = grace
        self._step = 0
        self._next_step = 0.0

    def own_processes(self) -> list[Process]:
        """Returns the processes that came with this cell."""
        return [
            process
            for process in scan()
            if process.key not in self._before and process.pid != self.repl_pid
        ]

    def stop(self, reason: str, now: float) -> None:
        """Begins to stop the code; the first reason stands."""
        if not self.reason and self.report is None:
            self.reason = reason
            self._next_step = now

    def tick(self, now: float) -> None:
        """Takes the steps that are due."""
        if self.report is not None:
            return
        if self._deadline and now >= self._deadline:
            self.stop("timed_out", now)
        if self.reason and now >= self._next_step and self._step < len(STEPS):
            to_repl, to_others = STEPS[self._step]
            signal_all(self.own_processes(), to_others)
            if to_repl != NOTHING:
                signal_one(self.repl_pid, to_repl)
            self._step += 1
            self._next_step = now + self._grace

    def next_time(self) -> float | None:
        """Returns when `tick` has something to do next."""
        if self.report is not None:
            return None
        if self.reason:
            return self._next_step if self._step < len(STEPS) else None
        return self._deadline or None

    def finish(self, report: dict[str, Any], payload: bytes) -> None:
        """Takes the REPL's report, or one about its death. A stopped cell leaves no process."""
        self.report = (report, payload)
        if self.reason or report["outcome"] == "repl_died":
            self.sweep = Sweep(self._before)
