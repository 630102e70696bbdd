"""The supervisor's end of the capture: forks the helper that walks the workspace.

Called by the supervisor, once no process of the sandbox's code is left; calls `capture` in the
helper.
"""

from __future__ import annotations

import _socket
import posix

from . import frames

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .settings import Settings


class CaptureLink:
    """One helper process, which has the uid of the code and no descriptor but this socket."""

    __slots__ = ("_files", "descriptor", "socket")

    def __init__(self, settings: Settings, request: dict[str, Any]) -> None:
        """Forks the helper; the child never returns from here."""
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        supervisor = posix.getpid()
        if posix.fork() == 0:
            from .capture import run_child

            run_child(theirs, settings, request, supervisor)
        theirs.close()
        ours.setblocking(False)
        self.socket = ours
        self.descriptor = ours.fileno()
        self._files = 0

    def receive(self) -> frames.Frame | None:
        """Takes one frame; None when there is none now.

        A helper that died, for example of the sandbox's memory limit, is answered for here, so
        that the host never waits in vain.
        """
        try:
            packet = self.socket.recv(frames.MAX_FRAME_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            packet = b""
        if not packet:
            refused = [{"name_hex": "", "reason": "the capture was cut short"}]
            return frames.Frame({"type": "captured", "files": self._files, "refused": refused})
        frame = frames.decode_packet(packet)
        if frame.type == "file" and frame.header["last"]:
            self._files += 1
        return frame

    def close(self) -> None:
        """Frees the socket; the helper exits by itself and is reaped with the others."""
        self.socket.close()
