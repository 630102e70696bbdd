"""What one cell prints: two pipes, read by credit and passed on with their offsets.

Called by the supervisor's loop; calls `hostlink`.
"""

from __future__ import annotations

import fcntl
import posix

from . import frames

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .hostlink import HostLink

FIONREAD = 0x541B
STREAMS = ("stdout", "stderr")


def make_pipe() -> tuple[int, int]:
    """Makes a pipe whose ends any uid of the sandbox may open again through /proc."""
    reader, writer = posix.pipe2(posix.O_CLOEXEC)
    posix.set_blocking(reader, False)
    posix.fchmod(writer, 0o666)
    return reader, writer


class Stream:
    """One stream of one cell, from its pipe to the host."""

    __slots__ = ("_left", "descriptor", "name", "offset", "taken")

    def __init__(self, name: str, descriptor: int) -> None:
        """Reads from a non-blocking descriptor."""
        self.name = name
        self.descriptor = descriptor
        self.offset = 0  # bytes passed on
        self.taken = 0  # of them, bytes that the host has taken
        self._left: int | None = None

    @property
    def has_credit(self) -> bool:
        """Whether the host takes more of this stream now."""
        return self.offset - self.taken < frames.CREDIT_WINDOW_BYTES

    @property
    def is_drained(self) -> bool:
        """Whether all that was there when draining began has been read."""
        return self.descriptor < 0 or self._left == 0

    def begin_drain(self) -> None:
        """Bounds what is still read by what is there now: others may go on writing for ever."""
        if self.descriptor >= 0:
            count = fcntl.ioctl(self.descriptor, FIONREAD, bytes(4))
            self._left = int.from_bytes(count, "little")

    def read(self) -> bytes:
        """Reads one piece; empty when there is nothing, and closes at the end."""
        want = frames.OUTPUT_CHUNK_BYTES
        if self._left is not None:
            want = min(want, self._left)
        try:
            data = posix.read(self.descriptor, want)
        except BlockingIOError:
            return b""
        except OSError:
            data = b""
        if not data and want:
            self.close()
        if self._left is not None:
            self._left -= len(data)
        return data

    def close(self) -> None:
        """Closes the pipe, once."""
        if self.descriptor >= 0:
            posix.close(self.descriptor)
            self.descriptor = -1

    def detach(self) -> int:
        """Gives the open descriptor away, or -1."""
        descriptor, self.descriptor = self.descriptor, -1
        return descriptor


class Outputs:
    """Both streams of one cell, with the limit that they have together."""

    __slots__ = ("_cell", "_link", "_room", "cut", "streams")

    def __init__(self, link: HostLink, cell: str, readers: tuple[int, int], limit: int) -> None:
        """Takes the pipes' reading ends; a limit of 0 means none."""
        self._link = link
        self._cell = cell
        self._room = limit or frames.MAX_INTEGER
        self.cut = False
        self.streams = [Stream(name, fd) for name, fd in zip(STREAMS, readers)]

    def readable(self) -> list[Stream]:
        """Returns the streams that may be read now."""
        return [
            stream
            for stream in self.streams
            if stream.descriptor >= 0 and stream.has_credit and not stream.is_drained
        ]

    def pump(self, stream: Stream) -> None:
        """Passes on one piece; what is over the limit is read and thrown away."""
        data = stream.read()
        if len(data) > self._room:
            data = data[: self._room]
            self.cut = True
        if not data:
            return
        self._room -= len(data)
        header = {
            "type": "output",
            "cell": self._cell,
            "stream": stream.name,
            "offset": stream.offset,
        }
        self._link.send_in_order(header, data)
        stream.offset += len(data)

    def credit(self, name: str, offset: int) -> None:
        """Notes up to where the host has taken a stream."""
        for stream in self.streams:
            if stream.name == name and offset > stream.taken:
                stream.taken = min(offset, stream.offset)

    def begin_drain(self) -> None:
        """Bounds what is still read of both streams."""
        for stream in self.streams:
            stream.begin_drain()

    @property
    def is_drained(self) -> bool:
        """Whether both streams are."""
        return all(stream.is_drained for stream in self.streams)
