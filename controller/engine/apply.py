"""Folds records into the state. It never decides: recovery runs the same code over the journal.

Called by `controller.loop` for every record, and at recovery for those of the live trees.
"""

from __future__ import annotations

from dataclasses import replace

from controller.core.errors import invariant
from controller.core.ids import CallId, InvocationId, tool_owner
from controller.core.model import CellOutcome, State
from controller.engine import records as rec
from controller.engine.state import (
    KNOWN_REQUESTS,
    Call,
    EngineState,
    Node,
    OpenCell,
    Slot,
    ToolUse,
    Tree,
)


def apply(state: EngineState, record: rec.Record) -> EngineState:
    """The state after this record (the same object, changed)."""
    if isinstance(record, rec.Admitted):
        _admitted(state, record)
        return state
    node = state.nodes.get(record.invocation_id)
    invariant(node is not None, f"record {record.kind} of unknown {record.invocation_id}")
    assert node is not None
    match record:
        case rec.SlotGranted():
            _slot_granted(state, node, record)
        case rec.CallRefused():
            node.calls[record.call_id] = Call(refusal=(record.reason, record.message))
            node.call_refusals += 1
        case rec.CallOpened():
            node.calls[record.call_id] = Call(child_id=record.child_id, cancel=record.cancel)
            if not state.nodes[record.child_id].ended:
                _waits(node, state.nodes[record.child_id], record.call_id)
        case rec.ArtifactPublished():
            _artifact_published(node, record)
        case rec.CodeStarted():
            node.state = State.RUNNING
            node.start_time_us = node.start_time_us or record.time_us
            node.enforcement = record.enforcement
            node.driver = record.driver
            node.idle_since_us = record.time_us
        case rec.CellAccepted() | rec.CellInterrupted() | rec.CellDisplayed():
            _of_box(node, record)
        case rec.CellRecorded() if node.interactive:
            _box_cell_ended(node, record)
        case rec.ToolCalled():
            _tool_called(state, node, record)
        case rec.ToolAnswered():
            _tool_answered(state, node, record)
        case rec.CellRecorded():
            node.cell_outcome = record.outcome
            node.cell_evidence = record.evidence
            node.stdout_bytes = record.stdout_bytes
            node.stderr_bytes = record.stderr_bytes
            node.checking = record.value if record.check else None
            node.capturing = node.capturing or record.capture
        case rec.ValueChecked():
            node.checking = None
            if node.returned_cell is not None:
                node.ended_cells.add(node.returned_cell)
                node.returned_cell = None
                node.return_refusals += not record.accepted
        case rec.EndingDecided():
            _ending_decided(state, node, record)
        case rec.CaptureEnded():
            node.capturing = False
            node.captured = True
        case rec.Ended():
            _ended(state, node, record)
        case rec.SandboxRemoved():
            state.ledger.free(node, state.parent_of(node))
            node.slot = None
            node.capturing = False
            if node.ending is not None and node.ending.evidence is None:
                node.ending = replace(node.ending, evidence=record.evidence)
        case rec.AttemptAbandoned():
            _abandoned(state, node)
        case rec.TreeEnded():
            _tree_ended(state, record.invocation_id)
    return state


def _admitted(state: EngineState, record: rec.Admitted) -> None:
    node = Node(
        tenant_id=record.tenant_id,
        tree_id=record.tree_id,
        invocation_id=record.invocation_id,
        parent_id=record.parent_id,
        lineage=record.lineage,
        depth=record.depth,
        level=record.level,
        ordinal=state.next_ordinal,
        spec=record.spec,
        granted=record.granted,
        create_time_us=record.time_us,
        session_id=record.session_id,
        cancel_on_disconnect=record.cancel_on_disconnect,
        spawned_by=(record.parent_attempt, record.cell_id, record.call_id)
        if record.parent_id
        else None,
        detached=record.detached,
        readable=dict.fromkeys(record.spec.readable_artifacts),
    )
    state.next_ordinal += 1
    state.nodes[node.invocation_id] = node
    if record.request_id:
        key = (record.tenant_id, record.request_id)
        state.requests[key] = (record.content_digest, record.invocation_id)
        while len(state.requests) > KNOWN_REQUESTS:
            state.requests.popitem(last=False)
    if record.parent_id is None:
        state.trees[node.tree_id] = Tree(
            tenant_id=node.tenant_id,
            tree_id=node.tree_id,
            ordinal=node.ordinal,
            depth=record.granted.spawn.max_depth,
            nodes=[node.invocation_id],
        )
        state.ledger.queue(node, state.trees[node.tree_id])
        return
    tree = state.trees[node.tree_id]
    tree.nodes.append(node.invocation_id)
    state.ledger.queue(node, tree)
    parent = state.nodes[record.parent_id]
    parent.children[node.invocation_id] = None
    parent.child_count += 1
    if record.call_id:
        parent.calls[record.call_id] = Call(child_id=node.invocation_id, wants_id=record.detached)
        if not record.detached:
            _waits(parent, node, record.call_id)
    for ancestor_id in record.lineage:
        state.nodes[ancestor_id].descendant_count += 1


def _waits(parent: Node, child: Node, call_id: CallId) -> None:
    parent.waiting_calls += 1
    child.waited[call_id] = None


def _slot_granted(state: EngineState, node: Node, record: rec.SlotGranted) -> None:
    invariant(node.slot is None, f"{node.invocation_id} has a slot already")
    node.slot = Slot(
        host_id=record.host_id,
        host_generation=record.host_generation,
        level=node.level,
        borrowed=record.borrowed,
    )
    node.attempt = record.attempt
    node.state = State.STARTING
    tree = state.trees[node.tree_id]
    state.ledger.take(node, tree, state.parent_of(node))
    tree.reserved = True


def _artifact_published(node: Node, record: rec.ArtifactPublished) -> None:
    node.artifact_count += 1
    node.artifact_bytes += record.artifact.size_bytes
    node.readable[record.artifact.artifact_id] = None
    if record.call_id:
        node.calls[record.call_id] = Call(artifact=record.artifact)


def _ended(state: EngineState, node: Node, record: rec.Ended) -> None:
    invariant(node.ending is not None, f"{node.invocation_id} ends without an ending")
    node.state = State.ENDED
    node.end_time_us = record.time_us
    parent = state.parent_of(node)
    state.ledger.ended(node, parent)
    if parent is not None:
        parent.readable.update(node.readable)
        parent.waiting_calls -= len(node.waited)
        parent.idle_since_us = record.time_us


def _abandoned(state: EngineState, node: Node) -> None:
    state.ledger.free(node, state.parent_of(node))
    node.slot = None
    node.state = State.QUEUED
    node.cell_outcome = None
    node.cell_evidence = None
    node.checking = None
    node.capturing = node.captured = False
    _close_tool_calls(state, node)
    node.calls.clear()
    node.waiting_calls = 0
    for child in state.children_of(node):
        child.waited.clear()
    state.ledger.queue(node, state.trees[node.tree_id])


def _tree_ended(state: EngineState, tree_id: InvocationId) -> None:
    tree = state.trees[tree_id]
    for invocation_id in tree.nodes:
        invariant(state.nodes[invocation_id].gone, f"{invocation_id} outlives its tree")
    state.ledger.release(tree)
    tree.over = True
    tree.reserved = False


def _ending_decided(state: EngineState, node: Node, record: rec.EndingDecided) -> None:
    node.ending = record.ending
    node.value = record.value
    node.checking = None
    node.capturing = node.capturing or record.capture
    node.state = State.ENDING
    node.open_cells.clear()
    _close_tool_calls(state, node)
    state.ledger.unqueue(node)


def _of_box(node: Node, record: rec.CellAccepted | rec.CellInterrupted | rec.CellDisplayed) -> None:
    match record:
        case rec.CellAccepted():
            node.readable.update(dict.fromkeys(record.readable_artifacts))
            node.open_cells[record.cell_id] = OpenCell(
                cell_id=record.cell_id,
                code=record.code,
                inputs=record.inputs,
                timeout_seconds=record.timeout_seconds,
            )
        case rec.CellInterrupted():
            cell = node.open_cells[record.cell_id]
            node.open_cells[record.cell_id] = replace(cell, interrupted=True)
        case rec.CellDisplayed():
            stored = (item.artifact for item in record.data if item.artifact is not None)
            node.readable.update({reference.artifact_id: None for reference in stored})


def _box_cell_ended(node: Node, record: rec.CellRecorded) -> None:
    node.open_cells.pop(record.cell_id, None)
    node.cell_evidence = record.evidence
    node.stdout_bytes += record.stdout_bytes
    node.stderr_bytes += record.stderr_bytes
    node.idle_since_us = record.time_us
    if record.outcome is not CellOutcome.CANCELLED_BEFORE_START:
        node.bound = not record.state_lost
    if record.check:
        node.returned_cell = record.cell_id
        node.checking = record.value
    else:
        node.ended_cells.add(record.cell_id)


def _tool_called(state: EngineState, node: Node, record: rec.ToolCalled) -> None:
    node.calls[record.call_id] = Call(
        tool=ToolUse(
            tool_call_id=record.tool_call_id,
            tool_id=record.tool_id,
            method=record.method,
            arguments=record.arguments,
            deadline_us=record.deadline_us,
        )
    )
    node.waiting_calls += 1
    state.tool_calls[record.tool_call_id] = (node.invocation_id, record.call_id)
    owner = state.nodes.get(InvocationId(tool_owner(record.tool_id)))
    if owner is not None:
        owner.serving[record.tool_call_id] = node.invocation_id
        owner.readable.update(dict.fromkeys(record.artifact_ids))


def _tool_answered(state: EngineState, node: Node, record: rec.ToolAnswered) -> None:
    use = node.calls[record.call_id].tool
    invariant(use is not None and use.open, f"{record.tool_call_id} is answered twice")
    assert use is not None
    use.value, use.failure, use.arguments = record.value, record.failure, None
    node.readable.update(dict.fromkeys(record.artifact_ids))
    _close_tool_call(state, node, use)


def _close_tool_calls(state: EngineState, node: Node) -> None:
    """Nobody waits any more for what its code asked of tools."""
    for call in node.calls.values():
        if call.tool is not None and call.tool.open:
            _close_tool_call(state, node, call.tool)


def _close_tool_call(state: EngineState, node: Node, use: ToolUse) -> None:
    if state.tool_calls.pop(use.tool_call_id, None) is None:
        return
    node.waiting_calls -= 1
    owner = state.nodes.get(InvocationId(tool_owner(use.tool_id)))
    if owner is not None:
        owner.serving.pop(use.tool_call_id, None)
