"""Carries out the engine's commands that concern sandboxes.

Made by `controller.app`; called by the executor. Each sandbox attempt has one task that keeps it
attached; destroying is a task of its own beside it.
"""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import grpc.aio
import structlog
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from controller.convert import evidence_in
from controller.core.errors import Reason, Refused
from controller.core.ids import SandboxId
from controller.core.model import Evidence, GoneCause, State
from controller.engine import commands as cmd
from controller.engine import events as ev
from controller.engine.state import Node
from controller.hosts.attachment import Attachment, SandboxDenied, StreamEnded
from controller.hosts.link import FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS, HostLink
from controller.hosts.services import Services
from controller.store.ports import StoreFull
from hutch.v1 import host_service_pb2 as hs
from hutch.v1 import sandbox_file_pb2 as sf

log = structlog.get_logger(__name__)

DESTROY_SECONDS = 5.0  # for the stream to say that it is gone, before it is asked again by a call

_REFUSED = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.INTERNAL,
)


def _reason(problem: grpc.aio.AioRpcError) -> str:
    """The reason that a host gave, empty where it gave none."""
    status = rpc_status.from_call(problem)  # type: ignore[arg-type]
    info = error_details_pb2.ErrorInfo()
    for detail in status.details if status is not None else ():
        if detail.Unpack(info):
            return str(info.reason)
    return ""


class HostPool:
    """The hosts (one for now) and the sandboxes on them."""

    def __init__(self, services: Services, target: str) -> None:
        self._services = services
        self.link = HostLink(services, target)
        self._attachments: dict[SandboxId, Attachment] = {}

    def start(self) -> None:
        """Begins to dial."""
        self._services.nursery.start(self.link.run(), name="host-link")

    def issue(self, command: cmd.Command) -> None:
        """Begins to carry out a command about a sandbox."""
        match command:
            case cmd.StartSandbox():
                self._start(command)
            case cmd.Reply():
                if (found := self._attachments.get(command.sandbox_id)) is not None:
                    found.reply(command)
            case cmd.RunCell():
                if (found := self._attachments.get(command.sandbox_id)) is not None:
                    found.run_cell(command)
            case cmd.InterruptCell():
                if (found := self._attachments.get(command.sandbox_id)) is not None:
                    found.interrupt(command)
            case cmd.CallTool():
                if (found := self._attachments.get(command.sandbox_id)) is not None:
                    found.call_tool(command)
            case cmd.EndToolCall():
                if (found := self._attachments.get(command.sandbox_id)) is not None:
                    found.end_tool_call(command)
            case cmd.CaptureArtifacts():
                if (found := self._attachments.get(command.sandbox_id)) is not None:
                    found.capture_files(command)
                    self._services.nursery.start(self._time_capture(found), name="capture-timeout")
            case cmd.DestroySandbox():
                self._services.nursery.start(
                    self._destroy(command), name=f"destroy-{command.sandbox_id}"
                )

    async def write_stdin(
        self, sandbox_id: SandboxId, offset: int, data: bytes, *, close: bool
    ) -> int:
        """Gives a sandbox's code standard input; the offset up to which it has come.

        Raises:
            Refused: INVOCATION_ENDED; FIELD_INVALID for a gap; HOST_UNAVAILABLE.
        """
        return await self._attached(sandbox_id).write_stdin(offset, data, close=close)

    async def file_operation(
        self, sandbox_id: SandboxId, operation: sf.FileOperation
    ) -> sf.FileOutcome:
        """Works on a file of a live sandbox.

        Raises:
            Refused: INVOCATION_ENDED; HOST_UNAVAILABLE when its outcome was lost.
        """
        return await self._attached(sandbox_id).file_operation(operation)

    def _attached(self, sandbox_id: SandboxId) -> Attachment:
        found = self._attachments.get(sandbox_id)
        if found is None or found.capture is not None:
            raise Refused(Reason.INVOCATION_ENDED, "its sandbox is being ended")
        return found

    def _start(self, command: cmd.StartSandbox) -> None:
        node = self._services.loop.state.live(command.invocation_id)
        if node is None or node.sandbox_id != command.sandbox_id:
            return
        attachment = Attachment(self._services, command, node, lambda: len(self._attachments) > 1)
        self._attachments[command.sandbox_id] = attachment
        self._services.nursery.start(
            self._keep(command, attachment), name=f"attach-{command.sandbox_id}"
        )

    async def _keep(self, command: cmd.StartSandbox, attachment: Attachment) -> None:
        try:
            await self._attach_until_gone(command, attachment)
        finally:
            attachment.gone.set()
            if self._attachments.get(command.sandbox_id) is attachment:
                del self._attachments[command.sandbox_id]
            await attachment.close()

    async def _attach_until_gone(self, command: cmd.StartSandbox, attachment: Attachment) -> None:
        delay = FIRST_RETRY_SECONDS
        while True:
            await self.link.connected.wait()
            if self._current(command) is None:
                return
            attach = hs.SandboxAttach(
                sandbox_id=command.sandbox_id,
                owner_epoch=self._services.owner_epoch,
                host_generation=self.link.host_generation,
            )
            stream = self.link.new_stream()
            try:
                await attachment.converse(stream, attach)
                return
            except SandboxDenied as denied:
                await self._deny(command, attachment, str(denied))
                return
            except StreamEnded as ended:
                log.info("stream_ended", sandbox_id=command.sandbox_id, problem=str(ended))
            except grpc.aio.AioRpcError as problem:
                if await self._refused(command, attachment, problem):
                    return
            except Exception as problem:  # a store that fails, or a defect
                await self._give_up(command, attachment, problem)
                return
            finally:
                stream.cancel()
            await asyncio.sleep(delay)
            delay = min(delay * 2, LAST_RETRY_SECONDS)

    def _current(self, command: cmd.StartSandbox) -> Node | None:
        node = self._services.loop.state.live(command.invocation_id)
        if node is None or node.slot is None or node.sandbox_id != command.sandbox_id:
            return None
        return node

    async def _refused(
        self, command: cmd.StartSandbox, attachment: Attachment, problem: grpc.aio.AioRpcError
    ) -> bool:
        """Whether the host's answer is final, and then what it means is posted."""
        code, details = problem.code(), problem.details() or ""
        log.info("attach_failed", sandbox_id=command.sandbox_id, code=code.name, problem=details)
        node = self._current(command)
        if node is None:
            return True
        evidence = Evidence(detail=details[:2000])
        if code is grpc.StatusCode.NOT_FOUND:
            await attachment.lost(GoneCause.LOST, "the host no longer knows it", evidence)
            return True
        if code in _REFUSED or _reason(problem) == Reason.NOT_ENFORCEABLE:
            # It may be there all the same: its slot is free once it is proved gone.
            await self._destroy_until_done(command.sandbox_id)
            ran = node.state is not State.STARTING
            cause = GoneCause.LOST if ran else GoneCause.START_FAILED
            await attachment.lost(cause, details, evidence)
            return True
        return False  # fenced, unavailable or cut: the link says when to try again

    async def _give_up(
        self, command: cmd.StartSandbox, attachment: Attachment, problem: Exception
    ) -> None:
        """Ends what cannot be served, whatever the reason: it must not keep its slot."""
        log.error("attachment_failed", sandbox_id=command.sandbox_id, exc_info=problem)
        full = isinstance(problem, StoreFull)
        message = "the store is full" if full else "the controller failed to serve it"
        await self._end(command, attachment, GoneCause.LOST, message, message)

    async def _deny(self, command: cmd.StartSandbox, attachment: Attachment, problem: str) -> None:
        log.warning("sandbox_denied", sandbox_id=command.sandbox_id, problem=problem)
        message = f"it broke the protocol: {problem}"
        await self._end(command, attachment, GoneCause.DENIED, message, problem)

    async def _end(
        self,
        command: cmd.StartSandbox,
        attachment: Attachment,
        cause: GoneCause,
        message: str,
        detail: str,
    ) -> None:
        await self._destroy_until_done(command.sandbox_id)
        await attachment.lost(cause, message, Evidence(detail=detail[:2000]))
        # Its end is durable, and nobody will hear its last events: now the host forgets them.
        await self._destroy_until_done(command.sandbox_id)

    async def _time_capture(self, attachment: Attachment) -> None:
        seconds = self._services.config.capture_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                await attachment.gone.wait()
        except TimeoutError:
            await attachment.give_up_capture(f"the capture took longer than {seconds:g} s")

    async def _destroy(self, command: cmd.DestroySandbox) -> None:
        attachment = self._attachments.get(command.sandbox_id)
        if attachment is not None and attachment.destroy():
            # A message on the stream that is there costs less than a call of its own.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DESTROY_SECONDS):
                    await attachment.gone.wait()
            node = self._services.loop.state.live(command.invocation_id)
            if node is None or node.slot is None:
                return
        response = await self._destroy_until_done(command.sandbox_id)
        await self._services.loop.post(
            ev.SandboxGone(
                invocation_id=command.invocation_id,
                sandbox_id=command.sandbox_id,
                cause=GoneCause.DESTROYED,
                message="",
                evidence=evidence_in(response.evidence) if response else Evidence(),
            )
        )

    async def _destroy_until_done(self, sandbox_id: SandboxId) -> hs.DestroySandboxResponse | None:
        delay = FIRST_RETRY_SECONDS
        while True:
            await self.link.connected.wait()
            try:
                return await self.link.destroy(sandbox_id)
            except grpc.aio.AioRpcError as problem:
                log.warning(
                    "destroy_failed",
                    sandbox_id=sandbox_id,
                    code=problem.code().name,
                    problem=problem.details(),
                )
                if problem.code() is grpc.StatusCode.NOT_FOUND:
                    return None
            await asyncio.sleep(delay)
            delay = min(delay * 2, LAST_RETRY_SECONDS)

    async def close(self) -> None:
        """Hangs up; the sandboxes live on."""
        await self.link.close()
