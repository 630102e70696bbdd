"""What the fake code does: plans made by chance, so that every one of them ends by itself.

A plan says what its threads do, how it comes out, and what its tools do when a child calls them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from controller.core.model import InvocationSpec, Mode, SpawnRequest, ToolGrant


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One act: `spawn` and wait, `detach`, `await` or `cancel` the child detached as `index`, call
    the `tool` of that index, or `pause`."""

    act: str
    plan: Plan | None = None
    index: int = 0


Steps = tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One invocation's code."""

    number: int
    threads: tuple[Steps, ...] = ()
    outcome: str = "return"  # or raise, die, forever
    tools: tuple[Steps, ...] = ()  # what its own tools do; its children are granted them
    max_concurrent: int | None = None
    max_depth: int | None = None
    retry: bool = False
    timeout_seconds: float | None = None
    cells: tuple[Plan, ...] = ()  # of an interactive box


@dataclass(slots=True, kw_only=True)
class Planner:
    """Makes plans; what it made is found again by number."""

    chance: Random
    endless: bool = False
    made: dict[int, Plan] = field(default_factory=dict)
    budget: int = 0

    def keep(self, **fields: object) -> Plan:
        """A plan with the next number."""
        plan = Plan(number=len(self.made), **fields)  # type: ignore[arg-type]
        self.made[plan.number] = plan
        return plan

    def root(self, depth: int, budget: int) -> Plan:
        """A root's plan; `budget` bounds how many invocations it leads to."""
        self.budget = budget
        return self._plan(depth, depth=depth)

    def box(self, depth: int, budget: int) -> Plan:
        """An interactive box's plan: cells, the last of which returns."""
        self.budget = budget
        cells = tuple(self._plan(depth - 1) for _ in range(self.chance.randint(1, 3)))
        return self.keep(cells=cells, max_depth=depth, tools=self._tools(depth - 1))

    def waiting(self, levels: int, threads: int, depth: int | None = None) -> Plan:
        """Nothing but parents that wait: every thread of every level has one child."""
        if levels == 1:
            return self.keep(max_depth=depth)
        return self.keep(
            threads=tuple(
                (*self._pauses(), Step(act="spawn", plan=self.waiting(levels - 1, threads)))
                for _ in range(threads)
            ),
            max_depth=depth,
        )

    def _pauses(self) -> Steps:
        return (Step(act="pause"),) * self.chance.randint(0, 9)

    def _plan(self, levels: int, depth: int | None = None) -> Plan:
        chance = self.chance
        threads = tuple(self._steps(levels - 1) for _ in range(chance.choice((1, 1, 1, 2))))
        outcome = chance.choices(("return", "raise", "die"), (16, 2, 1))[0]
        timeout = None
        if self.endless and chance.random() < 0.15:
            outcome, timeout = "forever", chance.uniform(0.05, 2)
        return self.keep(
            threads=threads,
            outcome=outcome,
            tools=self._tools(levels - 1),
            max_concurrent=chance.choice((None, 1, 1, 2, 3)),
            max_depth=depth,
            retry=chance.random() < 0.4,
            timeout_seconds=timeout,
        )

    def _tools(self, levels: int) -> tuple[Steps, ...]:
        if levels < 1 or self.chance.random() < 0.5:
            return ()
        return tuple(self.tool_body(levels - 1) for _ in range(self.chance.randint(1, 2)))

    def tool_body(self, levels: int) -> Steps:
        """What a tool does: it may invoke, and waits only for what it made itself."""
        return tuple(step for step in self._steps(levels) if step.act != "tool")

    def _steps(self, levels: int) -> Steps:
        chance = self.chance
        steps: list[Step] = []
        detached = 0
        for _ in range(chance.randint(0, 4)):
            act = chance.choice(("spawn", "spawn", "detach", "detach", "tool", "tool", "pause"))
            if act in ("spawn", "detach"):
                if levels < 0 or self.budget <= 0:  # a spawn that is too deep is refused
                    continue
                self.budget -= 1
                steps.append(Step(act=act, plan=self._plan(levels)))
                detached += act == "detach"
            else:
                steps.append(Step(act=act, index=chance.randrange(3)))
            if detached and chance.random() < 0.5:
                act = chance.choice(("await", "await", "await", "cancel"))
                steps.append(Step(act=act, index=chance.randrange(detached)))
        steps.extend(
            Step(act="await", index=index) for index in range(detached) if chance.random() < 0.7
        )
        return tuple(steps)


def spec_of(plan: Plan, tools: tuple[ToolGrant, ...] = ()) -> InvocationSpec:
    """What a caller asks for when it wants this plan run."""
    return InvocationSpec(
        mode=Mode.INTERACTIVE if plan.cells else Mode.PROGRAM,
        program="" if plan.cells else str(plan.number),
        spawn=SpawnRequest(max_depth=plan.max_depth, max_concurrent=plan.max_concurrent),
        retry_on_loss=plan.retry,
        timeout_seconds=plan.timeout_seconds,
        tools=tools,
        label=str(plan.number),
    )
