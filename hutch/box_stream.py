"""The stream to one box: cells and interrupts up; output, displays and results down.

Made by `hutch.aio_boxes`; calls `hutch.transport`. One task reads and one writes, on a connection
of its own that is made anew whenever it is cut or silent. Nothing is lost with a connection: a cell
that the controller has not acknowledged is given again under its id, which changes nothing if it
had arrived, and the new stream goes on after what is known here. A cut says nothing about a cell:
until its end is told, its state is unknown.

An observer that is slow is waited for: then nothing more is read, gRPC's flow control stops the
controller for this stream alone, and memory stays bounded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Literal

import grpc

from hutch import convert, types, wire_errors
from hutch.cells import DISPLAYS_LIMIT_BYTES, OutputKeeper
from hutch.errors import ConnectionLostError, HutchError, InvocationEndedError, refused
from hutch.transport import Link, Patience, Transport
from hutch.v1 import invocation_service_pb2 as pb

SILENCE_SECONDS = 30.0  # three of the controller's heartbeats
_HALF_CLOSE_SECONDS = 1.0
_LATER = ("CONTROLLER_DRAINING", "HOST_UNAVAILABLE", "STORE_UNAVAILABLE")

Shown = types.CellOutput | types.Display
Observer = Callable[[Shown], Awaitable[None]]
CellState = Literal["submitted", "accepted", "unknown", "ended"]

_observing: ContextVar[tuple[str, ...]] = ContextVar("hutch_observing", default=())


class CellRecord:
    """One cell, as far as it is known here.

    Attributes:
        cell_id: Its id.
        request: What gives it, until it is acknowledged.
        accepted: Set once it is.
        interrupted: Whether somebody here wants it interrupted.
        outputs: What it has printed, by stream.
        displays: What it has shown.
        displays_left_out: How many displays more there were.
        ended: Its end, once known; or why it cannot be known now.
    """

    def __init__(
        self, cell_id: str, request: pb.SubmitCell | None, observer: Observer | None, view: int
    ) -> None:
        """A cell that was not given yet, or is somebody else's."""
        self.cell_id = cell_id
        self.request = request
        self.observer = observer
        self.accepted = asyncio.Event()
        self.interrupted = False
        self.outputs: dict[types.Stream, OutputKeeper] = {
            "stdout": OutputKeeper(view),
            "stderr": OutputKeeper(view),
        }
        self.displays: list[types.Display] = []
        self.displays_left_out = 0
        self._displays_bytes = 0
        self.ended: asyncio.Future[types.Cell] = asyncio.get_running_loop().create_future()

    def accept(self) -> None:
        """It has arrived."""
        self.request = None
        self.accepted.set()

    def fail(self, error: Exception) -> None:
        """Its end will not be known, or somebody here cannot take what it shows."""
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # whoever asks is told; nobody has to
        self.accepted.set()

    def show(self, display: types.Display) -> None:
        """Keeps a display, within bounds."""
        size = sum(len(item.data or b"") for item in display.data)
        if self._displays_bytes + size > DISPLAYS_LIMIT_BYTES:
            self.displays_left_out += 1
            return
        self._displays_bytes += size
        self.displays.append(display)


class _Silent(HutchError):
    """Nothing came for too long, not even a heartbeat."""


class _FromNow(Exception):
    """What is past is known to be past: the next connection leaves it out."""


class BoxStream:
    """One box's stream, for as long as somebody here needs it.

    Attributes:
        ended: The box once it has ended.
    """

    def __init__(
        self,
        transport: Transport,
        invocation_id: str,
        *,
        on_disconnect: str = "detach",
        from_now: bool = False,
        without_output: bool = False,
    ) -> None:
        """A stream that is opened by its first use.

        Args:
            transport: Where the controller is.
            invocation_id: The box.
            on_disconnect: What becomes of this stream's cells when it is cut.
            from_now: Whether what was durable before the first connection is not wanted.
            without_output: Whether what cells print is not wanted.
        """
        self._transport = transport
        self._invocation_id = invocation_id
        self._on_disconnect = on_disconnect
        self._from_now = from_now
        self._without_output = without_output
        self._sequence = 0
        self._records: dict[str, CellRecord] = {}
        self._outgoing: deque[pb.AttachInvocationRequest] = deque()
        self._more = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._call: Any = None
        self._greeted: asyncio.Future[types.BoxStatus] | None = None
        self._linked = False
        self._closed = False
        self.ended: types.Invocation | None = None

    # --- what users of a box do ----------------------------------------------------------------

    async def attach(self) -> types.BoxStatus:
        """Opens the stream and waits until the box is known.

        Raises:
            HutchError: There is no such box, or the controller cannot be reached.
        """
        self._ensure()
        assert self._greeted is not None
        return await asyncio.shield(self._greeted)

    def submit(
        self, request: pb.SubmitCell, observer: Observer | None, view_bytes: int
    ) -> CellRecord:
        """Gives a cell.

        Raises:
            HutchError: The box has ended.
        """
        self._check_alive()
        record = CellRecord(request.cell_id, request, observer, view_bytes)
        self._records[record.cell_id] = record
        self._send(pb.AttachInvocationRequest(submit=request))
        self._ensure()
        return record

    def watch(self, cell_id: str, view_bytes: int) -> CellRecord:
        """Waits for the end of a cell that was given before; there may be no such cell."""
        self._check_alive()
        record = CellRecord(cell_id, None, None, view_bytes)
        self._records[cell_id] = record
        self._ensure()
        return record

    def interrupt(self, cell_id: str, *, queue: bool) -> None:
        """Interrupts a cell, and with `queue` those that wait behind it."""
        self._check_alive()
        seen = cell_id not in self._records
        for record in self._records.values():
            seen = seen or record.cell_id == cell_id
            if record.cell_id == cell_id or (queue and seen):
                record.interrupted = True
        interrupt = pb.InterruptCell(cell_id=cell_id, queue=queue)
        self._send(pb.AttachInvocationRequest(interrupt=interrupt))
        self._ensure()

    def try_interrupt(self, record: CellRecord) -> None:
        """Interrupts a cell of ours that has not ended, if that can be said."""
        if self.ended is None and not self._closed and record.cell_id in self._records:
            self.interrupt(record.cell_id, queue=False)

    async def result(self, record: CellRecord) -> types.Cell:
        """Waits for a cell's end, through any number of cuts.

        Raises:
            ConnectionLostError: The controller cannot be reached; the cell's state is unknown, and
                asking again tries again.
            RequestRefused: The cell was refused and did not run.
            InvocationFailed: The box ended before the cell.
        """
        if self._invocation_id in _observing.get():
            raise HutchError("what takes a cell's output cannot wait for a cell of the same box")
        if record.ended.done() and isinstance(record.ended.exception(), ConnectionLostError):
            self._check_alive()
            record.ended = asyncio.get_running_loop().create_future()
            self._records.setdefault(record.cell_id, record)
        if not record.ended.done():
            self._ensure()
        return await asyncio.shield(record.ended)

    def state(self, record: CellRecord) -> CellState:
        """What is known of a cell now."""
        if record.ended.done():
            lost = isinstance(record.ended.exception(), ConnectionLostError)
            return "unknown" if lost else "ended"
        if not self._linked:
            return "unknown"
        return "submitted" if record.request is not None else "accepted"

    async def stop(self) -> None:
        """Leaves the box alone; what it runs goes on."""
        self._closed = True
        call, runner = self._call, self._runner
        if runner is None:
            return
        if call is not None and self._on_disconnect == "cancel" and self.ended is None:
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
                async with asyncio.timeout(_HALF_CLOSE_SECONDS):
                    await call.done_writing()
                    await asyncio.wait({runner})
        runner.cancel()
        await asyncio.wait({runner})
        self._fail_all(ConnectionLostError("the stream to the box was closed"))

    # --- the connection ------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self.ended is not None:
            raise _end_of(self.ended)
        if self._closed:
            raise ConnectionLostError("the stream to the box is closed")

    def _ensure(self) -> None:
        """Sees to it that somebody reads and writes."""
        if self._closed or self.ended is not None:
            return
        if self._runner is None or self._runner.done():
            if self._greeted is None or self._greeted.done():
                self._greeted = asyncio.get_running_loop().create_future()
            self._runner = asyncio.create_task(self._run(), name="hutch-box")

    def _send(self, request: pb.AttachInvocationRequest) -> None:
        if self._call is not None and not self._from_now:  # else the next opening has it
            self._outgoing.append(request)
            self._more.set()

    async def _run(self) -> None:
        """Keeps the stream until the box has ended or patience has."""
        patience = self._transport.patience()
        try:
            while self.ended is None:
                await self._try(patience)
        except HutchError as error:
            await self._give_up(error)
        except Exception as error:
            self._fail_all(error)
            raise

    async def _try(self, patience: Patience) -> None:
        link = self._transport.link()
        try:
            await self._converse(link, patience)
            if self.ended is None:
                await patience.pause(ConnectionLostError("the controller ended the stream"))
        except grpc.aio.AioRpcError as error:
            self._unlink()
            await patience.after(error)
        except _Silent as error:
            self._unlink()
            await patience.pause(ConnectionLostError(str(error)))
        except _FromNow:
            return
        finally:
            self._unlink()
            await link.close()
        if self.ended is None:
            await self._transport.revive()

    def _unlink(self) -> None:
        self._linked = False
        self._call = None

    async def _converse(self, link: Link, patience: Patience) -> None:
        """One connection, to its end."""
        call = link.invocations.AttachInvocation(metadata=link.metadata)
        self._outgoing = deque(self._opening())
        self._more.set()
        self._call = call
        writer = asyncio.create_task(self._write(call), name="hutch-box-write")
        try:
            while True:
                try:
                    async with asyncio.timeout(SILENCE_SECONDS):
                        response = await call.read()
                except TimeoutError:
                    raise _Silent(f"the controller was silent for {SILENCE_SECONDS:g} s") from None
                if not isinstance(response, pb.AttachInvocationResponse):
                    return  # the end
                await self._take(response)
                patience.progress()
                if self.ended is not None:
                    return
        finally:
            call.cancel()
            writer.cancel()
            await asyncio.wait({writer})

    def _opening(self) -> list[pb.AttachInvocationRequest]:
        """What a connection begins with: all that the controller may not know."""
        attach = pb.AttachBox(
            invocation_id=self._invocation_id,
            after_sequence=self._sequence,
            without_output=self._without_output,
        )
        cancel = self._on_disconnect == "cancel"
        attach.on_disconnect = (
            pb.DISCONNECT_ACTION_CANCEL if cancel else pb.DISCONNECT_ACTION_DETACH
        )
        for record in self._records.values():
            stdout, stderr = record.outputs["stdout"], record.outputs["stderr"]
            # One that was acknowledged is named all the same: it is this client's still.
            if stdout.total_bytes or stderr.total_bytes or record.accepted.is_set():
                attach.positions.add(
                    cell_id=record.cell_id,
                    stdout_offset=stdout.total_bytes,
                    stderr_offset=stderr.total_bytes,
                )
        opening = [pb.AttachInvocationRequest(attach=attach)]
        return opening if self._from_now else opening + self._unacknowledged()

    def _unacknowledged(self) -> list[pb.AttachInvocationRequest]:
        """Requests that may not have arrived, in their order. An interrupt is not acknowledged: it
        is sent again until its cell has ended, for each cell by itself, so that none is hit that
        was given later."""
        requests = []
        for record in self._records.values():
            if record.request is not None:
                requests.append(pb.AttachInvocationRequest(submit=record.request))
            if record.interrupted:
                interrupt = pb.InterruptCell(cell_id=record.cell_id)
                requests.append(pb.AttachInvocationRequest(interrupt=interrupt))
        return requests

    async def _write(self, call: Any) -> None:
        """Sends what there is to send, in order."""
        try:
            while True:
                while self._outgoing:
                    await call.write(self._outgoing.popleft())
                self._more.clear()
                await self._more.wait()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader learns why

    # --- what comes down -----------------------------------------------------------------------

    async def _take(self, response: pb.AttachInvocationResponse) -> None:
        kind = response.WhichOneof("message")
        known = 0 < response.sequence <= self._sequence
        if kind == "attached":
            self._take_greeting(response)
        elif kind == "output":
            await self._take_output(convert.cell_output(response.output))
        elif kind == "refused":
            self._take_refusal(response.refused)
        elif kind == "cell_accepted":
            self._accept(response.cell_accepted.cell_id)
        elif kind == "display" and not known:
            display = convert.display(response.display)
            record = self._records.get(display.cell_id)
            if record is not None:
                record.accept()
                record.show(display)
                await self._observe(record, display)
        elif kind == "cell_completed":
            self._complete(convert.cell(response.cell_completed))
        elif kind == "ended":
            self._end(convert.invocation(response.ended))
        elif kind == "heartbeat":
            self._miss()
        if kind != "attached":
            self._sequence = max(self._sequence, response.sequence)

    def _take_greeting(self, response: pb.AttachInvocationResponse) -> None:
        if self._from_now:
            self._from_now = False
            if response.sequence:
                self._sequence = response.sequence
                raise _FromNow
            self._outgoing.extend(self._unacknowledged())
            self._more.set()
        self._linked = True
        self._accept(response.attached.running_cell_id)
        for cell_id in response.attached.waiting_cell_ids:
            self._accept(cell_id)
        if self._greeted is not None and not self._greeted.done():
            self._greeted.set_result(convert.box_status(response.attached))

    async def _take_output(self, output: types.CellOutput) -> None:
        record = self._records.get(output.cell_id)
        if record is None:
            return
        keeper = record.outputs[output.stream]
        fresh = keeper.take(output.offset, output.data)
        if fresh:
            offset = output.offset + len(output.data) - len(fresh)
            await self._observe(
                record,
                types.CellOutput(
                    cell_id=output.cell_id, stream=output.stream, offset=offset, data=fresh
                ),
            )

    async def _observe(self, record: CellRecord, shown: Shown) -> None:
        """Lets a cell's observer take something; one that fails ends nothing but its own cell's
        watching."""
        if record.observer is None:
            return
        token = _observing.set((*_observing.get(), self._invocation_id))
        try:
            await record.observer(shown)
        except Exception as error:
            record.observer = None
            record.fail(error)
        finally:
            _observing.reset(token)

    def _accept(self, cell_id: str) -> None:
        record = self._records.get(cell_id)
        if record is not None:
            record.accept()

    def _miss(self) -> None:
        """Nothing is left to be told: a cell that is still not known does not exist."""
        for record in list(self._records.values()):
            if record.request is None and not record.accepted.is_set():
                del self._records[record.cell_id]
                record.fail(refused("CELL_NOT_FOUND", f"no cell {record.cell_id!r}"))

    def _complete(self, cell: types.Cell) -> None:
        record = self._records.pop(cell.cell_id, None)
        if record is not None:
            record.accept()
            if not record.ended.done():
                record.ended.set_result(cell)

    def _take_refusal(self, refusal: pb.BoxRefusal) -> None:
        record = self._records.get(refusal.cell_id)
        if record is None or refusal.reason == "INVOCATION_ENDED":
            return  # the box's end follows, and says more
        if refusal.reason in _LATER:
            raise _Silent(refusal.message)  # it is given again on the next connection
        if record.request is not None or refusal.reason == "CELL_NOT_FOUND":
            del self._records[refusal.cell_id]
            record.fail(refused(refusal.reason, refusal.message))

    def _end(self, invocation: types.Invocation) -> None:
        self.ended = invocation
        self._fail_all(_end_of(invocation))
        self._records.clear()

    async def _give_up(self, error: HutchError) -> None:
        """Patience is at its end, or the box has."""
        if isinstance(error, InvocationEndedError):
            try:
                self._end(convert.invocation((await self._get()).invocation))
                return
            except HutchError as another:
                error = another
        self._fail_all(error)
        if not isinstance(error, ConnectionLostError):
            self._records.clear()

    async def _get(self) -> pb.GetInvocationResponse:
        request = pb.GetInvocationRequest(invocation_id=self._invocation_id)
        return await self._transport.call(
            self._transport.invocations.GetInvocation, lambda: request
        )

    def _fail_all(self, error: Exception) -> None:
        for record in list(self._records.values()):
            record.fail(error)
        if self._greeted is not None and not self._greeted.done():
            self._greeted.set_exception(error)
            self._greeted.exception()


def _end_of(invocation: types.Invocation) -> HutchError:
    """Why nothing can be done in a box that has ended."""
    if invocation.ending is None or invocation.ending.kind == "returned":
        return InvocationEndedError(
            f"the box {invocation.invocation_id} has ended: it returned", "INVOCATION_ENDED"
        )
    return wire_errors.ending_exception(invocation)
