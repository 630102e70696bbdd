"""Boxes: sandboxes whose cells a client gives one after the other.

Made by `hutch.aio`; calls `hutch.box_stream` and the client. `hutch.boxes` has a blocking front to
all of it.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from hutch import calls, convert, starting, types
from hutch.box_stream import BoxStream, CellRecord, CellState, Observer, Shown
from hutch.cells import CellResult, OutputKeeper
from hutch.errors import HutchError, ResultTimeoutError
from hutch.v1 import invocation_service_pb2 as pb
from hutch.workspace import AsyncFiles

if TYPE_CHECKING:
    from hutch.aio import AsyncClient

AsyncCellResult = CellResult[AsyncIterator[bytes]]
Queueing = Literal["wait", "refuse"]
OnOutput = Callable[[types.CellOutput], Awaitable[None] | None]
OnDisplay = Callable[[types.Display], Awaitable[None] | None]

_VIEW_BYTES = 64 * 1024
_QUEUEINGS = {"wait": pb.CELL_QUEUEING_WAIT, "refuse": pb.CELL_QUEUEING_REFUSE}
_STDIN_PIECE_BYTES = 256 * 1024


def _observer(on_output: OnOutput | None, on_display: OnDisplay | None) -> Observer | None:
    if on_output is None and on_display is None:
        return None

    async def observe(shown: Shown) -> None:
        taken: Awaitable[None] | None = None
        if isinstance(shown, types.CellOutput):
            taken = on_output(shown) if on_output is not None else None
        elif on_display is not None:
            taken = on_display(shown)
        if inspect.isawaitable(taken):
            await taken

    return observe


class AsyncBox:
    """A sandbox that takes cells. Use it as `async with client.sandbox() as box:`.

    Leaving the block ends the box, unless it was detached or belongs to somebody else.
    """

    def __init__(
        self, client: AsyncClient, call: calls.BoxCall, invocation_id: str = "", *, ours: bool
    ) -> None:
        """A box that is not open yet.

        Args:
            client: Whose box it is.
            call: What is asked for.
            invocation_id: The box, where it exists already.
            ours: Whether leaving the block ends it.
        """
        self._client = client
        self._call = call
        self._id = invocation_id
        self._ours = ours
        self._stream: BoxStream | None = None
        self._view_bytes = call.spec.output.output_view_bytes or _VIEW_BYTES
        self._stdin_offset: int | None = 0 if ours else None
        # Guards that pieces of standard input are sent in the order in which they were given.
        self._stdin_lock = asyncio.Lock()

    def __repr__(self) -> str:
        """Names the invocation."""
        return f"<{type(self).__name__} {self._id or 'not open'}>"

    @property
    def id(self) -> str:
        """The invocation's id."""
        if not self._id:
            raise HutchError("the box is not open: use it as `with client.sandbox() as box:`")
        return self._id

    @property
    def files(self) -> AsyncFiles:
        """The files of its sandbox."""
        return AsyncFiles(self._client, self.id)

    @property
    def on_disconnect(self) -> str:
        """What becomes of this client's cells when its connection is cut."""
        return self._call.on_disconnect

    async def __aenter__(self) -> Self:
        """Opens it."""
        return await self.open()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends it, or leaves it alone where it was detached or is not ours."""
        if self._ours:
            await self.close()
        else:
            await self.detach()

    async def open(self) -> Self:
        """Makes the box where it does not exist yet; its sandbox may still be starting afterwards.

        Raises:
            RequestRefused: It was refused and nothing was started.
            NotFoundError: There is no such box to come back to.
        """
        if self._stream is not None:
            return self
        if not self._id:
            bound = self._call.cancel_on_disconnect
            created = await starting.create(
                self._client,
                self._call.spec,
                bound=self._client.is_local if bound is None else bound,
            )
            self._id = created.invocation_id
            self._stream = self._make_stream(from_now=False)
        else:
            self._stream = self._make_stream(from_now=True)
            try:
                await self._stream.attach()
            except BaseException:
                await self._stop()
                raise
        self._client.boxes.add(self)
        return self

    def _make_stream(self, *, from_now: bool) -> BoxStream:
        on_disconnect = self._call.on_disconnect
        return BoxStream(
            self._client._open(), self.id, on_disconnect=on_disconnect, from_now=from_now
        )

    def _make_side_stream(self) -> BoxStream:
        """A stream for one question about what has been."""
        return BoxStream(self._client._open(), self.id, without_output=True)

    def _open(self) -> BoxStream:
        if self._stream is None:
            raise HutchError("the box is not open: use it as `with client.sandbox() as box:`")
        return self._stream

    # --- cells ---------------------------------------------------------------------------------

    async def run(
        self,
        code: str,
        *,
        timeout_seconds: float | None = None,
        queueing: Queueing = "wait",
        cell_id: str | None = None,
        on_output: OnOutput | None = None,
        on_display: OnDisplay | None = None,
        inputs: Mapping[str, Any] | None = None,
    ) -> AsyncCellResult:
        """Runs a cell and gives back what it came to; an exception of its code is data in there.

        Interrupted itself, it interrupts the cell.

        Args:
            code: Python source.
            timeout_seconds: The cell's own wall-clock limit.
            queueing: `wait` behind other cells, or `refuse` at once when one runs.
            cell_id: The caller's id for it; the same id again gives the same result.
            on_output: Called with what it prints while it runs. While it is slow nothing more is
                taken, and the code's own printing stops in the end: nothing is lost or piled up.
            on_display: Called with what it shows.
            inputs: Values to bind in the namespace first.

        Raises:
            CellBusyError: Another cell runs, and this one did not want to wait.
            ConnectionLostError: The controller cannot be reached; what became of the cell is
                unknown, and running it again under its id gives its one result.
            InvocationFailed: The box has ended; `.ending` says how.
        """
        cell = await self.submit(
            code,
            timeout_seconds=timeout_seconds,
            queueing=queueing,
            cell_id=cell_id,
            on_output=on_output,
            on_display=on_display,
            inputs=inputs,
        )
        done = False
        try:
            result = await cell.result()
            done = True
            return result
        finally:
            if not done:
                cell.abandon()

    async def submit(
        self,
        code: str,
        *,
        timeout_seconds: float | None = None,
        queueing: Queueing = "wait",
        cell_id: str | None = None,
        on_output: OnOutput | None = None,
        on_display: OnDisplay | None = None,
        inputs: Mapping[str, Any] | None = None,
    ) -> AsyncCell:
        """Gives a cell and does not wait for it; see `run` for what the options mean."""
        stream = self._open()
        if queueing not in _QUEUEINGS:
            raise calls.invalid("queueing", f"queueing is {queueing!r}: wait or refuse")
        encoded = calls.encode_inputs(inputs or {}, {})
        stored = await self._client._uploads.store_inputs(self._client._open(), encoded)
        request = pb.SubmitCell(
            cell_id=cell_id or f"cell_{secrets.token_hex(8)}",
            code=calls.check_source(code, "code"),
            queueing=_QUEUEINGS[queueing],
            inputs=[convert.named_value(item, stored) for item in encoded],
        )
        seconds = calls.seconds(timeout_seconds)
        if seconds is not None:
            request.timeout.CopyFrom(convert.duration(seconds))
        record = stream.submit(request, _observer(on_output, on_display), self._view_bytes)
        return AsyncCell(self, stream, record)

    def cell(self, cell_id: str) -> AsyncCell:
        """A cell that was given before, by this client or another."""
        self._open()
        return AsyncCell(self, None, CellRecord(cell_id, None, None, self._view_bytes))

    async def interrupt(self, cell_id: str, *, queue: bool = False) -> None:
        """Interrupts a cell: SIGINT, then SIGTERM, then SIGKILL of its processes.

        One that waits never runs; one that has ended is left alone.

        Args:
            cell_id: The cell.
            queue: Also those that wait behind it.
        """
        stream = self._open()
        await stream.attach()
        stream.interrupt(cell_id, queue=queue)

    async def status(self) -> types.BoxStatus:
        """The box, the cell that runs and those that wait, as they stand now."""
        side = self._make_side_stream()
        try:
            return await side.attach()
        finally:
            await side.stop()

    def read_output(
        self,
        cell_id: str,
        stream: types.Stream = "stdout",
        *,
        offset: int = 0,
        max_bytes: int = 0,
        follow: bool = False,
    ) -> AsyncIterator[types.OutputChunk]:
        """Yields what a cell printed, from any byte; see `AsyncClient.read_output`."""
        return self._client.read_output(
            self.id, stream, offset=offset, max_bytes=max_bytes, follow=follow, cell_id=cell_id
        )

    async def pieces(self, cell_id: str, stream: types.Stream) -> AsyncIterator[bytes]:
        """Yields all that a cell has printed so far."""
        async for chunk in self.read_output(cell_id, stream):
            yield chunk.data

    async def look_up(self, cell_id: str) -> tuple[types.Cell, CellRecord]:
        """The end of a cell that was given before; waits for one that has not ended.

        Raises:
            CellNotFoundError: The box was never given such a cell.
        """
        side = self._make_side_stream()
        try:
            record = side.watch(cell_id, self._view_bytes)
            cell = await side.result(record)
        finally:
            await side.stop()
        for name, size in (("stdout", cell.stdout_bytes), ("stderr", cell.stderr_bytes)):
            await self._view(record.outputs[name], cell_id, name, size)  # type: ignore[index, arg-type]
        return cell, record

    async def _view(
        self, keeper: OutputKeeper, cell_id: str, stream: types.Stream, size: int
    ) -> None:
        """Reads the beginning and the end of what an ended cell printed."""
        half = max(1, self._view_bytes // 2)
        spans = [(0, half), (max(half, size - half), half)] if size > half else [(0, size)]
        for offset, length in spans:
            if length:
                found = self.read_output(cell_id, stream, offset=offset, max_bytes=length)
                async for chunk in found:
                    keeper.take(chunk.offset, chunk.data)

    async def result_of(self, cell: types.Cell, record: CellRecord) -> AsyncCellResult:
        """What a user sees of an ended cell."""
        value_json = None if cell.value is None else await self._client.value_bytes(cell.value)
        return CellResult(
            cell,
            displays=tuple(record.displays),
            displays_left_out=record.displays_left_out,
            stdout=record.outputs["stdout"].view(),
            stderr=record.outputs["stderr"].view(),
            value_json=value_json,
            hint=self._call.hint,
            read=lambda stream: self.pieces(cell.cell_id, stream),
        )

    # --- standard input, life ------------------------------------------------------------------

    async def write_stdin(self, data: bytes | str, *, close: bool = False) -> None:
        """Gives bytes to the code's standard input, over all its cells.

        Waits while the sandbox has no room for them.

        Args:
            data: The bytes; a text is sent as UTF-8.
            close: Whether nothing follows: then the code meets the end of the file.
        """
        raw = data.encode() if isinstance(data, str) else bytes(data)
        async with self._stdin_lock:
            if self._stdin_offset is None:  # somebody wrote before us
                self._stdin_offset = await self._client.write_stdin(self.id, b"", offset=0)
            begin = self._stdin_offset
            while True:
                done = self._stdin_offset - begin
                piece = raw[done : done + _STDIN_PIECE_BYTES]
                last = done + len(piece) == len(raw)
                if not piece and not (last and close):
                    return
                self._stdin_offset = await self._client.write_stdin(
                    self.id, piece, offset=self._stdin_offset, close=close and last
                )
                if close and last and self._stdin_offset - begin >= len(raw):
                    return

    async def invocation(self) -> types.Invocation:
        """The box as it stands."""
        return await self._client.get_invocation(self.id)

    async def close(self) -> types.Invocation | None:
        """Ends the box and all below it; answers when every sandbox is gone. Once is enough."""
        if self._stream is None:
            return None
        ended = self._stream.ended
        try:
            return ended or await self._client.cancel_invocation(self.id)
        finally:
            await self._stop()

    async def detach(self) -> None:
        """Leaves the box running, with its cells; `client.attach(box.id)` comes back to it."""
        self._ours = False
        await self._stop()

    async def _stop(self) -> None:
        self._client.boxes.discard(self)
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.stop()


class AsyncCell:
    """A cell that was given to a box."""

    def __init__(self, box: AsyncBox, stream: BoxStream | None, record: CellRecord) -> None:
        """A handle to it; without a stream it is a cell of before."""
        self._box = box
        self._stream = stream
        self._record = record
        self._result: AsyncCellResult | None = None

    def __repr__(self) -> str:
        """Names the cell."""
        return f"<{type(self).__name__} {self.cell_id} {self.state}>"

    @property
    def cell_id(self) -> str:
        """The cell's id."""
        return self._record.cell_id

    @property
    def state(self) -> CellState:
        """What is known of it here: `submitted`, `accepted`, `ended`, or `unknown` while there is
        no connection."""
        if self._result is not None:
            return "ended"
        return "unknown" if self._stream is None else self._stream.state(self._record)

    async def result(self, timeout_seconds: float | None = None) -> AsyncCellResult:
        """Waits for its end; see `AsyncBox.run`.

        Raises:
            ResultTimeoutError: It has not ended in time; it goes on.
        """
        if self._result is None:
            try:
                async with asyncio.timeout(timeout_seconds):
                    self._result = await self._wait()
            except TimeoutError as error:
                if timeout_seconds is None or isinstance(error, HutchError):
                    raise
                raise ResultTimeoutError(
                    f"{self.cell_id} has not ended within {timeout_seconds} s"
                ) from None
        return self._result

    async def _wait(self) -> AsyncCellResult:
        if self._stream is None:
            cell, record = await self._box.look_up(self.cell_id)
        else:
            record = self._record
            cell = await self._stream.result(record)
        return await self._box.result_of(cell, record)

    async def interrupt(self, *, queue: bool = False) -> None:
        """Interrupts it, and with `queue` the cells that wait behind it."""
        if self._result is None or queue:
            await self._box.interrupt(self.cell_id, queue=queue)

    def abandon(self) -> None:
        """Nobody waits for it any more: interrupts it, if that can be said."""
        self._record.observer = None
        if self._stream is not None and self.state != "unknown":
            self._stream.try_interrupt(self._record)

    async def output(
        self, stream: types.Stream = "stdout", *, offset: int = 0, follow: bool = True
    ) -> AsyncIterator[types.OutputChunk]:
        """Yields what it prints, up to its end, at the reader's own speed.

        Args:
            stream: `stdout` or `stderr`.
            offset: The first byte wanted.
            follow: Whether to go on until the cell has ended.
        """
        if self._stream is not None:
            await self._record.accepted.wait()
            if self._record.ended.done():
                await self.result()  # or why there is none
        position = offset
        if follow and self._result is None:
            source = self._box.read_output(self.cell_id, stream, offset=offset, follow=True)
            async for chunk in _until(source, self._settled()):
                position = chunk.offset + len(chunk.data)
                yield chunk
            result = await self.result()
            size = result.cell.stdout_bytes if stream == "stdout" else result.cell.stderr_bytes
            if position >= size:
                return
        async for chunk in self._box.read_output(self.cell_id, stream, offset=position):
            yield chunk

    async def _settled(self) -> None:
        try:
            await self.result()
        except HutchError:
            return


async def _until(
    source: AsyncIterator[types.OutputChunk], end: Coroutine[Any, Any, None]
) -> AsyncIterator[types.OutputChunk]:
    """Yields from a source until it ends or something else has."""
    over = asyncio.create_task(end)
    step: asyncio.Task[types.OutputChunk | None] | None = None
    try:
        while True:
            step = asyncio.create_task(_next(source))
            await asyncio.wait({over, step}, return_when=asyncio.FIRST_COMPLETED)
            if not step.done():
                return
            chunk = step.result()
            if chunk is None:
                return
            yield chunk
    finally:
        tasks = {task for task in (over, step) if task is not None}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        close = getattr(source, "aclose", None)
        if close is not None:
            await close()


async def _next(source: AsyncIterator[types.OutputChunk]) -> types.OutputChunk | None:
    return await anext(source, None)
