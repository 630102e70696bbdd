"""One `AttachInvocation` stream: cells and interrupts up; output, displays and results down.

Made by the invocation servicer for each stream. Everything down is made by one coroutine, in order:
it follows what becomes durable in the tree and reads output from the log, so that a slow client
slows only itself and a new stream can go on where an old one was cut.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Collection

from controller import convert, convert_cells
from controller.checks import Checker
from controller.config import ControllerConfig
from controller.core.errors import Reason, Refused
from controller.core.ids import CellId, InvocationId, TenantId
from controller.core.model import CellOutcome
from controller.engine import events as ev
from controller.engine import records as rec
from controller.loop import Feed, Loop
from controller.store.ports import InvocationRow, Journal, OutputLog, tree_records
from controller.wire.cut_cells import CutCells
from controller.wire.outputs import STREAMS
from hutch.v1 import invocation_pb2
from hutch.v1 import invocation_service_pb2 as isv

CHUNK_BYTES = 256 * 1024
REFUSALS = 1000
MAX_SEQUENCE = 2**63 - 1
CUT_SECONDS = 0.5  # a client that half-closes stays longer, or has no open cell
POSITIONS = 1000  # ended cells whose later output is told

Requests = AsyncIterator[isv.AttachInvocationRequest]
Response = isv.AttachInvocationResponse


class BoxStream:
    """A client's stream to one box."""

    def __init__(
        self,
        *,
        config: ControllerConfig,
        loop: Loop,
        journal: Journal,
        output: OutputLog,
        checker: Checker,
        codec: rec.Codec,
        cut_cells: CutCells,
        tenant_id: TenantId,
        row: InvocationRow,
        attach: isv.AttachBox,
    ) -> None:
        if attach.after_sequence > MAX_SEQUENCE:
            raise Refused(Reason.FIELD_INVALID, f"at most {MAX_SEQUENCE}", field="after_sequence")
        self._config = config
        self._loop = loop
        self._journal = journal
        self._output = output
        self._checker = checker
        self._codec = codec
        self._cut_cells = cut_cells
        self._tenant_id = tenant_id
        self._tree_id = InvocationId(row.tree_id)
        self._invocation_id = InvocationId(row.invocation_id)
        self._row = row
        self._attach = attach
        self._sequence = attach.after_sequence
        self._feed: Feed
        self._refusals: asyncio.Queue[isv.BoxRefusal] = asyncio.Queue(REFUSALS)
        self._again: deque[CellId] = deque()  # ended before they were given once more
        # Given on this stream, or on one that was cut and that this one takes the place of.
        self._own: dict[CellId, None] = {}
        self._half_closed = False
        self._half_closed_seconds = 0.0
        self._positions: dict[CellId, list[int]] = {
            CellId(item.cell_id): [item.stdout_offset, item.stderr_offset]
            for item in attach.positions
        }
        self._returned: rec.CellRecorded | None = None  # its value is being checked
        self._said_seconds = 0.0  # when something was last said
        self._beat: asyncio.TimerHandle | None = None
        self._is_silent = False
        self._over = False

    async def run(self, requests: Requests) -> AsyncIterator[Response]:
        """What the client is told, until the box has ended or the client has had its answers."""
        watchers = self._loop.watchers
        self._feed = watchers.follow(self._tree_id)
        self._take_over()
        reader = asyncio.create_task(self._read(requests), name="box-read")
        try:
            await self._loop.settled()
            tree = self._loop.state.trees.get(self._tree_id)
            yield Response(sequence=tree.records if tree else 0, attached=self._greeting())
            async for message in self._take_up():
                yield message
            while not self._over:
                async for message in self._news():
                    yield message
                if self._over or (self._half_closed and not self._own):
                    break
                if reader.done() and not self._half_closed:
                    reader.result()
                if self._loop.draining:
                    raise Refused(Reason.CONTROLLER_DRAINING, "the controller is shutting down")
                if self._nothing_new():
                    await self._until_changed()
                    if self._is_silent:
                        self._is_silent = False
                        yield Response(heartbeat=isv.Heartbeat())
                self._feed.changed.clear()
        finally:
            if self._beat is not None:
                self._beat.cancel()
            watchers.unfollow(self._tree_id, self._feed)
            reader.cancel()
            await asyncio.wait({reader})
            if self._was_cut():
                self._disconnected()

    async def _until_changed(self) -> None:
        """Waits for news, or for the time of a heartbeat: the one timer of the stream looks, when
        it is over, whether it was put off meanwhile."""
        loop = asyncio.get_running_loop()
        self._said_seconds = loop.time()
        if self._beat is None:
            self._beat = loop.call_later(self._config.heartbeat_seconds, self._beat_is_due)
        await self._feed.changed.wait()

    def _beat_is_due(self) -> None:
        loop = asyncio.get_running_loop()
        at = self._said_seconds + self._config.heartbeat_seconds
        if loop.time() < at:
            self._beat = loop.call_at(at, self._beat_is_due)
            return
        self._beat = None
        self._is_silent = True
        self._feed.changed.set()

    def _was_cut(self) -> bool:
        """Whether the stream ended without a half-close.

        gRPC ends the requests of a stream that was cut as it ends those of one that was
        half-closed, a moment before it cancels.
        """
        waited = asyncio.get_running_loop().time() - self._half_closed_seconds
        return not self._half_closed or waited < CUT_SECONDS

    def _greeting(self) -> isv.BoxAttached:
        found = isv.BoxAttached(invocation=convert.invocation_of_row(self._row))
        node = self._loop.state.live(self._invocation_id)
        if node is not None:
            running = node.next_cell
            found.invocation.CopyFrom(convert.invocation_out(node))
            found.running_cell_id = running.cell_id if running is not None else ""
            found.waiting_cell_ids.extend(
                item for item in node.open_cells if item != found.running_cell_id
            )
        return found

    # Up.

    async def _read(self, requests: Requests) -> None:
        try:
            async for request in requests:
                await self._take(request)
        finally:
            self._feed.changed.set()
        self._half_closed = True
        self._half_closed_seconds = asyncio.get_running_loop().time()

    async def _take(self, request: isv.AttachInvocationRequest) -> None:
        cell_id = request.submit.cell_id or request.interrupt.cell_id
        try:
            match request.WhichOneof("message"):
                case "submit":
                    await self._submit(request.submit)
                case "interrupt":
                    self._loop.post(
                        ev.InterruptRequested(
                            invocation_id=self._invocation_id,
                            cell_id=convert_cells.cell_id_in(cell_id),
                            queue=request.interrupt.queue,
                        )
                    )
                case _:
                    raise Refused(Reason.FIELD_INVALID, "`attach` comes once, first")
        except Refused as refused:
            refusal = isv.BoxRefusal(
                cell_id=cell_id[:64], reason=refused.reason.value, message=refused.message
            )
            self._feed.changed.set()
            await self._refusals.put(refusal)  # a client that does not read is not heard
            self._feed.changed.set()

    async def _submit(self, submit: isv.SubmitCell) -> None:
        cell_id = convert_cells.cell_id_in(submit.cell_id)
        if self._loop.draining:
            raise Refused(Reason.CONTROLLER_DRAINING, "the controller is shutting down")
        code = convert.source_in("code", submit.code.encode())
        inputs = convert.inputs_in([convert.input_in(item) for item in submit.inputs])
        timeout = convert_cells.timeout_in(submit)
        node = self._loop.state.live(self._invocation_id)
        tools = node.granted.tools if node is not None else ()
        readable = await self._checker.check_inputs(self._tenant_id, inputs, tools)
        if node is not None and cell_id in node.ended_cells:
            self._again.append(cell_id)
            self._feed.changed.set()
            return
        self._cut_cells.take(self._invocation_id, cell_id)
        self._own[cell_id] = None
        try:
            self._loop.post(
                ev.CellSubmitted(
                    invocation_id=self._invocation_id,
                    cell_id=cell_id,
                    code=code,
                    inputs=inputs,
                    readable_artifacts=readable,
                    timeout_seconds=timeout,
                    refuse_busy=submit.queueing == isv.CELL_QUEUEING_REFUSE,
                )
            )
        except Refused:
            self._own.pop(cell_id, None)
            raise

    def _disconnected(self) -> None:
        """What becomes of this stream's cells when it was cut."""
        if self._attach.on_disconnect != isv.DISCONNECT_ACTION_CANCEL:
            return
        # Those that wait first: none begins meanwhile.
        self._cut_cells.leave(self._invocation_id, reversed(list(self._own)))

    def _take_over(self) -> None:
        """Makes its own what its client had given on a stream that was cut a moment ago."""
        if self._attach.on_disconnect == isv.DISCONNECT_ACTION_CANCEL:
            for cell_id in self._positions:
                if self._cut_cells.take(self._invocation_id, cell_id):
                    self._own[cell_id] = None

    # Down.

    def _nothing_new(self) -> bool:
        feed = self._feed
        known = feed.facts or feed.missed or feed.printed or self._again
        return not known and self._refusals.empty()

    async def _take_up(self) -> AsyncIterator[Response]:
        """What came after what is known: records of the journal, output behind the positions."""
        for cell_id in list(self._positions):
            async for message in self._printed(cell_id, STREAMS.values()):
                yield message
        async for message in self._replay():
            yield message
        if not self._over and self._loop.state.live(self._invocation_id) is None:
            yield await self._box_ended(self._sequence)  # the client knew, or nearly

    async def _replay(self) -> AsyncIterator[Response]:
        """What is in the journal and was not told on this stream."""
        self._feed.missed = False
        async for sequence, record in self._journalled(self._sequence):
            self._sequence = sequence
            async for message in self._told(sequence, record):
                yield message

    async def _tell_again(self, cell_id: CellId) -> AsyncIterator[Response]:
        """What a cell came to that ended before it was given once more."""
        found: rec.CellRecorded | None = None
        async for sequence, record in self._journalled(0):
            match record:
                case rec.CellRecorded() if record.cell_id == cell_id:
                    found = record
                    if not record.check:
                        cell = convert_cells.cell_out(record)
                        yield Response(sequence=sequence, cell_completed=cell)
                        return
                case rec.ValueChecked() if found is not None:
                    cell = convert_cells.cell_out(found, record)
                    yield Response(sequence=sequence, cell_completed=cell)
                    return

    async def _journalled(self, after_sequence: int) -> AsyncIterator[tuple[int, rec.Record]]:
        async for item in tree_records(
            self._journal, self._tenant_id, self._tree_id, after_sequence
        ):
            if item.invocation_id == self._invocation_id:
                yield item.sequence, self._codec.load(item.payload)

    async def _news(self) -> AsyncIterator[Response]:
        feed = self._feed
        while not self._refusals.empty():
            yield Response(refused=self._refusals.get_nowait())
        while self._again:
            async for message in self._tell_again(self._again.popleft()):
                yield message
        if feed.missed:
            async for message in self._replay():
                yield message
        while feed.facts and not self._over:
            sequence, record = feed.facts.popleft()
            if sequence <= self._sequence:
                continue
            self._sequence = sequence
            if record.invocation_id == self._invocation_id:
                async for message in self._told(sequence, record):
                    yield message
        while feed.printed:
            cell_id, stream = feed.printed.pop()
            async for message in self._printed(cell_id, (stream,)):
                yield message

    async def _told(self, sequence: int, record: rec.Record) -> AsyncIterator[Response]:
        """The messages that a durable record means, with the output that comes before them."""
        match record:
            case rec.CellAccepted() if not self._ends_next(record.cell_id):
                accepted = convert_cells.accepted_out(record)
                yield Response(sequence=sequence, cell_accepted=accepted)
            case rec.CellDisplayed():
                yield Response(sequence=sequence, display=convert_cells.display_out(record))
            case rec.CellRecorded() if record.check:
                self._returned = record
            case rec.CellRecorded():
                async for message in self._ended(sequence, record, None):
                    yield message
            case rec.ValueChecked():
                returned, self._returned = self._returned, None
                returned = returned or await self._returned_before(sequence)
                async for message in self._ended(sequence, returned, record):
                    yield message
            case rec.Ended():
                yield await self._box_ended(sequence)

    def _ends_next(self, cell_id: CellId) -> bool:
        """Whether a cell's end is told next, so that nobody need be told of its beginning."""
        if not self._feed.facts:
            return False
        _, record = self._feed.facts[0]
        return (
            isinstance(record, rec.CellRecorded) and record.cell_id == cell_id and not record.check
        )

    async def _returned_before(self, sequence: int) -> rec.CellRecorded:
        """The cell whose value a verdict is about, where it came before what this stream tells."""
        found: rec.CellRecorded | None = None
        async for earlier, record in self._journalled(0):
            if earlier >= sequence:
                break
            if isinstance(record, rec.CellRecorded) and record.check:
                found = record
        assert found is not None
        return found

    async def _box_ended(self, sequence: int) -> Response:
        row = await self._journal.get_invocation(self._tenant_id, self._invocation_id)
        self._over = True
        return Response(sequence=sequence, ended=convert.invocation_of_row(row or self._row))

    async def _ended(
        self, sequence: int, record: rec.CellRecorded, checked: rec.ValueChecked | None
    ) -> AsyncIterator[Response]:
        self._own.pop(record.cell_id, None)
        streams = convert_cells.streams_of(record)
        if record.outcome is not CellOutcome.CANCELLED_BEFORE_START and streams:
            async for message in self._printed(record.cell_id, streams, begin=True):
                yield message
        yield Response(sequence=sequence, cell_completed=convert_cells.cell_out(record, checked))
        if not self._attach.without_output and record.outcome is not (
            CellOutcome.CANCELLED_BEFORE_START
        ):
            self._positions.setdefault(record.cell_id, [0, 0])
            if len(self._positions) > POSITIONS:
                del self._positions[next(iter(self._positions))]

    async def _printed(
        self, cell_id: CellId, streams: Collection[str], *, begin: bool = False
    ) -> AsyncIterator[Response]:
        """What a cell has printed on these streams beyond its position."""
        if self._attach.without_output:
            return
        position = self._positions.get(cell_id)
        if position is None:
            node = self._loop.state.live(self._invocation_id)
            if not begin and (node is None or cell_id in node.ended_cells):
                return  # it had ended before this stream began, and was not asked for
            position = self._positions[cell_id] = [0, 0]
        kept = convert_cells.cell_output_id(self._invocation_id, cell_id)
        for index, (number, name) in enumerate(STREAMS.items()):
            if name not in streams:
                continue
            while position[index] < await self._output.size(self._tenant_id, kept, name):
                offset = position[index]
                data = await self._output.read(self._tenant_id, kept, name, offset, CHUNK_BYTES)
                if not data:
                    break
                position[index] += len(data)
                yield Response(
                    output=isv.CellOutput(cell_id=cell_id, stream=number, offset=offset, data=data)
                )


def is_box(row: InvocationRow) -> bool:
    """Whether clients give it its cells."""
    invocation = convert.invocation_of_row(row)
    return invocation.mode == invocation_pb2.INVOCATION_MODE_INTERACTIVE
