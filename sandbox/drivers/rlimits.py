"""Limits without cgroups: those the kernel holds for a process, or for a user namespace.

Called by the drivers for what no cgroup holds; calls `prlimit`.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
from typing import TYPE_CHECKING

from sandbox.drivers import launch
from sandbox.drivers.driver import Enforcement, Level, Limits, StartFailed

if TYPE_CHECKING:
    from sandbox.drivers.process import SandboxProcess

# RLIMIT_AS counts mapped addresses, not touched pages: an interpreter maps some 20 MiB of libraries
# and locale data before it runs anything, so the address space gets this much on top of the limit.
_ADDRESS_SPACE_SLACK_BYTES = 64 * 1024 * 1024
# The supervisor holds channels of the REPL and of its output; it gives its child the exact limit.
_SUPERVISOR_FILES = 64
_GATE_SECONDS = 30.0
_NO_LIMIT_FILES = 1_048_576  # what the kernel gives at most unless it is told otherwise
_PER_NAMESPACE_SINCE = (5, 14)  # Linux: RLIMIT_NPROC is counted for each user namespace

PIDS = Enforcement(
    limit="pids", level=Level.SANDBOX, mechanism="RLIMIT_NPROC in its user namespace"
)
NO_PIDS = Enforcement(limit="pids", level=Level.NONE, mechanism="")


def address_space_bytes(limits: Limits) -> int:
    """RLIMIT_AS for a memory limit."""
    return limits.memory_limit_bytes + _ADDRESS_SPACE_SLACK_BYTES


def supervisor_files(limits: Limits) -> int:
    """RLIMIT_NOFILE for a supervisor."""
    return limits.open_files_limit + _SUPERVISOR_FILES


def most_files() -> int:
    """How many open files this process may give to another."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return _NO_LIMIT_FILES if most == resource.RLIM_INFINITY else most


def check_files(limits: Limits) -> None:
    """Refuses more open files than this host may give.

    Raises:
        StartFailed: It may not; the text names the mend.
    """
    most = most_files()
    if most < supervisor_files(limits):
        raise StartFailed(
            f"open_files_limit is {limits.open_files_limit}; this host may give at most "
            f"{most - _SUPERVISOR_FILES}: raise its own hard limit (ulimit -Hn, or LimitNOFILE of "
            "its systemd unit)"
        )


def memory(pid: int, limits: Limits) -> Enforcement:
    """Bounds the address space of a process and of what it starts from now on."""
    size = address_space_bytes(limits)
    resource.prlimit(pid, resource.RLIMIT_AS, (size, size))
    return Enforcement(limit="memory", level=Level.PROCESS, mechanism="RLIMIT_AS")


def open_files(pid: int, limits: Limits) -> Enforcement:
    """Bounds the open files of a supervisor and of what it starts from now on."""
    number = supervisor_files(limits)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (number, number))
    return Enforcement(limit="open_files", level=Level.PROCESS, mechanism="RLIMIT_NOFILE")


def no_core_dumps(pid: int) -> None:
    """Keeps a crash inside from writing the sandbox's memory anywhere."""
    resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))


def pids_supported() -> bool:
    """Says whether RLIMIT_NPROC counts the processes of one sandbox and not all of the user's."""
    release = os.uname().release.split("-")[0].split(".")
    return tuple(int(part) for part in release[:2] if part.isdecimal()) >= _PER_NAMESPACE_SINCE


class Gate:
    """Holds bwrap's child back until RLIMIT_NPROC is set on it.

    The limit cannot be set before bwrap has made the user namespace: there it would count all
    processes of the host's user. So bwrap says its child's pid and waits for one byte.
    """

    def __init__(self, limits: Limits) -> None:
        self._number = limits.pids_limit
        self._said, said = os.pipe()
        waited, self._let_go = os.pipe()
        self.theirs = (said, waited)
        self.options = ("--info-fd", str(said), "--block-fd", str(waited))
        self._descriptors = [self._said, said, waited, self._let_go]

    async def open(self, child: SandboxProcess, uid: int | None) -> None:
        """Sets the limit and lets the sandbox begin.

        Args:
            child: bwrap.
            uid: The uid it runs under; None for this process's own.

        Raises:
            StartFailed: bwrap ended first, or said nothing in time.
        """
        for descriptor in self.theirs:
            self._close(descriptor)
        try:
            async with asyncio.timeout(_GATE_SECONDS):
                text = await self._read_all()
            pid = json.loads(text)["child-pid"]
            await asyncio.to_thread(self._limit, pid, uid)
            os.write(self._let_go, b"x")
        except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
            raise StartFailed(f"bwrap did not start: {child.diagnostics or error}") from error
        finally:
            self.close()

    def _limit(self, pid: int, uid: int | None) -> None:
        number = self._number
        if uid is None:
            resource.prlimit(pid, resource.RLIMIT_NPROC, (number, number))
            return
        # A root without CAP_SYS_RESOURCE may not do this to another uid, but that uid itself may.
        words = launch.as_uid(uid)
        words += ["prlimit", f"--pid={pid}", f"--nproc={number}:{number}"]
        subprocess.run(words, check=True, timeout=_GATE_SECONDS, capture_output=True, cwd="/")

    def close(self) -> None:
        """Closes the pipes; safe to repeat."""
        for descriptor in list(self._descriptors):
            self._close(descriptor)

    def _close(self, descriptor: int) -> None:
        if descriptor in self._descriptors:
            self._descriptors.remove(descriptor)
            os.close(descriptor)

    async def _read_all(self) -> bytes:
        os.set_blocking(self._said, False)
        loop = asyncio.get_running_loop()
        text = b""
        while True:
            ready: asyncio.Future[None] = loop.create_future()
            loop.add_reader(self._said, _settle, ready)
            try:
                await ready
            finally:
                loop.remove_reader(self._said)
            piece = os.read(self._said, 4096)
            text += piece
            if not piece or text.rstrip().endswith(b"}"):
                return text


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
