"""Tool calls: from the code that was granted a tool to whoever owns it, and back.

Called by `engine.decide` and `engine.spawning`. A call has one id, is answered once and for good,
and is never sent to a second owner.
"""

from __future__ import annotations

from controller.core.errors import Reason, Refused
from controller.core.ids import InvocationId, ToolCallId, ToolServerId, tool_owner
from controller.core.model import Failure, State, ToolGrant
from controller.engine import events as ev
from controller.engine import records as rec
from controller.engine.draft import Draft
from controller.engine.state import EngineState, Node

MICROSECONDS = 1_000_000


def requested(draft: Draft, node: Node, event: ev.ToolRequested) -> None:
    """Opens a call.

    Raises:
        Refused: GRANT_DENIED; FIELD_INVALID; TOOL_UNREACHABLE; QUOTA_EXCEEDED.
    """
    if node.ending is not None:
        raise Refused(Reason.INVOCATION_ENDED, "it has ended")
    granted = next((item for item in node.granted.tools if item.tool_id == event.tool_id), None)
    if granted is None:
        raise Refused(Reason.GRANT_DENIED, f"no such tool: {event.tool_id[:100]!r}")
    _check_method(granted, event.method)
    if foreign := [item for item in event.artifact_ids if item not in node.readable]:
        raise Refused(Reason.GRANT_DENIED, f"no such artifacts: {', '.join(foreign)[:500]}")
    if len(node.calls) >= draft.config.calls:
        raise Refused(Reason.QUOTA_EXCEEDED, f"more than {draft.config.calls} calls")
    owner = draft.state.live(InvocationId(tool_owner(event.tool_id)))
    if event.tool_id.startswith("tool_inv_") and not _can_serve(owner):
        raise Refused(Reason.TOOL_UNREACHABLE, "the owner of the tool has ended")
    seconds = granted.timeout_seconds or draft.config.limits.tool_timeout_seconds.default
    draft.add(
        rec.ToolCalled(
            invocation_id=node.invocation_id,
            call_id=event.call_id,
            tool_call_id=event.tool_call_id,
            tool_id=event.tool_id,
            method=event.method,
            arguments=event.arguments,
            deadline_us=draft.now_us + int(seconds * MICROSECONDS),
            artifact_ids=event.artifact_ids,
        )
    )


def returned(draft: Draft, event: ev.ToolReturned) -> None:
    """Takes an owner's answer; one to a call that is not open, or not its own, changes nothing."""
    found = draft.state.tool_calls.get(event.tool_call_id)
    if found is None:
        return
    use = draft.state.nodes[found[0]].calls[found[1]].tool
    if use is None or tool_owner(use.tool_id) != event.owner:
        return
    owner = draft.state.nodes.get(InvocationId(event.owner))
    if owner is not None and any(item not in owner.readable for item in event.artifact_ids):
        message = "the tool's value names artifacts that it may not"
        _fail(draft, event.tool_call_id, Reason.GRANT_DENIED, message)
        return
    draft.add(
        rec.ToolAnswered(
            invocation_id=found[0],
            call_id=found[1],
            tool_call_id=event.tool_call_id,
            value=event.value,
            failure=event.failure,
            artifact_ids=event.artifact_ids,
        )
    )


def timed_out(draft: Draft, event: ev.ToolTimeout) -> None:
    """The caller waits no longer; whether the tool ran to its end is not known."""
    _fail(draft, event.tool_call_id, Reason.TOOL_TIMED_OUT, "the tool did not answer in time")


def server_lost(draft: Draft, event: ev.ToolServerLost) -> None:
    """Answers all calls of a client's tool server that has died."""
    for tool_call_id in open_calls_of(draft.state, event.server_id):
        if tool_call_id in event.unsent:
            message = "the process that serves the tool is gone; the call was not sent"
            _fail(draft, tool_call_id, Reason.TOOL_UNREACHABLE, message)
        else:
            message = "the process that serves the tool died; the call may or may not have run"
            _fail(draft, tool_call_id, Reason.TOOL_OUTCOME_UNKNOWN, message)


def repl_lost(draft: Draft, node: Node) -> None:
    """Answers the calls that the code of a REPL which died was running."""
    message = "the REPL that owns the tool died; the call may or may not have run"
    for tool_call_id in list(node.serving):
        _fail(draft, tool_call_id, Reason.TOOL_OUTCOME_UNKNOWN, message)


def open_calls_of(state: EngineState, server_id: ToolServerId) -> list[ToolCallId]:
    """The open calls of a client's tool server."""
    return [
        tool_call_id
        for tool_call_id, (invocation_id, call_id) in state.tool_calls.items()
        if (use := state.nodes[invocation_id].calls[call_id].tool) is not None
        and tool_owner(use.tool_id) == server_id
    ]


def level_below(state: EngineState, parent: Node) -> int:
    """The level of a child: below its parent, and below everyone who waits for a tool of it."""
    callers = (state.nodes[item].level for item in parent.serving.values())
    return 1 + max([parent.level, *callers])


def granted_tools(
    asked: tuple[ToolGrant, ...], parent: Node | None, longest: float
) -> tuple[ToolGrant, ...]:
    """What an invocation gets of the tools that its caller names.

    Args:
        asked: As the caller names them.
        parent: Whose code asks; None for a client.
        longest: The most seconds that one call may take.

    Raises:
        Refused: FIELD_INVALID; GRANT_DENIED, with every excess named.
    """
    found: list[ToolGrant] = []
    excess: list[str] = []
    held = {item.tool_id: item for item in parent.granted.tools} if parent is not None else {}
    for tool in asked:
        owner = tool_owner(tool.tool_id)
        own = owner == parent.invocation_id if parent is not None else not owner.startswith("inv_")
        if not own and tool.tool_id in held and held[tool.tool_id].delegable:
            found.append(held[tool.tool_id])
        elif not own:
            excess.append(f"tool {tool.name[:80] or tool.tool_id[:80]!r}")
        elif tool.timeout_seconds is not None and not 0 < tool.timeout_seconds <= longest:
            message = f"tools: a call takes over 0 s and at most {longest:g} s"
            raise Refused(Reason.FIELD_INVALID, message, field="tools")
        else:
            found.append(tool)
    if excess:
        message = "not the caller's to give: " + ", ".join(excess)
        raise Refused(Reason.GRANT_DENIED, message[:2000], excess=", ".join(excess)[:500])
    return tuple(found)


def _can_serve(owner: Node | None) -> bool:
    return owner is not None and owner.ending is None and owner.state is State.RUNNING


def _check_method(granted: ToolGrant, method: str) -> None:
    if not granted.methods and method:
        raise Refused(Reason.FIELD_INVALID, "the tool is a function, it has no methods")
    if granted.methods and method not in {item.name for item in granted.methods}:
        raise Refused(Reason.FIELD_INVALID, f"the tool has no method {method[:100]!r}")


def _fail(draft: Draft, tool_call_id: ToolCallId, reason: Reason, message: str) -> None:
    found = draft.state.tool_calls.get(tool_call_id)
    if found is None:
        return
    draft.add(
        rec.ToolAnswered(
            invocation_id=found[0],
            call_id=found[1],
            tool_call_id=tool_call_id,
            failure=Failure(message=message, reason=reason.value),
        )
    )
