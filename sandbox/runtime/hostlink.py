"""The supervisor's end of the channel to the host: non-blocking, control before output.

Called by the supervisor's loop, which says when a descriptor is ready; calls `frames`.
"""

from __future__ import annotations

import posix

from . import frames

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

READ_BYTES = 262_144
ROOM_BYTES = 1024 * 1024  # above this, nobody is asked for more to send
JOINED_BYTES = 65_536  # of frames that are written at once
HELD_SECONDS = 0.002  # how long the start of a cell waits for what follows: most cells are short


class HostLink:
    """Frames to and from the host. The host is trusted; a fault in its stream ends everything."""

    __slots__ = (
        "_control",
        "_decoder",
        "_held",
        "_output",
        "_partial",
        "held_until",
        "queued_bytes",
        "reader",
        "writer",
    )

    def __init__(self, reader: int, writer: int) -> None:
        """Takes the descriptors, which may be one socket or two pipes."""
        posix.set_blocking(reader, False)
        posix.set_blocking(writer, False)
        self.reader = reader
        self.writer = writer
        self.queued_bytes = 0
        self._decoder = frames.Decoder()
        self._control: list[Any] = []
        self._output: list[Any] = []
        self._partial = memoryview(b"")
        self._held = b""
        self.held_until = 0.0  # when what is held goes out by itself; 0: nothing is

    @property
    def has_room(self) -> bool:
        """Whether more may be queued for the host."""
        return self.queued_bytes < ROOM_BYTES

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        """Queues a control frame: it goes before all output."""
        self._queue(self._control, frames.encode(header, payload))

    def send_in_order(self, header: dict[str, Any], payload: bytes = b"") -> None:
        """Queues a frame that must not overtake output: output itself, and the end of a cell."""
        self._queue(self._output, frames.encode(header, payload))

    def send_packed(self, frame: bytes) -> None:
        """Queues an already serialized control frame."""
        self._queue(self._control, frame)

    def send_soon(self, header: dict[str, Any], now: float) -> None:
        """Holds a small control frame for a moment: it goes out together with what follows it."""
        self.release()
        self._held = frames.encode(header)
        self.held_until = now + HELD_SECONDS

    def release(self) -> None:
        """Queues what is held."""
        if self._held:
            frame, self._held, self.held_until = self._held, b"", 0.0
            self._queue(self._control, frame)

    def _queue(self, queue: Any, frame: bytes) -> None:
        self.release()
        queue.append(frame)
        self.queued_bytes += len(frame)

    def flush(self) -> None:
        """Writes what the other side takes now.

        Raises:
            EOFError: the other side is gone.
        """
        while self.queued_bytes:
            if not self._partial:
                self._partial = memoryview(self._next())
            try:
                written = posix.write(self.writer, self._partial)
            except BlockingIOError:
                return
            except OSError:
                raise EOFError("the host is gone") from None
            self._partial = self._partial[written:]
            self.queued_bytes -= written

    def _next(self) -> bytes:
        """Takes the frames that are written next, small ones together."""
        taken = [(self._control or self._output).pop(0)]
        size = len(taken[0])
        while size < JOINED_BYTES and (self._control or self._output):
            taken.append((self._control or self._output).pop(0))
            size += len(taken[-1])
        return b"".join(taken) if len(taken) > 1 else bytes(taken[0])

    def read(self) -> list[frames.Frame]:
        """Reads what is there.

        Raises:
            EOFError: the host is gone.
            FrameError: what came is no frame.
        """
        try:
            data = posix.read(self.reader, READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            raise EOFError("the host is gone")
        return self._decoder.feed(data)
