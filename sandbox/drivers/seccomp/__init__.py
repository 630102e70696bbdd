"""The system call filter of a sandbox: policy, compiler and the compiled result.

Called by the bubblewrap driver, which hands the bytes to bwrap.
"""

from __future__ import annotations

import platform

from sandbox.drivers.seccomp.compiled import FILTERS


def filter_bytes(machine: str = "") -> bytes:
    """The compiled filter for a machine.

    Args:
        machine: As `platform.machine()` names it; this one when empty.

    Raises:
        LookupError: There is no filter for it, so no sandbox can be made on it.
    """
    name = machine or platform.machine()
    if name not in FILTERS:
        known = ", ".join(sorted(FILTERS))
        raise LookupError(f"no system call filter exists for {name}; there is one for {known}")
    return bytes.fromhex(FILTERS[name])
