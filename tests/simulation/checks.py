"""The invariants, asserted after every step and at the end of a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from controller.core.ids import CellId, InvocationId, TenantId, ToolCallId
from controller.engine import commands as cmd
from controller.engine import records as rec
from controller.engine.apply import apply
from controller.engine.ledger import Ledger, counts
from controller.engine.state import EngineState
from tests.simulation.hosts import Host, Sandbox

if TYPE_CHECKING:
    from tests.simulation.control import Controller
    from tests.simulation.world import World

SUMS_EVERY = 5  # decisions; the sums cost as much as the decisions
# What a run of its own may differ in from one that was recovered: see docs/capacity.md.
VOLATILE = {"ordinal", "records", "gathering", "stirred"}


class Broken(AssertionError):
    """An invariant does not hold."""


def hold(condition: object, text: str) -> None:
    """Demands that something is so."""
    if not condition:
        raise Broken(text)


class Checks:
    """All invariants of one run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._cells: set[CellId] = set()
        self._tools: set[ToolCallId] = set()
        self._captures: set[InvocationId] = set()  # those asked for and not over
        self._decisions = 0
        self.most_live = 0

    # In the sandboxes.

    def cell_runs(self, cell_id: CellId) -> None:
        """No cell runs twice."""
        hold(cell_id not in self._cells, f"the cell {cell_id} runs twice")
        self._cells.add(cell_id)

    def tool_runs(self, tool_call_id: ToolCallId) -> None:
        """No tool call runs twice."""
        hold(tool_call_id not in self._tools, f"the tool call {tool_call_id} runs twice")
        self._tools.add(tool_call_id)

    def sandbox_starts(self, host: Host, sandbox: Sandbox) -> None:
        """It was granted durably, fits on its host, and nobody above it has ended."""
        journal = self._world.journal
        hold(sandbox.sandbox_id in journal.slots, "a sandbox starts before its slot is durable")
        hold(host.live <= host.capacity, f"{host.host_id} holds {host.live} of {host.capacity}")
        self.most_live = max(self.most_live, sum(item.live for item in self._world.hosts))
        for ancestor_id in journal.lineage[sandbox.invocation_id]:
            hold(ancestor_id not in journal.ended, "a child begins after its parent's end")

    def replied(self, reply: cmd.Reply) -> None:
        """Code is told of a child's end only when that is durable."""
        for controller in self._world.living():
            nodes = controller.state.nodes.values()
            node = next((item for item in nodes if item.sandbox_id == reply.sandbox_id), None)
            call = node.calls.get(reply.call_id) if node is not None else None
            if call is None or call.child_id is None:
                return  # it is forgotten meanwhile, or no child's
            known = self._world.journal.lineage if call.wants_id else self._world.journal.ended
            hold(call.child_id in known, "code is told what is not durable")

    # In the engine.

    def begins(self, state: EngineState) -> None:
        """A new controller: what was decided and not durable was never decided."""
        self._captures = {node.invocation_id for node in state.nodes.values() if node.capturing}

    def decided(self, controller: Controller, records: list[rec.Record]) -> None:
        """What was decided is allowed."""
        state = controller.state
        for record in records:
            match record:
                case rec.Admitted() if record.parent_id is not None:
                    self._within_parent(state, record)
                case rec.SlotGranted():
                    self._may_start(state, record)
                case rec.Ended():
                    node = state.nodes[record.invocation_id]
                    gone = all(child.gone for child in state.children_of(node))
                    hold(gone, "an invocation ends before what is below it")
                    due = record.invocation_id in self._captures
                    hold(not due, "an invocation ends before its files are captured")
                case rec.EndingDecided(capture=True) | rec.CellRecorded(capture=True):
                    self._captures.add(record.invocation_id)
                case rec.CaptureEnded() | rec.SandboxRemoved() | rec.AttemptAbandoned():
                    self._captures.discard(record.invocation_id)
        self._decisions += bool(records)
        if records and self._decisions % SUMS_EVERY == 0:
            check_sums(state)

    def _may_start(self, state: EngineState, record: rec.SlotGranted) -> None:
        node = state.nodes[record.invocation_id]
        if node.slot is None:  # lost again in the same decision
            return
        host = state.hosts[record.host_id]
        hold(state.ledger.used[record.host_id] <= host.capacity, "a host's capacity is exceeded")
        parent = state.parent_of(node)
        hold(parent is None or parent.ending is None, "a child starts below an ended parent")
        hold(
            all(child.gone for child in state.children_of(node)),
            "an attempt begins before the last one's descendants have ended",
        )

    def _within_parent(self, state: EngineState, record: rec.Admitted) -> None:
        assert record.parent_id is not None
        parent = state.nodes[record.parent_id]
        for item in fields(record.granted.spawn):
            mine, theirs = (
                getattr(granted.spawn, item.name) for granted in (record.granted, parent.granted)
            )
            hold(mine <= theirs, f"a child has more {item.name} than its parent")
        hold(record.granted.deadline_us <= parent.granted.deadline_us, "a deadline grew")
        hold(record.level <= state.trees[record.tree_id].depth, "a level beyond the tree's depth")
        hold(record.level > parent.level, "a level that is not below its parent")

    # In the journal.

    def durable(self, records: list[tuple[InvocationId, rec.Record]]) -> None:
        """No sandbox outlives an ended ancestor, but on a host that was given up."""
        ended = [item.invocation_id for _, item in records if isinstance(item, rec.Ended)]
        if not ended:
            return
        journal = self._world.journal
        for host in self._world.hosts:
            if host.host_id in self._world.lost_hosts or not host.reachable:
                continue
            for sandbox in host.sandboxes.values():
                above = journal.lineage[sandbox.invocation_id]
                orphan = sandbox.alive and any(item in above for item in ended)
                hold(not orphan, f"{sandbox.sandbox_id} outlives its parent")

    def recovered(self, state: EngineState) -> None:
        """A fold of the live trees' records is the state."""
        folded = EngineState()
        for record in self._world.journal.live():
            apply(folded, record)
        compare(state.nodes, folded.nodes, "node")
        compare(state.trees, folded.trees, "tree")
        compare({"": state.ledger}, {"": folded.ledger}, "ledger")
        for mine, theirs in zip(by_age(state), by_age(folded), strict=True):
            hold(mine == theirs, "recovery changes who is older")

    def over(self) -> None:
        """Everything has ended, once, and nothing is left."""
        journal = self._world.journal
        hold(set(journal.lineage) == set(journal.ended), "not everything has ended")
        hold(set(journal.decided) == set(journal.ended), "an ending is missing")
        for host in self._world.hosts:
            if host.up and host.reachable:
                hold(not host.live, f"{host.host_id} still holds {host.live} sandboxes")
        for controller in self._world.living():
            hold(not controller.state.nodes, "the state still has nodes")
            hold(not controller.state.tool_calls, "a tool call is still open")
            check_sums(controller.state)


def by_age(state: EngineState) -> list[InvocationId]:
    """The live invocations, oldest first."""
    nodes = sorted(state.nodes.values(), key=lambda node: node.ordinal)
    return [node.invocation_id for node in nodes]


def compare(mine: dict[Any, Any], theirs: dict[Any, Any], what: str) -> None:
    """Demands that two sets of values are the same but for what is volatile."""
    hold(mine.keys() == theirs.keys(), f"recovery finds other {what}s")
    for key, value in mine.items():
        for item in fields(value):
            if item.name in VOLATILE:
                continue
            one, other = getattr(value, item.name), getattr(theirs[key], item.name)
            hold(one == other, f"{what} {key}: {item.name} is {one!r}, recovered {other!r}")


def check_sums(state: EngineState) -> None:
    """The running sums are what counting gives, and none is negative."""
    ledger = state.ledger
    used: Counter[str] = Counter()
    borrowed: Counter[TenantId] = Counter()
    running: Counter[InvocationId] = Counter()
    own: set[tuple[InvocationId, int]] = set()
    for node in state.nodes.values():
        if node.slot is None:
            continue
        used[node.slot.host_id] += 1
        if node.slot.borrowed:
            borrowed[node.tenant_id] += 1
        else:
            hold((node.tree_id, node.slot.level) not in own, "two have one reserved slot")
            own.add((node.tree_id, node.slot.level))
        parent = state.parent_of(node)
        if parent is not None and not node.ended and counts(node, parent):
            running[parent.invocation_id] += 1
    reserved: Counter[TenantId] = Counter()
    for tree in state.trees.values():
        if tree.reserved:
            reserved[tree.tenant_id] += tree.depth
    hold(dict(used) == ledger.used, "used slots")
    hold(own == ledger.own, "reserved slots in use")
    hold(dict(running) == ledger.running, "running children")
    hold(ledger.borrowed == borrowed.total() >= 0, "borrowed slots")
    hold(ledger.reserved == reserved.total() >= 0, "reserved slots")
    shares = {key: (item.reserved, item.borrowed) for key, item in ledger.shares.items()}
    for tenant_id in {*shares, *reserved, *borrowed}:
        counted = (reserved[tenant_id], borrowed[tenant_id])
        hold(shares.get(tenant_id, (0, 0)) == counted, f"the share of {tenant_id}")
    hold(_waiting(ledger) == _queued(state), "who waits")


def _waiting(ledger: Ledger) -> set[InvocationId]:
    found = {item for share in ledger.shares.values() for item in share.roots}
    for groups in ledger.waiting.values():
        for group in groups.values():
            found.update(group)
    return found


def _queued(state: EngineState) -> set[InvocationId]:
    return {node.invocation_id for node in state.nodes.values() if node.state == "queued"}
