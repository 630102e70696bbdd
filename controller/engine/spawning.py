"""Accepting roots and children: identity, depth, grants.

Called by `engine.decide`. Depth and lineage come from the parent's node, never from a message.
"""

from __future__ import annotations

from dataclasses import replace

from controller.core.errors import Reason, Refused
from controller.core.ids import CallId, InvocationId
from controller.core.model import InvocationSpec
from controller.engine import events as ev
from controller.engine import grants
from controller.engine import records as rec
from controller.engine.draft import Draft
from controller.engine.state import Node
from controller.engine.tools import level_below

JOURNALLED_REFUSALS = 20


def root(draft: Draft, event: ev.InvocationRequested) -> None:
    """Accepts a root, or nothing when the same request was accepted before.

    Raises:
        Refused: as `grants.for_root`; REQUEST_ID_REUSED; QUOTA_EXCEEDED; HOST_UNAVAILABLE.
    """
    state = draft.state
    known = state.requests.get((event.tenant_id, event.request_id))
    if known is not None:
        if known[0] != event.content_digest:
            raise Refused(Reason.REQUEST_ID_REUSED, "the request id was used with other content")
        return
    if event.tool_call_id:
        draft.add(_for_tool(draft, event))
        return
    if not state.hosts:
        raise Refused(Reason.HOST_UNAVAILABLE, "no sandbox host is connected")
    statements = [item for host in state.hosts.values() for item in host.statements]
    granted = grants.for_root(event.spec, draft.config.limits, statements, draft.now_us)
    if granted.spawn.max_depth > state.capacity:
        raise Refused(
            Reason.QUOTA_EXCEEDED,
            f"max_depth {granted.spawn.max_depth} needs as many sandboxes at once, and the hosts"
            f" hold {state.capacity}; lower max_depth",
        )
    if len(state.nodes) >= draft.config.live_invocations:
        raise Refused(Reason.QUOTA_EXCEEDED, "too many invocations are live")
    waiting = sum(len(share.roots) for share in state.ledger.shares.values())
    if waiting >= draft.config.queued_roots:
        raise Refused(Reason.QUOTA_EXCEEDED, "too many invocations wait for capacity")
    draft.add(
        rec.Admitted(
            tenant_id=event.tenant_id,
            tree_id=event.invocation_id,
            invocation_id=event.invocation_id,
            parent_id=None,
            lineage=(),
            depth=1,
            level=1,
            spec=event.spec,
            granted=granted,
            time_us=draft.now_us,
            request_id=event.request_id,
            content_digest=event.content_digest,
            session_id=event.session_id,
            cancel_on_disconnect=event.cancel_on_disconnect,
        )
    )


def child(draft: Draft, event: ev.SpawnRequested) -> None:
    """Accepts a child, or refuses it; a repeated request changes nothing.

    Raises:
        Refused: see `refuse`.
    """
    parent = draft.state.live(event.parent_id)
    if parent is None or parent.sandbox_id != event.sandbox_id or event.call_id in parent.calls:
        return
    try:
        record = replace(
            _admit(draft, parent, event.invocation_id, event.spec),
            cell_id=event.cell_id,
            call_id=event.call_id,
            detached=event.detached,
        )
    except Refused as refused:
        refuse(draft, parent, event.call_id, refused)
        return
    draft.add(record)


def refuse_call(draft: Draft, event: ev.SpawnInvalid) -> None:
    """Answers a spawn whose form is bad.

    Raises:
        Refused: see `refuse`.
    """
    parent = draft.state.live(event.parent_id)
    if parent is None or parent.sandbox_id != event.sandbox_id or event.call_id in parent.calls:
        return
    refuse(draft, parent, event.call_id, Refused(Reason(event.reason), event.message))


def refuse(draft: Draft, node: Node, call_id: CallId, refused: Refused) -> None:
    """Journals why a call of this node's code is refused. After the first few a refusal is only
    told, so that code which asks in a loop does not make the journal grow.

    Raises:
        Refused: it is not journalled; whoever brought the call answers it.
    """
    if node.call_refusals >= JOURNALLED_REFUSALS:
        raise refused
    draft.add(
        rec.CallRefused(
            invocation_id=node.invocation_id,
            call_id=call_id,
            reason=refused.reason.value,
            message=refused.message,
        )
    )


def _for_tool(draft: Draft, event: ev.InvocationRequested) -> rec.Admitted:
    """What a client's tool asks for while it serves a call: a child of whoever called it."""
    found = draft.state.tool_calls.get(event.tool_call_id) if event.tool_call_id else None
    if found is None or draft.state.nodes[found[0]].tenant_id != event.tenant_id:
        message = "tool_call_id: no such open tool call"
        raise Refused(Reason.FIELD_INVALID, message, field="tool_call_id")
    caller = draft.state.nodes[found[0]]
    return replace(
        _admit(draft, caller, event.invocation_id, event.spec, client=True),
        request_id=event.request_id,
        content_digest=event.content_digest,
        session_id=event.session_id,
        cancel_on_disconnect=event.cancel_on_disconnect,
    )


def _admit(
    draft: Draft,
    parent: Node,
    invocation_id: InvocationId,
    spec: InvocationSpec,
    *,
    client: bool = False,
) -> rec.Admitted:
    state = draft.state
    if parent.ending is not None:
        raise Refused(Reason.INVOCATION_ENDED, "the parent has ended")
    depth = parent.depth + 1
    if depth > parent.granted.spawn.max_depth:
        raise Refused(
            Reason.DEPTH_LIMIT_REACHED,
            f"a child would be at depth {depth}, the limit is {parent.granted.spawn.max_depth}",
        )
    level = level_below(state, parent) if draft.rules.tool_levels else parent.level + 1
    tree = state.trees[parent.tree_id]
    if level > tree.depth:
        raise Refused(
            Reason.DEPTH_LIMIT_REACHED,
            f"a child made while tools of deeper invocations are served would be at level {level},"
            f" and the tree has {tree.depth}",
        )
    statements = [item for host in state.hosts.values() for item in host.statements]
    granted = grants.for_child(
        spec, parent, draft.config.limits, statements, draft.now_us, client=client
    )
    if parent.child_count >= parent.granted.spawn.max_children:
        raise Refused(
            Reason.QUOTA_EXCEEDED,
            f"max_children: the parent has had {parent.child_count} children",
        )
    lineage = (*parent.lineage, parent.invocation_id)
    for ancestor_id in lineage:
        _check_descendants(state.nodes[ancestor_id], ancestor_id)
    if len(state.nodes) >= draft.config.live_invocations:
        raise Refused(Reason.QUOTA_EXCEEDED, "too many invocations are live")
    foreign = [item for item in spec.readable_artifacts if item not in parent.readable]
    if foreign and not client:
        raise Refused(
            Reason.GRANT_DENIED,
            f"the parent may not read the artifacts {', '.join(foreign)[:500]}",
            excess=", ".join(foreign)[:500],
        )
    return rec.Admitted(
        tenant_id=parent.tenant_id,
        tree_id=parent.tree_id,
        invocation_id=invocation_id,
        parent_id=parent.invocation_id,
        lineage=lineage,
        depth=depth,
        level=level,
        spec=spec,
        granted=granted,
        time_us=draft.now_us,
        parent_attempt=parent.attempt,
    )


def _check_descendants(ancestor: Node, ancestor_id: InvocationId) -> None:
    limit = ancestor.granted.spawn.max_descendants
    if ancestor.descendant_count >= limit:
        raise Refused(
            Reason.QUOTA_EXCEEDED, f"max_descendants of {ancestor_id}: there have been {limit}"
        )
