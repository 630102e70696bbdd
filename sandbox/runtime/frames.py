"""The frames of the channel between a sandbox host and a supervisor (docs/frames.md).

Called by `sandbox.host` and by the supervisor and REPL inside a sandbox. It knows bytes only: no
sockets, no waiting. It checks what holds for every frame (sizes, one JSON object, its numbers,
nesting and text); which keys a type may have is the receiver's to check.
"""

from __future__ import annotations

from . import fastjson

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any

FRAME_VERSION = 1
PREFIX_BYTES = 8
MIN_HEADER_BYTES = 2
MAX_HEADER_BYTES = 65_536
MAX_FRAME_BYTES = 262_144
CHUNK_BYTES = 196_608  # of a blob or a captured file
OUTPUT_CHUNK_BYTES = 65_536
CREDIT_WINDOW_BYTES = 4 * 1024 * 1024  # of one stream of one cell
CREDIT_STEP_BYTES = 1024 * 1024
MAX_OPEN_BLOBS = 16
MAX_BLOB_BYTES = 64 * 1024 * 1024
MAX_TEXT = 8_192
MAX_MESSAGE = 8_000
MAX_TRACEBACK = 16_000
MAX_NESTING = 8
MAX_INTEGER = 2**63 - 1
MAX_REFUSED_FILES = 256


class FrameError(Exception):
    """Bytes that are not a frame, or a header or payload that cannot be one."""


class Frame:
    """One frame: a JSON object with `type`, and raw bytes."""

    __slots__ = ("header", "payload")

    def __init__(self, header: dict[str, Any], payload: bytes = b"") -> None:
        """Holds both parts as they are; nothing is checked here."""
        self.header = header
        self.payload = payload

    @property
    def type(self) -> str:
        """The frame's type, a non-empty text in every decoded frame."""
        return str(self.header["type"])

    def __eq__(self, other: object) -> bool:
        """Frames are equal when both parts are."""
        if not isinstance(other, Frame):
            return NotImplemented
        return self.header == other.header and self.payload == other.payload

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Names the header and the payload's length."""
        return f"Frame({self.header!r}, {len(self.payload)} bytes)"


def pack(header: bytes, payload: bytes = b"") -> bytes:
    """Puts the lengths before an already serialized header and a payload.

    Raises:
        FrameError: the header or the whole frame is larger than a frame may be.
    """
    if not MIN_HEADER_BYTES <= len(header) <= MAX_HEADER_BYTES:
        raise FrameError(f"a header of {len(header)} bytes; 2 to {MAX_HEADER_BYTES} are allowed")
    if PREFIX_BYTES + len(header) + len(payload) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of over {MAX_FRAME_BYTES} bytes")
    return b"".join(
        (len(header).to_bytes(4, "big"), len(payload).to_bytes(4, "big"), header, payload)
    )


def encode(header: dict[str, Any], payload: bytes = b"") -> bytes:
    """Serializes one frame.

    Raises:
        FrameError: the header is no JSON object with a `type`, or something is too large.
    """
    check_header(header)
    return pack(fastjson.dumps(header).encode(), payload)


class Decoder:
    """Turns a byte stream into frames, however it is cut.

    A decoder that raised `FrameError` is of no more use: where the next frame begins is unknown.
    """

    __slots__ = ("_buffer", "_failed")

    def __init__(self) -> None:
        """Starts at the beginning of a frame."""
        self._buffer = bytearray()
        self._failed = False

    @property
    def buffered_bytes(self) -> int:
        """How many bytes of an incomplete frame are held."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """Takes the next bytes and returns the frames that they complete.

        Raises:
            FrameError: the stream is not one of frames. Frames before the fault, in the same
                call, are lost with it: the sender is not to be trusted any more.
        """
        self.push(data)
        complete = []
        while (frame := self.pop()) is not None:
            complete.append(frame)
        return complete

    def push(self, data: bytes | bytearray | memoryview) -> None:
        """Takes the next bytes; `pop` gives the frames that they complete, one by one."""
        self._buffer += data

    def pop(self) -> Frame | None:
        """Returns the next complete frame; None when there is none yet.

        Raises:
            FrameError: the stream is not one of frames.
        """
        if self._failed:
            raise FrameError("the stream has already failed")
        buffer = self._buffer
        if len(buffer) < PREFIX_BYTES:
            return None
        try:
            header_bytes, payload_bytes = read_lengths(buffer[:PREFIX_BYTES])
            body = PREFIX_BYTES + header_bytes
            end = body + payload_bytes
            if len(buffer) < end:
                return None
            frame = Frame(decode_header(bytes(buffer[PREFIX_BYTES:body])), bytes(buffer[body:end]))
        except FrameError:
            self._failed = True
            self._buffer.clear()
            raise
        del buffer[:end]
        return frame

    def close(self) -> None:
        """Says that the stream has ended.

        Raises:
            FrameError: it ended inside a frame.
        """
        if self._buffer:
            raise FrameError(f"the stream ended inside a frame, after {len(self._buffer)} bytes")


def read_lengths(prefix: bytes | bytearray) -> tuple[int, int]:
    """Reads the first 8 bytes of a frame: its header's and its payload's length.

    Raises:
        FrameError: a length is outside what is allowed.
    """
    header_bytes = int.from_bytes(prefix[:4], "big")
    payload_bytes = int.from_bytes(prefix[4:8], "big")
    if not MIN_HEADER_BYTES <= header_bytes <= MAX_HEADER_BYTES:
        raise FrameError(f"a header of {header_bytes} bytes; 2 to {MAX_HEADER_BYTES} are allowed")
    if PREFIX_BYTES + header_bytes + payload_bytes > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of over {MAX_FRAME_BYTES} bytes")
    return header_bytes, payload_bytes


def decode_packet(packet: bytes) -> Frame:
    """Reads bytes that must be exactly one frame, as a message socket delivers them.

    Raises:
        FrameError: they are not.
    """
    if len(packet) < PREFIX_BYTES:
        raise FrameError(f"a packet of {len(packet)} bytes")
    header_bytes, payload_bytes = read_lengths(packet[:PREFIX_BYTES])
    if len(packet) != PREFIX_BYTES + header_bytes + payload_bytes:
        raise FrameError("a packet that is not exactly one frame")
    body = PREFIX_BYTES + header_bytes
    return Frame(decode_header(packet[PREFIX_BYTES:body]), packet[body:])


def decode_header(data: bytes) -> dict[str, Any]:
    """Reads one header and checks what holds for all of them.

    Raises:
        FrameError: it is not UTF-8, not JSON, not an object with a `type`, names a key twice, or
            holds a number, text or nesting that no header may have.
    """
    try:
        header = fastjson.loads(data.decode("utf-8"), _refuse_number)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a header that is not JSON: {str(error)[:200]}") from None
    check_header(header)
    return header  # type: ignore[no-any-return]


def check_header(header: object) -> None:
    """Checks a header's form: an object with a `type`, whole numbers, sound text, little nesting.

    Raises:
        FrameError: it has another form.
    """
    if not isinstance(header, dict):
        raise FrameError("a header that is not a JSON object")
    kind = header.get("type")
    if not isinstance(kind, str) or not kind:
        raise FrameError("a header without a type")
    _check_object(header, 1)


def _check_object(value: dict[Any, Any], depth: int) -> None:
    for key in value:
        if not isinstance(key, str):
            raise FrameError("a header key that is not text")
        _check_text(key)
    _check_items(value.values(), depth)


def _check_items(items: Collection[Any], depth: int) -> None:
    """Checks what a container at some depth holds. Every frame passes here, so that what is simple
    is told apart without a call of its own."""
    if depth > MAX_NESTING and items:
        raise FrameError(f"a header nested deeper than {MAX_NESTING}")
    for item in items:
        if isinstance(item, str):
            if not item.isascii():
                _check_text(item)
        elif isinstance(item, dict):
            _check_object(item, depth + 1)
        elif isinstance(item, list):
            _check_items(item, depth + 1)
        elif isinstance(item, int):
            if not 0 <= item <= MAX_INTEGER:
                raise FrameError("a header number outside 0 to 2^63 - 1")
        elif item is not None:
            raise FrameError(f"a header value of type {type(item).__name__}")


def _check_text(text: str) -> None:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise FrameError("a header text with lone surrogates") from None


def _refuse_number(text: str) -> object:
    raise FrameError(f"a header number that is not whole: {text[:40]}")
