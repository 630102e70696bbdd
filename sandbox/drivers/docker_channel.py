"""The frame channel of a container: the socket by which the engine attaches to its streams.

Called by the docker driver. What is written to that socket is the container's standard input as it
is; what is read from it comes in pieces with a header of 8 bytes each, which say whether it is
standard output or standard error. Only reading differs from a plain socket, so no process or thread
copies anything in between.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable

_HEADER_BYTES = 8
_STDOUT = 1
_KEPT_BYTES = 4096


class AttachedSocket(socket.socket):
    """A stream socket whose `recv` gives standard output only.

    No byte is read ahead: what `recv` takes from the kernel it gives, so the descriptor is readable
    as long as there is more.
    """

    def __init__(self, fileno: int) -> None:
        """Takes over a connected descriptor, before the container writes anything."""
        super().__init__(fileno=fileno)
        self._header = b""
        self._left = 0
        self._is_stdout = False
        self._tail = b""

    @property
    def diagnostics(self) -> str:
        """The last 4 KiB of standard error that came, as text."""
        return self._tail.decode("utf-8", "replace").strip()

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        """Reads up to `bufsize` bytes of standard output; with flags, what the kernel has."""
        if flags:
            return super().recv(bufsize, flags)
        while True:
            data = super().recv(bufsize)
            if not data:
                return b""
            if output := self._without_headers(data):
                return output

    def _without_headers(self, data: bytes) -> bytes:
        output: list[bytes] = []
        at = 0
        while at < len(data):
            if not self._left:
                missing = _HEADER_BYTES - len(self._header)
                self._header += data[at : at + missing]
                at += missing
                if len(self._header) == _HEADER_BYTES:
                    self._is_stdout = self._header[0] == _STDOUT
                    self._left = int.from_bytes(self._header[4:], "big")
                    self._header = b""
                continue
            piece = data[at : at + self._left]
            at += len(piece)
            self._left -= len(piece)
            if self._is_stdout:
                output.append(piece)
            else:
                self._tail = (self._tail + piece)[-_KEPT_BYTES:]
        return b"".join(output)


class Hangups:
    """Tells when the engine has closed its end of an attached socket, whether anybody reads it.

    The engine closes it when the container ends; the socket itself belongs to whoever reads it, so
    this watches for its end only, all sockets by one descriptor.
    """

    def __init__(self) -> None:
        """Watches from now on, with the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._epoll = select.epoll()
        self._called: dict[int, Callable[[], object]] = {}
        self._loop.add_reader(self._epoll.fileno(), self._look)

    def watch(self, channel: socket.socket, call: Callable[[], object]) -> None:
        """Calls once when the other end is closed."""
        self._called[channel.fileno()] = call
        self._epoll.register(channel.fileno(), select.EPOLLRDHUP)

    def forget(self, channel: socket.socket) -> None:
        """Watches no more; call it before the socket is closed. Safe to repeat."""
        if self._called.pop(channel.fileno(), None) is not None:
            self._epoll.unregister(channel.fileno())

    def close(self) -> None:
        """Frees the descriptor. Safe to repeat."""
        if not self._epoll.closed:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()

    def _look(self) -> None:
        for descriptor, _ in self._epoll.poll(0):
            if call := self._called.pop(descriptor, None):
                self._epoll.unregister(descriptor)
                call()
