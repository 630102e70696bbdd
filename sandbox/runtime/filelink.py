"""The supervisor's end of operations on files: forks the helper that does them, one at a time.

Called by the supervisor's loop; calls `fileops` in the helper, which has the uid of the code and no
descriptor but its socket. Whatever a file makes the helper wait for, the supervisor does not. The
code may kill a helper: what it was doing is asked of another one, once.
"""

from __future__ import annotations

import _socket
import posix
import time

from . import frames
from .processes import SIGKILL, look, signal_one
from .replink import SEND_BUFFER_BYTES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .processes import Process
    from .settings import Settings

OPERATION_SECONDS = 20.0
TRIES = 2


class FileLink:
    """At most one helper process, from the first operation on."""

    __slots__ = (
        "_answers",
        "_current",
        "_is_closed",
        "_key",
        "_pid",
        "_settings",
        "_socket",
        "_tries",
        "_until",
        "_waiting",
    )

    def __init__(self, settings: Settings) -> None:
        """Begins without a helper."""
        self._settings = settings
        self._socket: Any = None
        self._pid = -1
        self._key: tuple[int, bytes] | None = None
        self._waiting: list[frames.Frame] = []
        self._answers: list[frames.Frame] = []
        self._current: frames.Frame | None = None
        self._tries = 0
        self._until = 0.0
        self._is_closed = False

    @property
    def descriptor(self) -> int:
        """What becomes readable with the outcome; -1 while nothing is asked."""
        return self._socket.fileno() if self._current is not None else -1

    def next_time(self) -> float | None:
        """Returns when the helper has taken too long."""
        if self._answers:
            return 0.0
        return self._until if self._current is not None else None

    def owns(self, process: Process) -> bool:
        """Tells whether a process is the helper."""
        return process.key == self._key

    def gone(self, pid: int) -> None:
        """Notes that a process has ended; its number may be another's from now on."""
        if pid == self._pid:
            self._pid, self._key = -1, None

    def ask(self, frame: frames.Frame) -> None:
        """Takes an operation; its outcome comes by `receive`."""
        self._waiting.append(frame)
        self._begin_next()

    def receive(self) -> frames.Frame | None:
        """Takes one outcome; None when there is none now."""
        if self._current is not None and not self._answers:
            self._listen()
        if self._current is None:
            self._begin_next()
        return self._answers.pop(0) if self._answers else None

    def close(self) -> None:
        """Ends the helper; what is asked from now on fails."""
        self._is_closed = True
        self._fail("the sandbox is ending")
        self._drop()

    def _begin_next(self) -> None:
        while self._current is None and self._waiting:
            self._current = self._waiting.pop(0)
            self._tries = 0
            if self._is_closed:
                self._fail("the sandbox is ending")
            else:
                self._send()

    def _send(self) -> None:
        current = self._current
        if current is None:
            return
        packet = frames.encode(current.header, current.payload)
        while self._tries < TRIES:
            self._tries += 1
            self._until = time.monotonic() + OPERATION_SECONDS
            try:
                if self._socket is None:
                    self._fork()
                self._socket.send(packet)
                return
            except OSError:
                # The helper of an earlier operation was killed meanwhile, or none can be started.
                self._drop()
        self._fail("no process can work on files now")

    def _listen(self) -> None:
        if time.monotonic() >= self._until:
            self._drop()
            self._fail(f"it took over {OPERATION_SECONDS:.0f} seconds")
            return
        try:
            packet = self._socket.recv(frames.MAX_FRAME_BYTES)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        try:
            outcome = frames.decode_packet(packet)
        except frames.FrameError:
            self._drop()
            self._send()
            return
        current, self._current = self._current, None
        if current is not None:
            # A process of the code's uid said this; that it is about this operation is our word.
            outcome.header.update(type="file_outcome", id=current.header["id"])
            self._answers.append(outcome)

    def _fork(self) -> None:
        """Forks the helper; the child never returns from here."""
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        supervisor = posix.getpid()
        self._pid = posix.fork()
        if self._pid == 0:
            from .fileops import run_child

            run_child(theirs, self._settings, supervisor)
        theirs.close()
        ours.setblocking(False)
        self._socket = ours
        found = look(self._pid)
        self._key = found.key if found is not None else None

    def _drop(self) -> None:
        if self._pid > 0:
            signal_one(self._pid, SIGKILL)
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _fail(self, message: str) -> None:
        if self._current is not None:
            header = {
                "type": "file_outcome",
                "id": self._current.header["id"],
                "problem": "failed",
                "message": message,
                "entries": [],
                "more": False,
                "end": False,
            }
            self._current = None
            self._answers.append(frames.Frame(header))
