"""Every frame that comes out of a sandbox, checked against docs/frames.md and what went before.

Called by `sandbox.host.hosted` with each frame; calls nobody. It keeps the state of one sandbox's
side of the channel: which cells were given to it, how far their output goes, which calls are open.
A breach is final: the sandbox is destroyed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hutch.v1 import host_service_pb2 as pb
from sandbox.host import calls
from sandbox.host.cells import Cells
from sandbox.host.contents import PartReader, SandboxBlobs, pieces
from sandbox.host.exchanges import FileOperations, Stdin, ToolCalls
from sandbox.host.fields import Fields, ProtocolBreach
from sandbox.host.received import Received, RecentIds, end, one
from sandbox.runtime import frames

_ANSWERED_CALLS = 4_096


@dataclass(slots=True, kw_only=True)
class _Capture:
    max_files: int
    max_bytes: int
    files: int = 0
    bytes: int = 0
    name: str | None = None
    offset: int = 0
    completed: bool = False


class Inbound:
    """The state of what one sandbox may send next."""

    def __init__(
        self,
        *,
        open_calls: int,
        output_limit_bytes: int,
        waiting_file_operations: int = 32,
        remembered_ids: int = 65_536,
    ) -> None:
        """Starts before the `ready` frame.

        Args:
            open_calls: How many calls may wait for a reply, and of calls of its tools for a result.
            output_limit_bytes: What one cell may print.
            waiting_file_operations: How many file operations may wait for the one before.
            remembered_ids: How many ids of ended exchanges are kept.
        """
        self._max_open_calls = open_calls
        self._open_calls: set[str] = set()
        self._answered = RecentIds(_ANSWERED_CALLS)
        self._blobs = SandboxBlobs()
        self._capture: _Capture | None = None
        self.cells = Cells(self._blobs, output_limit_bytes)
        self.stdin = Stdin()
        self.tools = ToolCalls(self._blobs, max_open=open_calls, remembered=remembered_ids)
        self.files = FileOperations(max_waiting=waiting_file_operations, remembered=remembered_ids)
        self.ready = False
        self._readers: dict[str, Callable[[Fields, bytes], Received]] = {
            "ready": self._ready,
            "started": self.cells.started,
            "output": self.cells.output,
            "display": self.cells.display,
            "call": self._call,
            "done": self.cells.done,
            "blob": self._blob,
            "file": self._file,
            "captured": self._captured,
            "tool_result": self.tools.result,
            "stdin_taken": self.stdin.taken,
            "file_outcome": self.files.outcome,
        }

    def busy(self) -> bool:
        """Whether a cell was given that has not ended, or files were asked for."""
        return self._capture is not None or self.cells.running is not None

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
        self._answered.add(call_id)

    def accept(self, frame: frames.Frame) -> Received:
        """Checks one frame.

        Raises:
            ProtocolBreach: no sandbox may send it, or not now.
        """
        fields = Fields(frame.header, "header")
        kind = fields.text("type")
        if (kind == "ready") is self.ready:
            raise ProtocolBreach("ready: not the first frame, or not for the first time")
        reader = self._readers.get(kind)
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
        end(fields, payload)
        self.ready = True
        return one(pb.AttachSandboxResponse(ready=pb.SandboxReady(python_version=python)))

    def _call(self, fields: Fields, payload: bytes) -> Received:
        call_id = fields.identifier("call")
        cell_id = fields.text("cell")
        if cell_id and cell_id not in self.cells:
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
        end(fields, payload)
        capture.completed = True
        return one(pb.AttachSandboxResponse(capture_completed=done))

    def _capturing(self) -> _Capture:
        if self._capture is None or self._capture.completed:
            raise ProtocolBreach("file: nobody asked for files")
        return self._capture


def _name(fields: Fields, name_hex: str) -> bytes:
    try:
        name = bytes.fromhex(name_hex)
    except ValueError:
        name = b""
    if not name or name.hex() != name_hex:
        raise fields.breach("name_hex", "not a name in lower-case hexadecimal")
    return name
