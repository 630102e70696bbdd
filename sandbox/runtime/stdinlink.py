"""Standard input of the code: one pipe over all cells, filled as far as it takes.

Called by the supervisor. The pipe's reading end is kept here too, so that what nobody has read yet
outlives a REPL that died.
"""

from __future__ import annotations

import posix

from . import frames

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .frames import Frame
    from .hostlink import HostLink


class StdinLink:
    """What came from the host and is not in the pipe yet."""

    __slots__ = ("_closes", "_link", "_offset", "_queue", "_reader", "descriptor")

    def __init__(self, link: HostLink) -> None:
        """Begins without a pipe."""
        self._link = link
        self._reader = -1
        self.descriptor = -1  # the writing end
        self._queue = bytearray()
        self._offset = 0  # of all input, what is in the pipe
        self._closes = False

    @property
    def wants_write(self) -> bool:
        """Whether bytes wait for room in the pipe."""
        return bool(self._queue)

    def reader(self) -> int:
        """Returns a new descriptor of the reading end, to be passed on."""
        self._open()
        return posix.dup(self._reader)

    def feed(self, frame: Frame) -> None:
        """Takes what the host sends.

        Raises:
            FrameError: it does not go on where the last frame ended.
        """
        if frame.header["offset"] != self._offset + len(self._queue) or self._closes:
            raise frames.FrameError("standard input out of order")
        self._open()
        self._queue += frame.payload
        self._closes = frame.header["close"]
        self.flush()

    def flush(self) -> None:
        """Writes what the pipe takes now, and says how far that is."""
        before = self._offset
        while self._queue:
            try:
                written = posix.write(self.descriptor, self._queue)
            except BlockingIOError:
                break
            del self._queue[:written]
            self._offset += written
        if self._offset != before:
            self._link.send({"type": "stdin_taken", "offset": self._offset})
        if self._closes and not self._queue and self.descriptor >= 0:
            posix.close(self.descriptor)
            self.descriptor = -1

    def _open(self) -> None:
        if self._reader < 0:
            self._reader, self.descriptor = posix.pipe2(posix.O_CLOEXEC)
            posix.set_blocking(self.descriptor, False)
            posix.fchmod(self._reader, 0o666)  # any uid of the sandbox may open /dev/stdin
