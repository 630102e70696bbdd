"""The one place of control flow: what follows from an event.

Called by `controller.loop`. `decide` answers with records, each folded at once through the
`Draft`, so that one event may lead to several that build on each other: after the event's own
records it settles the tree (ends descendants, finishes what can finish) and gives out slots.
"""

from __future__ import annotations

from dataclasses import replace

from controller.config import ControllerConfig
from controller.core.errors import Reason, Refused, invariant
from controller.core.ids import CallId, InvocationId, SandboxId
from controller.core.model import (
    Cause,
    CellOutcome,
    Ending,
    EndingKind,
    Evidence,
    GoneCause,
    Mode,
    State,
)
from controller.engine import boxes, spawning, tools
from controller.engine import events as ev
from controller.engine import records as rec
from controller.engine.draft import Draft
from controller.engine.endings import of_cell, of_gone, of_mismatch
from controller.engine.scheduler import RULES, Rules, next_grant, over_capacity
from controller.engine.settle import decide_ending, settle
from controller.engine.state import EngineState, HostState, Node


def decide(
    state: EngineState,
    event: ev.Event,
    now_us: int,
    config: ControllerConfig,
    rules: Rules = RULES,
) -> list[rec.Record]:
    """The records that follow from an event, already folded into the state.

    Raises:
        Refused: the request cannot be granted; nothing has changed.
    """
    draft = Draft(state=state, now_us=now_us, config=config, rules=rules)
    try:
        _dispatch(draft, event)
    except Refused:
        invariant(not draft.records, "a refusal came after a record")
        raise
    settle(draft)
    while (grant := next_grant(state, config, rules)) is not None:
        node = state.nodes[grant.invocation_id]
        draft.add(
            rec.SlotGranted(
                invocation_id=node.invocation_id,
                attempt=node.attempt + 1,
                host_id=grant.host_id,
                borrowed=grant.borrowed,
                host_generation=state.hosts[grant.host_id].host_generation,
            )
        )
    return draft.records


def _dispatch(draft: Draft, event: ev.Event) -> None:
    state = draft.state
    match event:
        case ev.InvocationRequested():
            spawning.root(draft, event)
        case ev.SpawnRequested():
            spawning.child(draft, event)
        case ev.SpawnInvalid():
            spawning.refuse_call(draft, event)
        case ev.AwaitRequested() | ev.ChildCancelRequested():
            _child_call(draft, event)
        case ev.ArtifactSaved():
            _artifact_saved(draft, event)
        case ev.SandboxStarted():
            _sandbox_started(draft, event)
        case ev.CellEnded():
            _cell_ended(draft, event)
        case ev.CellSubmitted():
            boxes.submitted(draft, event)
        case ev.InterruptRequested():
            boxes.interrupt(draft, event)
        case ev.CellShown():
            if (node := _current(draft, event.invocation_id, event.sandbox_id)) is not None:
                boxes.shown(draft, node, event)
        case ev.IdlePassed():
            boxes.idle_passed(draft, event)
        case ev.ToolRequested():
            _tool_requested(draft, event)
        case ev.ToolReturned():
            tools.returned(draft, event)
        case ev.ToolServerLost():
            tools.server_lost(draft, event)
        case ev.ToolTimeout():
            tools.timed_out(draft, event)
        case ev.ContractChecked():
            _contract_checked(draft, event)
        case ev.FilesCaptured():
            _files_captured(draft, event)
        case ev.SandboxGone():
            _sandbox_gone(draft, event)
        case ev.CancelRequested():
            _cancel(draft, state.live(event.invocation_id), event.cause)
        case ev.SessionLost():
            for node in list(state.nodes.values()):
                if node.session_id == event.session_id and node.cancel_on_disconnect:
                    _cancel(draft, node, Cause.DISCONNECTED)
        case ev.DeadlinePassed():
            _deadline_passed(draft, event)
        case ev.HostJoined():
            _host_joined(draft, event)
        case ev.HostLost():
            _host_lost(draft, event)


def _current(draft: Draft, invocation_id: InvocationId, sandbox_id: SandboxId) -> Node | None:
    """The node, if this sandbox is its current attempt's; late news of others changes nothing."""
    node = draft.state.live(invocation_id)
    if node is None or node.sandbox_id != sandbox_id or node.slot is None:
        return None
    return node


def _child_call(draft: Draft, event: ev.AwaitRequested | ev.ChildCancelRequested) -> None:
    node = _current(draft, event.parent_id, event.sandbox_id)
    if node is None or event.call_id in node.calls:
        return
    problem = None
    if event.child_id not in node.children:
        problem = Refused(Reason.INVOCATION_NOT_FOUND, "no such child of this invocation")
    elif len(node.calls) >= draft.config.calls:
        problem = Refused(Reason.QUOTA_EXCEEDED, f"more than {draft.config.calls} calls")
    if problem is not None:
        spawning.refuse(draft, node, event.call_id, problem)
        return
    cancel = isinstance(event, ev.ChildCancelRequested)
    draft.add(
        rec.CallOpened(
            invocation_id=node.invocation_id,
            call_id=event.call_id,
            child_id=event.child_id,
            cancel=cancel,
        )
    )
    if cancel:
        _cancel(draft, draft.state.live(event.child_id), Cause.PARENT_CANCELLED)


def _artifact_saved(draft: Draft, event: ev.ArtifactSaved) -> None:
    node = _current(draft, event.invocation_id, event.sandbox_id)
    if node is None or (event.call_id and event.call_id in node.calls):
        return
    draft.add(
        rec.ArtifactPublished(
            invocation_id=node.invocation_id, call_id=event.call_id, artifact=event.artifact
        )
    )


def _tool_requested(draft: Draft, event: ev.ToolRequested) -> None:
    node = _current(draft, event.invocation_id, event.sandbox_id)
    if node is None or event.call_id in node.calls:
        return
    try:
        tools.requested(draft, node, event)
    except Refused as refused:
        spawning.refuse(draft, node, event.call_id, refused)


def _sandbox_started(draft: Draft, event: ev.SandboxStarted) -> None:
    node = _current(draft, event.invocation_id, event.sandbox_id)
    if node is None or node.state is not State.STARTING:
        return
    draft.add(
        rec.CodeStarted(
            invocation_id=node.invocation_id,
            sandbox_id=event.sandbox_id,
            enforcement=event.enforcement,
            driver=event.driver,
            time_us=draft.now_us,
        )
    )


def _cell_ended(draft: Draft, event: ev.CellEnded) -> None:
    node = _current(draft, event.invocation_id, event.sandbox_id)
    if node is None:
        return
    if event.state_lost or event.outcome is CellOutcome.REPL_DIED:
        tools.repl_lost(draft, node)
    if node.interactive:
        boxes.cell_ended(draft, node, event)
        if node.checking is not None and event.checked is not None:
            _contract_checked(draft, event.checked)
        return
    if node.cell_id != event.cell_id or node.cell_outcome is not None:
        return
    check = (
        node.ending is None
        and not event.output_cut
        and event.outcome in (CellOutcome.RETURNED, CellOutcome.COMPLETED)
    )
    draft.add(
        rec.CellRecorded(
            invocation_id=node.invocation_id,
            cell_id=event.cell_id,
            outcome=event.outcome,
            value=event.value if check else None,
            failure=event.failure,
            stdout_bytes=event.stdout_bytes,
            stderr_bytes=event.stderr_bytes,
            evidence=event.evidence,
            check=check,
            capture=check and node.spec.mode is Mode.PROGRAM,
        )
    )
    if check and event.checked is not None:
        _contract_checked(draft, event.checked)
    elif node.ending is None and not check:
        decide_ending(draft, node, of_cell(event, node.granted))


def _contract_checked(draft: Draft, event: ev.ContractChecked) -> None:
    node = draft.state.live(event.invocation_id)
    if node is None or node.checking is None or node.ending is not None:
        return
    value = node.checking
    foreign = [item for item in event.artifact_ids if item not in node.readable]
    accepted = event.accepted and not foreign
    draft.add(
        rec.ValueChecked(
            invocation_id=node.invocation_id,
            accepted=accepted,
            mismatch=event.mismatch,
            artifact_ids=event.artifact_ids if accepted else (),
        )
    )
    if accepted:
        returned = Ending(kind=EndingKind.RETURNED, evidence=node.cell_evidence)
        decide_ending(draft, node, returned, value=value)
    else:
        missed = replace(of_mismatch(event, foreign), evidence=node.cell_evidence)
        if node.interactive:
            boxes.refused_return(draft, node, missed)
        else:
            decide_ending(draft, node, missed)


def _files_captured(draft: Draft, event: ev.FilesCaptured) -> None:
    node = _current(draft, event.invocation_id, event.sandbox_id)
    if node is None or not node.capturing:
        return
    for artifact in event.artifacts:
        draft.add(
            rec.ArtifactPublished(
                invocation_id=node.invocation_id, call_id=CallId(""), artifact=artifact
            )
        )
    draft.add(
        rec.CaptureEnded(
            invocation_id=node.invocation_id,
            refused_count=event.refused_count,
            problem=event.problem,
        )
    )


def _sandbox_gone(draft: Draft, event: ev.SandboxGone) -> None:
    node = _current(draft, event.invocation_id, event.sandbox_id)
    if node is None:
        return
    if node.ending is None and node.checking is None:  # a value that was given stays given
        ending = of_gone(event)
        if _may_retry(draft, node, ending):
            _abandon(draft, node, event)
            return
        decide_ending(draft, node, ending)
    _removed(draft, node, event.evidence)


def _removed(draft: Draft, node: Node, evidence: Evidence) -> None:
    draft.add(
        rec.SandboxRemoved(
            invocation_id=node.invocation_id, attempt=node.attempt, evidence=evidence
        )
    )


def _may_retry(draft: Draft, node: Node, ending: Ending) -> bool:
    lost = ending.kind in (EndingKind.SANDBOX_LOST, EndingKind.HOST_LOST)
    return lost and node.spec.retry_on_loss and node.attempt < draft.config.attempts


def _abandon(draft: Draft, node: Node, event: ev.SandboxGone) -> None:
    """The attempt's descendants are ended; the next one waits until they are gone."""
    for child in draft.state.children_of(node):
        _cancel(draft, child, Cause.PARENT_ENDED)
    draft.add(
        rec.AttemptAbandoned(
            invocation_id=node.invocation_id, attempt=node.attempt, message=event.message
        )
    )


def _cancel(draft: Draft, node: Node | None, cause: Cause) -> None:
    if node is not None and node.ending is None:
        decide_ending(draft, node, Ending(kind=EndingKind.CANCELLED, cause=cause))


def _deadline_passed(draft: Draft, event: ev.DeadlinePassed) -> None:
    node = draft.state.live(event.invocation_id)
    if node is None or node.ending is not None or draft.now_us < node.granted.deadline_us:
        return
    seconds = (node.granted.deadline_us - node.create_time_us) / 1_000_000
    ending = Ending(
        kind=EndingKind.DEADLINE_EXCEEDED,
        message=f"it took longer than {seconds:g} s",
        cause=Cause.DEADLINE,
        evidence=Evidence(limit="timeout", limit_value=max(1, round(seconds))),
    )
    decide_ending(draft, node, ending)


def _host_joined(draft: Draft, event: ev.HostJoined) -> None:
    """Hosts are not journalled: they tell again after every start of the controller."""
    draft.state.hosts[event.host_id] = HostState(
        host_id=event.host_id,
        host_generation=event.host_generation,
        capacity=event.capacity,
        statements=event.statements,
    )
    for node in list(draft.state.nodes.values()):
        slot = node.slot
        if slot is None or slot.host_id != event.host_id:
            continue
        if slot.host_generation == event.host_generation:
            continue  # the sandbox's own stream tells what became of it, or starts it
        _lost_with_host(draft, node, "the host restarted and its sandboxes ended with it")
    _fit(draft, event.more_expected)


def _host_lost(draft: Draft, event: ev.HostLost) -> None:
    draft.state.hosts.pop(event.host_id, None)
    message = "the host does not answer"
    for node in list(draft.state.nodes.values()):
        if node.slot is None or node.slot.host_id != event.host_id:
            continue
        if node.ending is None and node.checking is None:
            # No new attempt: the old one may still run over there.
            decide_ending(draft, node, Ending(kind=EndingKind.HOST_LOST, message=message))
        _removed(draft, node, Evidence(detail=message))
    _fit(draft, event.more_expected)


def _lost_with_host(draft: Draft, node: Node, message: str) -> None:
    _sandbox_gone(
        draft,
        ev.SandboxGone(
            invocation_id=node.invocation_id,
            sandbox_id=node.sandbox_id,
            cause=GoneCause.HOST_LOST,
            message=message,
            evidence=Evidence(detail=message),
        ),
    )


def _fit(draft: Draft, more_expected: bool) -> None:
    """The capacity changed. Until all hosts have told, it is not known what there is."""
    draft.state.ledger.stir()
    if more_expected:
        return
    for tree_id in over_capacity(draft.state, draft.rules):
        node = draft.state.nodes[tree_id]
        message = "capacity fell below what the live trees had been promised"
        decide_ending(draft, node, Ending(kind=EndingKind.CAPACITY_LOST, message=message))
