"""Capacity without deadlock: who may start now.

Called by `engine.decide`. C slots; every admitted tree has one slot reserved per level of its
granted depth; beyond them a slot is borrowed if one is free outside all reservations. A root is
admitted only if all reservations, the borrowed slots and its own reservations fit into C.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from controller.core.ids import HostId, InvocationId
from controller.core.model import State
from controller.engine.state import EngineState, Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """One invocation may start."""

    invocation_id: InvocationId
    host_id: HostId
    borrowed: bool


class _Ledger:
    """What is reserved, borrowed and used, summed from the live trees."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self.capacity = state.capacity
        self.reserved = sum(tree.depth for tree in state.trees.values() if tree.reserved)
        self.borrowed = 0
        self.levels: set[tuple[InvocationId, int]] = set()
        self.used: Counter[HostId] = Counter()
        self.running: Counter[InvocationId] = Counter()
        for node in state.nodes.values():
            if node.slot is None:
                continue
            self.used[node.slot.host_id] += 1
            self.borrowed += node.slot.borrowed
            if not node.slot.borrowed:
                self.levels.add((node.tree_id, node.slot.level))
            if node.parent_id and not node.ended:
                self.running[node.parent_id] += 1

    def root_fits(self, depth: int) -> bool:
        return self.reserved + self.borrowed + depth <= self.capacity

    def may_borrow(self) -> bool:
        return self.reserved + self.borrowed < self.capacity

    def has_own(self, node: Node) -> bool:
        return (node.tree_id, node.level) not in self.levels

    def host(self) -> HostId | None:
        """The host with the most free slots."""
        best: tuple[int, HostId] | None = None
        for host in self._state.hosts.values():
            free = host.capacity - self.used[host.host_id]
            if free > 0 and (best is None or free > best[0]):
                best = (free, host.host_id)
        return best[1] if best else None

    def take(self, node: Node, host_id: HostId, *, borrowed: bool) -> None:
        self.used[host_id] += 1
        if borrowed:
            self.borrowed += 1
        else:
            self.levels.add((node.tree_id, node.level))
        if node.parent_id:
            self.running[node.parent_id] += 1


def schedule(state: EngineState) -> list[Grant]:
    """The invocations that may start now, oldest first.

    A queued root that does not fit keeps younger invocations from borrowing, so that a stream of
    small requests cannot starve it; reserved slots are given out all the same, so that every
    admitted tree goes on.
    """
    if not state.queue:
        return []
    ledger = _Ledger(state)
    grants: list[Grant] = []
    root_waits = False
    for invocation_id in state.queue:
        node = state.nodes[invocation_id]
        if node.state is not State.QUEUED or _held_back(state, ledger, node):
            continue
        tree = state.trees[node.tree_id]
        borrowed = False
        if not tree.reserved:
            if root_waits or not ledger.root_fits(tree.depth):
                root_waits = True
                continue
        elif not ledger.has_own(node):
            if root_waits or not ledger.may_borrow():
                continue
            borrowed = True
        host_id = ledger.host()
        if host_id is None:
            break
        if not tree.reserved:
            ledger.reserved += tree.depth
        ledger.take(node, host_id, borrowed=borrowed)
        grants.append(Grant(invocation_id=invocation_id, host_id=host_id, borrowed=borrowed))
    return grants


def _held_back(state: EngineState, ledger: _Ledger, node: Node) -> bool:
    """Whether a parent's `max_concurrent` or the remains of a lost attempt hold it back."""
    parent = state.parent_of(node)
    if parent is not None and ledger.running[parent.invocation_id] >= (
        parent.granted.spawn.max_concurrent
    ):
        return True
    return any(not child.gone for child in state.children_of(node))


def over_capacity(state: EngineState) -> list[InvocationId]:
    """The youngest trees that must end because capacity fell below what was promised."""
    ledger = _Ledger(state)
    excess = ledger.reserved + ledger.borrowed - ledger.capacity
    victims: list[InvocationId] = []
    for tree in sorted(state.trees.values(), key=lambda tree: -tree.ordinal):
        if excess <= 0:
            break
        if not tree.reserved or state.nodes[tree.tree_id].ending is not None:
            continue
        borrowed = sum(
            1
            for invocation_id in tree.nodes
            if (slot := state.nodes[invocation_id].slot) is not None and slot.borrowed
        )
        victims.append(tree.tree_id)
        excess -= tree.depth + borrowed
    return victims
