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


class HostLink:
    """Frames to and from the host. The host is trusted; a fault in its stream ends everything."""

    __slots__ = ("_control", "_decoder", "_output", "_partial", "queued_bytes", "reader", "writer")

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

    def _queue(self, queue: Any, frame: bytes) -> None:
        queue.append(frame)
        self.queued_bytes += len(frame)

    def flush(self) -> None:
        """Writes what the other side takes now.

        Raises:
            EOFError: the other side is gone.
        """
        while self.queued_bytes:
            if not self._partial:
                self._partial = memoryview((self._control or self._output).pop(0))
            try:
                written = posix.write(self.writer, self._partial)
            except BlockingIOError:
                return
            except OSError:
                raise EOFError("the host is gone") from None
            self._partial = self._partial[written:]
            self.queued_bytes -= written

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
