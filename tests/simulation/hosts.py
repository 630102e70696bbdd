"""Fake hosts and fake sandboxes: they outlive controllers and keep what the real ones promise.

Events of one sandbox come in order and again until they are acknowledged; a cell id, a tool call's
id and a destroyed sandbox's id never act twice; a host that restarts is a new generation.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from controller.core.ids import CallId, CellId, HostId, InvocationId, SandboxId, ToolCallId
from controller.core.model import CellOutcome, GoneCause
from tests.simulation.clock import Clock, Pipe
from tests.simulation.plans import Plan, Step, Steps

if TYPE_CHECKING:
    from tests.simulation.world import World

Thread = Generator[tuple[str, dict[str, Any]], Any, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One event of a sandbox."""

    sequence: int
    kind: str
    data: dict[str, Any]


class Stream:
    """One conversation about a sandbox; a newer one ends it."""

    def __init__(
        self, clock: Clock, hear: Callable[[Told], None], broke: Callable[[], None]
    ) -> None:
        self._clock = clock
        self.down, self.up = Pipe(clock), Pipe(clock)
        self.hear = hear
        self._broke = broke

    def cut(self) -> None:
        """Ends it, with all that is on the way; the controller notices after a while."""
        if self.up.open:
            self.down.open = self.up.open = False
            self._clock.soon(self._broke, 20_000)


class Sandbox:
    """One sandbox and the code in it."""

    def __init__(
        self, world: World, host: Host, sandbox_id: SandboxId, invocation_id: InvocationId
    ) -> None:
        self._world, self._host = world, host
        self.sandbox_id, self.invocation_id = sandbox_id, invocation_id
        self.alive = True
        self.ready = False
        self.events: list[Told] = []
        self.sequence = 0
        self.stream: Stream | None = None
        self.open_calls: dict[CallId, Thread] = {}
        self._calls = 0
        self._cells: dict[CellId, int] = {}  # threads that still run
        self._waiting: list[tuple[CellId, int, bool]] = []
        self._handles: dict[int, InvocationId | None] = {}
        self._served: set[ToolCallId] = set()
        self._threads: dict[int, tuple[Thread, Callable[[], None]]] = {}
        self._captured = False
        self._own = world.planner.made[int(world.specs[invocation_id].label)]
        world.clock.soon(self._begin)

    def _begin(self) -> None:
        if not self.alive:
            return
        if self._world.faults and self._world.clock.likely(0.02):
            self.go(GoneCause.START_FAILED)
            return
        self.ready = True
        self.tell("ready")
        waiting, self._waiting = self._waiting, []
        for cell in waiting:
            self.run_cell(*cell)

    def tell(self, kind: str, **data: Any) -> None:
        """Says something, now and again until it is acknowledged."""
        self.sequence += 1
        told = Told(sequence=self.sequence, kind=kind, data=data)
        self.events.append(told)
        if self.stream is not None:
            stream = self.stream
            stream.up.send(lambda: stream.hear(told))

    def attach(self, stream: Stream, after: int) -> None:
        """Speaks on this stream from now on."""
        if self.stream is not None:
            self.stream.cut()
        self.stream = stream
        greeting = Told(
            sequence=0,
            kind="attached",
            data={
                "last": max((item.sequence for item in self.events), default=0),
                "open": tuple(self.open_calls),
            },
        )
        stream.up.send(lambda: stream.hear(greeting))
        for told in self.events:
            if told.sequence > after:
                stream.up.send(lambda told=told: stream.hear(told))  # type: ignore[misc]

    def acknowledge(self, sequence: int) -> None:
        """Forgets what is durable."""
        gone = any(item.kind == "gone" and item.sequence <= sequence for item in self.events)
        self.events = [item for item in self.events if item.sequence > sequence]
        if gone:
            self._host.forget(self)

    # What the code does.

    def run_cell(self, cell_id: CellId, number: int, capture: bool) -> None:
        """Runs a cell, once."""
        if cell_id in self._cells or not self.alive or self._captured:
            return
        if not self.ready:
            if all(item[0] != cell_id for item in self._waiting):
                self._waiting.append((cell_id, number, capture))
            return
        self._world.checks.cell_runs(cell_id)
        plan = self._world.planner.made[number]
        self._cells[cell_id] = len(plan.threads)
        self._handles = {}

        def done() -> None:
            self._cells[cell_id] -= 1
            if self._cells[cell_id] <= 0:
                self._cell_done(cell_id, plan, capture)

        if not plan.threads:
            self._world.clock.soon(lambda: self._alive_then(done))
        for steps in plan.threads:
            self._spin(self._thread(steps, cell_id, self._handles), done)

    def _alive_then(self, action: Callable[[], None]) -> None:
        if self.alive and not self._captured:
            action()

    def _cell_done(self, cell_id: CellId, plan: Plan, capture: bool) -> None:
        if plan.outcome == "forever":
            return
        if plan.outcome == "die":
            self.go(GoneCause.DIED)
            return
        box = bool(self._own.cells)
        outcome = CellOutcome.RAISED if plan.outcome == "raise" else CellOutcome.RETURNED
        if box and plan is not self._own.cells[-1]:
            outcome = CellOutcome.COMPLETED
        self.tell("cell_completed", cell_id=cell_id, outcome=outcome)
        if capture:
            self.capture()

    def _spin(self, thread: Thread, done: Callable[[], None]) -> None:
        self._threads[id(thread)] = (thread, done)
        self._advance(thread, None)

    def _advance(self, thread: Thread, value: Any) -> None:
        if not self.alive or id(thread) not in self._threads:
            return
        try:
            kind, data = thread.send(value)
        except StopIteration:
            _, done = self._threads.pop(id(thread))
            done()
            return
        if kind == "pause":
            self._world.clock.soon(lambda: self._advance(thread, None))
            return
        self._calls += 1
        call_id = CallId(f"call{self._calls}")
        self.open_calls[call_id] = thread
        self.tell("call", call_id=call_id, operation=kind, **data)

    def _thread(
        self, steps: Steps, cell_id: CellId, handles: dict[int, InvocationId | None]
    ) -> Thread:
        yield "pause", {}
        for step in steps:
            yield from self._step(step, cell_id, handles)

    def _step(self, step: Step, cell_id: CellId, handles: dict[int, InvocationId | None]) -> Thread:
        match step.act:
            case "pause":
                yield "pause", {}
            case "spawn":
                yield "spawn", {"plan": step.plan, "cell_id": cell_id, "detached": False}
            case "detach":
                number = len(handles)
                handles[number] = None
                data = {"plan": step.plan, "cell_id": cell_id, "detached": True}
                handles[number] = yield "spawn", data
            case "await" | "cancel":
                if (child_id := handles.get(step.index)) is not None:
                    yield step.act, {"child_id": child_id}
            case "tool":
                yield "tool", {"index": step.index}

    def reply(self, call_id: CallId, value: Any) -> None:
        """Answers a call, once."""
        thread = self.open_calls.pop(call_id, None)
        if thread is not None:
            self._advance(thread, value)

    def serve(self, tool_call_id: ToolCallId, index: int) -> None:
        """Has its code's tool called, once."""
        if tool_call_id in self._served or not self.alive or self._captured:
            return
        self._served.add(tool_call_id)
        self._world.checks.tool_runs(tool_call_id)
        steps = self._own.tools[index] if index < len(self._own.tools) else ()
        self._spin(
            self._thread(steps, CellId(""), {}),
            lambda: self.tell("tool_result", tool_call_id=tool_call_id),
        )

    def capture(self) -> None:
        """Ends the code, then says what files there were; once."""
        if self._captured or not self.alive:
            return
        self._captured = True
        self._threads.clear()
        self.open_calls.clear()
        for cell_id, left in self._cells.items():
            if left > 0:
                self._cells[cell_id] = 0
                self.tell("cell_completed", cell_id=cell_id, outcome=CellOutcome.INTERRUPTED)
        self._world.clock.soon(lambda: self.tell("captured") if self.alive else None)

    def go(self, cause: GoneCause) -> None:
        """Ends every process of it."""
        if self.alive:
            self.alive = False
            self._threads.clear()
            self.open_calls.clear()
            self.tell("gone", cause=cause)


class Host:
    """One machine."""

    def __init__(self, world: World, host_id: HostId, capacity: int) -> None:
        self._world = world
        self.host_id, self.capacity = host_id, capacity
        self.generation = 1
        self.up = True  # it runs
        self.reachable = True
        self.epoch = 0
        self.sandboxes: dict[SandboxId, Sandbox] = {}
        self._never: set[SandboxId] = set()

    @property
    def answers(self) -> bool:
        """Whether a controller can talk to it."""
        return self.up and self.reachable

    @property
    def live(self) -> int:
        """Sandboxes with processes."""
        return sum(sandbox.alive for sandbox in self.sandboxes.values())

    def attach(
        self,
        stream: Stream,
        sandbox_id: SandboxId,
        invocation_id: InvocationId,
        fence: tuple[int, int],
        after: int,
    ) -> str:
        """Starts a sandbox or attaches to it; says `ok`, `fenced` or `not_found`."""
        epoch, generation = fence
        if epoch < self.epoch or generation != self.generation:
            return "fenced"
        if sandbox_id in self._never:
            return "not_found"
        sandbox = self.sandboxes.get(sandbox_id)
        if sandbox is None:
            sandbox = Sandbox(self._world, self, sandbox_id, invocation_id)
            self.sandboxes[sandbox_id] = sandbox
            self._world.checks.sandbox_starts(self, sandbox)
        sandbox.attach(stream, after)
        return "ok"

    def destroy(self, sandbox_id: SandboxId) -> None:
        """Ends a sandbox; one that never was will never be."""
        sandbox = self.sandboxes.get(sandbox_id)
        if sandbox is None:
            self._never.add(sandbox_id)
        else:
            sandbox.go(GoneCause.DESTROYED)

    def forget(self, sandbox: Sandbox) -> None:
        """Nobody needs to hear of it again."""
        self.sandboxes.pop(sandbox.sandbox_id, None)

    def crash(self) -> None:
        """All processes end at once, and nothing is told."""
        for sandbox in self.sandboxes.values():
            sandbox.alive = False
            if sandbox.stream is not None:
                sandbox.stream.cut()
        self.sandboxes.clear()
        self._never.clear()
        self.up = False

    def come_back(self) -> None:
        """A new generation."""
        self.up = True
        self.generation += 1

    def cut_off(self) -> None:
        """The network to it breaks."""
        self.reachable = False
        for sandbox in self.sandboxes.values():
            if sandbox.stream is not None:
                sandbox.stream.cut()
                sandbox.stream = None
