"""The frame channel of one sandbox, on the host's end of its socket.

Made and driven by `sandbox.host.hosted`. Reading and writing never wait for each other, and control
goes before contents. The socket belongs to the driver's container; only its readiness is watched
here.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from typing import Protocol

from sandbox.host.fields import ProtocolBreach
from sandbox.host.outbound import Message
from sandbox.runtime import frames

READ_BYTES = 256 * 1024
# A sandbox whose frames take long to read gives way to the others: a turn ends with the first frame
# beyond this, and the next one comes after a rest of so many times what it took.
TURN_SECONDS = 0.001
REST_FACTOR = 2


class Receiver(Protocol):
    """Who is told what the channel brings."""

    def frame_received(self, frame: frames.Frame) -> None:
        """One frame came; raises ProtocolBreach when it is none that may come."""

    def channel_breached(self, problem: str) -> None:
        """What came is no frame, or none that may come. Nothing more will be read."""

    def channel_failed(self, problem: str) -> None:
        """What was to be sent can no longer be read from the host's own disk."""

    def channel_ended(self, truncated: bool) -> None:
        """The other end is closed, perhaps within a frame. Nothing more will come."""


class FrameChannel:
    """Frames out, frames in."""

    def __init__(self, receiver: Receiver, queue_bytes: int) -> None:
        """Takes frames to send at once; they wait until `connect` and `release`.

        Args:
            receiver: Who is told.
            queue_bytes: Above so many waiting bytes `room` waits.
        """
        self._receiver = receiver
        self._queue_limit = queue_bytes
        self._socket: socket.socket | None = None
        self._decoder = frames.Decoder()
        self._next_turn: asyncio.TimerHandle | None = None
        self._urgent: deque[bytes] = deque()
        self._messages: deque[Message] = deque()
        self._current = memoryview(b"")
        self._queued_bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._released = False
        self._writing = False
        self._reading = False
        self._paused: set[str] = set()
        self._closed = False
        self._ended = False

    def hand_to(self, receiver: Receiver) -> None:
        """Tells somebody else from now on."""
        self._receiver = receiver

    def connect(self, channel: socket.socket) -> None:
        """Begins to read from a connected, non-blocking socket."""
        self._socket = channel
        self._update_reading()

    def is_silent(self) -> bool:
        """Whether the other end lives, as far as this one can tell, and has said nothing new."""
        if self._socket is None or self._ended or self._closed:
            return False
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False
        return False

    def release(self) -> None:
        """Begins to write: the other end takes frames now."""
        self._released = True
        self._flush()

    def send(self, frame: bytes) -> None:
        """Sends a small frame before everything that waits."""
        if not self._closed:
            self._urgent.append(frame)
            self._flush()

    def post(self, message: Message) -> None:
        """Sends the frames of one message, made as they are needed, after earlier messages."""
        if self._closed:
            message.close()
            return
        self._messages.append(message)
        self._queued_bytes += message.size
        self._update_room()
        self._flush()

    async def room(self) -> None:
        """Waits until little enough waits to be written."""
        await self._has_room.wait()

    def pause(self, reason: str) -> None:
        """Stops reading until every reason was taken back."""
        self._paused.add(reason)
        self._update_reading()

    def resume(self, reason: str) -> None:
        """Takes back one reason."""
        if reason in self._paused:
            self._paused.remove(reason)
            self._take_turn()

    def close(self) -> None:
        """Stops both directions for good and forgets what waits; the socket stays open."""
        self._closed = True
        self._update_reading()
        self._stop_writing()
        if self._next_turn is not None:
            self._next_turn.cancel()

    def _update_reading(self) -> None:
        if self._socket is None:
            return
        wanted = not (self._closed or self._ended or self._paused or self._next_turn)
        if wanted and not self._reading:
            asyncio.get_running_loop().add_reader(self._socket, self._readable)
        elif not wanted and self._reading:
            asyncio.get_running_loop().remove_reader(self._socket)
        self._reading = wanted

    def _readable(self) -> None:
        if self._socket is None:
            return
        try:
            data = self._socket.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._ended = True
            self._update_reading()
            self._receiver.channel_ended(self._decoder.buffered_bytes > 0)
            return
        self._decoder.push(data)
        self._take_turn()

    def _take_turn(self) -> None:
        """Tells of the frames that are here, for as long as is fair to the others on the loop."""
        if self._next_turn is not None:
            return
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            while not (self._paused or self._closed):
                frame = self._decoder.pop()
                if frame is None:
                    break
                self._receiver.frame_received(frame)
                if (took := loop.time() - began) > TURN_SECONDS:
                    self._next_turn = loop.call_later(REST_FACTOR * took, self._end_rest)
                    break
        except (ProtocolBreach, frames.FrameError) as error:
            self._breach(str(error))
        self._update_reading()

    def _end_rest(self) -> None:
        self._next_turn = None
        self._take_turn()

    def _breach(self, problem: str) -> None:
        self.close()
        self._receiver.channel_breached(problem)

    def _flush(self) -> None:
        if self._socket is None or not self._released or self._closed or self._writing:
            return
        self._write()

    def _write(self) -> None:
        if self._socket is None:
            return
        try:
            while self._next_frame():
                sent = self._socket.send(self._current)
                self._current = self._current[sent:]
        except (BlockingIOError, InterruptedError):
            if not self._writing:
                self._writing = True
                asyncio.get_running_loop().add_writer(self._socket, self._write)
            return
        except OSError:
            # The other end is gone: reading will find its end and tell.
            self._stop_writing()
            return
        self._no_writer()

    def _next_frame(self) -> bool:
        try:
            return self._fill()
        except OSError as error:
            self._stop_writing()
            self._receiver.channel_failed(str(error))
            return False

    def _fill(self) -> bool:
        while not self._current:
            if self._urgent:
                self._current = memoryview(self._urgent.popleft())
                continue
            if not self._messages:
                return False
            frame = next(self._messages[0].frames, None)
            if frame is not None:
                self._current = memoryview(frame)
                continue
            self._queued_bytes -= self._messages.popleft().size
            self._update_room()
        return True

    def _update_room(self) -> None:
        if self._queued_bytes <= self._queue_limit:
            self._has_room.set()
        else:
            self._has_room.clear()

    def _no_writer(self) -> None:
        if self._writing and self._socket is not None:
            asyncio.get_running_loop().remove_writer(self._socket)
        self._writing = False

    def _stop_writing(self) -> None:
        self._no_writer()
        self._urgent.clear()
        for message in self._messages:
            message.close()
        self._messages.clear()
        self._current = memoryview(b"")
        self._queued_bytes = 0
        self._has_room.set()
