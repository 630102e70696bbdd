"""The one conversion between wire messages and `hutch.types`, in and out.

Called by `hutch.aio`; calls only the generated messages. Nothing here reads a value's JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from hutch import types as t
from hutch.errors import Failure
from hutch.tools import Grant
from hutch.v1 import (
    artifact_pb2,
    artifact_service_pb2,
    cell_pb2,
    ending_pb2,
    event_pb2,
    invocation_pb2,
    invocation_service_pb2,
    tool_pb2,
    value_pb2,
    workspace_service_pb2,
)

STREAMS: Mapping[t.Stream, invocation_service_pb2.OutputStream.ValueType] = {
    "stdout": invocation_service_pb2.OUTPUT_STREAM_STDOUT,
    "stderr": invocation_service_pb2.OUTPUT_STREAM_STDERR,
}


def word(enum: Any, number: int, prefix: str) -> str:
    """The lower-case word of an enumerator; empty for 0, `unknown_N` for one of a newer release."""
    if number == 0:
        return ""
    try:
        return str(enum.Name(number)).removeprefix(prefix).lower()
    except ValueError:
        return f"unknown_{number}"


def _time(message: Message, name: str) -> datetime | None:
    if not message.HasField(name):
        return None
    stamp: Timestamp = getattr(message, name)
    return stamp.ToDatetime(tzinfo=UTC)


def _seconds(message: Message, name: str) -> float | None:
    if not message.HasField(name):
        return None
    span: Duration = getattr(message, name)
    return span.ToTimedelta().total_seconds()


def duration(seconds: float) -> Duration:
    """A span of `seconds` as the wire writes it."""
    span = Duration()
    span.FromTimedelta(timedelta(seconds=seconds))
    return span


def _optional(message: Message, names: Iterable[str]) -> dict[str, int | None]:
    return {name: getattr(message, name) if message.HasField(name) else None for name in names}


_SPAWN = ("max_depth", "max_children", "max_concurrent", "max_descendants")
_RESOURCES = (
    "memory_limit_bytes",
    "pids_limit",
    "cpu_limit_millis",
    "tmpfs_limit_bytes",
    "open_files_limit",
)
_OUTPUT = ("output_view_bytes", "output_limit_bytes")
_COUNTERS = (
    "exit_code",
    "signal",
    "oom_kill_count",
    "memory_peak_bytes",
    "pids_limit_hits",
    "disk_full_hits",
    "limit_value",
)


def artifact(message: artifact_pb2.Artifact) -> t.Artifact:
    """An artifact from the wire."""
    return t.Artifact(
        artifact_id=message.artifact_id,
        name=message.name,
        sha256=message.sha256,
        size_bytes=message.size_bytes,
        media_type=message.media_type,
        invocation_id=message.invocation_id,
        create_time=_time(message, "create_time"),
    )


def artifact_page(message: artifact_service_pb2.ListArtifactsResponse) -> t.ArtifactPage:
    """One page of artifacts from the wire."""
    return t.ArtifactPage(
        artifacts=tuple(artifact(item) for item in message.artifacts),
        refusals=tuple(t.ArtifactRefusal(name=r.name, reason=r.reason) for r in message.refusals),
        next_page_token=message.next_page_token,
    )


def value(message: value_pb2.Value) -> t.Value:
    """A value from the wire, still encoded."""
    if message.WhichOneof("body") == "artifact":
        reference = message.artifact
        return t.Value(
            artifact_id=reference.artifact_id,
            sha256=reference.sha256,
            size_bytes=reference.size_bytes,
        )
    return t.Value(json=message.json, size_bytes=len(message.json))


def failure(message: ending_pb2.Failure) -> Failure:
    """A failure from the wire."""
    return Failure(
        type_name=message.type_name,
        message=message.message,
        traceback=message.traceback,
        invocation_id=message.invocation_id,
        path=message.mismatch.path,
        expected=message.mismatch.expected,
        got=message.mismatch.got,
        ending=word(ending_pb2.EndingKind, message.ending_kind, "ENDING_KIND_"),
        reason=message.reason,
    )


def enforcement(items: Iterable[ending_pb2.LimitEnforcement]) -> tuple[t.LimitEnforcement, ...]:
    """At which level each limit is held."""
    return tuple(
        t.LimitEnforcement(
            limit=item.limit,
            level=word(ending_pb2.LimitLevel, item.level, "LIMIT_LEVEL_"),
            mechanism=item.mechanism,
        )
        for item in items
    )


def _evidence(message: ending_pb2.Evidence) -> t.Evidence:
    return t.Evidence(
        **_optional(message, _COUNTERS),
        cpu_seconds=_seconds(message, "cpu_time"),
        wall_seconds=_seconds(message, "wall_time"),
        limit=message.limit,
        enforcement=enforcement(message.enforcement),
        detail=message.detail,
    )


def ending(message: ending_pb2.Ending) -> t.Ending:
    """An ending from the wire."""
    return t.Ending(
        kind=word(ending_pb2.EndingKind, message.kind, "ENDING_KIND_"),
        message=message.message,
        cause=word(ending_pb2.EndingCause, message.cause, "ENDING_CAUSE_"),
        failure=failure(message.failure) if message.HasField("failure") else None,
        evidence=_evidence(message.evidence) if message.HasField("evidence") else None,
    )


def invocation(message: invocation_pb2.Invocation) -> t.Invocation:
    """An invocation from the wire."""
    return t.Invocation(
        invocation_id=message.invocation_id,
        parent_id=message.parent_id,
        lineage=tuple(message.lineage),
        depth=message.depth,
        mode=word(invocation_pb2.InvocationMode, message.mode, "INVOCATION_MODE_"),
        state=word(invocation_pb2.InvocationState, message.state, "INVOCATION_STATE_"),
        ending=ending(message.ending) if message.HasField("ending") else None,
        value=value(message.value) if message.HasField("value") else None,
        label=message.label,
        create_time=_time(message, "create_time"),
        start_time=_time(message, "start_time"),
        end_time=_time(message, "end_time"),
        deadline_time=_time(message, "deadline_time"),
        attempt=message.attempt,
        sandbox_id=message.sandbox_id,
        driver=message.driver,
        spawn=t.SpawnGrant(**_optional(message.spawn, _SPAWN)),
        resources=t.ResourceLimits(**_optional(message.resources, _RESOURCES)),
        output=t.OutputLimits(**_optional(message.output, _OUTPUT)),
        enforcement=enforcement(message.enforcement),
        child_count=message.child_count,
        descendant_count=message.descendant_count,
        stdout_bytes=message.stdout_bytes,
        stderr_bytes=message.stderr_bytes,
        artifact_count=message.artifact_count,
        spawned_by=message.spawned_by,
        cell_count=message.cell_count,
    )


def invocation_page(message: invocation_service_pb2.ListInvocationsResponse) -> t.InvocationPage:
    """One page of invocations from the wire."""
    return t.InvocationPage(
        invocations=tuple(invocation(item) for item in message.invocations),
        next_page_token=message.next_page_token,
    )


def _detail(message: event_pb2.InvocationEvent) -> t.EventDetail:
    match message.WhichOneof("event"):
        case "accepted":
            return t.Accepted(invocation=invocation(message.accepted.invocation))
        case "state_changed":
            change = message.state_changed
            return t.StateChanged(
                state=word(invocation_pb2.InvocationState, change.state, "INVOCATION_STATE_"),
                attempt=change.attempt,
                sandbox_id=change.sandbox_id,
            )
        case "call_refused":
            refused = message.call_refused
            return t.CallRefused(reason=refused.reason, message=refused.message)
        case "cell_completed":
            cell = message.cell_completed
            return t.CellCompleted(
                cell_id=cell.cell_id,
                outcome=cell.outcome,
                stdout_bytes=cell.stdout_bytes,
                stderr_bytes=cell.stderr_bytes,
            )
        case "contract_checked":
            checked = message.contract_checked
            return t.ContractChecked(
                accepted=checked.accepted,
                path=checked.mismatch.path,
                expected=checked.mismatch.expected,
                got=checked.mismatch.got,
            )
        case "artifact_published":
            return t.ArtifactPublished(artifact=artifact(message.artifact_published.artifact))
        case "ended":
            return t.Ended(ending=ending(message.ended.ending))
        case "cell_accepted":
            accepted = message.cell_accepted
            return t.CellAccepted(cell_id=accepted.cell_id, code=accepted.code)
        case "display":
            return display(message.display)
        case "tool_called":
            called = message.tool_called
            return t.ToolCalled(
                call_id=called.call_id,
                tool_id=called.tool_id,
                name=called.name,
                method=called.method,
            )
        case "tool_answered":
            answered = message.tool_answered
            failed = failure(answered.failure) if answered.HasField("failure") else None
            return t.ToolAnswered(call_id=answered.call_id, failure=failed)
        case _:
            return t.UnknownEvent()


def display(message: cell_pb2.Display) -> t.Display:
    """A display from the wire."""
    return t.Display(
        cell_id=message.cell_id,
        index=message.index,
        is_result=message.is_result,
        data=tuple(_display_data(item) for item in message.data),
    )


def _display_data(message: cell_pb2.DisplayData) -> t.DisplayData:
    if message.WhichOneof("body") == "artifact":
        return t.DisplayData(
            media_type=message.media_type,
            artifact_id=message.artifact.artifact_id,
            size_bytes=message.artifact.size_bytes,
        )
    return t.DisplayData(
        media_type=message.media_type, data=message.data, size_bytes=len(message.data)
    )


def cell(message: cell_pb2.Cell) -> t.Cell:
    """An ended cell from the wire."""
    return t.Cell(
        cell_id=message.cell_id,
        outcome=word(cell_pb2.CellOutcome, message.outcome, "CELL_OUTCOME_"),
        value=value(message.value) if message.HasField("value") else None,
        failure=failure(message.failure) if message.HasField("failure") else None,
        text=message.text,
        stdout_bytes=message.stdout_bytes,
        stderr_bytes=message.stderr_bytes,
        killed_processes=message.killed_processes,
        background_processes=message.background_processes,
        state_lost=message.state_lost,
        output_cut=message.output_cut,
        evidence=_evidence(message.evidence) if message.HasField("evidence") else None,
    )


def box_status(message: invocation_service_pb2.BoxAttached) -> t.BoxStatus:
    """A box as it stands, from the wire."""
    return t.BoxStatus(
        invocation=invocation(message.invocation),
        running_cell_id=message.running_cell_id,
        waiting_cell_ids=tuple(message.waiting_cell_ids),
    )


def cell_output(message: invocation_service_pb2.CellOutput) -> t.CellOutput:
    """Printed bytes from the wire."""
    stderr = message.stream == invocation_service_pb2.OUTPUT_STREAM_STDERR
    return t.CellOutput(
        cell_id=message.cell_id,
        stream="stderr" if stderr else "stdout",
        offset=message.offset,
        data=message.data,
    )


def workspace_file(message: workspace_service_pb2.WorkspaceFile) -> t.WorkspaceFile:
    """A file of a live sandbox from the wire."""
    kinds = workspace_service_pb2.WorkspaceFileKind
    return t.WorkspaceFile(
        path=message.path,
        kind=word(kinds, message.kind, "WORKSPACE_FILE_KIND_"),
        size_bytes=message.size_bytes,
        modify_time=_time(message, "modify_time"),
        mode=message.mode,
    )


def event(message: event_pb2.InvocationEvent) -> t.Event:
    """An event from the wire."""
    return t.Event(
        sequence=message.sequence,
        event_time=_time(message, "event_time"),
        invocation_id=message.invocation_id,
        kind=message.WhichOneof("event") or "unknown",
        detail=_detail(message),
    )


def event_page(message: invocation_service_pb2.ListEventsResponse) -> t.EventPage:
    """A bounded view of events from the wire."""
    return t.EventPage(
        events=tuple(
            t.EventView(
                sequence=item.sequence,
                event_time=_time(item, "event_time"),
                invocation_id=item.invocation_id,
                kind=item.kind,
                text=item.text,
                truncated=item.truncated,
                total_bytes=item.total_bytes,
            )
            for item in message.events
        ),
        truncated=message.truncated,
        before_sequence=message.before_sequence,
    )


def server_info(message: invocation_service_pb2.OpenSessionResponse) -> t.ServerInfo:
    """The controller's greeting from the wire."""
    return t.ServerInfo(
        version=message.controller_version,
        drivers=tuple(message.drivers),
        capacity=message.capacity,
        disconnect_grace_seconds=_seconds(message, "disconnect_grace") or 0.0,
    )


def state_number(state: str) -> invocation_pb2.InvocationState.ValueType:
    """The wire's number of a state's word; an empty word means any.

    Raises:
        ValueError: No such state.
    """
    if not state:
        return invocation_pb2.INVOCATION_STATE_UNSPECIFIED
    return invocation_pb2.InvocationState.Value(f"INVOCATION_STATE_{state.upper()}")


def _fill(message: Message, source: object, names: Iterable[str]) -> bool:
    """Copies the fields that are not None; whether there was any."""
    filled = False
    for name in names:
        number = getattr(source, name)
        if number is not None:
            setattr(message, name, number)
            filled = True
    return filled


def named_value(item: t.NamedInput, stored: Mapping[str, t.Artifact]) -> value_pb2.NamedValue:
    """One input as the wire writes it: inline, or the artifact that holds it."""
    named = value_pb2.NamedValue(name=item.name, description=item.description)
    if item.name in stored:
        kept = stored[item.name]
        named.value.artifact.artifact_id = kept.artifact_id
        named.value.artifact.sha256 = kept.sha256
        named.value.artifact.size_bytes = kept.size_bytes
    else:
        named.value.json = item.json
    return named


def tool(grant: Grant) -> tool_pb2.ToolGrant:
    """What is told of a tool, as the wire writes it."""
    return tool_pb2.ToolGrant(
        tool_id=grant.tool_id,
        name=grant.name,
        description=grant.description,
        signature=grant.signature,
        methods=[
            tool_pb2.ToolMethod(name=m.name, signature=m.signature, description=m.description)
            for m in grant.methods
        ],
        delegable=grant.delegable,
        timeout=duration(grant.timeout_ms / 1000) if grant.timeout_ms else None,
    )


def spec(
    source: t.Spec, stored: Mapping[str, t.Artifact], grants: Iterable[Grant] = ()
) -> invocation_pb2.InvocationSpec:
    """What is asked for, as the wire writes it.

    Args:
        source: What the caller named.
        stored: By input name, the artifacts that hold inputs too large to be sent inline.
        grants: The tools that the inputs name.
    """
    message = invocation_pb2.InvocationSpec(
        template=source.template,
        driver=source.driver,
        artifact_patterns=source.artifact_patterns,
        label=source.label,
        retry_on_loss=source.retry_on_loss,
    )
    message.attach_stdin = source.attach_stdin
    if source.interactive is not None:
        message.interactive.SetInParent()
        if source.interactive.idle_timeout_seconds is not None:
            idle = duration(source.interactive.idle_timeout_seconds)
            message.interactive.idle_timeout.CopyFrom(idle)
    elif source.task is not None:
        message.task = source.task
    else:
        message.program = source.program or ""
    for item in source.inputs:
        message.inputs.append(named_value(item, stored))
    message.tools.extend(tool(grant) for grant in grants)
    if source.contract is not None:
        message.contract.schema_json = source.contract.schema_json
        message.contract.max_failures = source.contract.max_failures
    for part, origin, names in (
        (invocation_pb2.SpawnGrant(), source.spawn, _SPAWN),
        (invocation_pb2.ResourceLimits(), source.resources, _RESOURCES),
        (invocation_pb2.OutputLimits(), source.output, _OUTPUT),
    ):
        if _fill(part, origin, names):
            match part:
                case invocation_pb2.SpawnGrant():
                    message.spawn.CopyFrom(part)
                case invocation_pb2.ResourceLimits():
                    message.resources.CopyFrom(part)
                case invocation_pb2.OutputLimits():
                    message.output.CopyFrom(part)
    if source.timeout_seconds is not None:
        message.timeout.CopyFrom(duration(source.timeout_seconds))
    return message
