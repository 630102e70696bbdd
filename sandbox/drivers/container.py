"""One sandbox of the bubblewrap driver: its measurements, and its end with proof.

Made by the bubblewrap driver; calls `procfs`, `disks` and the sandbox's cgroup. Outside there are
two processes of interest: bwrap itself, a child of the host, and the supervisor, which is the first
process of the sandbox's pid namespace: when that one ends, the kernel ends all others of it before
anyone can see it as ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import time
from typing import TYPE_CHECKING, Protocol

from sandbox.drivers import disks, procfs
from sandbox.drivers.arguments import WRITABLE
from sandbox.drivers.cgroups import Counters
from sandbox.drivers.driver import Enforcement, Measurement

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from sandbox.drivers.process import SandboxProcess
    from sandbox.drivers.rlimits import Gate

_DESTROY_SECONDS = 10.0
_OUTER_SECONDS = 0.5
_REMOVE_POLL_SECONDS = 0.002
# bwrap answers a command that died of a signal like a shell does.
_SIGNAL_BASE = 128


class Group(Protocol):
    """A cgroup, whoever made it."""

    @property
    def is_certain(self) -> bool:
        """Whether every process of the sandbox is in it from its beginning to its end."""

    def pids(self) -> set[int]:
        """The processes in it."""

    def counters(self) -> Counters:
        """The kernel's counters."""

    def remove(self) -> None:
        """Removes it, once empty."""


def processes_of(mark: str) -> dict[int, str]:
    """Finds bwrap and first processes by their command line: pid and the sandbox each names.

    Code inside can choose the command line of its own processes, so only others count: those that
    are in no further pid namespace, and the first one of such a namespace.

    Args:
        mark: The folder inside that is named after the owner, or after one sandbox.
    """
    sought = re.compile(re.escape(mark.encode("ascii")) + rb"([A-Za-z0-9_-]*)")
    found: dict[int, str] = {}
    for pid in procfs.pids():
        line = procfs.read(pid, "cmdline")
        named = sought.search(line)
        if named is None or pid == os.getpid():
            continue
        inside = procfs.namespace_pids(pid)
        # Outside there may also be an operator who looks for a sandbox by its name.
        outer = len(inside) == 1 and b"--as-pid-1" in line
        if outer or (len(inside) > 1 and inside[-1] == 1):
            found[pid] = named[1].decode("ascii")
    return found


class BubblewrapContainer:
    """One live sandbox; made by the driver only."""

    def __init__(
        self,
        *,
        sandbox_id: str,
        child: SandboxProcess,
        group: Group | None,
        uids: frozenset[int],
        mark: str,
        gate: Gate | None,
        tmpfs: int,
        enforcement: Sequence[Enforcement],
        on_gone: Callable[[], None],
    ) -> None:
        self._sandbox_id = sandbox_id
        self._child = child
        self._group = group
        self._uids = uids
        self._mark = mark
        self._gate = gate
        self._tmpfs = tmpfs
        self._enforcement = tuple(enforcement)
        self._on_gone = on_gone
        self._destroying = asyncio.Lock()  # one pass at a time; a second one finds nothing to do
        self._final: Measurement | None = None

    @property
    def sandbox_id(self) -> str:
        """The id it was made for."""
        return self._sandbox_id

    @property
    def channel(self) -> socket.socket:
        """The host's end of the frame channel."""
        return self._child.channel

    @property
    def enforcement(self) -> Sequence[Enforcement]:
        """At which level each limit is held for this one."""
        return self._enforcement

    async def admit(self) -> None:
        """Lets the supervisor begin, once the limits that need its pid are set.

        Raises:
            StartFailed: It ended before.
        """
        if self._gate is not None:
            await self._gate.open(self._child, min(self._uids, default=None))

    async def measure(self) -> Measurement:
        """Measures now."""
        return self._final or self._measurement(self._child.return_code, full=self._count_full())

    async def wait(self) -> Measurement:
        """Waits until the supervisor has exited."""
        await self._child.wait()
        return await self.measure()

    async def destroy(self) -> Measurement:
        """Ends every process, proves them gone and removes the cgroup.

        Raises:
            RuntimeError: A process survived.
        """
        async with self._destroying:
            if self._final is None:
                code = self._child.return_code  # an end that is ours is no evidence
                before = self._group.counters() if self._group else Counters()
                full = self._count_full()
                # First what is inside, so that bwrap reaps the supervisor and ends by itself;
                # ended together, a zombie would be left to whoever adopts orphans.
                self._child.end_inside()
                if not await self._ended():
                    self._child.kill()
                final = await asyncio.to_thread(self._end, code, before, full)
                await self._child.wait()
                if self._gate is not None:
                    self._gate.close()
                self._child.close()
                self._final = dataclasses.replace(final, detail=self._child.diagnostics)
                self._on_gone()
            return self._final

    async def _ended(self) -> bool:
        """Gives it a moment to end, bwrap after its child did."""
        try:
            async with asyncio.timeout(_OUTER_SECONDS):
                await self._child.wait()
        except TimeoutError:
            return False
        return True

    def _count_full(self) -> int | None:
        if self._child.return_code is not None:
            return None
        return disks.count_full(self._child.first_process(), WRITABLE, self._tmpfs)

    def _measurement(
        self, code: int | None, before: Counters | None = None, *, full: int | None
    ) -> Measurement:
        counters = self._group.counters() if self._group else Counters()
        if counters == Counters() and before is not None:
            counters = before
        signal = None
        if code is not None and code < 0:
            signal = -code
        elif code is not None and code > _SIGNAL_BASE:
            signal = code - _SIGNAL_BASE
        return Measurement(
            exit_code=code if signal is None else None,
            signal=signal,
            oom_kill_count=counters.oom_kill_count,
            memory_peak_bytes=counters.memory_peak_bytes,
            pids_limit_hits=counters.pids_limit_hits,
            disk_full_hits=full,
            cpu_seconds=counters.cpu_seconds,
            detail=self._child.diagnostics,
        )

    def _members(self) -> set[int]:
        found: set[int] = set()
        if self._child.return_code is None:
            found.add(self._child.pid)
        if self._group is not None:
            inside = self._group.pids()
            if inside or self._group.is_certain:  # no look at all processes of the machine
                return found | inside
        if self._group is None or found:  # a process may be about to join its group
            found |= set(processes_of(self._mark))
        if self._child.pid in found:
            found |= set(procfs.children(self._child.pid))
        if self._group is None and self._uids:
            found |= {pid for pid in procfs.pids() if procfs.uids(pid) & self._uids}
        return found

    def _end(self, code: int | None, before: Counters, full: int | None) -> Measurement:
        survivors = procfs.end_all(self._members, within_seconds=_DESTROY_SECONDS)
        if survivors:
            raise RuntimeError(
                f"processes of sandbox {self._sandbox_id} survived SIGKILL: {survivors}"
            )
        final = self._measurement(code, before, full=full)
        self._remove_group()
        return final

    def _remove_group(self) -> None:
        if self._group is None:
            return
        deadline = time.monotonic() + _DESTROY_SECONDS
        while True:
            with contextlib.suppress(OSError):
                self._group.remove()
                return
            if time.monotonic() > deadline:
                left = sorted(self._group.pids())
                raise RuntimeError(f"the cgroup of {self._sandbox_id} is not empty: {left}")
            time.sleep(_REMOVE_POLL_SECONDS)
