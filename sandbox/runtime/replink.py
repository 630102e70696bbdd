"""The supervisor's end of a REPL: forks it, passes frames on, and renames what it names.

Called by the supervisor's loop. Whatever comes from a REPL is hostile: it is checked for its form
here and, fully, by the host.
"""

from __future__ import annotations

import _socket
import gc
import posix
import sys

from . import frames
from .processes import SIGKILL, look, signal_one

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .settings import Settings

MAX_NAME = 48  # of the REPL's own ids, so that renamed ones fit
SEND_BUFFER_BYTES = 212_992
RELAYED = ("call", "blob", "started", "done", "tool_result", "display", "threads_ended")


class ReplLink:
    """One REPL process and the message socket to it."""

    __slots__ = (
        "_blobs",
        "_generation",
        "_given",
        "_key",
        "_queue",
        "_tools",
        "descriptor",
        "fault",
        "pid",
        "socket",
    )

    def __init__(self, settings: Settings, generation: int) -> None:
        """Forks the REPL; the child never returns from here.

        Args:
            settings: what the supervisor was started with.
            generation: counts the REPLs of this sandbox; part of renamed ids.
        """
        # A message socket keeps frames whole whatever interrupts a sender: see `channel`.
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        supervisor = posix.getpid()
        self._generation = generation
        self._queue: list[Any] = []
        self._blobs: dict[str, int] = {}
        self._given: set[str] = set()  # blobs of the host that no frame has named yet
        self.fault = ""  # why it was ended, if it was
        self._tools: set[str] = set()  # calls of its tools that it has not answered
        # What is here stays here: collecting it in either process would only copy its pages.
        gc.freeze()
        self.pid = posix.fork()
        gc.enable()
        if self.pid == 0:
            from .repl import run_child

            run_child(theirs, settings, supervisor)
        theirs.close()
        ours.setblocking(False)
        self._key: tuple[int, bytes] | None = None
        self.socket = ours
        self.descriptor = ours.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._queue)

    @property
    def key(self) -> tuple[int, bytes] | None:
        """What tells the process from a later one with the same pid; None when it is gone."""
        if self._key is None:
            process = look(self.pid)
            self._key = process.key if process is not None else None
        return self._key

    def send(
        self,
        frame: bytes,
        descriptors: tuple[int, ...] = (),
        kept: tuple[int, ...] = (),
    ) -> None:
        """Queues a frame with the descriptors that go along: first those that stay open here, then
        those that are closed here once they were sent."""
        self._queue.append((frame, kept, descriptors))
        self.flush()

    def send_blob(self, frame: frames.Frame) -> None:
        """Passes on a part of a blob that a later frame names."""
        self._given.add(frame.header["blob"])
        self.send(frames.encode(frame.header, frame.payload))

    def has_contents(self, header: dict[str, Any]) -> bool:
        """Tells whether this REPL was given every blob that a header names, which are used now."""
        named = {part["blob"] for part in _parts(header)}
        complete = named <= self._given
        self._given -= named
        return complete

    def flush(self) -> None:
        """Sends what the REPL takes now. What a dead REPL does not take is dropped."""
        while self._queue:
            frame, kept, descriptors = self._queue[0]
            rights = b"".join(fd.to_bytes(4, sys.byteorder) for fd in kept + descriptors)
            extra = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)] if rights else []
            try:
                self.socket.sendmsg([frame], extra)
            except BlockingIOError:
                return
            except OSError:
                pass  # the REPL is gone; its end is noticed by `waitpid`
            self._queue.pop(0)
            for descriptor in descriptors:
                posix.close(descriptor)

    def receive(self) -> frames.Frame | None:
        """Takes one frame; None when there is none now.

        Raises:
            EOFError: the REPL closed its end.
            FrameError: it sent what is no frame of its own.
        """
        try:
            packet = self.socket.recv(frames.MAX_FRAME_BYTES + 1)
        except BlockingIOError:
            return None
        except OSError:
            packet = b""
        if not packet:
            raise EOFError("the REPL closed its end")
        frame = frames.decode_packet(packet)
        if frame.type not in RELAYED:
            raise frames.FrameError(f"a REPL sends no {frame.type[:40]}")
        self._rename(frame)
        return frame

    def own_call(self, call: object) -> str | None:
        """Returns the REPL's own id of a call that the host answers; None if it is another's."""
        prefix = f"{self._generation}-"
        if isinstance(call, str) and call.startswith(prefix):
            return call[len(prefix) :]
        return None

    def call_tool(self, frame: frames.Frame) -> None:
        """Passes a call of a tool on, once."""
        call = frame.header["call"]
        if call not in self._tools:
            self._tools.add(call)
            self.send(frames.encode(frame.header, frame.payload))

    def unanswered_tools(self) -> list[str]:
        """Returns the calls of its tools for which it owes a result."""
        return sorted(self._tools)

    def unfinished_blobs(self) -> list[tuple[str, int]]:
        """Returns the renamed blobs that were not sent to their end, with their sizes so far."""
        return sorted(self._blobs.items())

    def close(self) -> None:
        """Frees the socket and what was to be passed to the REPL."""
        for _, _, descriptors in self._queue:
            for descriptor in descriptors:
                posix.close(descriptor)
        self._queue.clear()
        self.socket.close()

    def kill(self, fault: str) -> None:
        """Ends the REPL at once for a fault; `waitpid` tells when it is gone."""
        self.fault = self.fault or fault
        signal_one(self.pid, SIGKILL)

    def _rename(self, frame: frames.Frame) -> None:
        header = frame.header
        if frame.type == "call":
            header["call"] = self._renamed(header.get("call"))
        if frame.type == "tool_result":
            call = header.get("call")
            if not isinstance(call, str) or call not in self._tools:
                raise frames.FrameError("a result of no open tool call")
            self._tools.remove(call)
        if frame.type == "blob":
            name = header["blob"] = self._renamed(header.get("blob"))
            if header.get("last") is True:
                self._blobs.pop(name, None)
            else:
                self._blobs[name] = self._blobs.get(name, 0) + len(frame.payload)
                if len(self._blobs) > frames.MAX_OPEN_BLOBS:
                    raise frames.FrameError("too many open blobs")
            return
        for part in _parts(header):
            part["blob"] = self._renamed(part["blob"])

    def _renamed(self, name: object) -> str:
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
            raise frames.FrameError("an id that is no short text")
        return f"{self._generation}-{name}"


def _parts(node: Any) -> list[dict[str, Any]]:
    """Finds the parts of a header that name a blob."""
    if isinstance(node, list):
        return [part for item in node for part in _parts(item)]
    if not isinstance(node, dict):
        return []
    if set(node) == {"blob", "n"}:
        return [node]
    return [part for item in node.values() for part in _parts(item)]
