"""What the code in a sandbox asks for: `call` frames, checked and turned into events.

Called by `inbound`. Only the form is checked; whether a call may do what it asks is the
controller's to decide.
"""

from __future__ import annotations

from collections.abc import Callable

from google.protobuf.duration_pb2 import Duration

from hutch.v1 import host_service_pb2 as pb
from hutch.v1 import invocation_pb2, invocation_service_pb2
from sandbox.host.contents import PartReader
from sandbox.host.fields import Fields, ProtocolBreach
from sandbox.runtime import frames

STREAMS = {
    "stdout": invocation_service_pb2.OUTPUT_STREAM_STDOUT,
    "stderr": invocation_service_pb2.OUTPUT_STREAM_STDERR,
}
_VIEWS = {
    "status": pb.CHILD_VIEW_STATUS,
    "output": pb.CHILD_VIEW_OUTPUT,
    "artifacts": pb.CHILD_VIEW_ARTIFACTS,
    "events": pb.CHILD_VIEW_EVENTS,
}
_MAX_UINT32 = 2**32 - 1
_MAX_DURATION_SECONDS = 315_576_000_000  # of google.protobuf.Duration
_MAX_INPUTS = 1_000
_MAX_PATTERNS = 1_000
_MAX_TOOLS = 1_000
_MAX_METHODS = 1_000
_SPAWN_LIMITS = ("max_depth", "max_children", "max_concurrent", "max_descendants")
_RESOURCES_64 = ("memory_limit_bytes", "tmpfs_limit_bytes")
_RESOURCES_32 = ("pids_limit", "cpu_limit_millis", "open_files_limit")


def operation(name: str, fields: Fields, parts: PartReader, call: pb.SandboxCall) -> None:
    """Reads one operation's keys into `call`.

    Raises:
        ProtocolBreach: the operation is unknown or its keys are not what they must be.
    """
    readers: dict[str, Callable[[Fields, PartReader, pb.SandboxCall], None]] = {
        "spawn": _spawn,
        "await_child": _await_child,
        "cancel_child": _cancel_child,
        "inspect_child": _inspect_child,
        "save_artifact": _save_artifact,
        "read_artifact": _read_artifact,
        "tool": _tool_use,
    }
    reader = readers.get(name)
    if reader is None:
        raise ProtocolBreach("call.op: an operation that does not exist")
    reader(fields, parts, call)


def _spawn(fields: Fields, parts: PartReader, call: pb.SandboxCall) -> None:
    spawn = call.spawn
    spawn.detached = fields.flag("detached")
    _work(fields, parts, spawn)
    for item in fields.items("inputs", _MAX_INPUTS):
        _input(Fields(item, "call.inputs"), parts, spawn)
    spec = spawn.spec
    contract = fields.object_or_none("contract")
    if contract is not None:
        spec.contract.schema_json = parts.data(contract.take("schema"))
        spec.contract.max_failures = min(contract.number("max_failures"), _MAX_UINT32)
        contract.end()
    _limits(fields.object("spawn"), spec.spawn, (), _SPAWN_LIMITS)
    _limits(fields.object("resources"), spec.resources, _RESOURCES_64, _RESOURCES_32)
    if timeout_ms := fields.number("timeout_ms"):
        spec.timeout.CopyFrom(duration_from_ms(timeout_ms))
    spec.template = fields.text("template")
    spec.label = fields.text("label")
    spec.artifact_patterns.extend(_texts(fields, "artifact_patterns", _MAX_PATTERNS))
    spec.retry_on_loss = fields.flag("retry_on_loss")
    if view_bytes := fields.number("output_view_bytes"):
        spec.output.output_view_bytes = view_bytes
    if limit_bytes := fields.number("output_limit_bytes"):
        spec.output.output_limit_bytes = limit_bytes
    for item in fields.items("tools", _MAX_TOOLS):
        _tool(Fields(item, "call.tools"), spec)


def _tool(fields: Fields, spec: invocation_pb2.InvocationSpec) -> None:
    tool = spec.tools.add(
        tool_id=fields.text("tool"),
        name=fields.text("name"),
        description=fields.text("description"),
        signature=fields.text("signature"),
        delegable=fields.flag("delegable"),
    )
    for item in fields.items("methods", _MAX_METHODS):
        method = Fields(item, "call.tools.methods")
        tool.methods.add(
            name=method.text("name"),
            signature=method.text("signature"),
            description=method.text("description"),
        )
        method.end()
    if timeout_ms := fields.number("timeout_ms"):
        tool.timeout.CopyFrom(duration_from_ms(timeout_ms))
    fields.end()


def _work(fields: Fields, parts: PartReader, spawn: pb.SpawnCall) -> None:
    program, task = fields.take("program"), fields.take("task")
    if program is not None and task is not None:
        raise ProtocolBreach("call.task: both a task and a program")
    if task is not None:
        if type(task) is not str or len(task) > frames.MAX_TEXT:
            raise ProtocolBreach("call.task: not a text")
        spawn.spec.task = task
    if program is not None:
        content = parts.content(program)
        if content.HasField("blob_id"):
            spawn.program.CopyFrom(content)
            return
        try:
            spawn.spec.program = content.data.decode("utf-8")
        except UnicodeDecodeError:
            raise ProtocolBreach("call.program: not UTF-8") from None


def _input(fields: Fields, parts: PartReader, spawn: pb.SpawnCall) -> None:
    name = fields.text("name")
    value = parts.content(fields.take("value"))
    description = fields.text("description")
    fields.end()
    spawn.inputs.append(pb.NamedContent(name=name, value=value, description=description))


def _limits(
    fields: Fields,
    target: invocation_pb2.SpawnGrant | invocation_pb2.ResourceLimits,
    wide: tuple[str, ...],
    narrow: tuple[str, ...],
) -> None:
    for key in wide:
        if fields.has(key):
            setattr(target, key, fields.number(key))
    for key in narrow:
        if fields.has(key):
            # More than the field holds is more than any limit: the controller refuses it by name.
            setattr(target, key, min(fields.number(key), _MAX_UINT32))
    fields.end()


def _await_child(fields: Fields, parts: PartReader, call: pb.SandboxCall) -> None:
    call.await_child.invocation_id = fields.text("invocation")


def _cancel_child(fields: Fields, parts: PartReader, call: pb.SandboxCall) -> None:
    call.cancel_child.invocation_id = fields.text("invocation")


def _inspect_child(fields: Fields, parts: PartReader, call: pb.SandboxCall) -> None:
    inspect = call.inspect_child
    inspect.invocation_id = fields.text("invocation")
    inspect.view = fields.choice("view", _VIEWS)
    if inspect.view != pb.CHILD_VIEW_OUTPUT and fields.has("stream"):
        fields.choice("stream", {**STREAMS, "": None})
    else:
        inspect.stream = fields.choice("stream", STREAMS)
    inspect.offset = fields.number("offset")
    inspect.max_bytes = fields.number("max_bytes")
    if inspect.view == pb.CHILD_VIEW_EVENTS and fields.has("max_events"):
        inspect.max_events = min(fields.number("max_events"), 2**31)


def _save_artifact(fields: Fields, parts: PartReader, call: pb.SandboxCall) -> None:
    save = call.save_artifact
    save.name = fields.text("name")
    save.media_type = fields.text("media_type")
    save.content.CopyFrom(parts.content(fields.take("content")))


def _read_artifact(fields: Fields, parts: PartReader, call: pb.SandboxCall) -> None:
    read = call.read_artifact
    read.artifact_id = fields.text("artifact")
    read.offset = fields.number("offset")
    read.max_bytes = fields.number("max_bytes")


def _tool_use(fields: Fields, parts: PartReader, call: pb.SandboxCall) -> None:
    call.tool.tool_id = fields.text("tool")
    call.tool.method = fields.text("method")
    call.tool.arguments.CopyFrom(parts.content(fields.take("arguments")))


def _texts(fields: Fields, key: str, limit: int) -> list[str]:
    texts = fields.items(key, limit)
    if any(type(text) is not str or len(text) > frames.MAX_TEXT for text in texts):
        raise fields.breach(key, "not a list of texts")
    return texts


def duration_from_ms(milliseconds: int) -> Duration:
    """A duration, cut at the longest that the message type can hold."""
    if milliseconds >= _MAX_DURATION_SECONDS * 1_000:
        return Duration(seconds=_MAX_DURATION_SECONDS)
    return Duration(seconds=milliseconds // 1_000, nanos=milliseconds % 1_000 * 1_000_000)
