"""What cells print: two pipes each, read by credit and passed on with their offsets.

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
F_SETPIPE_SZ = 1031
PIPE_BYTES = 262_144
RECORDING_BYTES = 4 * 1024 * 1024
MAX_LATE = 128  # ended cells whose pipes are kept; beyond, the oldest are closed
STREAMS = ("stdout", "stderr")


def make_pipe() -> tuple[int, int]:
    """Makes a pipe whose ends any uid of the sandbox may open again through /proc, where it can."""
    reader, writer = posix.pipe2(posix.O_CLOEXEC)
    posix.set_blocking(reader, False)
    try:
        posix.fchmod(writer, 0o666)
    except OSError:
        pass  # a kernel such as gVisor's, whose pipes have one mode for good
    try:
        fcntl.fcntl(writer, F_SETPIPE_SZ, PIPE_BYTES)
    except OSError:
        pass  # the kernel's share for this user is used up: the usual size it is
    return reader, writer


def make_recording() -> tuple[int, int]:
    """Makes a file in memory, for what a cell prints, and a second descriptor; or -1 and -1."""
    try:
        descriptor = posix.memfd_create("output", posix.MFD_CLOEXEC)
    except (AttributeError, OSError):
        return -1, -1
    return descriptor, posix.dup(descriptor)


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

    def end_drain(self) -> None:
        """Lets all be read again that may still come."""
        self._left = None


class Outputs:
    """Both streams of one cell, with the limit that they have together."""

    __slots__ = ("_link", "_recorded", "_recording", "_room", "_writers", "cell", "cut", "streams")

    def __init__(
        self,
        link: HostLink,
        cell: str,
        pipes: tuple[tuple[int, int], tuple[int, int]],
        limit: int,
        recording: int,
    ) -> None:
        """Takes the pipes' ends; a limit of 0 means none.

        Args:
            link: where output goes.
            cell: whose output it is.
            pipes: of standard output and of standard error, each with its reading end first.
            limit: how many bytes both may have together.
            recording: the file that keeps their beginning for the code itself, or -1.
        """
        self._recording = recording
        self._recorded = 0
        self._link = link
        self.cell = cell
        self._room = limit or frames.MAX_INTEGER
        self.cut = False
        self.streams = [Stream(name, pipe[0]) for name, pipe in zip(STREAMS, pipes)]
        # Kept until the next cell has ended: else the pipes' end would be told just when that one
        # begins, and both would wait for each other.
        self._writers = [pipe[1] for pipe in pipes]

    def readable(self) -> list[Stream]:
        """Returns the streams that may be read now."""
        return [
            stream
            for stream in self.streams
            if stream.descriptor >= 0 and stream.has_credit and not stream.is_drained
        ]

    def pump(self, stream: Stream, pieces: int = 1) -> int:
        """Passes on some pieces; what is over the limit is read and thrown away.

        Returns:
            How many bytes were read.
        """
        taken = 0
        while pieces and stream.descriptor >= 0 and stream.has_credit and not stream.is_drained:
            pieces -= 1
            data = stream.read()
            taken += len(data)
            if len(data) > self._room:
                data = data[: self._room]
                self.cut = True
            if not data:
                break
            self._room -= len(data)
            header = {
                "type": "output",
                "cell": self.cell,
                "stream": stream.name,
                "offset": stream.offset,
            }
            self._link.send_in_order(header, data)
            stream.offset += len(data)
            if self._recording >= 0:
                self._record(data)
        return taken

    def _record(self, data: bytes) -> None:
        try:
            self._recorded += posix.pwrite(
                self._recording, data[: RECORDING_BYTES - self._recorded], self._recorded
            )
            if self._recorded < RECORDING_BYTES:
                return
        except OSError:
            pass  # there is no room for it
        posix.close(self._recording)
        self._recording = -1

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

    def release(self) -> None:
        """Leaves the writing ends to those who print."""
        while self._writers:
            posix.close(self._writers.pop())

    def close(self) -> None:
        """Closes both pipes; whoever still prints finds out."""
        self.release()
        for stream in self.streams:
            stream.close()
        if self._recording >= 0:
            posix.close(self._recording)
            self._recording = -1


class LateOutputs:
    """What threads and processes of ended cells still print. It goes on where the cell's ended."""

    __slots__ = ("_cells",)

    def __init__(self) -> None:
        """Begins without a cell."""
        self._cells: list[Outputs] = []

    def add(self, outputs: Outputs) -> None:
        """Takes over the streams of a cell that ended."""
        for earlier in self._cells:
            earlier.release()
        for stream in outputs.streams:
            stream.end_drain()
        self._cells.append(outputs)
        self._forget()
        while len(self._cells) > MAX_LATE:
            self._cells.pop(0).close()

    def readable(self) -> list[tuple[Outputs, Stream]]:
        """Returns the streams that may be read now."""
        return [(outputs, stream) for outputs in self._cells for stream in outputs.readable()]

    def pump(self, ready: set[int]) -> None:
        """Passes on one piece of each stream that is ready."""
        for outputs, stream in self.readable():
            if stream.descriptor in ready:
                outputs.pump(stream)
        self._forget()

    def credit(self, cell: str, name: str, offset: int) -> None:
        """Notes up to where the host has taken a stream of an ended cell."""
        for outputs in self._cells:
            if outputs.cell == cell:
                outputs.credit(name, offset)

    def _forget(self) -> None:
        kept = []
        for outputs in self._cells:
            if any(stream.descriptor >= 0 for stream in outputs.streams):
                kept.append(outputs)
            else:
                outputs.close()
        self._cells = kept
