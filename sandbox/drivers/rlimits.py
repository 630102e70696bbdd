"""Limits that the kernel holds for each process: the level `process`.

Called by the drivers for what no cgroup holds; calls `prlimit`.
"""

from __future__ import annotations

import resource

from sandbox.drivers.driver import Enforcement, Level, Limits

# RLIMIT_AS counts mapped addresses, not touched pages: an interpreter maps some 20 MiB of libraries
# and locale data before it runs anything, so the address space gets this much on top of the limit.
_ADDRESS_SPACE_SLACK_BYTES = 64 * 1024 * 1024


def memory(pid: int, limits: Limits) -> Enforcement:
    """Bounds the address space of a process and of what it starts from now on."""
    size = limits.memory_limit_bytes + _ADDRESS_SPACE_SLACK_BYTES
    resource.prlimit(pid, resource.RLIMIT_AS, (size, size))
    return Enforcement(limit="memory", level=Level.PROCESS, mechanism="RLIMIT_AS")


def open_files(pid: int, limits: Limits) -> Enforcement:
    """Bounds the open files of a process and of what it starts from now on."""
    number = limits.open_files_limit
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (number, number))
    return Enforcement(limit="open_files", level=Level.PROCESS, mechanism="RLIMIT_NOFILE")


def no_core_dumps(pid: int) -> None:
    """Keeps a crash inside from writing the sandbox's memory anywhere."""
    resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
