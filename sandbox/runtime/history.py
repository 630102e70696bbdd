"""`__history__`: the cells that this REPL ran, with what they printed and how they failed.

Called by `repl`. What a cell printed is read from a file in memory that the supervisor fills while
it passes the output on; it holds the first 4 MiB, and later output of the cell's threads too.
"""

from __future__ import annotations

import posix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

RECORDING_BYTES = 4 * 1024 * 1024  # as the supervisor keeps it
MAX_RECORDINGS = 64
MAX_BYTES = 32 * 1024 * 1024


class Entry:
    """One cell.

    Attributes:
        code: its source.
        error: the traceback of the exception that left it, or None.
    """

    __slots__ = ("_recording", "code", "error")

    def __init__(self, recording: int) -> None:
        """Takes the descriptor of the recording; -1 where there is none."""
        self._recording = recording
        self.code = ""
        self.error: str | None = None

    def end(self, code: str, failure: dict[str, str] | None) -> None:
        """Notes what the cell was and how it failed."""
        self.code = code
        self.error = failure["traceback"] if failure is not None else None

    @property
    def output(self) -> str:
        """What it printed on both streams, in the order in which it came; see `output_cut`."""
        data = posix.pread(self._recording, self.recorded, 0) if self._recording >= 0 else b""
        return data.decode("utf-8", "replace")

    @property
    def output_cut(self) -> bool:
        """Whether `output` is not all: only so much of each cell, and of all, is kept."""
        return self._recording < 0 or self.recorded >= RECORDING_BYTES

    @property
    def recorded(self) -> int:
        """How many bytes of output are kept."""
        if self._recording < 0:
            return 0
        return min(posix.fstat(self._recording).st_size, RECORDING_BYTES)

    def forget(self) -> None:
        """Gives the recording up."""
        if self._recording >= 0:
            posix.close(self._recording)
            self._recording = -1

    def __repr__(self) -> str:
        """Names the code's first line and how it ended."""
        first = self.code.strip().partition("\n")[0][:60]
        return f"<cell {first!r}{', failed' if self.error is not None else ''}>"


class History:
    """All cells, the first at 0; the one that runs is the last."""

    __slots__ = ("_entries", "_kept", "_total")

    def __init__(self) -> None:
        """Begins empty."""
        self._entries: list[Entry] = []
        self._kept: list[tuple[Entry, int]] = []  # oldest first, with what was recorded at its end
        self._total = 0

    def begin(self, recording: int) -> Entry:
        """Adds the cell that begins; recordings beyond the bounds are given up, oldest first."""
        if self._entries:
            last = self._entries[-1]
            self._kept.append((last, last.recorded))
            self._total += last.recorded
        while len(self._kept) > MAX_RECORDINGS or self._total > MAX_BYTES:
            oldest, size = self._kept.pop(0)
            self._total -= size
            oldest.forget()
        entry = Entry(recording)
        self._entries.append(entry)
        return entry

    def __getitem__(self, index: Any) -> Any:
        """Returns a cell, or a list of cells for a slice."""
        return self._entries[index]

    def __len__(self) -> int:
        """Counts the cells, the one that runs included."""
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """Iterates from the first cell on."""
        return iter(list(self._entries))

    def __repr__(self) -> str:
        """Lists the cells."""
        return repr(self._entries)
