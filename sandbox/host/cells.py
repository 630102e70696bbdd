"""The cells of one sandbox: what was given to it, and the frames that tell of them.

Called by `inbound` with each frame about a cell, and through it by `hosted`. Cells come one after
the other; what an ended one still prints goes on in its streams, so of each cell its offsets are
kept, and little else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hutch.v1 import cell_pb2
from hutch.v1 import host_service_pb2 as pb
from sandbox.host import calls, failures
from sandbox.host.contents import PartReader, SandboxBlobs
from sandbox.host.events import OutputMark
from sandbox.host.fields import Fields, ProtocolBreach
from sandbox.host.received import Received, end, one
from sandbox.runtime import frames

MAX_DISPLAYS = 256  # of one cell
MAX_MEDIA_TYPES = 8  # of one display
MAX_MEDIA_TYPE = 100
MAX_TEXT_BYTES = 64 * 1024
_MAX_INT32 = 2**31 - 1
_MAX_UINT32 = 2**32 - 1
_MAX_SIGNAL = 127
_OUTCOMES = {
    "completed": cell_pb2.CELL_OUTCOME_COMPLETED,
    "returned": cell_pb2.CELL_OUTCOME_RETURNED,
    "raised": cell_pb2.CELL_OUTCOME_RAISED,
    "errored": cell_pb2.CELL_OUTCOME_ERRORED,
    "interrupted": cell_pb2.CELL_OUTCOME_INTERRUPTED,
    "timed_out": cell_pb2.CELL_OUTCOME_TIMED_OUT,
    "repl_died": cell_pb2.CELL_OUTCOME_REPL_DIED,
}
# Stopping a cell may take the REPL with it.
_MAY_KILL_REPL = (
    cell_pb2.CELL_OUTCOME_REPL_DIED,
    cell_pb2.CELL_OUTCOME_INTERRUPTED,
    cell_pb2.CELL_OUTCOME_TIMED_OUT,
)
_FAILED = (cell_pb2.CELL_OUTCOME_RAISED, cell_pb2.CELL_OUTCOME_ERRORED)


@dataclass(slots=True, kw_only=True)
class _Stream:
    end: int = 0
    credited: int = 0


@dataclass(slots=True, kw_only=True)
class _Cell:
    stdout: _Stream = field(default_factory=_Stream)
    stderr: _Stream = field(default_factory=_Stream)

    def stream(self, kind: int) -> _Stream:
        return self.stdout if kind == calls.STREAMS["stdout"] else self.stderr


@dataclass(slots=True, kw_only=True)
class _Running:
    cell_id: str
    interactive: bool
    started: bool = False
    displays: int = 0
    display_bytes: int = 0


class Cells:
    """What one sandbox may say of its cells next."""

    def __init__(self, blobs: SandboxBlobs, output_limit_bytes: int) -> None:
        """Starts without a cell.

        Args:
            blobs: The sandbox's blobs.
            output_limit_bytes: What one cell may print, and what it may show.
        """
        self._blobs = blobs
        self._output_limit = output_limit_bytes
        self._cells: dict[str, _Cell] = {}
        self._running: _Running | None = None

    def __contains__(self, cell_id: str) -> bool:
        """Whether the cell was given to the sandbox."""
        return cell_id in self._cells

    def __len__(self) -> int:
        """How many cells were given to the sandbox."""
        return len(self._cells)

    @property
    def running(self) -> str | None:
        """The cell that was given and has not ended."""
        return self._running.cell_id if self._running is not None else None

    def expect(self, cell_id: str, *, interactive: bool) -> None:
        """The sandbox is given a cell, after the one before has ended."""
        self._cells[cell_id] = _Cell()
        self._running = _Running(cell_id=cell_id, interactive=interactive)

    def take_output(self, mark: OutputMark) -> bool:
        """Output up to a mark was taken; True if it is time to give credit up to there."""
        stream = self._cells[mark.cell_id].stream(mark.stream)
        if mark.end - stream.credited < frames.CREDIT_STEP_BYTES:
            return False
        stream.credited = mark.end
        return True

    def started(self, fields: Fields, payload: bytes) -> Received:
        """Reads a `started` frame.

        Raises:
            ProtocolBreach: as every reader here: the frame may not come, or not now.
        """
        running = self._runs(fields)
        end(fields, payload)
        if running.started:
            raise ProtocolBreach("started: not for the first time")
        running.started = True
        return one(pb.AttachSandboxResponse(cell_started=pb.CellStarted(cell_id=running.cell_id)))

    def output(self, fields: Fields, payload: bytes) -> Received:
        """Reads an `output` frame, also of a cell that has ended."""
        cell_id = fields.text("cell")
        cell = self._cells.get(cell_id)
        if cell is None:
            raise ProtocolBreach("cell: no such cell was given")
        kind = fields.choice("stream", calls.STREAMS)
        offset = fields.number("offset")
        fields.end()
        stream = cell.stream(kind)
        if offset != stream.end:
            raise ProtocolBreach("output.offset: not where the stream ended")
        if not 0 < len(payload) <= frames.OUTPUT_CHUNK_BYTES:
            raise ProtocolBreach(f"output: a chunk of {len(payload)} bytes")
        # While any credit is left, a chunk goes out whole.
        if offset - stream.credited >= frames.CREDIT_WINDOW_BYTES:
            raise ProtocolBreach("output: beyond its credit")
        if cell.stdout.end + cell.stderr.end + len(payload) > self._output_limit:
            raise ProtocolBreach("output: beyond its limit")
        stream.end = offset + len(payload)
        chunk = pb.OutputChunk(cell_id=cell_id, stream=kind, offset=offset, data=payload)
        mark = OutputMark(cell_id=cell_id, stream=kind, end=stream.end)
        return Received(events=[pb.AttachSandboxResponse(output=chunk)], mark=mark)

    def display(self, fields: Fields, payload: bytes) -> Received:
        """Reads a `display` frame."""
        running = self._runs(fields)
        index = fields.number("index", MAX_DISPLAYS - 1)
        if not running.started or index != running.displays:
            raise ProtocolBreach("display.index: not the next one")
        shown = pb.DisplayShown(
            cell_id=running.cell_id, index=index, is_result=fields.flag("result")
        )
        parts = PartReader(self._blobs, payload)
        for item in fields.items("data", MAX_MEDIA_TYPES):
            one_form = Fields(item, "display.data")
            media_type = one_form.identifier("media_type", MAX_MEDIA_TYPE)
            content = parts.content(one_form.take("content"))
            one_form.end()
            running.display_bytes += content.size_bytes
            shown.data.add(media_type=media_type, content=content)
        fields.end()
        parts.end()
        if not shown.data:
            raise ProtocolBreach("display.data: nothing")
        if running.display_bytes > self._output_limit:
            raise ProtocolBreach("display: beyond the output limit")
        running.displays += 1
        return Received(events=[*parts.events, pb.AttachSandboxResponse(display=shown)])

    def done(self, fields: Fields, payload: bytes) -> Received:
        """Reads a `done` frame. A REPL may die before its cell begins: `started` may be missing."""
        running = self._runs(fields)
        cell = self._cells[running.cell_id]
        parts = PartReader(self._blobs, payload)
        completed = pb.CellCompleted(
            cell_id=running.cell_id,
            outcome=fields.choice("outcome", _OUTCOMES),
            killed_processes=fields.number("killed", _MAX_UINT32),
            background_processes=fields.number("background", _MAX_UINT32),
            state_lost=fields.flag("state_lost"),
            output_cut=fields.flag("output_cut"),
            failure_errno=_errno(fields),
        )
        completed.evidence.SetInParent()
        _how_it_ended(fields, parts, completed)
        completed.text = _text(fields, parts, running.interactive)
        ends = [cell.stdout.end, cell.stderr.end]
        if [fields.number("stdout_bytes"), fields.number("stderr_bytes")] != ends:
            raise ProtocolBreach("done: other output than was sent")
        completed.stdout_bytes, completed.stderr_bytes = ends
        fields.end()
        parts.end()
        self._running = None
        return Received(events=[*parts.events, pb.AttachSandboxResponse(cell_completed=completed)])

    def _runs(self, fields: Fields) -> _Running:
        if self._running is None or fields.text("cell") != self._running.cell_id:
            raise ProtocolBreach("cell: it does not run")
        return self._running


def _how_it_ended(fields: Fields, parts: PartReader, completed: pb.CellCompleted) -> None:
    value = fields.take("value")
    if (value is not None) != (completed.outcome == cell_pb2.CELL_OUTCOME_RETURNED):
        raise ProtocolBreach("done.value: does not go with the outcome")
    if value is not None:
        completed.value.CopyFrom(parts.content(value))
    failure = fields.object_or_none("failure")
    if failure is not None:
        completed.failure.CopyFrom(failures.from_frame(failure))
    elif completed.outcome in _FAILED:
        raise ProtocolBreach("done.failure: does not go with the outcome")
    exit_code = fields.number_or_none("exit_code", _MAX_INT32)
    signal = fields.number_or_none("signal", _MAX_SIGNAL)
    if completed.outcome not in _MAY_KILL_REPL and (exit_code, signal) != (None, None):
        raise ProtocolBreach("done.exit_code: the REPL lives")
    if exit_code is not None:
        completed.evidence.exit_code = exit_code
    if signal is not None:
        completed.evidence.signal = signal


def _text(fields: Fields, parts: PartReader, interactive: bool) -> str:
    part = fields.take("text")
    if part is None:
        return ""
    data = parts.data(part)
    if not interactive or len(data) > MAX_TEXT_BYTES:
        raise ProtocolBreach("done.text: of another mode, or too long")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise ProtocolBreach("done.text: not UTF-8") from None


def _errno(fields: Fields) -> int | None:
    # Code may raise an OSError with any number; one that no kernel has is none.
    number = fields.number_or_none("errno")
    return number if number is not None and number <= _MAX_INT32 else None
