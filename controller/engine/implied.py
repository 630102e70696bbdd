"""Which commands a record implies, and which ones recovery issues again.

Called by `controller.loop`, after the record is folded; the commands are issued when it is durable.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from controller.core.errors import Reason
from controller.core.ids import CallId, InvocationId, SandboxId, ToolServerId, tool_owner
from controller.core.model import (
    NONE_VALUE,
    Artifact,
    CellOutcome,
    Ending,
    EndingKind,
    Failure,
    State,
    Value,
)
from controller.engine import commands as cmd
from controller.engine import records as rec
from controller.engine.state import Call, EngineState, Node, ToolUse


def commands(state: EngineState, record: rec.Record) -> list[cmd.Command]:
    """What to do because of this record."""
    node = state.nodes.get(record.invocation_id)
    if node is None:  # its tree is over
        return []
    match record:
        case rec.Admitted():
            return [_deadline(node), *_accepted(state, node, record)]
        case rec.SlotGranted():
            return [_start(node)]
        case rec.CallRefused():
            failure = Failure(message=record.message, reason=record.reason)
            return [_reply(node, record.call_id, failure=failure)]
        case rec.CallOpened():
            return list(answer(state, node, record.call_id))
        case rec.ArtifactPublished() if record.call_id:
            value = _artifact_value(record.artifact)
            return [_reply(node, record.call_id, value=value)]
        case rec.CodeStarted() if node.interactive:
            return [*_run_next(node), *_idle_timer(state, node)]
        case rec.CellAccepted():
            runs = next(iter(node.open_cells)) == record.cell_id
            return [*(_run_next(node) if runs else ()), *_idle_timer(state, node)]
        case rec.CellInterrupted():
            return [cmd.InterruptCell(sandbox_id=node.sandbox_id, cell_id=record.cell_id)]
        case rec.CellRecorded() if node.interactive:
            if node.checking is not None:
                return [_check(node, node.checking)]
            never_ran = record.outcome is CellOutcome.CANCELLED_BEFORE_START
            return [*(() if never_ran else _run_next(node)), *_idle_timer(state, node)]
        case rec.ValueChecked() if node.interactive:
            return [*_run_next(node), *_idle_timer(state, node)]
        case rec.ToolCalled():
            use = node.calls[record.call_id].tool
            return [_call_tool(state, node, use)] if use is not None and use.open else []
        case rec.ToolAnswered():
            return [*answer(state, node, record.call_id), _end_tool_call(state, record)]
        case rec.CellRecorded() if record.value is not None:
            captures = [_capture(node)] if record.capture else []
            checks = [_check(node, record.value)] if node.checking is not None else []
            return [*checks, *captures]
        case rec.EndingDecided():
            found: list[cmd.Command] = [cmd.DropDeadline(invocation_id=node.invocation_id)]
            if node.interactive:
                found.append(cmd.SetIdleTimer(invocation_id=node.invocation_id, at_us=0))
            found.extend(_cancel_tool_calls(state, node))
            if record.capture:
                found.append(_capture(node))
            return found
        case rec.Ended():
            parent = state.parent_of(node)
            timer = _idle_timer(state, parent) if parent is not None else ()
            return [*_tell_parent(state, node), *timer, *_destroy(node)]
        case _:
            return []


def recovery(state: EngineState) -> list[cmd.Command]:
    """What a new controller does to take over the live trees, oldest first."""
    found: list[cmd.Command] = []
    for node in sorted(state.nodes.values(), key=lambda node: node.ordinal):
        if node.ended:
            found.extend(_destroy(node))
            continue
        if node.ending is None:
            found.append(_deadline(node))
        if node.checking is not None:
            found.append(_check(node, node.checking))
        if node.slot is None:
            continue
        if node.ending is None or node.capturing:
            found.append(_start(node))
        if node.capturing:
            found.append(_capture(node))
        if node.interactive and node.ending is None:
            found.extend([*_run_next(node), *_idle_timer(state, node)])
            if node.next_cell is not None and node.next_cell.interrupted:
                cell_id = node.next_cell.cell_id
                found.append(cmd.InterruptCell(sandbox_id=node.sandbox_id, cell_id=cell_id))
    for invocation_id, call_id in state.tool_calls.values():
        node = state.nodes[invocation_id]
        use = node.calls[call_id].tool
        assert use is not None
        found.append(_call_tool(state, node, use))
    return found


def answer(state: EngineState, node: Node, call_id: CallId) -> Iterator[cmd.Reply]:
    """The answer to a call of this node's code, if there is one yet."""
    call = node.calls.get(call_id)
    if call is None:
        return
    if call.refusal is not None:
        reason, message = call.refusal
        yield _reply(node, call_id, failure=Failure(message=message, reason=reason))
    elif call.tool is not None:
        if not call.tool.open:
            yield _reply(node, call_id, value=call.tool.value, failure=call.tool.failure)
    elif call.artifact is not None:
        yield _reply(node, call_id, value=_artifact_value(call.artifact))
    elif call.child_id is not None:
        yield from _child_answer(node, call_id, call, state.nodes[call.child_id])


def _child_answer(node: Node, call_id: CallId, call: Call, child: Node) -> Iterator[cmd.Reply]:
    if call.wants_id:
        value = Value(json=json.dumps(child.invocation_id).encode())
        yield _reply(node, call_id, value=value)
    elif not child.ended:
        return
    elif call.cancel:
        yield _reply(node, call_id, value=NONE_VALUE)
    else:
        assert child.ending is not None
        if child.ending.kind is EndingKind.RETURNED:
            yield _reply(node, call_id, value=child.value or NONE_VALUE)
        else:
            yield _reply(node, call_id, failure=child_failure(child, child.ending))


def child_failure(child: Node, ending: Ending) -> Failure:
    """What the parent's code sees of a child that did not return."""
    own = ending.failure or Failure()
    raised = ending.kind is EndingKind.RAISED and own.type_name
    return Failure(
        type_name=own.type_name,
        message=own.message if raised else ending.message or own.message,
        traceback=own.traceback,
        invocation_id=child.invocation_id,
        ending=ending.kind,
        reason=own.reason,
        mismatch=own.mismatch,
    )


def _accepted(state: EngineState, node: Node, record: rec.Admitted) -> Iterator[cmd.Command]:
    parent = state.parent_of(node)
    if parent is not None and record.detached:
        yield from answer(state, parent, record.call_id)


def _tell_parent(state: EngineState, node: Node) -> Iterator[cmd.Command]:
    parent = state.parent_of(node)
    if parent is None or parent.slot is None:
        return
    for call_id in node.waited:
        yield from answer(state, parent, call_id)


def _deadline(node: Node) -> cmd.SetDeadline:
    return cmd.SetDeadline(invocation_id=node.invocation_id, at_us=node.granted.deadline_us)


def _start(node: Node) -> cmd.StartSandbox:
    assert node.slot is not None
    return cmd.StartSandbox(
        tenant_id=node.tenant_id,
        invocation_id=node.invocation_id,
        host_id=node.slot.host_id,
        sandbox_id=node.sandbox_id,
        cell_id=node.cell_id,
        program=node.spec.program,
        inputs=node.spec.inputs,
        granted=node.granted,
        depth=node.depth,
        has_contract=node.spec.contract is not None,
        run=node.cell_outcome is None and node.ending is None and not node.interactive,
        mode=node.spec.mode,
        attach_stdin=node.spec.attach_stdin,
    )


def _run_next(node: Node) -> Iterator[cmd.RunCell]:
    cell = node.next_cell
    if cell is None or node.ending is not None:
        return
    yield cmd.RunCell(
        invocation_id=node.invocation_id,
        sandbox_id=node.sandbox_id,
        cell_id=cell.cell_id,
        code=cell.code,
        inputs=cell.inputs if node.bound else (*node.spec.inputs, *cell.inputs),
        timeout_seconds=cell.timeout_seconds,
    )


def _idle_timer(state: EngineState, node: Node) -> Iterator[cmd.SetIdleTimer]:
    """The timer of a box as it stands: it runs while nothing of the box does."""
    if not node.interactive or node.ending is not None or node.state is not State.RUNNING:
        return
    at_us = node.idle_since_us + node.granted.idle_timeout_us if state.is_idle(node) else 0
    yield cmd.SetIdleTimer(invocation_id=node.invocation_id, at_us=at_us)


def _owner_of(state: EngineState, tool_id: str) -> tuple[InvocationId | ToolServerId, SandboxId]:
    """Who owns a tool, with the sandbox where its code runs; none for a client's tool server."""
    owner = tool_owner(tool_id)
    node = state.nodes.get(InvocationId(owner))
    return ToolServerId(owner), node.sandbox_id if node is not None else SandboxId("")


def _call_tool(state: EngineState, node: Node, use: ToolUse) -> cmd.CallTool:
    owner, sandbox_id = _owner_of(state, use.tool_id)
    return cmd.CallTool(
        tenant_id=node.tenant_id,
        owner=owner,
        sandbox_id=sandbox_id,
        tool_call_id=use.tool_call_id,
        tool_id=use.tool_id,
        method=use.method,
        arguments=use.arguments or NONE_VALUE,
        invocation_id=node.invocation_id,
        deadline_us=use.deadline_us,
    )


def _end_tool_call(state: EngineState, record: rec.ToolAnswered) -> cmd.EndToolCall:
    use = state.nodes[record.invocation_id].calls[record.call_id].tool
    assert use is not None
    owner, sandbox_id = _owner_of(state, use.tool_id)
    reason = record.failure.reason if record.failure is not None else ""
    return cmd.EndToolCall(
        owner=owner,
        sandbox_id=sandbox_id,
        tool_call_id=record.tool_call_id,
        cancel=reason == Reason.TOOL_TIMED_OUT,
    )


def _cancel_tool_calls(state: EngineState, node: Node) -> list[cmd.Command]:
    """Tells the owners of its open tool calls that nobody waits any more."""
    found: list[cmd.Command] = []
    for call in node.calls.values():
        if call.tool is None or not call.tool.open:
            continue
        owner, sandbox_id = _owner_of(state, call.tool.tool_id)
        found.append(
            cmd.EndToolCall(
                owner=owner,
                sandbox_id=sandbox_id,
                tool_call_id=call.tool.tool_call_id,
                cancel=True,
            )
        )
    return found


def _destroy(node: Node) -> Iterator[cmd.Command]:
    if node.slot is not None:
        yield cmd.DestroySandbox(
            invocation_id=node.invocation_id,
            host_id=node.slot.host_id,
            sandbox_id=node.sandbox_id,
        )


def _capture(node: Node) -> cmd.CaptureArtifacts:
    return cmd.CaptureArtifacts(
        tenant_id=node.tenant_id,
        invocation_id=node.invocation_id,
        sandbox_id=node.sandbox_id,
        patterns=node.granted.artifact_patterns,
    )


def _check(node: Node, value: Value) -> cmd.CheckContract:
    contract = node.spec.contract
    return cmd.CheckContract(
        tenant_id=node.tenant_id,
        tree_id=node.tree_id,
        invocation_id=node.invocation_id,
        value=value,
        schema_json=contract.schema_json if contract else None,
    )


def _reply(
    node: Node, call_id: CallId, *, value: Value | None = None, failure: Failure | None = None
) -> cmd.Reply:
    return cmd.Reply(
        tenant_id=node.tenant_id,
        sandbox_id=node.sandbox_id,
        call_id=call_id,
        value=value,
        failure=failure,
    )


def _artifact_value(artifact: Artifact) -> Value:
    return Value(json=artifact_json(artifact))


def artifact_json(artifact: Artifact) -> bytes:
    """An artifact as the JSON object that code in a sandbox gets."""
    return json.dumps(
        {
            "artifact_id": artifact.artifact_id,
            "name": artifact.name,
            "sha256": artifact.sha256,
            "size_bytes": artifact.size_bytes,
            "media_type": artifact.media_type,
        }
    ).encode()


def shown_state(node: Node) -> State:
    """The state a reader sees: code that waits for a child is `waiting`."""
    if node.state is not State.RUNNING:
        return node.state
    return State.WAITING if node.cell_outcome is None and node.waits else State.RUNNING
