"""Whether the disk under the store has room for new work.

Called by the loop before it takes new work, and by the artifact servicer; told by the writer when
the disk took nothing. What is in flight goes on below the reserve: the reserve is for it.
"""

from __future__ import annotations

import os
from pathlib import Path

_DEFAULT_BYTES = 256 * 1024 * 1024
_DEFAULT_SHARE = 0.01  # of a disk on which that is less


class Space:
    """The free bytes of one file system. To ask costs microseconds, so it is asked each time.

    Attributes:
        stalled: whether the disk refuses what must be written before anything else is.
    """

    def __init__(self, folder: Path, reserve_bytes: int) -> None:
        """Asks nothing yet.

        Args:
            folder: Any folder of the file system.
            reserve_bytes: Below so many free bytes no new work is taken; 0 means 256 MiB, or a
                hundredth of a disk where that is less.
        """
        self.stalled = False
        self._folder = folder
        self._reserve = reserve_bytes

    def short(self) -> bool:
        """Whether new work must be refused."""
        return self.stalled or self._is_short()

    def _is_short(self) -> bool:
        try:
            state = os.statvfs(self._folder)
        except OSError:
            return False  # whoever writes will be told why it fails
        total = state.f_blocks * state.f_frsize
        reserve = self._reserve or min(_DEFAULT_BYTES, int(total * _DEFAULT_SHARE))
        return state.f_bavail * state.f_frsize < reserve
