"""The REPL's end of the message socket to the supervisor.

Called by the REPL's loop and, through `guest`, by the code's own threads. Frames travel as messages
of a SEQPACKET socket: each is sent whole or not at all, so that no signal handler of the code, no
second thread and no forked child can leave half a frame behind.

Whoever waits between cells reads the socket itself; while a cell runs, a thread does, and only once
the code has asked for something: code that forks then has no second thread beside it.
"""

from __future__ import annotations

import _thread
import posix
import sys

# Not by its name at the call: `threads` puts one of its own there, for the code's threads.
from _thread import start_new_thread as start_new_thread

from . import errors, frames

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

INLINE_BYTES = 160 * 1024  # contents that travel in a frame itself
SOCKET_LEVEL, RIGHTS = 1, 1  # SOL_SOCKET, SCM_RIGHTS
RECEIVE_BYTES = frames.MAX_FRAME_BYTES + 1
ANCILLARY_BYTES = 256


class Pending:
    """A call without an answer, for any number of waiting threads."""

    __slots__ = ("_callbacks", "_guard", "_turnstile", "answer", "failure", "is_answered")

    def __init__(self) -> None:
        """Begins unanswered."""
        self.answer = b""
        self.failure: errors.Failure | None = None
        self.is_answered = False
        self._callbacks: list[Callable[[], object]] = []
        self._guard = _thread.allocate_lock()
        self._turnstile = _thread.allocate_lock()
        self._turnstile.acquire()

    def resolve(self, answer: bytes, failure: errors.Failure | None) -> None:
        """Answers it and wakes whoever waits."""
        with self._guard:
            self.answer, self.failure, self.is_answered = answer, failure, True
            callbacks, self._callbacks = self._callbacks, []
        self._turnstile.release()
        for callback in callbacks:
            callback()

    def when_answered(self, callback: Callable[[], object]) -> None:
        """Calls back once, from any thread, at once if it is answered already."""
        with self._guard:
            if not self.is_answered:
                self._callbacks.append(callback)
                return
        callback()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Waits for the answer; returns whether it came. A signal's handler may raise out of it."""
        timeout = -1 if timeout_seconds is None else max(0.0, timeout_seconds)
        if not self._turnstile.acquire(timeout=timeout):
            return self.is_answered
        self._turnstile.release()
        return True

    def result(self) -> bytes:
        """Returns the answer.

        Raises:
            HutchError: the call failed.
        """
        if self.failure is not None:
            raise errors.from_failure(self.failure)
        return self.answer


class Order:
    """What the supervisor asks of the REPL: a cell to run, or to end the last one's threads."""

    __slots__ = ("code", "descriptors", "header", "inputs")

    def __init__(
        self,
        header: dict[str, Any],
        code: bytes,
        inputs: list[tuple[str, bytes]],
        descriptors: tuple[int, ...],
    ) -> None:
        """Holds the frame's header, its contents, and what came with it: the new descriptors 1
        and 2, then as the header says the recording of the output and standard input."""
        self.header = header
        self.code = code
        self.inputs = inputs
        self.descriptors = descriptors


class Channel:
    """Sends and receives; safe to use from any thread of its own process."""

    def __init__(self, socket: Any) -> None:
        """Takes a blocking SEQPACKET socket."""
        self._socket = socket
        self._pid = posix.getpid()
        self._guard = _thread.allocate_lock()  # of the fields below
        self._bulk = _thread.allocate_lock()  # held by who sends blobs: few may be open at once
        self._orders: list[Order] = []
        self._order_here = _thread.allocate_lock()
        self._order_here.acquire()
        self._pending: dict[str, Pending] = {}
        self._blobs: dict[str, bytearray] = {}
        self._next_id = 0
        self._has_thread = False
        self._main_reads = False
        # Given calls of tools that this process's code owns and their cancellations, on whichever
        # thread reads: it must not wait. A call comes with the bytes of its arguments.
        self.on_tool: Callable[[dict[str, Any], list[bytes]], None] = self._refuse_tool

    @property
    def is_own(self) -> bool:
        """Whether this is the process that the channel belongs to, not a fork of it."""
        return posix.getpid() == self._pid

    # Sending

    def call(self, header: dict[str, Any], contents: list[bytes]) -> Pending:
        """Asks for something; parts of the header are numbers of contents: see `place`.

        Raises:
            HutchError: this is a fork of the REPL, or the request is too large.
        """
        if not self.is_own:
            raise errors.HutchError("a forked process cannot call; let the REPL's own process call")
        pending = Pending()
        with self._guard:
            if not self._has_thread and not self._main_reads:
                start_new_thread(self._read_for_ever, ())
                self._has_thread = True
            call = self._new_id("c")
            self._pending[call] = pending
        try:
            self.send({"type": "call", "call": call, **header}, contents)
        except BaseException:
            self._pending.pop(call, None)
            raise
        return pending

    def send(self, header: dict[str, Any], contents: list[bytes]) -> None:
        """Sends a frame whose parts are `Place` objects, with the blobs that they need before it.

        Raises:
            PayloadTooLargeError: it does not fit into a frame or needs too many blobs.
        """
        parts, payload, blobs = self._place(contents)
        try:
            frame = frames.encode(_fill(header, parts), payload)
        except frames.FrameError as error:
            limit = {"limit": str(frames.MAX_HEADER_BYTES)}
            message = f"the request does not fit into a frame: {error}"
            raise errors.PayloadTooLargeError(message, "PAYLOAD_TOO_LARGE", limit) from None
        if not blobs:
            self._send(frame)
            return
        with self._bulk:
            for name, content in blobs:
                self._send_blob(name, content)
            self._send(frame)

    def _place(self, contents: list[bytes]) -> tuple[list[Any], bytes, list[tuple[str, bytes]]]:
        """Decides which contents travel in the frame itself: small ones first."""
        room = INLINE_BYTES
        inline = set()
        for index in sorted(range(len(contents)), key=lambda index: len(contents[index])):
            if len(contents[index]) > room:
                break
            room -= len(contents[index])
            inline.add(index)
        if len(contents) - len(inline) >= frames.MAX_OPEN_BLOBS:
            message = f"more than {frames.MAX_OPEN_BLOBS - 1} large contents in one request"
            raise errors.PayloadTooLargeError(message, "PAYLOAD_TOO_LARGE", {})
        parts: list[Any] = []
        payload: list[bytes] = []
        blobs = []
        offset = 0
        for index, content in enumerate(contents):
            if index in inline:
                parts.append({"at": offset, "n": len(content)})
                payload.append(content)
                offset += len(content)
            else:
                with self._guard:
                    name = self._new_id("b")
                parts.append({"blob": name, "n": len(content)})
                blobs.append((name, content))
        return parts, b"".join(payload), blobs

    def _send_blob(self, name: str, content: bytes) -> None:
        for offset in range(0, len(content), frames.CHUNK_BYTES):
            chunk = content[offset : offset + frames.CHUNK_BYTES]
            last = offset + len(chunk) == len(content)
            header = {"type": "blob", "blob": name, "offset": offset, "last": last}
            self._send(frames.encode(header, chunk))

    def _send(self, frame: bytes) -> None:
        if not self.is_own:
            raise errors.HutchError("a forked process cannot speak for the REPL")
        self._socket.send(frame)

    def _new_id(self, letter: str) -> str:
        self._next_id += 1
        return f"{letter}{self._next_id}"

    # Receiving

    def next_order(self, wait_seconds: float | None = None) -> Order | None:
        """Waits for the next cell; None when the time is over first."""
        with self._guard:
            if self._has_thread:
                reads = False
            else:
                reads = self._main_reads = True
        if not reads:
            timeout = -1 if wait_seconds is None else wait_seconds
            if not self._orders and not self._order_here.acquire(timeout=timeout):
                return None
            return self._orders.pop(0) if self._orders else None
        try:
            if wait_seconds is not None and not self._is_readable(wait_seconds):
                return None
            while not self._orders:
                self._receive()
            self._order_here.acquire(False)
            return self._orders.pop(0)
        finally:
            self._leave_reading()

    def _leave_reading(self) -> None:
        """Hands the socket to a thread if the code of an earlier cell still waits for answers."""
        with self._guard:
            self._main_reads = False
            if self._pending and not self._has_thread:
                start_new_thread(self._read_for_ever, ())
                self._has_thread = True

    def _is_readable(self, seconds: float) -> bool:
        import select

        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def _read_for_ever(self) -> None:
        while True:
            self._receive()

    def _receive(self) -> None:
        packet, extra, _, _ = self._socket.recvmsg(RECEIVE_BYTES, ANCILLARY_BYTES)
        if not packet:
            posix._exit(0)  # the supervisor is gone, and with it all that this process is for
        descriptors: list[int] = []
        for level, kind, data in extra:
            if (level, kind) == (SOCKET_LEVEL, RIGHTS):
                pieces = (data[i : i + 4] for i in range(0, len(data) - len(data) % 4, 4))
                descriptors += [int.from_bytes(piece, sys.byteorder) for piece in pieces]
        self._dispatch(frames.decode_packet(packet), tuple(descriptors))

    def _dispatch(self, frame: frames.Frame, descriptors: tuple[int, ...]) -> None:
        header = frame.header
        if frame.type == "blob":
            self._blobs.setdefault(header["blob"], bytearray()).extend(frame.payload)
        elif frame.type == "reply":
            self._answer(header, frame.payload)
        elif frame.type == "cell":
            code = self._content(header["code"], frame.payload)
            inputs = [
                (item["name"], self._content(item["value"], frame.payload))
                for item in header["inputs"]
            ]
            self._put(Order(header, code, inputs, descriptors))

        elif frame.type == "end_threads":
            self._put(Order(header, b"", [], ()))
        elif frame.type == "tool_call":
            self.on_tool(header, [self._content(header["arguments"], frame.payload)])
        elif frame.type == "tool_cancel":
            self.on_tool(header, [])

    def _put(self, order: Order) -> None:
        self._orders.append(order)
        if self._order_here.locked():
            self._order_here.release()

    def _refuse_tool(self, header: dict[str, Any], contents: list[bytes]) -> None:
        """Answers for tools while there are none; a cancellation has no answer of its own."""
        if header["type"] == "tool_call":
            failure = errors.Failure(type_name="ToolUnreachableError", reason="TOOL_UNREACHABLE")
            failure.message = "the code that had this tool is gone"
            answer = {"type": "tool_result", "call": header["call"], "failure": failure.to_dict()}
            self.send(answer, [])

    def _answer(self, header: dict[str, Any], payload: bytes) -> None:
        failure = header.get("failure")
        answer = b"" if failure else self._content(header["value"], payload)
        pending = self._pending.pop(header["call"], None)
        if pending is not None:
            pending.resolve(answer, errors.Failure.from_mapping(failure) if failure else None)

    def _content(self, part: dict[str, Any], payload: bytes) -> bytes:
        if "blob" in part:
            return bytes(self._blobs.pop(part["blob"], b""))
        return payload[part["at"] : part["at"] + part["n"]]


class Place:
    """Stands in a header for the content with this number."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        """Names the content by its place in the list."""
        self.index = index


def _fill(node: Any, parts: list[Any]) -> Any:
    if isinstance(node, Place):
        return parts[node.index]
    if isinstance(node, dict):
        return {name: _fill(item, parts) for name, item in node.items()}
    if isinstance(node, list):
        return [_fill(item, parts) for item in node]
    return node
