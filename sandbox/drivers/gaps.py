"""What a driver does not hold, in the words of its statement, where tests and documents ask for it.

Called by the drivers; a gap that depends on the machine is worded where it is found.
"""

from __future__ import annotations

SHARED_KERNEL = "Sandboxes share this machine's kernel."
SHARED_UIDS = (
    "Its sandboxes have no user namespaces of their own: their supervisors are uid 0 of this "
    "machine with three capabilities, their code is uid 10001, and these uids share the machine's "
    "quotas of inotify and pipes."
)
ENDS_WHOLE = (
    "What exceeds the memory or the number of processes ends the whole sandbox, with its state, "
    "because its kernel is one process of this machine."
)
COUNTERS_END = (
    "What a container used is read while it lives: of one that ended as a whole, the peak of its "
    "memory may be missing."
)
OPEN_PROC = (
    "Code can read the environment, the memory map and the list of descriptors of its supervisor, "
    "which hold no secret; it can open none of those descriptors, nor its memory."
)
UNSEEN_DISK = "A full disk is not measured: its file systems live inside its own kernel."
