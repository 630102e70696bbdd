"""One sandbox on this host, from its start until it is proved gone.

Made by the table; told what its owner says by the attached stream and what its code says by the
channel. Whatever ends it first is the cause; after that nothing else counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from hutch.v1 import cell_pb2, ending_pb2, host_pb2, invocation_pb2, sandbox_file_pb2
from hutch.v1 import host_service_pb2 as pb
from sandbox.drivers.driver import Container, Measurement, SandboxRequest, StartFailed
from sandbox.host import calls, evidence, outbound
from sandbox.host.channel import FrameChannel
from sandbox.host.disposal import dispose
from sandbox.host.errors import field_invalid
from sandbox.host.events import EventLog
from sandbox.host.inbound import Inbound
from sandbox.host.outbound import Outbound, StreamContents
from sandbox.host.pool import WarmSandbox
from sandbox.host.received import Received
from sandbox.host.spill import Spill
from sandbox.host.verdict import Verdict, judge
from sandbox.host.workshop import Order, Workshop
from sandbox.runtime import frames

MAX_GONE_MESSAGE = 2_000
DEFAULT_OUTPUT_LIMIT_BYTES = 1024 * 1024 * 1024
_FULL = "full"
_MEASURING = "measuring"
_COUNTED_SECONDS = 0.1  # for so long the kernel's counters are taken for what they were
_UNREMARKABLE = (cell_pb2.CELL_OUTCOME_COMPLETED, cell_pb2.CELL_OUTCOME_RETURNED)
_STREAM_NAMES: dict[int, str] = {value: name for name, value in calls.STREAMS.items()}


@dataclass(slots=True, kw_only=True, eq=False)
class Attachment:
    """One stream's place at a sandbox."""

    after_sequence: int
    superseded: bool = False


class HostedSandbox:
    """A sandbox, its events and its state."""

    def __init__(
        self,
        order: Order,
        workshop: Workshop,
        on_settled: Callable[[HostedSandbox], object],
        warm: WarmSandbox | None = None,
    ) -> None:
        """Makes nothing yet; `start` does.

        Args:
            order: What to make.
            workshop: What is shared.
            on_settled: Called once it is gone and all its events were acknowledged.
            warm: One that is ready, claimed for this order; without one it is made.
        """
        config = workshop.config
        self.order = order
        self.state: host_pb2.SandboxState.ValueType = host_pb2.SANDBOX_STATE_STARTING
        self.gone = asyncio.Event()
        self.evidence = ending_pb2.Evidence()
        self.log = EventLog(
            Spill(workshop.spill_directory, order.sandbox_id),
            memory_bytes=config.event_memory_bytes,
            spill_bytes=config.spill_limit_bytes,
            max_events=config.unacknowledged_events,
        )
        self._workshop = workshop
        self._on_settled = on_settled
        self._born = workshop.clock.now()
        self._inbound = Inbound(
            open_calls=config.open_calls,
            output_limit_bytes=order.output_limit_bytes,
            waiting_file_operations=config.waiting_file_operations,
            remembered_ids=config.unacknowledged_events,
        )
        self._outbound = Outbound(order.output_limit_bytes)
        self._warm = warm
        self._channel = warm.channel if warm else FrameChannel(self, config.channel_queue_bytes)
        self._container: Container | None = None
        self._held_levels: list[ending_pb2.LimitEnforcement] | None = None
        self._verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._channel_end: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._measuring: asyncio.Task[None] | None = None
        self._before = Measurement()  # what the kernel had counted when the cell began
        self._counted_at = self._born
        self._draining = False
        self._capture_after: dict[str, pb.FileCapture] = {}
        self._attachment: Attachment | None = None
        self._logger = structlog.get_logger().bind(
            sandbox_id=order.sandbox_id, invocation_id=order.invocation_id
        )

    # What the owner does; nothing but `attach`, `acknowledge` and `end` once it is ending.

    def start(self) -> None:
        """Begins to make it, beside everything else; a warm one is ready at once."""
        if self._warm is not None:
            self._container = self._warm.container
            self._channel.hand_to(self)
            self.frame_received(self._warm.greeting)
            self._logger = self._logger.bind(container_id=self._container.sandbox_id)
        self._workshop.nursery.start(self._live(), f"sandbox {self.order.sandbox_id}")

    def attach(self, after_sequence: int) -> Attachment:
        """Gives a stream the place; the stream that had it loses it.

        Events that were acknowledged do not come again, even if an owner that has just started
        says that it knows of none.

        Raises:
            HostError: FIELD_INVALID, there is no such event yet.
        """
        if after_sequence > self.log.last_sequence:
            raise field_invalid(
                "attach.after_sequence", f"the last event is {self.log.last_sequence}"
            )
        if self._attachment is not None:
            self._attachment.superseded = True
        self._attachment = Attachment(after_sequence=after_sequence)
        self.log.wake()
        return self._attachment

    def run_cell(self, run: pb.RunCell, contents: StreamContents) -> None:
        """Runs a cell, once; a cell id that was given before does nothing.

        Raises:
            HostError: FIELD_INVALID or PAYLOAD_TOO_LARGE.
        """
        if not run.cell_id or len(run.cell_id) > 64 or not run.cell_id.isascii():
            raise field_invalid("run_cell.cell_id", "must have 1 to 64 ASCII characters")
        cells = self._inbound.cells
        if run.cell_id in cells:
            contents.discard([run.code, *(item.value for item in run.inputs)])
            return
        if self._inbound.busy():
            raise field_invalid("run_cell.cell_id", "another cell runs, or files were asked for")
        if len(cells) >= self._workshop.config.cells:
            raise field_invalid("run_cell.cell_id", f"the sandbox has had {len(cells)} cells")
        message = self._outbound.cell(run, contents)
        if run.HasField("capture"):
            outbound.capture(run.capture)  # a bad request is refused before anything runs
            self._capture_after[run.cell_id] = run.capture
        interactive = run.mode == invocation_pb2.INVOCATION_MODE_INTERACTIVE
        cells.expect(run.cell_id, interactive=interactive)
        self._channel.post(message)
        self._count_before(run.cell_id)

    def reply(self, reply: pb.CallReply, contents: StreamContents) -> None:
        """Answers a call, once; an answer to a call that is not open does nothing.

        Raises:
            HostError: FIELD_INVALID or PAYLOAD_TOO_LARGE.
        """
        if not self._inbound.call_is_open(reply.call_id):
            self._logger.info("reply_ignored", call_id=reply.call_id[:64])
            contents.discard([reply.value])
            return
        message = self._outbound.reply(reply, contents)
        self._inbound.answer(reply.call_id)
        self._channel.post(message)

    def interrupt(self, cell_id: str) -> None:
        """Interrupts a cell if it runs."""
        if cell_id and cell_id == self._inbound.cells.running:
            self._channel.send(outbound.control("interrupt", cell=cell_id))

    def feed(self, chunk: pb.StdinChunk) -> None:
        """Brings bytes for the code's standard input; what came before is dropped.

        Raises:
            HostError: FIELD_INVALID.
        """
        if (frame := self._inbound.stdin.frame(chunk)) is not None:
            self._channel.post(outbound.whole(frame))

    def call_tool(self, delivery: pb.ToolDelivery, contents: StreamContents) -> None:
        """Calls a tool of the sandbox's code, once; an id that was given before does nothing.

        Raises:
            HostError: FIELD_INVALID or PAYLOAD_TOO_LARGE.
        """
        tools = self._inbound.tools
        if tools.knows(delivery.call_id):
            contents.discard([delivery.arguments])
            return
        message = self._outbound.tool_call(delivery, contents)
        refused = tools.expect(delivery.call_id)
        if refused is None:
            self._channel.post(message)
            return
        message.close()
        self.log.append(pb.AttachSandboxResponse(tool_result=refused))

    def cancel_tool(self, call_id: str) -> None:
        """Says that nobody waits for a call any more, if it is open."""
        if self._inbound.tools.is_open(call_id):
            self._channel.post(outbound.whole(outbound.control("tool_cancel", call=call_id)))

    def operate(self, operation: sandbox_file_pb2.FileOperation) -> None:
        """Works on files, once; an id that was given before does nothing.

        Raises:
            HostError: FIELD_INVALID.
        """
        refused = self._inbound.files.ask(operation)
        if refused is not None:
            self.log.append(pb.AttachSandboxResponse(file_outcome=refused))
        self._next_file_operation()

    def _next_file_operation(self) -> None:
        if (frame := self._inbound.files.next_frame()) is not None:
            self._channel.post(outbound.whole(frame))

    def capture(self, request: pb.FileCapture) -> None:
        """Asks for files, once.

        Raises:
            HostError: FIELD_INVALID.
        """
        frame = outbound.capture(request)
        if self._inbound.expect_capture(request.max_files, request.max_bytes):
            self._channel.send(frame)

    def acknowledge(self, sequence: int) -> None:
        """Frees events and gives credit for the output among them.

        Raises:
            HostError: FIELD_INVALID, there is no such event yet.
        """
        try:
            taken = self.log.acknowledge(sequence)
        except IndexError as error:
            raise field_invalid("acknowledge.sequence", str(error)) from error
        for mark in taken:
            if self._inbound.cells.take_output(mark):
                stream = _STREAM_NAMES[mark.stream]
                self._channel.send(
                    outbound.control("credit", cell=mark.cell_id, stream=stream, offset=mark.end)
                )
        if not self.log.full:
            self._channel.resume(_FULL)
        self._settle()

    def end(self, cause: pb.GoneCause.ValueType, message: str) -> None:
        """Ends it unless something else did; `gone` is set once that is proved."""
        if not self._verdict.done():
            self._logger.info("sandbox_ending", cause=pb.GoneCause.Name(cause), why=message)
            self._verdict.set_result(Verdict(cause=cause, message=message[:MAX_GONE_MESSAGE]))

    async def room(self) -> None:
        """Waits until the sandbox has taken enough of what was said to it."""
        await self._channel.room()

    @property
    def open_calls(self) -> list[str]:
        """The calls that have had no reply."""
        return self._inbound.open_call_ids()

    @property
    def stdin_offset(self) -> int:
        """Up to where standard input has come."""
        return self._inbound.stdin.offset

    @property
    def ending(self) -> bool:
        """Whether it is decided how it ends: nothing that is said to it counts any more."""
        return self._verdict.done()

    @property
    def settled(self) -> bool:
        """Whether it is gone and its owner knows all of it."""
        return self.gone.is_set() and self.log.acknowledged == self.log.last_sequence

    def describe(self) -> host_pb2.Sandbox:
        """It as a resource."""
        return host_pb2.Sandbox(
            sandbox_id=self.order.sandbox_id,
            invocation_id=self.order.invocation_id,
            state=self.state,
            owner_epoch=self.order.owner_epoch,
            evidence=self.evidence if self.gone.is_set() else None,
            wall_time=self.evidence.wall_time
            if self.gone.is_set()
            else evidence.duration(self._age()),
        )

    # What the channel tells.

    def frame_received(self, frame: frames.Frame) -> None:
        """Checks one frame and adds what it means to the events."""
        received = self._inbound.accept(frame)
        first = received.events[0]
        if first.HasField("ready"):
            self._become_ready(first.ready)
        completed = received.events[-1].cell_completed
        if received.events[-1].HasField("cell_completed"):
            if (wanted := self._capture_after.pop(completed.cell_id, None)) is not None:
                self.capture(wanted)
            if completed.outcome not in _UNREMARKABLE and self._container is not None:
                self._measure_first(received, completed, self._container)
                return
            self._add_evidence(completed, Measurement())
        self._append(received)
        if first.HasField("file_outcome"):
            self._next_file_operation()

    def channel_breached(self, problem: str) -> None:
        """Ends it: what it sent, no sandbox may send."""
        self.end(pb.GONE_CAUSE_DENIED, f"it broke the frame protocol: {problem}")

    def channel_failed(self, problem: str) -> None:
        """Ends it: it would wait for ever for the rest of what it was told."""
        self.end(pb.GONE_CAUSE_LOST, f"the host's disk failed: {problem}")

    def channel_ended(self, truncated: bool) -> None:
        """Notes that nothing more comes."""
        if not self._channel_end.done():
            self._channel_end.set_result(truncated)

    def _become_ready(self, ready: pb.SandboxReady) -> None:
        if self._container is None:
            raise AssertionError("a frame without a container")
        order = self.order
        ready.enforcement.extend(self._levels())
        ready.driver = order.driver.name
        ready.isolation = evidence.ISOLATIONS[order.statement.isolation]
        self.state = host_pb2.SANDBOX_STATE_READY
        self._ready.set_result(None)
        self._channel.release()

    def _append(self, received: Received) -> None:
        for event in received.events:
            self.log.append(event, received.mark)
        if self.log.full and not self._draining:
            self._channel.pause(_FULL)

    def _measure_first(
        self, received: Received, completed: pb.CellCompleted, container: Container
    ) -> None:
        # The next frame waits: the events stay in the order in which the sandbox sent them.
        self._channel.pause(_MEASURING)

        async def measure() -> None:
            try:
                async with asyncio.timeout(self._workshop.config.measure_timeout_seconds):
                    measurement = await container.measure()
            except Exception as error:
                self._logger.warning("measuring_failed", problem=str(error)[:500])
                measurement = Measurement()
            self._add_evidence(completed, evidence.since(measurement, self._before))
            self._before, self._counted_at = measurement, self._workshop.clock.now()
            self._append(received)
            self._channel.resume(_MEASURING)

        self._measuring = self._workshop.nursery.start(measure(), "measure")

    def _count_before(self, cell_id: str) -> None:
        """Notes what was counted before a cell, which is none of its doing.

        The cell does not wait for it, and cells in quick succession share one look: what takes more
        memory than there is takes longer.
        """
        container = self._container
        if container is None or self._workshop.clock.now() - self._counted_at < _COUNTED_SECONDS:
            return

        async def count() -> None:
            try:
                measurement = await container.measure()
            except Exception as error:
                self._logger.warning("measuring_failed", problem=str(error)[:500])
                return
            if self._inbound.cells.running == cell_id:
                self._before, self._counted_at = measurement, self._workshop.clock.now()

        self._workshop.nursery.start(count(), "count")

    def _add_evidence(self, completed: pb.CellCompleted, measurement: Measurement) -> None:
        # How the REPL ended is known from the supervisor only; the rest is measured.
        stated = completed.evidence
        measured = self._evidence(measurement)
        measured.ClearField("exit_code")
        measured.ClearField("signal")
        measured.MergeFrom(stated)
        completed.evidence.CopyFrom(measured)

    def _evidence(self, measurement: Measurement) -> ending_pb2.Evidence:
        return evidence.measured(
            measurement,
            limits=self.order.limits,
            held=self._levels(),
            wall_seconds=self._age(),
        )

    def _levels(self) -> Sequence[ending_pb2.LimitEnforcement]:
        """At which level each limit is held; made once, since every cell's evidence has it."""
        if self._held_levels is None and self._container is not None:
            self._held_levels = evidence.enforcement(self._container.enforcement)
        return self._held_levels or ()

    def _age(self) -> float:
        return max(0.0, self._workshop.clock.now() - self._born)

    # Its life.

    async def _live(self) -> None:
        if self._warm is not None:
            watch = self._begin_watch(self._warm.container)
        else:
            with self._workshop.builders.demand():
                container = await self._create()
                if container is not None:
                    watch = self._begin_watch(container)
                    await self._until_ready()
        await asyncio.wait({self._verdict})
        if self._container is not None:
            watch.cancel()
        await self._bury(await self._verdict)

    def _begin_watch(self, container: Container) -> asyncio.Task[None]:
        return self._workshop.nursery.start(self._watch(container), "watch")

    async def _create(self) -> Container | None:
        order = self.order
        request = SandboxRequest(
            sandbox_id=order.sandbox_id, template=order.template, limits=order.limits
        )
        try:
            async with self._workshop.builders.slots:
                if self._verdict.done():
                    return None
                self._container = await order.driver.create(request)
            self._channel.connect(self._container.channel)
        except StartFailed as error:
            self.end(pb.GONE_CAUSE_START_FAILED, str(error))
        except Exception:
            self._logger.exception("create_failed")
            self.end(pb.GONE_CAUSE_START_FAILED, "the driver failed; the host's log has the trace")
        return self._container

    async def _until_ready(self) -> None:
        limit = self._workshop.config.start_timeout_seconds
        await _first_of([self._ready, self._verdict], limit)
        if not self._ready.done():
            self.end(pb.GONE_CAUSE_START_FAILED, f"its supervisor was not ready within {limit:g} s")

    async def _watch(self, container: Container) -> None:
        """Finds out how it ended when nobody asked for it."""
        drain = self._workshop.config.exit_drain_seconds
        async with asyncio.TaskGroup() as group:
            exit_task = group.create_task(self._exit(container))
            await _first_of([exit_task, self._channel_end], None)
            if exit_task.done():
                # It is dead, so what it left in the channel is little: read it, full or not.
                self._draining = True
                self._channel.resume(_FULL)
            await _all_of([exit_task, self._channel_end], drain)
            exited = exit_task.result() if exit_task.done() else Measurement()
            exit_task.cancel()
        truncated = self._channel_end.done() and self._channel_end.result()
        verdict = judge(exited=exited, ready=self._ready.done(), truncated=truncated)
        self.end(verdict.cause, verdict.message)

    async def _exit(self, container: Container) -> Measurement:
        try:
            return await container.wait()
        except Exception:
            self._logger.exception("waiting_failed")
            return Measurement()

    async def _bury(self, verdict: Verdict) -> None:
        self.state = host_pb2.SANDBOX_STATE_DESTROYING
        while self._measuring is not None and not self._measuring.done():
            await asyncio.wait({self._measuring})
        self._channel.close()
        measurement = Measurement()
        if self._container is not None:
            measurement = await dispose(self._container, self._workshop, self._logger)
        self.evidence = self._evidence(measurement)
        gone = pb.SandboxGone(cause=verdict.cause, message=verdict.message, evidence=self.evidence)
        self.state = host_pb2.SANDBOX_STATE_GONE
        self.log.append(pb.AttachSandboxResponse(gone=gone))
        self.gone.set()
        self._logger.info("sandbox_gone", cause=pb.GoneCause.Name(verdict.cause))

    def _settle(self) -> None:
        if self.settled:
            self._on_settled(self)


async def _first_of(futures: Sequence[asyncio.Future[Any]], seconds: float | None) -> None:
    await asyncio.wait(futures, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)


async def _all_of(futures: Sequence[asyncio.Future[Any]], seconds: float) -> None:
    await asyncio.wait(futures, timeout=seconds)
