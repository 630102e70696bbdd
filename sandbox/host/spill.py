"""Bytes of events that are too many for memory, on the host's own disk.

Called by the event log only. The folder is the host's, 0700, and is emptied at its start; no
sandbox can reach it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

SEGMENT_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one record is."""

    segment: int
    offset: int
    length: int


@dataclass(slots=True, kw_only=True)
class _Segment:
    descriptor: int
    size: int = 0
    live_records: int = 0


class Spill:
    """Records in segment files; a segment is removed once all its records were released.

    Files are unlinked as soon as they are open, so that nothing is left behind by a host that is
    killed.
    """

    def __init__(self, directory: Path, name: str, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Makes no file before the first record.

        Args:
            directory: Where the segments are made.
            name: A prefix that is safe in a file name.
            segment_bytes: When the next segment begins.
        """
        self._directory = directory
        self._name = name
        self._segment_bytes = segment_bytes
        self._segments: dict[int, _Segment] = {}
        self._newest = 0
        self.live_bytes = 0

    def write(self, record: bytes) -> Place:
        """Appends one record.

        Raises:
            OSError: the disk does not take it; nothing was added.
        """
        segment = self._segments.get(self._newest)
        if segment is None or segment.size >= self._segment_bytes:
            segment = self._open()
        place = Place(segment=self._newest, offset=segment.size, length=len(record))
        written = 0
        while written < len(record):
            written += os.pwrite(
                segment.descriptor, memoryview(record)[written:], place.offset + written
            )
        segment.size += len(record)
        segment.live_records += 1
        self.live_bytes += len(record)
        return place

    def read(self, place: Place) -> bytes:
        """Returns one record that was not released.

        Raises:
            OSError: the disk does not give it back.
        """
        record = os.pread(self._segments[place.segment].descriptor, place.length, place.offset)
        if len(record) != place.length:
            raise OSError(f"{len(record)} of {place.length} spilled bytes came back")
        return record

    def release(self, place: Place) -> None:
        """Gives up one record."""
        segment = self._segments[place.segment]
        segment.live_records -= 1
        self.live_bytes -= place.length
        if segment.live_records == 0:
            os.close(segment.descriptor)
            del self._segments[place.segment]

    def close(self) -> None:
        """Gives up everything."""
        for segment in self._segments.values():
            os.close(segment.descriptor)
        self._segments.clear()
        self.live_bytes = 0

    def _open(self) -> _Segment:
        path = self._directory / f"{self._name}-{self._newest + 1}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        os.unlink(path)
        self._newest += 1
        segment = _Segment(descriptor=descriptor)
        self._segments[self._newest] = segment
        return segment
