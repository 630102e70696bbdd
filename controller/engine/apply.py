"""Folds records into the state. It never decides: recovery runs the same code over the journal.

Called by `controller.loop` for every record, and at recovery for those of the live trees.
"""

from __future__ import annotations

from dataclasses import replace

from controller.core.errors import invariant
from controller.core.ids import InvocationId
from controller.core.model import State
from controller.engine import records as rec
from controller.engine.state import KNOWN_REQUESTS, Call, EngineState, Node, Slot, Tree


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
                _waits(node, state.nodes[record.child_id])
        case rec.ArtifactPublished():
            _artifact_published(node, record)
        case rec.CodeStarted():
            node.state = State.RUNNING
            node.start_time_us = node.start_time_us or record.time_us
            node.enforcement = record.enforcement
            node.driver = record.driver
        case rec.CellRecorded():
            node.cell_outcome = record.outcome
            node.cell_evidence = record.evidence
            node.stdout_bytes = record.stdout_bytes
            node.stderr_bytes = record.stderr_bytes
            node.checking = record.value if record.check else None
            node.capturing = record.capture
        case rec.ValueChecked():
            node.checking = None
        case rec.EndingDecided():
            node.ending = record.ending
            node.value = record.value
            node.checking = None
            node.capturing = node.capturing or record.capture
            node.state = State.ENDING
            state.queue.pop(node.invocation_id, None)
        case rec.CaptureEnded():
            node.capturing = False
            node.captured = True
        case rec.Ended():
            _ended(state, node, record)
        case rec.SandboxRemoved():
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
    state.queue[node.invocation_id] = None
    if record.parent_id is None:
        state.trees[node.tree_id] = Tree(
            tenant_id=node.tenant_id,
            tree_id=node.tree_id,
            ordinal=node.ordinal,
            depth=record.granted.spawn.max_depth,
            nodes=[node.invocation_id],
        )
        key = (record.tenant_id, record.request_id)
        state.requests[key] = (record.content_digest, record.invocation_id)
        while len(state.requests) > KNOWN_REQUESTS:
            state.requests.popitem(last=False)
        return
    state.trees[node.tree_id].nodes.append(node.invocation_id)
    parent = state.nodes[record.parent_id]
    parent.children[node.invocation_id] = None
    parent.child_count += 1
    parent.calls[record.call_id] = Call(child_id=node.invocation_id, wants_id=record.detached)
    if not record.detached:
        _waits(parent, node)
    for ancestor_id in record.lineage:
        state.nodes[ancestor_id].descendant_count += 1


def _waits(parent: Node, child: Node) -> None:
    parent.waiting_calls += 1
    child.waited += 1


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
    state.trees[node.tree_id].reserved = True
    state.queue.pop(node.invocation_id, None)


def _artifact_published(node: Node, record: rec.ArtifactPublished) -> None:
    node.artifact_count += 1
    node.artifact_bytes += record.artifact.size_bytes
    node.readable[record.artifact.artifact_id] = None
    if record.call_id:
        node.calls[record.call_id] = Call(artifact_id=record.artifact.artifact_id)


def _ended(state: EngineState, node: Node, record: rec.Ended) -> None:
    invariant(node.ending is not None, f"{node.invocation_id} ends without an ending")
    node.state = State.ENDED
    node.end_time_us = record.time_us
    parent = state.parent_of(node)
    if parent is not None:
        parent.readable.update(node.readable)
        parent.waiting_calls -= node.waited
        node.waited = 0


def _abandoned(state: EngineState, node: Node) -> None:
    node.slot = None
    node.state = State.QUEUED
    node.cell_outcome = None
    node.cell_evidence = None
    node.checking = None
    node.capturing = node.captured = False
    node.calls.clear()
    node.waiting_calls = 0
    for child in state.children_of(node):
        child.waited = 0
    state.queue[node.invocation_id] = None


def _tree_ended(state: EngineState, tree_id: InvocationId) -> None:
    tree = state.trees[tree_id]
    for invocation_id in tree.nodes:
        invariant(state.nodes[invocation_id].gone, f"{invocation_id} outlives its tree")
    tree.over = True
    tree.reserved = False
