"""Whether a sandbox's writable file systems are full, seen from outside.

Called by a container when it measures. The kernel counts no failed write on a tmpfs, so what can be
known is whether one is full now. Nothing in a sandbox's folders is opened: a descriptor with O_PATH
names the root of each mount, below a root file system that the code inside cannot change, and is
asked for its free blocks and inodes only. See docs/adr/0007.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from sandbox.drivers import procfs

_NEARLY_BYTES = 65_536
_NAMES_ONLY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def count_full(first: int | None, folders: Sequence[str], size: int) -> int | None:
    """Counts the file systems that have no room for 64 KiB more, or for one file more.

    Args:
        first: The sandbox's first process.
        folders: Where they are mounted inside.
        size: Their size in bytes; what has another size is not one of them.

    Returns:
        How many, or None where this host may not look.
    """
    if first is None:
        return None
    page = os.sysconf("SC_PAGE_SIZE")
    expected = -(-size // page) * page
    full = 0
    for folder in folders:
        try:
            descriptor = os.open(f"{procfs.PROC}/{first}/root{folder}", _NAMES_ONLY)
        except OSError:
            return None
        try:
            found = os.fstatvfs(descriptor)
        finally:
            os.close(descriptor)
        if found.f_blocks * found.f_frsize != expected:
            return None  # they are not mounted yet
        no_inode = found.f_files > 0 and found.f_ffree == 0
        full += no_inode or found.f_bfree * found.f_frsize < min(_NEARLY_BYTES, size)
    return full
