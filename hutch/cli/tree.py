"""A tree of invocations: kept from events while it runs, or made from a list, and drawn.

Called by `run`, `tree` and `ps`; calls Rich. Everything shown of an invocation is made harmless
first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from rich.text import Text
from rich.tree import Tree

from hutch import types
from hutch.cli import display

_SHOWN_CHILDREN = 12
_SHOWN_ROWS = 40


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    """One invocation as far as it is known."""

    invocation_id: str
    parent_id: str = ""
    label: str = ""
    depth: int = 1
    state: str = "queued"
    ending: types.Ending | None = None
    create_time: datetime | None = None
    start_time: datetime | None = None
    end_time: datetime | None = None
    sandbox_id: str = ""
    children: list[str] = field(default_factory=list)

    @property
    def word(self) -> str:
        """The ending kind, else the state."""
        return self.ending.kind if self.ending is not None else self.state

    @property
    def name(self) -> str:
        """The label, else the id."""
        return display.line(self.label, 60) or self.invocation_id


class InvocationTree:
    """The invocations of one root, by id."""

    def __init__(self, root_id: str) -> None:
        """A tree of which only the root's id is known."""
        self.root_id = root_id
        self.nodes: dict[str, Node] = {root_id: Node(invocation_id=root_id)}

    def add(self, invocation: types.Invocation) -> Node:
        """Takes an invocation as it stands."""
        node = self.nodes.get(invocation.invocation_id)
        if node is None:
            node = Node(invocation_id=invocation.invocation_id)
            self.nodes[invocation.invocation_id] = node
        is_new = not node.parent_id and bool(invocation.parent_id)
        node.parent_id, node.label = invocation.parent_id, invocation.label
        node.depth, node.state = invocation.depth, invocation.state
        node.ending = invocation.ending or node.ending
        node.create_time = invocation.create_time or node.create_time
        node.start_time = invocation.start_time or node.start_time
        node.end_time = invocation.end_time or node.end_time
        node.sandbox_id = invocation.sandbox_id or node.sandbox_id
        if is_new and node.invocation_id != self.root_id:
            parent = self.nodes.get(node.parent_id)
            if parent is None:
                parent = Node(invocation_id=node.parent_id)
                self.nodes[node.parent_id] = parent
            parent.children.append(node.invocation_id)
        return node

    def fold(self, event: types.Event) -> Node | None:
        """Takes an event; the node that it changed."""
        match event.detail:
            case types.Accepted(invocation=invocation):
                return self.add(invocation)
            case types.StateChanged(state=state, sandbox_id=sandbox_id):
                node = self.nodes.get(event.invocation_id)
                if node is None:
                    return None
                node.state = state
                node.sandbox_id = sandbox_id or node.sandbox_id
                if state == "running" and node.start_time is None:
                    node.start_time = event.event_time
                return node
            case types.Ended(ending=ending):
                node = self.nodes.get(event.invocation_id)
                if node is None:
                    return None
                node.ending, node.state, node.end_time = ending, "ended", event.event_time
                return node
            case _:
                return None

    @property
    def sandboxes(self) -> int:
        """How many of them had a sandbox."""
        return sum(1 for node in self.nodes.values() if node.sandbox_id)

    def render(self, *, rows: int = _SHOWN_ROWS, everything: bool = False) -> Tree:
        """The tree for a terminal: the busy ones first, many of a kind as a number."""
        now = datetime.now(UTC)
        root = self.nodes[self.root_id]
        drawn = Tree(self._row(root, now), guide_style="dim")
        self._draw(drawn, root, now, [10**9 if everything else rows], everything)
        return drawn

    def _draw(
        self, drawn: Tree, node: Node, now: datetime, left: list[int], everything: bool
    ) -> None:
        children = [self.nodes[key] for key in node.children]
        shown = children
        if not everything:
            # The ones that run are what a person looks for; ended ones only fill the space left.
            busy = [child for child in children if child.ending is None and child.state != "queued"]
            shown = busy[:_SHOWN_CHILDREN]
            if len(shown) < _SHOWN_CHILDREN:
                taken = {child.invocation_id for child in shown}
                rest = [child for child in children if child.invocation_id not in taken]
                taken |= {child.invocation_id for child in rest[len(shown) - _SHOWN_CHILDREN :]}
                shown = [child for child in children if child.invocation_id in taken]
        for position, child in enumerate(shown):
            if left[0] <= 0:
                shown = shown[:position]
                break
            left[0] -= 1
            branch = drawn.add(self._row(child, now))
            self._draw(branch, child, now, left, everything)
        hidden = len(children) - len(shown)
        if hidden:
            drawn.add(Text(f"… and {hidden} more: {self._count(children)}", style="dim"))

    def _count(self, nodes: Iterable[Node]) -> str:
        counts: dict[str, int] = {}
        for node in nodes:
            counts[node.word] = counts.get(node.word, 0) + 1
        return ", ".join(f"{number} {display.safe(word)}" for word, number in counts.items())

    def _row(self, node: Node, now: datetime) -> Text:
        text = Text(node.name)
        style = (
            display.ENDING_STYLES.get(node.word, "red")
            if node.ending is not None
            else display.STATE_STYLES.get(node.word, "")
        )
        text.append(f"  {display.safe(node.word)}", style=style)
        took = display.span(node.start_time or node.create_time, node.end_time or now)
        if took is not None and node.create_time is not None:
            text.append(f"  {display.seconds(max(took, 0.0))}", style="dim")
        if node.label:  # last, where a narrow terminal cuts
            text.append(f"  {node.invocation_id}", style="dim")
        return text

    def to_json(self) -> dict[str, Any]:
        """The tree as nested JSON."""
        return self._json(self.nodes[self.root_id])

    def _json(self, node: Node) -> dict[str, Any]:
        # Trees are at most 16 deep, so recursion is.
        return {
            "invocation_id": node.invocation_id,
            "label": node.label,
            "depth": node.depth,
            "state": node.state,
            "ending": node.ending.kind if node.ending is not None else None,
            "message": node.ending.message if node.ending is not None else "",
            "sandbox_id": node.sandbox_id,
            "children": [self._json(self.nodes[key]) for key in node.children],
        }


def from_list(invocations: Iterable[types.Invocation], root_id: str) -> InvocationTree:
    """A tree from what a list shows, oldest first."""
    tree = InvocationTree(root_id)
    for invocation in invocations:
        tree.add(invocation)
    return tree
