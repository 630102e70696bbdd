"""Ends what must end and finishes what can finish.

Called by `engine.decide` after every event. An invocation whose ending is decided ends its live
children first; it is `ended` once they are gone and its files are captured; a tree is over once
nothing of it is left.
"""

from __future__ import annotations

from controller.core.ids import InvocationId
from controller.core.model import Cause, Ending, EndingKind, State, Value
from controller.engine import records as rec
from controller.engine.draft import Draft
from controller.engine.state import Node


def decide_ending(draft: Draft, node: Node, ending: Ending, *, value: Value | None = None) -> None:
    """Makes an ending final, with all live descendants' (cause: the parent ended)."""
    running = node.slot is not None and node.state is State.RUNNING
    captures = running and not node.capturing and not node.captured
    lost = ending.kind in (
        EndingKind.SANDBOX_LOST,
        EndingKind.HOST_LOST,
        EndingKind.DENIED,
        EndingKind.START_FAILED,
    )
    draft.add(
        rec.EndingDecided(
            invocation_id=node.invocation_id,
            ending=ending,
            value=value,
            capture=captures and not lost,
        )
    )
    for child in draft.state.children_of(node):
        if child.ending is None:
            inherited = Ending(kind=EndingKind.CANCELLED, cause=Cause.PARENT_ENDED)
            decide_ending(draft, child, inherited)


def settle(draft: Draft) -> None:
    """Adds `Ended` and `TreeEnded` wherever they are due, children before parents."""
    state = draft.state
    touched: dict[InvocationId, None] = {}
    for record in draft.records:
        touched[record.invocation_id] = None
    work = list(touched)
    while work:
        node = state.nodes.get(work.pop())
        if node is None:
            continue
        if _may_end(draft, node):
            draft.add(rec.Ended(invocation_id=node.invocation_id, time_us=draft.now_us))
        if not node.gone:
            continue
        if node.parent_id is not None:
            work.append(node.parent_id)
            continue
        tree = state.trees[node.tree_id]
        if not tree.over and all(state.nodes[item].gone for item in tree.nodes):
            draft.add(rec.TreeEnded(invocation_id=node.tree_id))


def _may_end(draft: Draft, node: Node) -> bool:
    if node.state is not State.ENDING or node.capturing:
        return False
    return all(child.gone for child in draft.state.children_of(node))
