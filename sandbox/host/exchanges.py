"""What the owner asks of a live sandbox besides cells: standard input, tool calls, file operations.

Called by `hosted` with what is asked, and by `inbound` with the frames that answer. Each exchange
knows what is open, so that a sandbox can answer only what it was asked, and once.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from typing import Any

from hutch.v1 import ending_pb2, sandbox_file_pb2
from hutch.v1 import host_service_pb2 as pb
from sandbox.host import failures
from sandbox.host.contents import PartReader, SandboxBlobs
from sandbox.host.errors import field_invalid
from sandbox.host.fields import Fields, ProtocolBreach
from sandbox.host.received import Received, RecentIds, end, one
from sandbox.runtime import frames

STDIN_CHUNK_BYTES = 64 * 1024
STDIN_WINDOW_BYTES = 256 * 1024
MAX_LISTED = 500
MAX_PATH_BYTES = 4_096
MAX_ID = 64
_MAX_UINT32 = 2**32 - 1
_UPLOAD = re.compile(r"[A-Za-z0-9]{1,64}")
_PROBLEMS = {
    name: name
    for name in (
        "",
        "not_found",
        "not_a_file",
        "not_a_folder",
        "denied",
        "full",
        "invalid",
        "failed",
    )
}
_KINDS = {name: name for name in ("file", "folder", "link", "other")}


class Stdin:
    """The code's standard input, over all cells of a sandbox."""

    def __init__(self) -> None:
        """Starts with nothing sent."""
        self.offset = 0
        self._taken = 0
        self._closed = False

    def frame(self, chunk: pb.StdinChunk) -> bytes | None:
        """Makes the frame for what is new in a chunk; None if nothing is.

        Raises:
            HostError: FIELD_INVALID, it leaves a gap, is too much or comes after the end.
        """
        if len(chunk.data) > STDIN_CHUNK_BYTES:
            raise field_invalid("stdin.data", f"at most {STDIN_CHUNK_BYTES} bytes")
        if chunk.offset > self.offset:
            raise field_invalid("stdin.offset", f"standard input has come up to {self.offset}")
        data = chunk.data[self.offset - chunk.offset :]
        close = chunk.close and not self._closed
        if not data and not close:
            return None
        if self._closed:
            raise field_invalid("stdin.offset", "standard input was closed")
        if self.offset + len(data) > self._taken + STDIN_WINDOW_BYTES:
            raise field_invalid("stdin.offset", f"more than {STDIN_WINDOW_BYTES} bytes not taken")
        frame = frames.encode({"type": "stdin", "offset": self.offset, "close": close}, data)
        self.offset += len(data)
        self._closed = close
        return frame

    def taken(self, fields: Fields, payload: bytes) -> Received:
        """Reads a `stdin_taken` frame.

        Raises:
            ProtocolBreach: more was taken than was sent, or less than before.
        """
        offset = fields.number("offset")
        end(fields, payload)
        if not self._taken <= offset <= self.offset:
            raise ProtocolBreach("stdin_taken.offset: not within what was sent")
        self._taken = offset
        return one(pb.AttachSandboxResponse(stdin_taken=pb.StdinTaken(offset=offset)))


class ToolCalls:
    """The calls of tools that this sandbox's code owns."""

    def __init__(self, blobs: SandboxBlobs, *, max_open: int, remembered: int) -> None:
        """Starts without a call.

        Args:
            blobs: The sandbox's blobs.
            max_open: How many calls may wait for their result.
            remembered: How many ids of answered calls are kept: at least as many as there can be
                results that the owner does not have for good.
        """
        self._blobs = blobs
        self._max_open = max_open
        self._open: set[str] = set()
        self._answered = RecentIds(remembered)

    def knows(self, call_id: str) -> bool:
        """Whether the call was delivered."""
        return call_id in self._open or call_id in self._answered

    def is_open(self, call_id: str) -> bool:
        """Whether the call was delivered and has no result."""
        return call_id in self._open

    def expect(self, call_id: str) -> pb.ToolResult | None:
        """The sandbox is given a call that it does not know; returns the result if it is not.

        Raises:
            HostError: FIELD_INVALID, the id is none.
        """
        _check_id("tool.call_id", call_id)
        if len(self._open) < self._max_open:
            self._open.add(call_id)
            return None
        self._answered.add(call_id)
        message = f"{self._max_open} calls of tools of this sandbox wait for their result already"
        failure = ending_pb2.Failure(
            type_name="QuotaExceededError", message=message, reason="QUOTA_EXCEEDED"
        )
        return pb.ToolResult(call_id=call_id, failure=failure)

    def result(self, fields: Fields, payload: bytes) -> Received:
        """Reads a `tool_result` frame.

        Raises:
            ProtocolBreach: nobody waits for it, or it has not the form it must have.
        """
        call_id = fields.identifier("call")
        if call_id not in self._open:
            raise ProtocolBreach("tool_result.call: no such call is open")
        parts = PartReader(self._blobs, payload)
        result = pb.ToolResult(call_id=call_id)
        if fields.has("failure"):
            result.failure.CopyFrom(failures.from_frame(fields.object("failure")))
        else:
            result.value.CopyFrom(parts.content(fields.take("value")))
        fields.end()
        parts.end()
        self._open.remove(call_id)
        self._answered.add(call_id)
        return Received(events=[*parts.events, pb.AttachSandboxResponse(tool_result=result)])


class FileOperations:
    """Operations on files: one at a time is with the sandbox, the others wait here."""

    def __init__(self, *, max_waiting: int, remembered: int) -> None:
        """Starts without an operation.

        Args:
            max_waiting: How many may wait here.
            remembered: How many ids of ended operations are kept.
        """
        self._max_waiting = max_waiting
        self._waiting: deque[sandbox_file_pb2.FileOperation] = deque()
        self._current: sandbox_file_pb2.FileOperation | None = None
        self._known: set[str] = set()
        self._ended = RecentIds(remembered)

    def ask(self, operation: sandbox_file_pb2.FileOperation) -> sandbox_file_pb2.FileOutcome | None:
        """Takes an operation, once; returns its outcome if too many wait already.

        Raises:
            HostError: FIELD_INVALID.
        """
        _check(operation)
        name = operation.operation_id
        if name in self._known or name in self._ended:
            return None
        if len(self._waiting) >= self._max_waiting:
            self._ended.add(name)
            message = f"{self._max_waiting} file operations wait already"
            return sandbox_file_pb2.FileOutcome(operation_id=name, problem="busy", message=message)
        self._known.add(name)
        self._waiting.append(operation)
        return None

    def next_frame(self) -> bytes | None:
        """The frame of the next operation, if none is with the sandbox and one waits."""
        if self._current is not None or not self._waiting:
            return None
        self._current = self._waiting.popleft()
        return _operation_frame(self._current)

    def outcome(self, fields: Fields, payload: bytes) -> Received:
        """Reads a `file_outcome` frame.

        Raises:
            ProtocolBreach: it answers nothing, or has not the form it must have.
        """
        current = self._current
        if current is None or fields.identifier("id") != current.operation_id:
            raise ProtocolBreach("file_outcome.id: no such operation is open")
        outcome = sandbox_file_pb2.FileOutcome(
            operation_id=current.operation_id,
            problem=fields.choice("problem", _PROBLEMS),
            message=fields.text("message"),
        )
        expected = _expected(current, outcome.problem)
        for item in fields.items("entries", expected.entries):
            _entry(Fields(item, "file_outcome.entries"), outcome)
        more, at_end = fields.flag("more"), fields.flag("end")
        fields.end()
        if len(payload) > expected.data_bytes:
            raise ProtocolBreach("file_outcome: more bytes than were asked for")
        if expected.is_one and len(outcome.entries) != 1:
            raise ProtocolBreach("file_outcome.entries: not one")
        outcome.data = payload
        outcome.more = more and expected.is_list
        outcome.end = at_end and expected.is_read
        if (outcome.more and not outcome.entries) or (
            expected.is_read and not payload and not at_end
        ):
            raise ProtocolBreach("file_outcome: nothing, and yet more would follow")
        self._current = None
        self._known.remove(current.operation_id)
        self._ended.add(current.operation_id)
        return one(pb.AttachSandboxResponse(file_outcome=outcome))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expected:
    """What an outcome may hold; of one that failed, nothing."""

    entries: int = 0
    data_bytes: int = 0
    is_one: bool = False
    is_list: bool = False
    is_read: bool = False


def _expected(operation: sandbox_file_pb2.FileOperation, problem: str) -> _Expected:
    if problem:
        return _Expected()
    match operation.WhichOneof("operation"):
        case "stat":
            return _Expected(entries=1, is_one=True)
        case "list":
            return _Expected(entries=operation.list.max_entries, is_list=True)
        case "read":
            return _Expected(data_bytes=operation.read.max_bytes, is_read=True)
        case _:
            made = operation.write.last and not operation.write.abandon
            return _Expected(entries=1, is_one=True) if made else _Expected()


def _entry(fields: Fields, outcome: sandbox_file_pb2.FileOutcome) -> None:
    outcome.entries.add(
        name=fields.text("name"),
        kind=fields.choice("kind", _KINDS),
        size_bytes=fields.number("size"),
        modify_time_us=fields.number("modified_us"),
        mode=fields.number("mode", _MAX_UINT32),
    )
    fields.end()


def _check(operation: sandbox_file_pb2.FileOperation) -> None:
    _check_id("file_operation.operation_id", operation.operation_id)
    if not 0 < len(operation.path.encode()) <= MAX_PATH_BYTES:
        raise field_invalid("file_operation.path", f"must have 1 to {MAX_PATH_BYTES} bytes")
    match operation.WhichOneof("operation"):
        case "stat":
            pass
        case "list":
            _check_range("list.max_entries", operation.list.max_entries, 1, MAX_LISTED)
            # A frame's header has an end: both it and the path must fit.
            if len(operation.list.after.encode()) > MAX_PATH_BYTES:
                problem = f"must have at most {MAX_PATH_BYTES} bytes"
                raise field_invalid("file_operation.list.after", problem)
        case "read":
            _check_range("read.max_bytes", operation.read.max_bytes, 1, frames.CHUNK_BYTES)
            _check_range("read.offset", operation.read.offset, 0, frames.MAX_INTEGER)
        case "write":
            write = operation.write
            _check_range("write.data", len(write.data), 0, frames.CHUNK_BYTES)
            _check_range("write.offset", write.offset, 0, frames.MAX_INTEGER)
            if _UPLOAD.fullmatch(write.upload_id) is None:
                problem = "must have 1 to 64 ASCII letters and digits"
                raise field_invalid("file_operation.write.upload_id", problem)
        case _:
            raise field_invalid("file_operation.operation", "must be set")


def _check_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise field_invalid(f"file_operation.{name}", f"must be from {least} to {most}")


def _check_id(name: str, value: str) -> None:
    if not 0 < len(value) <= MAX_ID or not value.isascii() or not value.isprintable():
        raise field_invalid(name, f"must have 1 to {MAX_ID} visible ASCII characters")


def _operation_frame(operation: sandbox_file_pb2.FileOperation) -> bytes:
    kind = operation.WhichOneof("operation")
    header: dict[str, Any] = {
        "type": "file_op",
        "id": operation.operation_id,
        "op": kind,
        "path": operation.path,
    }
    if kind == "list":
        header |= {"after": operation.list.after, "max_entries": operation.list.max_entries}
    elif kind == "read":
        header |= {"offset": operation.read.offset, "max_bytes": operation.read.max_bytes}
    elif kind == "write":
        write = operation.write
        header |= {
            "upload": write.upload_id,
            "offset": write.offset,
            "last": write.last,
            "executable": write.executable,
            "abandon": write.abandon,
        }
        return frames.encode(header, write.data)
    return frames.encode(header)
