"""The events of one sandbox, kept until its owner has acknowledged them.

Filled by the sandbox's channel, read by the attached stream. Events are numbered from 1 without
gaps. Memory holds little; what is more goes to the disk, and at the limit the log says that it is
full, so that the sandbox is no longer read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from hutch.v1 import host_service_pb2 as pb
from sandbox.host.spill import Place, Spill

ENTRY_OVERHEAD_BYTES = 512
JOINED_BYTES = 256 * 1024  # of output that goes out as one event
STARTED_SECONDS = 0.005  # how long the start of a cell waits for the event that makes it needless


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputMark:
    """How far the output of one stream of one cell goes with an event."""

    cell_id: str
    stream: int
    end: int


@dataclass(slots=True, kw_only=True)
class _Entry:
    event: pb.AttachSandboxResponse | None
    place: Place | None
    cost: int
    mark: OutputMark | None


class EventLog:
    """A bounded queue with sequence numbers that can be read more than once."""

    def __init__(
        self, spill: Spill, *, memory_bytes: int, spill_bytes: int, max_events: int
    ) -> None:
        """Starts empty; the limits are those of `HostConfig`."""
        self._spill = spill
        self._memory_limit = memory_bytes
        self._spill_limit = spill_bytes
        self._max_events = max_events
        self._entries: deque[_Entry] = deque()
        self._memory_bytes = 0
        self._disk_failed = False
        self._waiters: list[asyncio.Future[None]] = []
        self._later: asyncio.TimerHandle | None = None
        self.acknowledged = 0

    @property
    def last_sequence(self) -> int:
        """The sequence of the newest event; 0 before the first."""
        return self.acknowledged + len(self._entries)

    @property
    def full(self) -> bool:
        """Whether nothing more should be added before something was acknowledged."""
        return (
            self._spill.live_bytes >= self._spill_limit
            or len(self._entries) >= self._max_events
            or (self._disk_failed and self._memory_bytes >= self._memory_limit)
        )

    @property
    def memory_bytes(self) -> int:
        """What is held in memory, by estimate."""
        return self._memory_bytes

    @property
    def spilled_bytes(self) -> int:
        """What is held on the disk."""
        return self._spill.live_bytes

    def append(self, event: pb.AttachSandboxResponse, mark: OutputMark | None = None) -> int:
        """Adds one event and returns its sequence; the log owns the event from now on."""
        event.sequence = self.last_sequence + 1
        entry = self._kept(event, mark)
        self._entries.append(entry)
        if entry.place is None:
            self._memory_bytes += entry.cost
        if event.HasField("cell_started"):
            loop = asyncio.get_running_loop()
            self._later = self._later or loop.call_later(STARTED_SECONDS, self.wake)
        else:
            self.wake()
        return event.sequence

    def _kept(self, event: pb.AttachSandboxResponse, mark: OutputMark | None) -> _Entry:
        cost = event.ByteSize() + ENTRY_OVERHEAD_BYTES
        if self._memory_bytes + cost > self._memory_limit and not self._disk_failed:
            try:
                place = self._spill.write(event.SerializeToString())
            except OSError:
                # A full disk: what is at hand stays in memory, and the sandbox is read no further.
                self._disk_failed = True
            else:
                return _Entry(event=None, place=place, cost=0, mark=mark)
        return _Entry(event=event, place=None, cost=cost, mark=mark)

    def read(self, sequence: int) -> pb.AttachSandboxResponse:
        """Returns one event that is not acknowledged.

        Raises:
            IndexError: there is no such event.
            OSError: the disk does not give it back.
        """
        index = sequence - self.acknowledged - 1
        if index < 0:
            raise IndexError(f"event {sequence} was acknowledged")
        entry = self._entries[index]
        if entry.event is not None:
            return entry.event
        if entry.place is None:
            raise AssertionError("an entry without a place")
        return pb.AttachSandboxResponse.FromString(self._spill.read(entry.place))

    def read_joined(self, sequence: int) -> tuple[pb.AttachSandboxResponse, int]:
        """Returns one event, or consecutive output of one stream as one, and the last sequence in
        it, which it has: it is acknowledged as the events that it stands for. The start of a cell
        is left out where the next event is here: a message costs more than a short cell.

        Raises:
            IndexError: there is no such event.
            OSError: the disk does not give it back.
        """
        event = self.read(sequence)
        if event.HasField("cell_started") and sequence < self.last_sequence:
            sequence += 1
            event = self.read(sequence)
        mark = self._mark(sequence)
        if mark is None or self._mark(sequence + 1) is None:
            return event, sequence
        pieces, size = [event.output.data], len(event.output.data)
        while (follower := self._mark(sequence + 1)) is not None:
            size += follower.end - mark.end
            if (follower.cell_id, follower.stream) != (mark.cell_id, mark.stream):
                break
            if size > JOINED_BYTES:
                break
            sequence, mark = sequence + 1, follower
            pieces.append(self.read(sequence).output.data)
        joined = pb.OutputChunk(
            cell_id=mark.cell_id,
            stream=event.output.stream,
            offset=event.output.offset,
            data=b"".join(pieces),
        )
        return pb.AttachSandboxResponse(sequence=sequence, output=joined), sequence

    def _mark(self, sequence: int) -> OutputMark | None:
        """The mark of an event, if there is such an event and it is output."""
        index = sequence - self.acknowledged - 1
        return self._entries[index].mark if 0 <= index < len(self._entries) else None

    def acknowledge(self, sequence: int) -> list[OutputMark]:
        """Frees events up to and with `sequence` and returns what output was thereby taken.

        Raises:
            IndexError: there is no such event yet.
        """
        if sequence > self.last_sequence:
            raise IndexError(f"event {sequence} does not exist")
        taken: dict[tuple[str, int], OutputMark] = {}
        while self.acknowledged < sequence:
            entry = self._entries.popleft()
            self.acknowledged += 1
            if entry.place is not None:
                self._spill.release(entry.place)
            else:
                self._memory_bytes -= entry.cost
            if entry.mark is not None:
                taken[entry.mark.cell_id, entry.mark.stream] = entry.mark
        if self._memory_bytes < self._memory_limit:
            self._disk_failed = False
        return list(taken.values())

    async def wait_past(self, sequence: int) -> None:
        """Returns when there is an event after `sequence`, or when `wake` was called."""
        if self.last_sequence > sequence:
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def wake(self) -> None:
        """Lets every reader look again."""
        if self._later is not None:
            self._later.cancel()
            self._later = None
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    def close(self) -> None:
        """Frees everything that is on the disk."""
        self.wake()
        self._entries.clear()
        self._spill.close()
