"""One run: a world made from a seed, its faults, and what must be true of it.

A run is a function of its seed and its options; nothing else enters. Called by the tests and by
`python -m tests.simulation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from controller.config import ControllerConfig
from controller.core.ids import HostId, InvocationId, TenantId, ToolCallId, ToolId
from controller.core.model import GoneCause, InvocationSpec
from controller.engine import records as rec
from controller.engine.scheduler import RULES, Rules
from tests.simulation.checks import Checks, hold
from tests.simulation.clients import Clients
from tests.simulation.clock import SECOND, Clock
from tests.simulation.control import Controller
from tests.simulation.hosts import Host
from tests.simulation.journal import Journal
from tests.simulation.plans import Plan, Planner

STEPS = 200_000


class LockedUp(AssertionError):
    """Nothing is on its way any more, and something has not ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a run is like; those of a seed are made by `options_of`."""

    capacities: tuple[int, ...] = (8,)
    roots: int = 6
    budget: int = 10  # invocations below one root, at most
    depth: int = 4
    faults: int = 0
    endless: bool = False
    cancels: float = 0  # how likely a root is cancelled
    refusals: float = 0  # how likely a value is refused by its contract
    tenants: int = 2
    boxes: bool = True
    client_tools: bool = True
    rules: Rules = RULES
    naive_tools: bool = False  # a client's tool asks for roots and does not say for which call
    waiting_threads: int = 0  # all plans are parents that wait, each in so many threads
    within_us: int = SECOND // 4  # when roots and faults come
    grace_us: int = 3 * SECOND  # how long a host may be away
    for_good: bool = False  # hosts die and stay away; nothing else fails


def options_of(seed: int) -> Options:
    """The options of a seed: small worlds of every kind."""
    chance = Clock(seed).chance
    hosts = chance.choice((1, 1, 2, 3))
    return Options(
        capacities=tuple(chance.randint(2, 6) for _ in range(hosts)),
        roots=chance.randint(2, 12),
        budget=chance.randint(2, 20),
        depth=chance.randint(1, 4),
        faults=chance.choice((0, 0, 2, 5, 9)),
        endless=chance.random() < 0.4,
        cancels=0.15,
        refusals=0.05,
        tenants=chance.randint(1, 3),
    )


class World:
    """Everything of one run."""

    def __init__(self, seed: int, options: Options) -> None:
        self.clock = Clock(seed)
        self.options = options
        self.rules = options.rules
        self.faults = options.faults > 0
        self.naive_tools = options.naive_tools
        self.config = ControllerConfig(tenant_weights={"tenant1": 2.0})
        self.hosts = [
            Host(self, HostId(f"hst_{number}"), capacity)
            for number, capacity in enumerate(options.capacities, start=1)
        ]
        self.lost_hosts: set[HostId] = set()
        self.journal = Journal()
        self.checks = Checks(self)
        self.planner = Planner(chance=self.clock.chance, endless=options.endless)
        self.specs: dict[InvocationId, InvocationSpec] = {}
        self.clients = Clients(self)
        self._ids = 0
        self._epoch = 1
        self.controller = Controller(self, self._epoch)
        self._populate()

    def _populate(self) -> None:
        options, chance, planner = self.options, self.clock.chance, self.planner
        if options.client_tools and chance.random() < 0.6:
            planner.budget = 6
            self.clients.tools = tuple(
                planner.tool_body(options.depth - 2) for _ in range(chance.randint(1, 2))
            )
        total = sum(options.capacities)
        for _ in range(options.roots):
            depth = min(chance.randint(1, options.depth), total)
            tenant_id = TenantId(f"tenant{chance.randint(1, options.tenants)}")
            if options.waiting_threads:
                plan = planner.waiting(options.depth, options.waiting_threads, options.depth)
            elif options.boxes and chance.random() < 0.2:
                plan = planner.box(depth, options.budget)
            else:
                plan = planner.root(depth, options.budget)
            ask = partial(self._ask, tenant_id, plan)
            self.clock.after(chance.randint(0, options.within_us), ask)
        for _ in range(options.faults):
            self.clock.after(chance.randint(0, 4 * options.within_us), self._fault)

    def _ask(self, tenant_id: TenantId, plan: Plan) -> None:
        chance = self.clock.chance

        def accepted(invocation_id: InvocationId | None) -> None:
            if invocation_id is None:
                return
            if plan.cells:
                self.clients.drive(invocation_id, plan)
            if chance.random() < self.options.cancels:
                cancel = self.clients.cancel
                self.clock.after(chance.randint(1, SECOND), lambda: cancel(invocation_id))

        self.clients.create(tenant_id, plan, tools=True, then=accepted)

    # What the parts ask of the world.

    def living(self) -> Iterator[Controller]:
        """The controller, if there is one now."""
        if self.controller.alive:
            yield self.controller

    def new_invocation(self, spec: InvocationSpec) -> InvocationId:
        """A fresh id."""
        self._ids += 1
        invocation_id = InvocationId(f"inv_{self._ids}")
        self.specs[invocation_id] = spec
        return invocation_id

    def new_tool_call(self) -> ToolCallId:
        """A fresh id."""
        self._ids += 1
        return ToolCallId(f"tc_{self._ids}")

    def tool_id(self, owner: str, index: int) -> ToolId:
        """The id of an owner's tool."""
        return ToolId(f"tool_{owner}_{index + 1}")

    def noticed(self, records: list[tuple[InvocationId, rec.Record]]) -> None:
        """Something became durable."""
        self.checks.durable(records)
        ended = [item.invocation_id for _, item in records if isinstance(item, rec.Ended)]
        cells = [item.cell_id for _, item in records if isinstance(item, rec.CellRecorded)]
        self.clients.noticed(ended, cells)

    # Faults.

    def _fault(self) -> None:
        chance = self.clock.chance
        acts: list[Callable[[], None]] = [
            self._controller_dies,
            self._controller_dies,
            lambda: self._host_dies(chance.choice(self.hosts)),
            lambda: self._host_is_cut_off(chance.choice(self.hosts)),
            lambda: self._watch_breaks(chance.choice(self.hosts)),
            lambda: self._sandbox_dies(chance.choice(self.hosts)),
            self.clients.server_dies,
        ]
        if self.options.for_good:
            acts = [lambda: self._host_dies(chance.choice(self.hosts))]
        chance.choice(acts)()

    def _controller_dies(self) -> None:
        if not self.controller.alive:
            return
        if self.controller.idle:
            self.checks.recovered(self.controller.state)
        self.controller.crash()
        self.clock.after(self.clock.chance.randint(1, SECOND), self._next_controller)

    def _next_controller(self) -> None:
        self._epoch += 1
        self.controller = Controller(self, self._epoch)
        self.clients.heard_of(self.controller)

    def _host_dies(self, host: Host) -> None:
        last = self.options.for_good and sum(item.up for item in self.hosts) == 1
        if host.up and not last:
            host.crash()
            self._unreachable(host)
            if not self.options.for_good:
                self._back_later(host, host.come_back)

    def _host_is_cut_off(self, host: Host) -> None:
        if host.answers:
            host.cut_off()
            self._unreachable(host)
            self._back_later(host, lambda: setattr(host, "reachable", True))

    def _watch_breaks(self, host: Host) -> None:
        for controller in self.living():
            controller.links[host.host_id].lost_sight()

    def _back_later(self, host: Host, back: Callable[[], None]) -> None:
        chance = self.clock.chance
        away = chance.choice((SECOND // 20, SECOND // 2, 2 * SECOND, 8 * SECOND))

        def now() -> None:
            back()
            for controller in self.living():
                controller.links[host.host_id].broke()
                controller.links[host.host_id].dial()

        self.clock.after(chance.randint(1, away), now)

    def _unreachable(self, host: Host) -> None:
        def notice() -> None:
            for controller in self.living():
                controller.links[host.host_id].broke()

        self.clock.soon(notice)

    def _sandbox_dies(self, host: Host) -> None:
        live = [item for item in host.sandboxes.values() if item.alive]
        if live:
            cause = self.clock.chance.choice((GoneCause.LOST, GoneCause.DIED, GoneCause.DENIED))
            self.clock.chance.choice(live).go(cause)

    # The run.

    def run(self) -> World:
        """Runs until nothing is on its way, then demands that all has ended.

        Raises:
            LockedUp: something waits for ever.
            Broken: another invariant does not hold.
        """
        steps = 0
        while self.clock.step():
            steps += 1
            hold(steps < STEPS, "the run does not come to an end")
        for controller in self.living():
            self.checks.recovered(controller.state)
            state = controller.state
            stuck = [
                node
                for node in state.nodes.values()
                if not node.gone and state.trees[node.tree_id].depth <= state.capacity
            ]
            if stuck:
                told = ", ".join(
                    f"{node.invocation_id}(level {node.level} {node.state})" for node in stuck[:20]
                )
                raise LockedUp(f"nothing is on its way, and these have not ended: {told}")
            if state.nodes:
                return self  # they wait for more hosts than there are
        self.checks.over()
        return self
