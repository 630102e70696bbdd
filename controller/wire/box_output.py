"""The output of a whole box: of its cells as they ended, then of the running one.

Called by the invocation servicer. What a cell's threads print after its end is read by its id.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from controller.convert_cells import cell_output_id
from controller.core.ids import InvocationId, TenantId
from controller.core.model import CellOutcome
from controller.engine import records as rec
from controller.loop import Loop
from controller.store.ports import InvocationRow, Journal, OutputLog, tree_records

READ_BYTES = 256 * 1024


class BoxOutput:
    """One stream of one box, read from a byte on."""

    def __init__(
        self,
        *,
        loop: Loop,
        journal: Journal,
        output: OutputLog,
        codec: rec.Codec,
        row: InvocationRow,
        stream: str,
        offset: int,
    ) -> None:
        self._loop = loop
        self._journal = journal
        self._output = output
        self._codec = codec
        self._tenant_id = TenantId(row.tenant_id)
        self._tree_id = InvocationId(row.tree_id)
        self._invocation_id = InvocationId(row.invocation_id)
        self._stream = stream
        self._offset = offset
        self._base = 0  # where the next cell begins
        self._sequence = 0
        self._over = False

    async def read(self, *, follow: bool) -> AsyncIterator[tuple[int, bytes]]:
        """Pieces with their offsets; with `follow` until the box has ended."""
        watchers = self._loop.watchers
        feed = watchers.follow(self._tree_id)
        try:
            while True:
                feed.changed.clear()
                async for piece in self._ended_cells():
                    yield piece
                async for piece in self._running_cell():
                    yield piece
                if not follow or self._over or self._loop.draining:
                    return
                feed.facts.clear()
                feed.printed.clear()
                await feed.changed.wait()
        finally:
            watchers.unfollow(self._tree_id, feed)

    async def _ended_cells(self) -> AsyncIterator[tuple[int, bytes]]:
        async for item in tree_records(
            self._journal, self._tenant_id, self._tree_id, self._sequence
        ):
            self._sequence = item.sequence
            if item.invocation_id != self._invocation_id:
                continue
            record = self._codec.load(item.payload)
            self._over = self._over or isinstance(record, rec.Ended)
            if isinstance(record, rec.CellRecorded) and record.outcome is not (
                CellOutcome.CANCELLED_BEFORE_START
            ):
                size = record.stdout_bytes if self._stream == "stdout" else record.stderr_bytes
                async for piece in self._piece(record.cell_id, size):
                    yield piece
                self._base += size

    async def _running_cell(self) -> AsyncIterator[tuple[int, bytes]]:
        node = self._loop.state.live(self._invocation_id)
        running = node.next_cell if node is not None else None
        if running is None:
            return
        kept = cell_output_id(self._invocation_id, running.cell_id)
        size = await self._output.size(self._tenant_id, kept, self._stream)
        async for piece in self._piece(running.cell_id, size):
            yield piece

    async def _piece(self, cell_id: str, size: int) -> AsyncIterator[tuple[int, bytes]]:
        """What of one cell's first bytes is wanted and was not read yet."""
        kept = cell_output_id(self._invocation_id, cell_id)
        end = self._base + size
        while self._offset < end:
            if self._offset < self._base:
                return  # an earlier cell's bytes are not all there: its output was lost
            limit = min(READ_BYTES, end - self._offset)
            data = await self._output.read(
                self._tenant_id, kept, self._stream, self._offset - self._base, limit
            )
            if not data:
                return
            begin, self._offset = self._offset, self._offset + len(data)
            yield begin, data


async def limited(
    pieces: AsyncIterator[tuple[int, bytes]], max_bytes: int
) -> AsyncIterator[tuple[int, bytes]]:
    """At most so many bytes of them; 0 means all."""
    left = max_bytes
    async for offset, data in pieces:
        piece = data[:left] if max_bytes else data
        left -= len(piece)
        yield offset, piece
        if max_bytes and not left:
            return
