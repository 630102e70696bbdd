"""What the code in a sandbox asks for, turned into events or answered at once.

Called by `hosts.attachment` for every call on a sandbox's stream. Who asks is the stream's
invocation; nothing in the message can say otherwise.
"""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import replace

import structlog

from controller import convert_events
from controller.convert import (
    MIB,
    PROGRAM_BYTES,
    artifact_in,
    failure_of,
    output_id,
    spec_in,
)
from controller.core.errors import Reason, Refused
from controller.core.ids import (
    ArtifactId,
    CallId,
    CellId,
    InvocationId,
    SandboxId,
    ToolId,
    new_invocation_id,
    new_tool_call_id,
)
from controller.core.model import Failure, NamedValue, Value
from controller.engine import commands as cmd
from controller.engine import events as ev
from controller.engine.implied import artifact_json, shown_state
from controller.engine.state import Node
from controller.files import media_type_of, name_problem
from controller.hosts.blobs import InboundBlobs
from controller.hosts.files import derived_id
from controller.hosts.services import Services
from controller.store.ports import AlreadyPublished, ArtifactNotFound, StoreError, StoreFull
from hutch.v1 import host_service_pb2 as hs
from hutch.v1 import invocation_service_pb2 as isv

log = structlog.get_logger(__name__)

OUTPUT_VIEW_BYTES = 64 * 1024
ARTIFACT_VIEW = 256

Answer = asyncio.Future[None] | cmd.Reply


class Calls:
    """The calls of one sandbox."""

    def __init__(self, services: Services, node: Node, blobs: InboundBlobs) -> None:
        self._services = services
        self._tenant_id = node.tenant_id
        self._invocation_id = node.invocation_id
        self._sandbox_id: SandboxId = node.sandbox_id
        self._blobs = blobs

    async def handle(self, call: hs.SandboxCall) -> Answer:
        """Posts the event that a call means, or answers it.

        Raises:
            BlobRefused: the call names contents that are not there.
        """
        call_id = CallId(call.call_id)
        node = self._services.loop.state.live(self._invocation_id)
        try:
            if node is None or node.ending is not None:
                raise Refused(Reason.INVOCATION_ENDED, "it has ended")
            match call.WhichOneof("operation"):
                case "spawn":
                    return await self._spawn(call)
                case "await_child" | "cancel_child":
                    return self._child(call)
                case "save_artifact":
                    return await self._save(node, call)
                case "tool":
                    return await self._tool(call)
                case "inspect_child":
                    return self._value(call_id, await self._inspect(node, call.inspect_child))
                case "read_artifact":
                    return self._value(call_id, await self._read(node, call.read_artifact))
                case _:
                    raise Refused(Reason.NOT_BUILT, "no such operation")
        except Refused as refused:
            return self._failed(call_id, refused)
        except StoreError as problem:
            return self._failed(call_id, _store_refusal(problem))
        finally:
            await self._blobs.discard(_contents(call))

    def _failed(self, call_id: CallId, refused: Refused) -> cmd.Reply:
        return self._reply(call_id, failure=failure_of(refused))

    def _value(self, call_id: CallId, value: bytes) -> cmd.Reply:
        return self._reply(call_id, value=Value(json=value))

    def _reply(
        self, call_id: CallId, *, value: Value | None = None, failure: Failure | None = None
    ) -> cmd.Reply:
        return cmd.Reply(
            tenant_id=self._tenant_id,
            sandbox_id=self._sandbox_id,
            call_id=call_id,
            value=value,
            failure=failure,
        )

    async def _spawn(self, call: hs.SandboxCall) -> asyncio.Future[None]:
        spawn = call.spawn
        loop = self._services.loop
        try:
            program = None
            if spawn.HasField("program"):
                program = await self._blobs.small(spawn.program, PROGRAM_BYTES)
            described = {item.name: item.description for item in spawn.spec.inputs}
            inputs = [
                NamedValue(
                    name=item.name,
                    value=await self._blobs.value(item.value),
                    description=described.get(item.name, ""),
                )
                for item in spawn.inputs
            ]
            spec = spec_in(spawn.spec, program=program, inputs=inputs)
            if spec.contract is not None:
                await self._services.checker.check_schema(spec.contract.schema_json)
            readable = await self._services.checker.artifacts_named(
                self._tenant_id, spec.inputs, spec.tools
            )
        except Refused as refused:
            return loop.post(
                ev.SpawnInvalid(
                    parent_id=self._invocation_id,
                    sandbox_id=self._sandbox_id,
                    call_id=CallId(call.call_id),
                    reason=refused.reason.value,
                    message=refused.message,
                )
            )
        return loop.post(
            ev.SpawnRequested(
                parent_id=self._invocation_id,
                sandbox_id=self._sandbox_id,
                cell_id=CellId(call.cell_id),
                call_id=CallId(call.call_id),
                invocation_id=new_invocation_id(),
                spec=replace(spec, readable_artifacts=readable),
                detached=spawn.detached,
            )
        )

    async def _tool(self, call: hs.SandboxCall) -> asyncio.Future[None]:
        arguments, named = await self.named_value("arguments", call.tool.arguments)
        return self._services.loop.post(
            ev.ToolRequested(
                invocation_id=self._invocation_id,
                sandbox_id=self._sandbox_id,
                call_id=CallId(call.call_id),
                tool_call_id=new_tool_call_id(),
                tool_id=ToolId(call.tool.tool_id),
                method=call.tool.method[:200],
                arguments=arguments,
                artifact_ids=named,
            )
        )

    async def named_value(
        self, name: str, content: hs.Content
    ) -> tuple[Value, tuple[ArtifactId, ...]]:
        """A value that goes from code to code, with the artifacts that it names.

        Raises:
            BlobRefused: the content is not there.
            Refused: it is too large, no value, or holds a tool.
        """
        value = await self._blobs.value(content)
        item = NamedValue(name=name, value=value)
        return value, await self._services.checker.artifacts_named(self._tenant_id, [item])

    def _child(self, call: hs.SandboxCall) -> asyncio.Future[None]:
        cancel = call.WhichOneof("operation") == "cancel_child"
        named = call.cancel_child if cancel else call.await_child
        kind = ev.ChildCancelRequested if cancel else ev.AwaitRequested
        return self._services.loop.post(
            kind(
                parent_id=self._invocation_id,
                sandbox_id=self._sandbox_id,
                call_id=CallId(call.call_id),
                child_id=InvocationId(named.invocation_id),
            )
        )

    async def _save(self, node: Node, call: hs.SandboxCall) -> Answer:
        save = call.save_artifact
        call_id = CallId(call.call_id)
        if call_id in node.calls:  # told twice: the engine has answered or will
            return self._services.loop.post(_nothing(node))
        if problem := name_problem(save.name):
            raise Refused(Reason.FIELD_INVALID, f"name: {problem}", field="name")
        limits = self._services.config.limits
        if node.artifact_count >= limits.artifact_files:
            raise Refused(Reason.QUOTA_EXCEEDED, f"more than {limits.artifact_files} artifacts")
        room = limits.artifact_bytes - node.artifact_bytes
        if save.content.size_bytes > room:
            raise Refused(
                Reason.QUOTA_EXCEEDED, f"more than {limits.artifact_bytes} bytes of artifacts"
            )
        staged = await self._blobs.staged(save.content, room)
        row = await self._services.artifacts.publish(
            self._tenant_id,
            derived_id(self._invocation_id, f"{self._sandbox_id}/{call_id}"),
            save.name,
            staged,
            media_type_of(save.name, save.media_type),
            self._invocation_id,
            self._services.now_us(),
        )
        if isinstance(row, AlreadyPublished):
            raise Refused(
                Reason.FIELD_INVALID,
                f"name: an artifact {save.name!r} was published before",
                field="name",
            )
        return self._services.loop.post(
            ev.ArtifactSaved(
                invocation_id=self._invocation_id,
                sandbox_id=self._sandbox_id,
                call_id=call_id,
                artifact=artifact_in(row),
            )
        )

    async def _inspect(self, node: Node, call: hs.InspectChildCall) -> bytes:
        child_id = InvocationId(call.invocation_id)
        if child_id not in node.children:
            raise Refused(Reason.INVOCATION_NOT_FOUND, "no such child of this invocation")
        child = self._services.loop.state.nodes[child_id]
        match call.view:
            case hs.CHILD_VIEW_STATUS:
                return _status(child)
            case hs.CHILD_VIEW_EVENTS:
                return await self._events(node, call)
            case hs.CHILD_VIEW_OUTPUT:
                return await self._output(child, call)
            case _:
                rows = await self._services.artifacts.list(
                    self._tenant_id, child_id, limit=ARTIFACT_VIEW
                )
                found = [json.loads(artifact_json(artifact_in(row))) for row in rows]
                return json.dumps({"artifacts": found}).encode()

    async def _output(self, child: Node, call: hs.InspectChildCall) -> bytes:
        name = "stderr" if call.stream == isv.OUTPUT_STREAM_STDERR else "stdout"
        kept = output_id(child.invocation_id, child.attempt)
        limit = min(call.max_bytes or OUTPUT_VIEW_BYTES, OUTPUT_VIEW_BYTES)
        output = self._services.output
        data = await output.read(self._tenant_id, kept, name, call.offset, limit)
        total = await output.size(self._tenant_id, kept, name)
        return _bytes_view(call.offset, data, total)

    async def _events(self, node: Node, call: hs.InspectChildCall) -> bytes:
        request = isv.ListEventsRequest(
            invocation_id=call.invocation_id,
            max_events=call.max_events,
            max_bytes=min(call.max_bytes, convert_events.EVENT_BYTES_MAXIMUM),
            before_sequence=call.offset,
        )
        services = self._services
        found = await convert_events.view(
            services.journal, services.loop.codec, self._tenant_id, node.tree_id, request
        )
        events = [
            {
                "sequence": item.sequence,
                "time": item.event_time.ToMicroseconds() / 1_000_000,
                "kind": item.kind,
                "text": item.text,
                "truncated": item.truncated,
                "total_bytes": item.total_bytes,
            }
            for item in found.events
        ]
        view = {"events": events, "truncated": found.truncated}
        return json.dumps(view | {"before_sequence": found.before_sequence}).encode()

    async def _read(self, node: Node, call: hs.ReadArtifactCall) -> bytes:
        if call.artifact_id not in node.readable:
            raise Refused(Reason.ARTIFACT_NOT_FOUND, "no such artifact")
        row = await self._services.artifacts.stat(self._tenant_id, call.artifact_id)
        limit = min(call.max_bytes or MIB, MIB)
        data = bytearray()
        chunks = self._services.artifacts.open_read(self._tenant_id, row.artifact_id, call.offset)
        try:
            async for chunk in chunks:
                data += chunk
                if len(data) >= limit:
                    break
        finally:
            await chunks.aclose()
        return _bytes_view(call.offset, bytes(data[:limit]), row.size_bytes)


def _contents(call: hs.SandboxCall) -> list[hs.Content]:
    return [
        call.spawn.program,
        *(item.value for item in call.spawn.inputs),
        call.save_artifact.content,
        call.tool.arguments,
    ]


def _store_refusal(problem: StoreError) -> Refused:
    match problem:
        case ArtifactNotFound():
            return Refused(Reason.ARTIFACT_NOT_FOUND, "no such artifact")
        case StoreFull():
            return Refused(Reason.STORE_FULL, "the disk under the store is full")
    log.error("call_failed", exc_info=problem)
    return Refused(Reason.STORE_UNAVAILABLE, "the store does not answer")


def _nothing(node: Node) -> ev.Event:
    """An event that changes nothing and is done once all before it is durable."""
    return ev.AwaitRequested(
        parent_id=node.invocation_id,
        sandbox_id=SandboxId(""),
        call_id=CallId(""),
        child_id=node.invocation_id,
    )


def _status(child: Node) -> bytes:
    ending = child.ending.kind.value if child.ended and child.ending else None
    return json.dumps(
        {
            "state": shown_state(child).value,
            "ending": ending,
            "depth": child.depth,
            "child_count": child.child_count,
        }
    ).encode()


def _bytes_view(offset: int, data: bytes, total: int) -> bytes:
    return json.dumps(
        {
            "offset": offset,
            "data": {"$bytes": base64.b64encode(data).decode()},
            "total_bytes": total,
        }
    ).encode()
