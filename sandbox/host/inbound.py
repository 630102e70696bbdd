"""Every frame that comes out of a sandbox, checked against docs/frames.md and what went before.

Called by `sandbox.host.hosted` with each frame; calls nobody. It keeps the state of one sandbox's
side of the channel: which cells were given to it, how far their output goes, which calls are open.
A breach is final: the sandbox is destroyed.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from hutch.v1 import cell_pb2
from hutch.v1 import host_service_pb2 as pb
from sandbox.host import calls, failures
from sandbox.host.contents import PartReader, SandboxBlobs, pieces
from sandbox.host.events import OutputMark
from sandbox.host.fields import Fields, ProtocolBreach
from sandbox.runtime import frames

_ANSWERED_CALLS = 4_096
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
    started: bool = False
    done: bool = False
    streams: dict[int, _Stream] = field(
        default_factory=lambda: {value: _Stream() for value in calls.STREAMS.values()}
    )


@dataclass(slots=True, kw_only=True)
class _Capture:
    max_files: int
    max_bytes: int
    files: int = 0
    bytes: int = 0
    name: str | None = None
    offset: int = 0
    completed: bool = False


@dataclass(slots=True, kw_only=True)
class Received:
    """What one frame means: events in their order."""

    events: list[pb.AttachSandboxResponse]
    mark: OutputMark | None = None


class Inbound:
    """The state of what one sandbox may send next."""

    def __init__(self, *, open_calls: int, output_limit_bytes: int) -> None:
        """Starts before the `ready` frame.

        Args:
            open_calls: How many calls may wait for a reply.
            output_limit_bytes: How far one stream of a cell may go.
        """
        self._max_open_calls = open_calls
        self._output_limit = output_limit_bytes
        self._cells: dict[str, _Cell] = {}
        self._open_calls: set[str] = set()
        self._answered: OrderedDict[str, None] = OrderedDict()
        self._blobs = SandboxBlobs()
        self._capture: _Capture | None = None
        self.ready = False

    def knows_cell(self, cell_id: str) -> bool:
        """Whether the cell was given to the sandbox."""
        return cell_id in self._cells

    def runs_cell(self, cell_id: str) -> bool:
        """Whether the cell was given to the sandbox and has not ended."""
        cell = self._cells.get(cell_id)
        return cell is not None and not cell.done

    def busy(self) -> bool:
        """Whether a cell was given that has not ended, or files were asked for."""
        return self._capture is not None or any(not cell.done for cell in self._cells.values())

    def expect_cell(self, cell_id: str) -> None:
        """The sandbox is given a cell."""
        self._cells[cell_id] = _Cell()

    def expect_capture(self, max_files: int, max_bytes: int) -> bool:
        """The sandbox is asked for files; False if it was already."""
        if self._capture is not None:
            return False
        self._capture = _Capture(max_files=max_files, max_bytes=max_bytes)
        return True

    def call_is_open(self, call_id: str) -> bool:
        """Whether the sandbox waits for a reply to this call."""
        return call_id in self._open_calls

    def open_call_ids(self) -> list[str]:
        """The calls that wait for a reply."""
        return sorted(self._open_calls)

    def answer(self, call_id: str) -> None:
        """A call gets its reply."""
        self._open_calls.remove(call_id)
        self._answered[call_id] = None
        if len(self._answered) > _ANSWERED_CALLS:
            self._answered.popitem(last=False)

    def take_output(self, mark: OutputMark) -> bool:
        """Output up to a mark was taken; True if it is time to give credit up to there."""
        stream = self._cells[mark.cell_id].streams[mark.stream]
        if mark.end - stream.credited < frames.CREDIT_STEP_BYTES:
            return False
        stream.credited = mark.end
        return True

    def accept(self, frame: frames.Frame) -> Received:
        """Checks one frame.

        Raises:
            ProtocolBreach: no sandbox may send it, or not now.
        """
        fields = Fields(frame.header, "header")
        kind = fields.text("type")
        if (kind == "ready") is self.ready:
            raise ProtocolBreach("ready: not the first frame, or not for the first time")
        readers = {
            "ready": self._ready,
            "started": self._started,
            "output": self._output,
            "call": self._call,
            "done": self._done,
            "blob": self._blob,
            "file": self._file,
            "captured": self._captured,
        }
        reader = readers.get(kind)
        if reader is None:
            raise ProtocolBreach("type: a frame that does not exist")
        return reader(fields, frame.payload)

    def _ready(self, fields: Fields, payload: bytes) -> Received:
        version = fields.number("version")
        if version != frames.FRAME_VERSION:
            raise ProtocolBreach(f"ready.version: {version}, not {frames.FRAME_VERSION}")
        python = fields.text("python", 100)
        protections = fields.object("protections")
        for name in ("dumpable", "separate_uid", "filter"):
            protections.flag(name)
        protections.end()
        _end(fields, payload)
        self.ready = True
        return _one(pb.AttachSandboxResponse(ready=pb.SandboxReady(python_version=python)))

    def _started(self, fields: Fields, payload: bytes) -> Received:
        cell_id, cell = self._cell(fields)
        _end(fields, payload)
        if cell.started or cell.done:
            raise ProtocolBreach("started: not for the first time")
        cell.started = True
        return _one(pb.AttachSandboxResponse(cell_started=pb.CellStarted(cell_id=cell_id)))

    def _output(self, fields: Fields, payload: bytes) -> Received:
        cell_id, cell = self._cell(fields)
        kind = fields.choice("stream", calls.STREAMS)
        offset = fields.number("offset")
        fields.end()
        stream = cell.streams[kind]
        if cell.done:
            raise ProtocolBreach("output: of a cell that is over")
        if offset != stream.end:
            raise ProtocolBreach("output.offset: not where the stream ended")
        if not 0 < len(payload) <= frames.OUTPUT_CHUNK_BYTES:
            raise ProtocolBreach(f"output: a chunk of {len(payload)} bytes")
        end = offset + len(payload)
        # While any credit is left, a chunk goes out whole.
        if offset - stream.credited >= frames.CREDIT_WINDOW_BYTES:
            raise ProtocolBreach("output: beyond its credit")
        if end > self._output_limit:
            raise ProtocolBreach("output: beyond its limit")
        stream.end = end
        chunk = pb.OutputChunk(cell_id=cell_id, stream=kind, offset=offset, data=payload)
        mark = OutputMark(cell_id=cell_id, stream=kind, end=end)
        return Received(events=[pb.AttachSandboxResponse(output=chunk)], mark=mark)

    def _call(self, fields: Fields, payload: bytes) -> Received:
        call_id = fields.identifier("call")
        cell_id = fields.text("cell")
        if cell_id and cell_id not in self._cells:
            raise ProtocolBreach("call.cell: no such cell")
        if call_id in self._open_calls or call_id in self._answered:
            raise ProtocolBreach("call.call: an id that was used")
        if len(self._open_calls) >= self._max_open_calls:
            raise ProtocolBreach("call: too many are open")
        name = fields.text("op")
        call = pb.SandboxCall(call_id=call_id, cell_id=cell_id)
        parts = PartReader(self._blobs, payload)
        calls.operation(name, fields, parts, call)
        fields.end()
        parts.end()
        self._open_calls.add(call_id)
        return Received(events=[*parts.events, pb.AttachSandboxResponse(call=call)])

    def _done(self, fields: Fields, payload: bytes) -> Received:
        cell_id, cell = self._cell(fields)
        # A REPL may die before its cell begins, so `started` need not have come.
        if cell.done:
            raise ProtocolBreach("done: not for the first time")
        parts = PartReader(self._blobs, payload)
        completed = pb.CellCompleted(
            cell_id=cell_id,
            outcome=fields.choice("outcome", _OUTCOMES),
            killed_processes=fields.number("killed", _MAX_UINT32),
            background_processes=fields.number("background", _MAX_UINT32),
            state_lost=fields.flag("state_lost"),
            output_cut=fields.flag("output_cut"),
            failure_errno=_errno(fields),
        )
        completed.evidence.SetInParent()
        _how_it_ended(fields, parts, completed)
        ends = [cell.streams[kind].end for kind in calls.STREAMS.values()]
        if [fields.number("stdout_bytes"), fields.number("stderr_bytes")] != ends:
            raise ProtocolBreach("done: other output than was sent")
        completed.stdout_bytes, completed.stderr_bytes = ends
        fields.end()
        parts.end()
        cell.done = True
        return Received(events=[*parts.events, pb.AttachSandboxResponse(cell_completed=completed)])

    def _blob(self, fields: Fields, payload: bytes) -> Received:
        return Received(events=list(self._blobs.chunk(fields, payload)))

    def _file(self, fields: Fields, payload: bytes) -> Received:
        capture = self._capturing()
        name_hex = fields.text("name_hex")
        name = _name(fields, name_hex)
        offset, last = fields.number("offset"), fields.flag("last")
        fields.end()
        if capture.name is None:
            capture.name, capture.offset = name_hex, 0
        if name_hex != capture.name or offset != capture.offset:
            raise ProtocolBreach("file: out of order")
        if not payload and not last:
            raise ProtocolBreach("file: an empty chunk that is not the last")
        capture.offset += len(payload)
        capture.bytes += len(payload)
        if capture.files >= capture.max_files or capture.bytes > capture.max_bytes:
            raise ProtocolBreach("file: more than was asked for")
        if last:
            capture.name = None
            capture.files += 1
        chunks = [
            pb.FileChunk(name=name, offset=offset + at, data=piece, last=is_last)
            for piece, at, is_last in pieces(payload, last)
        ]
        return Received(events=[pb.AttachSandboxResponse(file=chunk) for chunk in chunks])

    def _captured(self, fields: Fields, payload: bytes) -> Received:
        capture = self._capturing()
        # A file may be cut short by the end of whoever read it; it counts for nothing.
        if fields.number("files") != capture.files:
            raise ProtocolBreach("captured.files: other files than were sent")
        done = pb.FileCaptureCompleted(file_count=capture.files)
        for item in fields.items("refused", frames.MAX_REFUSED_FILES):
            refused = Fields(item, "captured.refused")
            name_hex = refused.text("name_hex")
            name = _name(refused, name_hex) if name_hex else b""
            done.refused.add(name=name, reason=refused.text("reason"))
            refused.end()
        _end(fields, payload)
        capture.completed = True
        return _one(pb.AttachSandboxResponse(capture_completed=done))

    def _cell(self, fields: Fields) -> tuple[str, _Cell]:
        cell_id = fields.text("cell", frames.MAX_TEXT)
        cell = self._cells.get(cell_id)
        if cell is None:
            raise ProtocolBreach("cell: no such cell was given")
        return cell_id, cell

    def _capturing(self) -> _Capture:
        if self._capture is None or self._capture.completed:
            raise ProtocolBreach("file: nobody asked for files")
        return self._capture


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


def _errno(fields: Fields) -> int | None:
    # Code may raise an OSError with any number; one that no kernel has is none.
    number = fields.number_or_none("errno")
    return number if number is not None and number <= _MAX_INT32 else None


def _name(fields: Fields, name_hex: str) -> bytes:
    try:
        name = bytes.fromhex(name_hex)
    except ValueError:
        name = b""
    if not name or name.hex() != name_hex:
        raise fields.breach("name_hex", "not a name in lower-case hexadecimal")
    return name


def _end(fields: Fields, payload: bytes) -> None:
    fields.end()
    if payload:
        raise ProtocolBreach("payload: of a frame that has none")


def _one(event: pb.AttachSandboxResponse) -> Received:
    return Received(events=[event])
