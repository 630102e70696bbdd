"""One running cell as the supervisor sees it: its processes, its clock, and how it is stopped.

Called by the supervisor's loop; calls `processes`. It decides when to signal whom; the loop tells
it the time and what the REPL said.
"""

from __future__ import annotations

from .processes import (
    SIGINT,
    SIGKILL,
    SIGTERM,
    Sweep,
    is_alone_with,
    scan,
    signal_all,
    signal_one,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .outputs import Outputs
    from .processes import Process

# What each step of stopping a cell sends to the REPL and to the cell's other processes. While the
# others are being ended the REPL is left alone, so that code which waits for them can go on.
NOTHING = 0
THREADS_GRACES = 4  # how often that long the threads of a stopped cell have to end
DYING_SECONDS = 60.0
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
        "_is_ours",
        "_next_step",
        "_step",
        "_swept",
        "_threads_until",
        "draining",
        "final",
        "has_started",
        "id",
        "outputs",
        "reason",
        "repl_pid",
        "report",
        "state_lost",
        "sweep",
    )

    def __init__(
        self,
        cell: str,
        outputs: Outputs,
        repl_pid: int,
        repl_key: tuple[int, bytes] | None,
        deadline: float,
        grace: float,
        is_ours: Callable[[Process], bool],
    ) -> None:
        """Begins: every process that is there now is none of this cell's.

        Args:
            cell: its id.
            outputs: what it prints.
            repl_pid: the process that runs it.
            repl_key: what tells that process from others; a sweep spares it.
            deadline: when it is stopped; 0 for never.
            grace: how long each step of stopping waits for the next, in seconds.
            is_ours: tells processes of the supervisor's own, which are nobody's.
        """
        self.id = cell
        self.outputs = outputs
        self.repl_pid = repl_pid
        self.reason = ""  # interrupted, timed_out: why it is being stopped
        self.report: tuple[dict[str, Any], bytes] | None = None
        self.state_lost = False
        self.final = False  # its REPL ends by itself after the report
        self.sweep: Sweep | None = None
        self.draining = False
        self.has_started = False
        self._swept = False
        self._threads_until = 0.0  # when a REPL whose threads go on is ended; 0: nobody waits
        self._is_ours = is_ours
        self._before = {repl_key} if repl_key is not None else set()
        if not is_alone_with(repl_pid):
            self._before.update(process.key for process in scan())
        self._deadline = deadline
        self._grace = grace
        self._step = 0
        self._next_step = 0.0

    def own_processes(self) -> list[Process]:
        """Returns the processes that came with this cell."""
        if is_alone_with(self.repl_pid):
            return []
        return [
            process
            for process in scan()
            if process.key not in self._before
            and process.pid != self.repl_pid
            and not self._is_ours(process)
        ]

    def begin(self, now: float) -> None:
        """Notes that the code runs; what waited for that to stop it need not wait longer."""
        if not self.has_started:
            self.has_started = True
            if self.reason and self._step == 0:
                self._next_step = now

    def stop(self, reason: str, now: float) -> None:
        """Begins to stop the code; the first reason stands."""
        if not self.reason and self.report is None:
            self.reason = reason
            # Before the code runs, an interrupt would be lost.
            self._next_step = now if self.has_started else now + self._grace

    def tick(self, now: float) -> None:
        """Takes the steps that are due."""
        if self.report is not None:
            if self._threads_until and now >= self._threads_until:
                self._threads_until = now + DYING_SECONDS  # its end is noticed long before
                self.state_lost = True
                signal_one(self.repl_pid, SIGKILL)
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
            return self._threads_until or None
        if self.reason:
            return self._next_step if self._step < len(STEPS) else None
        return self._deadline or None

    def finish(self, report: dict[str, Any], payload: bytes) -> None:
        """Takes the REPL's report, or one about its death. A stopped cell leaves no process."""
        self.report = (report, payload)
        if self.reason or self.ends_repl or report["outcome"] == "repl_died":
            self.sweep = Sweep(self._before, self._is_ours, self.repl_pid)

    @property
    def ends_repl(self) -> bool:
        """Whether the REPL said that it ends with this report."""
        return self.report is not None and self.report[0].get("last") is True

    def wait_for_threads(self, now: float) -> None:
        """Waits until the REPL has ended the threads of this cell too, or itself; not for long."""
        self._threads_until = now + THREADS_GRACES * self._grace

    def threads_ended(self) -> None:
        """Notes that no thread of the cell goes on."""
        self._threads_until = 0.0

    @property
    def is_sweeping(self) -> bool:
        """Whether processes or threads of the cell are still being ended."""
        if self.sweep is None or self.draining:
            return False
        return not self._swept or self._threads_until > 0

    def step_sweep(self) -> bool:
        """Ends what it finds of the cell; returns whether nothing was left."""
        if self.sweep is not None and not self._swept:
            self._swept = self.sweep.step()
        return not self.is_sweeping
