"""The read model's rows of live invocations, made after every change.

Called by the loop; calls `convert`. What of an invocation stays the same is made once.
"""

from __future__ import annotations

from controller import convert
from controller.core.ids import InvocationId
from controller.core.model import Enforcement
from controller.engine.implied import shown_state
from controller.engine.state import Node
from controller.store.ports import InvocationRow
from hutch.v1 import invocation_pb2


class Rows:
    """Makes rows, and keeps for each live invocation the part that does not change."""

    def __init__(self) -> None:
        """Begins without an invocation."""
        self._kept: dict[
            InvocationId, tuple[tuple[Enforcement, ...], invocation_pb2.Invocation]
        ] = {}

    def __call__(self, node: Node) -> InvocationRow:
        """The row as the node stands."""
        kept = self._kept.get(node.invocation_id)
        if kept is None or kept[0] is not node.enforcement:
            kept = self._kept[node.invocation_id] = (node.enforcement, convert.attempt_out(node))
        if node.gone:
            del self._kept[node.invocation_id]
        found = invocation_pb2.Invocation()
        found.CopyFrom(kept[1])
        value = b""
        if node.ended and node.value is not None:
            value = convert.value_out(node.value).SerializeToString()
        return InvocationRow(
            tenant_id=node.tenant_id,
            invocation_id=node.invocation_id,
            tree_id=node.tree_id,
            parent_id=node.parent_id or "",
            depth=node.depth,
            state=shown_state(node),
            label=node.spec.label,
            create_time_us=node.create_time_us,
            end_time_us=node.end_time_us,
            ordinal=node.ordinal,
            snapshot=convert.with_changes(found, node).SerializeToString(),
            value=value,
        )
