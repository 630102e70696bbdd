"""The one conversion between the wire's messages and the controller's values, in and out.

Called by the servicers (`controller.wire`) and by the host client (`controller.hosts`); a client's
spec and a spawn's spec come in through the same function. Refuses what has a bad form; whether it
is granted is the engine's to say.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Sequence

from google.protobuf import duration_pb2, timestamp_pb2
from google.protobuf.message import Message

from controller.core.errors import Reason, Refused
from controller.core.ids import ArtifactId, InvocationId, ToolId, is_id, tool_owner
from controller.core.model import (
    Artifact,
    ArtifactReference,
    Cause,
    Contract,
    Ending,
    EndingKind,
    Enforcement,
    Evidence,
    Failure,
    InvocationSpec,
    Mismatch,
    Mode,
    NamedValue,
    ResourceRequest,
    SpawnRequest,
    State,
    ToolGrant,
    ToolMethod,
    Value,
)
from controller.engine.implied import shown_state
from controller.engine.state import Node
from controller.store.ports import ArtifactRow, InvocationRow
from hutch.v1 import artifact_pb2, ending_pb2, invocation_pb2, tool_pb2, value_pb2

MIB = 1024 * 1024
PROGRAM_BYTES = MIB
INLINE_VALUE_BYTES = MIB
VALUE_BYTES = 64 * MIB
SCHEMA_BYTES = 64 * 1024
INPUTS = 256
NAME_CHARACTERS = 128
DESCRIPTION_CHARACTERS = 2000
LABEL_CHARACTERS = 200
TOOLS = 256
TOOL_METHODS = 64
TOOL_CHARACTERS = 4000
TOOLS_BYTES = 48 * 1024  # they fit into the header of one frame
PATTERNS = 64
PATTERN_CHARACTERS = 512
US = 1_000_000


def timestamp(time_us: int) -> timestamp_pb2.Timestamp | None:
    """A time on the wire; None for 0, which means unset."""
    if not time_us:
        return None
    return timestamp_pb2.Timestamp(seconds=time_us // US, nanos=time_us % US * 1000)


def duration(seconds: float) -> duration_pb2.Duration:
    """A span on the wire."""
    whole = int(seconds)
    return duration_pb2.Duration(seconds=whole, nanos=int((seconds - whole) * 1e9))


def seconds_of(span: duration_pb2.Duration) -> float:
    """A span in seconds."""
    return float(span.seconds) + float(span.nanos) / 1e9


def spec_in(
    spec: invocation_pb2.InvocationSpec,
    *,
    program: bytes | None = None,
    inputs: Sequence[NamedValue] | None = None,
) -> InvocationSpec:
    """A caller's spec; program and inputs may come apart from it.

    Raises:
        Refused: FIELD_INVALID, PAYLOAD_TOO_LARGE, or NOT_BUILT for a task.
    """
    if spec.WhichOneof("work") == "task":
        raise Refused(Reason.NOT_BUILT, "agent mode is not built yet", field="task")
    named = [input_in(item) for item in spec.inputs] if inputs is None else inputs
    mode, source, idle_seconds = Mode.PROGRAM, "", None
    if program is None and spec.WhichOneof("work") == "interactive":
        mode = Mode.INTERACTIVE
        if spec.interactive.HasField("idle_timeout"):
            idle_seconds = seconds_of(spec.interactive.idle_timeout)
        if spec.retry_on_loss:
            raise _invalid("retry_on_loss", "a box cannot run again: its client feeds it")
    else:
        source = source_in("program", spec.program.encode() if program is None else program)
    return InvocationSpec(
        mode=mode,
        program=source,
        inputs=inputs_in(named),
        contract=_contract_in(spec, mode),
        spawn=SpawnRequest(
            max_depth=_optional(spec.spawn, "max_depth"),
            max_children=_optional(spec.spawn, "max_children"),
            max_concurrent=_optional(spec.spawn, "max_concurrent"),
            max_descendants=_optional(spec.spawn, "max_descendants"),
        ),
        resources=ResourceRequest(
            memory_limit_bytes=_optional(spec.resources, "memory_limit_bytes"),
            pids_limit=_optional(spec.resources, "pids_limit"),
            cpu_limit_millis=_optional(spec.resources, "cpu_limit_millis"),
            tmpfs_limit_bytes=_optional(spec.resources, "tmpfs_limit_bytes"),
            open_files_limit=_optional(spec.resources, "open_files_limit"),
        ),
        timeout_seconds=seconds_of(spec.timeout) if spec.HasField("timeout") else None,
        template=_text("template", spec.template, LABEL_CHARACTERS),
        driver=_text("driver", spec.driver, LABEL_CHARACTERS),
        artifact_patterns=_patterns(spec.artifact_patterns),
        output_view_bytes=_optional(spec.output, "output_view_bytes"),
        output_limit_bytes=_optional(spec.output, "output_limit_bytes"),
        label=_text("label", spec.label, LABEL_CHARACTERS),
        retry_on_loss=spec.retry_on_loss,
        idle_timeout_seconds=idle_seconds,
        attach_stdin=spec.attach_stdin,
        tools=_tools_in(spec.tools),
    )


def _optional(message: Message, name: str) -> int | None:
    return int(getattr(message, name)) if message.HasField(name) else None


def source_in(field: str, source: bytes) -> str:
    """The source of a program or of a cell.

    Raises:
        Refused: PAYLOAD_TOO_LARGE; FIELD_INVALID when it is empty, not UTF-8, or has null bytes.
    """
    if len(source) > PROGRAM_BYTES:
        raise Refused(
            Reason.PAYLOAD_TOO_LARGE,
            f"the {field} has {len(source)} bytes, the limit is {PROGRAM_BYTES}",
            field=field,
            limit=str(PROGRAM_BYTES),
        )
    try:
        text = source.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise _invalid(field, f"it is not UTF-8: {problem.reason}") from None
    if field == "program" and not text.strip():
        raise _invalid(field, "there is no task and no program: give one of them")
    if "\0" in text:
        raise _invalid(field, "it has null bytes")
    return text


def _tools_in(tools: Sequence[tool_pb2.ToolGrant]) -> tuple[ToolGrant, ...]:
    if len(tools) > TOOLS:
        raise _invalid("tools", f"at most {TOOLS}")
    if sum(tool.ByteSize() for tool in tools) > TOOLS_BYTES:
        raise Refused(
            Reason.PAYLOAD_TOO_LARGE,
            f"the descriptions of all tools together have over {TOOLS_BYTES} bytes",
            field="tools",
            limit=str(TOOLS_BYTES),
        )
    found: dict[ToolId, ToolGrant] = {}
    for tool in tools:
        tool_id = ToolId(tool.tool_id)
        if not tool_owner(tool_id) or tool_id in found:
            raise _invalid("tools", f"{tool_id[:100]!r} is no tool's id, or is given twice")
        if len(tool.methods) > TOOL_METHODS:
            raise _invalid("tools", f"an object has at most {TOOL_METHODS} methods")
        found[tool_id] = ToolGrant(
            tool_id=tool_id,
            name=_text("tools.name", tool.name, NAME_CHARACTERS),
            description=_text("tools.description", tool.description, TOOL_CHARACTERS),
            signature=_text("tools.signature", tool.signature, DESCRIPTION_CHARACTERS),
            methods=tuple(
                ToolMethod(
                    name=_text("tools.methods.name", item.name, NAME_CHARACTERS),
                    signature=_text("tools.methods.signature", item.signature, TOOL_CHARACTERS),
                    description=_text(
                        "tools.methods.description", item.description, TOOL_CHARACTERS
                    ),
                )
                for item in tool.methods
            ),
            delegable=tool.delegable,
            timeout_seconds=seconds_of(tool.timeout) if tool.HasField("timeout") else None,
        )
    return tuple(found.values())


def tool_out(tool: ToolGrant) -> tool_pb2.ToolGrant:
    """A tool as the sandbox that may call it is told of it."""
    return tool_pb2.ToolGrant(
        tool_id=tool.tool_id,
        name=tool.name,
        description=tool.description,
        signature=tool.signature,
        methods=[
            tool_pb2.ToolMethod(
                name=item.name, signature=item.signature, description=item.description
            )
            for item in tool.methods
        ],
        delegable=tool.delegable,
        timeout=duration(tool.timeout_seconds) if tool.timeout_seconds is not None else None,
    )


def _invalid(field: str, problem: str) -> Refused:
    return Refused(Reason.FIELD_INVALID, f"{field}: {problem}", field=field)


def _text(field: str, text: str, limit: int) -> str:
    if len(text) > limit:
        raise _invalid(field, f"it has {len(text)} characters, the limit is {limit}")
    return text


def _patterns(patterns: Iterable[str]) -> tuple[str, ...]:
    found = tuple(patterns)
    if len(found) > PATTERNS:
        raise _invalid("artifact_patterns", f"at most {PATTERNS}")
    for pattern in found:
        _text("artifact_patterns", pattern, PATTERN_CHARACTERS)
        if not pattern or pattern.startswith("/") or ".." in pattern.split("/"):
            raise _invalid("artifact_patterns", f"{pattern!r} is not below the workspace")
    return found


def input_in(item: value_pb2.NamedValue) -> NamedValue:
    """One named value, whose value is not looked into."""
    return NamedValue(name=item.name, value=value_in(item.value), description=item.description)


def inputs_in(inputs: Sequence[NamedValue]) -> tuple[NamedValue, ...]:
    """Named values whose names may be bound.

    Raises:
        Refused: FIELD_INVALID.
    """
    if len(inputs) > INPUTS:
        raise _invalid("inputs", f"at most {INPUTS}")
    seen: set[str] = set()
    for item in inputs:
        name = item.name
        if not name.isidentifier() or keyword.iskeyword(name) or len(name) > NAME_CHARACTERS:
            raise _invalid("inputs", f"{name[:80]!r} is not a Python name")
        if name.startswith("__"):
            raise _invalid("inputs", f"{name!r}: names with two leading underscores are reserved")
        if name in seen:
            raise _invalid("inputs", f"{name!r} is given twice")
        seen.add(name)
        _text("inputs", item.description, DESCRIPTION_CHARACTERS)
    return tuple(inputs)


def _contract_in(spec: invocation_pb2.InvocationSpec, mode: Mode) -> Contract | None:
    if not spec.HasField("contract"):
        return None
    schema = spec.contract.schema_json
    if len(schema) > SCHEMA_BYTES:
        raise Refused(
            Reason.PAYLOAD_TOO_LARGE,
            f"the contract has {len(schema)} bytes, the limit is {SCHEMA_BYTES}",
            field="contract",
            limit=str(SCHEMA_BYTES),
        )
    if spec.contract.max_failures and mode is Mode.PROGRAM:
        raise _invalid("contract", "max_failures must be 0 in mode program")
    return Contract(schema_json=schema, max_failures=spec.contract.max_failures)


def value_in(value: value_pb2.Value) -> Value:
    """A value; its JSON is not looked into.

    Raises:
        Refused: FIELD_INVALID when it is empty, PAYLOAD_TOO_LARGE when it should be an artifact.
    """
    if value.WhichOneof("body") == "artifact":
        reference = value.artifact
        if not is_id(reference.artifact_id, "art"):
            raise Refused(Reason.ARTIFACT_NOT_FOUND, "no such artifact")
        return Value(
            artifact=ArtifactReference(
                artifact_id=ArtifactId(reference.artifact_id),
                sha256=reference.sha256,
                size_bytes=reference.size_bytes,
            )
        )
    if len(value.json) > INLINE_VALUE_BYTES:
        raise Refused(
            Reason.PAYLOAD_TOO_LARGE,
            f"a value over {INLINE_VALUE_BYTES} bytes moves as an artifact",
            field="inputs",
            limit=str(INLINE_VALUE_BYTES),
        )
    if not value.json:
        raise _invalid("inputs", "a value has no JSON")
    return Value(json=value.json)


def value_out(value: Value) -> value_pb2.Value:
    """A value on the wire."""
    if value.artifact is not None:
        return value_pb2.Value(
            artifact=value_pb2.ArtifactReference(
                artifact_id=value.artifact.artifact_id,
                sha256=value.artifact.sha256,
                size_bytes=value.artifact.size_bytes,
            )
        )
    return value_pb2.Value(json=value.json or b"null")


def failure_in(failure: ending_pb2.Failure) -> Failure:
    """A failure from a sandbox, cut to its limits."""
    mismatch = None
    if failure.HasField("mismatch"):
        mismatch = Mismatch(
            path=failure.mismatch.path[:2000],
            expected=failure.mismatch.expected[:2000],
            got=failure.mismatch.got[:2000],
        )
    kind = failure.ending_kind
    return Failure(
        type_name=failure.type_name[:200],
        message=failure.message[:8000],
        traceback=failure.traceback[:16000],
        invocation_id=failure.invocation_id[:80],
        ending=EndingKind(_lower(ending_pb2.EndingKind.Name(kind))) if kind else None,
        reason=failure.reason[:64],
        mismatch=mismatch,
    )


def failure_of(refused: Refused) -> Failure:
    """A refusal as the failure that code meets."""
    return Failure(message=refused.message, reason=refused.reason.value)


def failure_out(failure: Failure) -> ending_pb2.Failure:
    """A failure on the wire."""
    found = ending_pb2.Failure(
        type_name=failure.type_name,
        message=failure.message,
        traceback=failure.traceback,
        invocation_id=failure.invocation_id,
        ending_kind=_ending_kind_out(failure.ending),
        reason=failure.reason,
    )
    if failure.mismatch is not None:
        found.mismatch.CopyFrom(mismatch_out(failure.mismatch))
    return found


def mismatch_out(mismatch: Mismatch) -> ending_pb2.ContractMismatch:
    """A mismatch on the wire."""
    return ending_pb2.ContractMismatch(
        path=mismatch.path, expected=mismatch.expected, got=mismatch.got
    )


def _lower(name: str) -> str:
    return name.removeprefix("ENDING_KIND_").lower()


def _ending_kind_out(kind: EndingKind | None) -> ending_pb2.EndingKind.ValueType:
    if kind is None:
        return ending_pb2.ENDING_KIND_UNSPECIFIED
    return ending_pb2.EndingKind.Value(f"ENDING_KIND_{kind.upper()}")


_LEVELS = {
    number: name.removeprefix("LIMIT_LEVEL_").lower()
    for name, number in ending_pb2.LimitLevel.items()
}


def enforcement_in(levels: Iterable[ending_pb2.LimitEnforcement]) -> tuple[Enforcement, ...]:
    """At which level each limit is held."""
    return tuple(
        Enforcement(
            limit=item.limit,
            level=_LEVELS[item.level],
            mechanism=item.mechanism,
        )
        for item in levels
    )


def enforcement_out(levels: Iterable[Enforcement]) -> list[ending_pb2.LimitEnforcement]:
    """At which level each limit is held, on the wire."""
    return [
        ending_pb2.LimitEnforcement(
            limit=item.limit,
            level=ending_pb2.LimitLevel.Value(f"LIMIT_LEVEL_{item.level.upper()}"),
            mechanism=item.mechanism,
        )
        for item in levels
    ]


_EVIDENCE_NUMBERS = (
    "exit_code",
    "signal",
    "oom_kill_count",
    "memory_peak_bytes",
    "pids_limit_hits",
    "disk_full_hits",
    "limit_value",
)


def evidence_in(evidence: ending_pb2.Evidence, *, levels: bool = True) -> Evidence:
    """What a host measured, with or without the levels at which limits are held."""
    numbers = {
        name: int(getattr(evidence, name))
        for name in _EVIDENCE_NUMBERS
        if evidence.HasField(name)  # type: ignore[arg-type]
    }
    return Evidence(
        cpu_seconds=seconds_of(evidence.cpu_time) if evidence.HasField("cpu_time") else None,
        wall_seconds=seconds_of(evidence.wall_time) if evidence.HasField("wall_time") else None,
        limit=evidence.limit,
        detail=evidence.detail[:2000],
        enforcement=enforcement_in(evidence.enforcement) if levels else (),
        **numbers,
    )


def evidence_out(evidence: Evidence) -> ending_pb2.Evidence:
    """What a host measured, on the wire."""
    found = ending_pb2.Evidence(
        limit=evidence.limit,
        detail=evidence.detail,
        enforcement=enforcement_out(evidence.enforcement),
        **{
            name: number
            for name in _EVIDENCE_NUMBERS
            if (number := getattr(evidence, name)) is not None
        },
    )
    if evidence.cpu_seconds is not None:
        found.cpu_time.CopyFrom(duration(evidence.cpu_seconds))
    if evidence.wall_seconds is not None:
        found.wall_time.CopyFrom(duration(evidence.wall_seconds))
    return found


def ending_out(ending: Ending) -> ending_pb2.Ending:
    """An ending on the wire."""
    cause: ending_pb2.EndingCause.ValueType = ending_pb2.ENDING_CAUSE_UNSPECIFIED
    if ending.cause is not Cause.ITSELF:
        cause = ending_pb2.EndingCause.Value(f"ENDING_CAUSE_{ending.cause.upper()}")
    found = ending_pb2.Ending(
        kind=_ending_kind_out(ending.kind), message=ending.message, cause=cause
    )
    if ending.failure is not None:
        found.failure.CopyFrom(failure_out(ending.failure))
    if ending.evidence is not None:
        found.evidence.CopyFrom(evidence_out(ending.evidence))
    return found


def state_out(state: State) -> invocation_pb2.InvocationState.ValueType:
    """A state on the wire."""
    return invocation_pb2.InvocationState.Value(f"INVOCATION_STATE_{state.upper()}")


def invocation_out(node: Node) -> invocation_pb2.Invocation:
    """A node as the resource that readers see, without its value."""
    return with_changes(attempt_out(node), node)


def attempt_out(node: Node) -> invocation_pb2.Invocation:
    """What of a node changes only with its `enforcement`, which comes with a sandbox."""
    granted = node.granted
    found = invocation_pb2.Invocation(
        invocation_id=node.invocation_id,
        parent_id=node.parent_id or "",
        lineage=node.lineage,
        depth=node.depth,
        mode=invocation_pb2.InvocationMode.Value(f"INVOCATION_MODE_{node.spec.mode.upper()}"),
        label=node.spec.label,
        create_time=timestamp(node.create_time_us),
        deadline_time=timestamp(granted.deadline_us),
        enforcement=enforcement_out(node.enforcement),
        spawned_by=f"{node.spawned_by[1]}/{node.spawned_by[2]}" if node.spawned_by else "",
    )
    for name in ("max_depth", "max_children", "max_concurrent", "max_descendants"):
        setattr(found.spawn, name, getattr(granted.spawn, name))
    for field in found.resources.DESCRIPTOR.fields:
        setattr(found.resources, field.name, getattr(granted.resources, field.name))
    found.output.output_view_bytes = granted.output_view_bytes
    found.output.output_limit_bytes = granted.output_limit_bytes
    return found


def with_changes(found: invocation_pb2.Invocation, node: Node) -> invocation_pb2.Invocation:
    """Adds what of a node changes to what `attempt_out` made."""
    found.MergeFrom(
        invocation_pb2.Invocation(
            state=state_out(shown_state(node)),
            start_time=timestamp(node.start_time_us),
            end_time=timestamp(node.end_time_us),
            attempt=node.attempt,
            sandbox_id=node.sandbox_id,
            child_count=node.child_count,
            descendant_count=node.descendant_count,
            stdout_bytes=node.stdout_bytes,
            stderr_bytes=node.stderr_bytes,
            driver=node.driver or node.granted.driver,
            artifact_count=node.artifact_count,
            cell_count=len(node.ended_cells),
        )
    )
    if node.ended and node.ending is not None:
        found.ending.CopyFrom(ending_out(node.ending))
    return found


def invocation_of_row(row: InvocationRow) -> invocation_pb2.Invocation:
    """The resource behind a row, with its value if the row has one."""
    found = invocation_pb2.Invocation.FromString(row.snapshot)
    if row.value:
        found.value.CopyFrom(value_pb2.Value.FromString(row.value))
    return found


def artifact_of_row(row: ArtifactRow) -> artifact_pb2.Artifact:
    """A stored artifact on the wire."""
    return artifact_pb2.Artifact(
        artifact_id=row.artifact_id,
        name=row.name,
        sha256=row.sha256,
        size_bytes=row.size_bytes,
        media_type=row.media_type,
        invocation_id=row.invocation_id,
        create_time=timestamp(row.create_time_us),
    )


def artifact_out(artifact: Artifact) -> artifact_pb2.Artifact:
    """An artifact on the wire."""
    return artifact_pb2.Artifact(
        artifact_id=artifact.artifact_id,
        name=artifact.name,
        sha256=artifact.sha256,
        size_bytes=artifact.size_bytes,
        media_type=artifact.media_type,
        invocation_id=artifact.invocation_id or "",
        create_time=timestamp(artifact.create_time_us),
    )


def artifact_in(row: ArtifactRow) -> Artifact:
    """A stored artifact as the engine knows it."""
    return Artifact(
        artifact_id=ArtifactId(row.artifact_id),
        name=row.name,
        sha256=row.sha256,
        size_bytes=row.size_bytes,
        media_type=row.media_type,
        invocation_id=InvocationId(row.invocation_id) if row.invocation_id else None,
        create_time_us=row.create_time_us,
    )


def output_id(invocation_id: str, attempt: int) -> str:
    """The name under which an attempt's output is kept; offsets begin at 0 in each attempt."""
    return invocation_id if attempt <= 1 else f"{invocation_id}a{attempt}"
