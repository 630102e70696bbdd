"""Capacity without deadlock: who may start next. `docs/capacity.md` has the rule and its proof.

Called by `engine.decide`. C slots; every admitted tree has one slot reserved per level of its
granted depth; beyond them a slot is borrowed if one is free outside all reservations. A root is
admitted only if all reservations, the borrowed slots and its own reservations fit into C.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from controller.config import ControllerConfig
from controller.core.ids import HostId, InvocationId
from controller.engine.ledger import Ledger, Share, counts
from controller.engine.state import EngineState, Node, Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules without which bounded capacity locks up. Only tests switch one off, to show it."""

    count_borrowed: bool = True  # borrowed slots count when a root is admitted
    tool_levels: bool = True  # what a tool invokes is below whoever called it
    drop_excess: bool = True  # lost capacity ends the trees that it had been promised to


RULES = Rules()


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """One invocation may start."""

    invocation_id: InvocationId
    host_id: HostId
    borrowed: bool


def next_grant(state: EngineState, config: ControllerConfig, rules: Rules = RULES) -> Grant | None:
    """The invocation that may start now, or None; the caller folds it and asks again.

    First every tree's own reserved slots: they are free whenever no one of that tree and level has
    them. Then what is free outside all reservations, shared over tenants; see `_shared`. The cost
    does not grow with the number of invocations that wait, only with that of their parents.
    """
    ledger = state.ledger
    for tree_id in list(ledger.stirred):
        node = _for_own_slot(state, state.trees[tree_id])
        if node is None:
            del ledger.stirred[tree_id]
            continue
        host_id = _host(state)
        if host_id is None:
            return None  # and the tree stays stirred
        return Grant(invocation_id=node.invocation_id, host_id=host_id, borrowed=False)
    return _shared(state, config, rules)


def _for_own_slot(state: EngineState, tree: Tree) -> Node | None:
    heads = [
        node
        for node in _heads(state, tree.tree_id)
        if (tree.tree_id, node.level) not in state.ledger.own
    ]
    return max(heads, key=_deepest_then_oldest, default=None)


def _shared(state: EngineState, config: ControllerConfig, rules: Rules) -> Grant | None:
    """Weighted fair queueing over tenants, of slots held and not of slots given: a slot is not
    pre-emptible, so whoever keeps slots for long is asked last, not whoever asks often.

    The tenant that holds least for its weight is next, with its deepest request, then its oldest;
    a queued root keeps the younger ones of its tenant from borrowing. When a root that is next
    needs more than is free, slots are gathered for it and nobody overtakes it, so no stream of
    small requests starves it.
    """
    ledger = state.ledger
    capacity = state.capacity
    free = capacity - ledger.reserved - (ledger.borrowed if rules.count_borrowed else 0)
    if free <= 0:
        return None
    chosen = _gathering(state, capacity)
    if chosen is None:
        chosen = _next_by_share(state, config, capacity)
    if chosen is None:
        return None
    tree = state.trees[chosen.tree_id]
    borrowed = tree.reserved
    if not borrowed and tree.depth > free:
        ledger.gathering = chosen.invocation_id
        return None
    if borrowed and ledger.reserved + ledger.borrowed >= capacity:
        return None
    host_id = _host(state)
    if host_id is None:
        return None
    return Grant(invocation_id=chosen.invocation_id, host_id=host_id, borrowed=borrowed)


def _gathering(state: EngineState, capacity: int) -> Node | None:
    """The root for which slots are gathered, unless it cannot have enough any more."""
    root_id = state.ledger.gathering
    if root_id is None or state.trees[root_id].depth > capacity:
        return None
    return state.nodes[root_id]


def _next_by_share(state: EngineState, config: ControllerConfig, capacity: int) -> Node | None:
    cap = math.ceil(config.borrowed_share * capacity)
    best: tuple[float, int] | None = None
    chosen: Node | None = None
    for tenant_id, share in state.ledger.shares.items():
        node = _next_of(state, share, cap, capacity)
        if node is None:
            continue
        key = (share.held / config.tenant_weights.get(tenant_id, 1.0), node.ordinal)
        if best is None or key < best:
            best, chosen = key, node
    return chosen


def _next_of(state: EngineState, share: Share, cap: int, capacity: int) -> Node | None:
    """A tenant's next request. A root that all hosts together cannot hold holds nobody back."""
    fitting = (
        state.nodes[root_id] for root_id in share.roots if state.trees[root_id].depth <= capacity
    )
    root = next(fitting, None)
    if share.borrowed >= cap:
        return root
    heads = (node for tree_id in share.trees for node in _heads(state, tree_id))
    older = (node for node in heads if root is None or node.ordinal < root.ordinal)
    return max(older, key=_deepest_then_oldest, default=root)


def _heads(state: EngineState, tree_id: InvocationId) -> Iterator[Node]:
    """Of those that wait in an admitted tree, the first of each group that nothing holds back."""
    for group in state.ledger.waiting[tree_id].values():
        for invocation_id in group:
            node = state.nodes[invocation_id]
            if not _at_limit(state.ledger, node, state.parent_of(node)):
                if any(not child.gone for child in state.children_of(node)):
                    continue  # the remains of a lost attempt
                yield node
            break


def _at_limit(ledger: Ledger, node: Node, parent: Node | None) -> bool:
    if parent is None or not counts(node, parent):
        return False
    return ledger.running.get(parent.invocation_id, 0) >= parent.granted.spawn.max_concurrent


def _deepest_then_oldest(node: Node) -> tuple[int, int]:
    return (node.level, -node.ordinal)


def _host(state: EngineState) -> HostId | None:
    """The host with the most free slots."""
    best: tuple[int, HostId] | None = None
    for host in state.hosts.values():
        free = host.capacity - state.ledger.used.get(host.host_id, 0)
        if free > 0 and (best is None or free > best[0]):
            best = (free, host.host_id)
    return best[1] if best else None


def over_capacity(state: EngineState, rules: Rules = RULES) -> list[InvocationId]:
    """The youngest trees that must end because capacity fell below what was promised. Trees that
    are ending anyway give back theirs."""
    ledger = state.ledger
    excess = ledger.reserved + ledger.borrowed - state.capacity
    if excess <= 0 or not rules.drop_excess:
        return []
    lasting: list[Tree] = []
    for tree in state.trees.values():
        if tree.reserved and state.nodes[tree.tree_id].ending is None:
            lasting.append(tree)
        elif tree.reserved:
            excess -= _held_by(state, tree)
    victims: list[InvocationId] = []
    for tree in sorted(lasting, key=lambda tree: -tree.ordinal):
        if excess <= 0:
            break
        victims.append(tree.tree_id)
        excess -= _held_by(state, tree)
    return victims


def _held_by(state: EngineState, tree: Tree) -> int:
    slots = (state.nodes[invocation_id].slot for invocation_id in tree.nodes)
    return tree.depth + sum(slot is not None and slot.borrowed for slot in slots)
