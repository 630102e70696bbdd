"""One sandbox, started through a driver and measured: what `--check` says beyond statements.

Called by `check`; calls the driver and speaks the frame channel itself. The code it runs is its
own, but what comes back is still read as data from a sandbox.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sandbox.drivers import procfs
from sandbox.drivers.driver import Container, Driver, Isolation, Limits, SandboxRequest, StartFailed
from sandbox.runtime import frames

_MIB = 1024 * 1024
_SECONDS = 30.0
_ROUNDS = 5
_LIMITS = Limits(
    memory_limit_bytes=256 * _MIB,
    pids_limit=64,
    cpu_limit_millis=1000,
    tmpfs_limit_bytes=16 * _MIB,
    open_files_limit=256,
)
_MEND_LINUX = (
    "use a kernel with system call filters (CONFIG_SECCOMP_FILTER), and an interpreter inside that "
    "has the module _ctypes"
)
_LOOK = b"""
import ctypes, json, os, socket, sys
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
try:
    os.close(os.open("/hutch-self-test", os.O_CREAT | os.O_WRONLY))
    writable = True
except OSError:
    writable = False
print(json.dumps({
    "uid": os.getuid(),
    "capabilities": int(status["CapEff"], 16),
    "seccomp": int(status["Seccomp"]),
    "no_new_privileges": ctypes.CDLL(None).prctl(39, 0, 0, 0, 0),
    "interfaces": [name for _, name in socket.if_nameindex()],
    "processes": sum(name.isdecimal() for name in os.listdir("/proc")),
    "root_is_writable": writable,
    "executable": sys.executable,
}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One statement about a sandbox, and whether it holds here."""

    name: str
    words: str
    holds: bool
    needed: bool = True  # whether the driver is unusable without it
    mend: str = ""


class _Talk:
    """The host's side of one channel, for one cell after the other."""

    def __init__(self, container: Container) -> None:
        self._socket = container.channel
        self._decoder = frames.Decoder()
        self._waiting: list[frames.Frame] = []
        self._cells = 0

    async def next(self) -> frames.Frame:
        while not self._waiting:
            data = await asyncio.get_running_loop().sock_recv(self._socket, 65_536)
            if not data:
                raise StartFailed("the sandbox ended")
            self._waiting += self._decoder.feed(data)
        return self._waiting.pop(0)

    async def run(self, code: bytes) -> bytes:
        """Runs a cell and gives what it printed."""
        self._cells += 1
        header = {
            "type": "cell",
            "cell": f"cell_{self._cells}",
            "code": {"at": 0, "n": len(code)},
            "inputs": [],
            "mode": "program",
            "invocation": "inv_self_test",
            "depth": 1,
            "max_depth": 1,
            "timeout_ms": 0,
            "output_limit": _MIB,
            "tools": [],
            "stdin": False,
        }
        await asyncio.get_running_loop().sock_sendall(self._socket, frames.encode(header, code))
        printed = b""
        while (frame := await self.next()).type != "done":
            if frame.type == "output":
                printed += frame.payload
        if frame.header.get("outcome") != "completed":
            raise StartFailed(f"a cell of the self-test ended {frame.header.get('outcome')!r}")
        return printed


async def run(driver: Driver, isolation: Isolation, template: str = "default") -> dict[str, Any]:
    """Starts a sandbox of a template, measures it and ends it.

    Returns:
        `passed`, `problem`, and, when it ran, `start_ms`, `round_trip_ms`, `destroy_ms`,
        `pss_bytes`, `python`, `executable` and `findings`.
    """
    try:
        async with asyncio.timeout(_SECONDS):
            return await _measure(driver, isolation, template)
    except (StartFailed, frames.FrameError, OSError, ValueError, KeyError, RuntimeError) as error:
        return {"passed": False, "problem": f"the self-test failed: {error}", "findings": []}
    except TimeoutError:
        problem = f"the self-test did not end within {_SECONDS:g} s"
        return {"passed": False, "problem": problem, "findings": []}


async def _measure(driver: Driver, isolation: Isolation, template: str) -> dict[str, Any]:
    begin = time.perf_counter()
    container = await driver.create(
        SandboxRequest(sandbox_id=f"check_{os.getpid()}", template=template, limits=_LIMITS)
    )
    try:
        talk = _Talk(container)
        ready = (await talk.next()).header
        started = time.perf_counter()
        seen = json.loads(await talk.run(_LOOK))
        trips = []
        for _ in range(_ROUNDS):
            before = time.perf_counter()
            await talk.run(b"1 + 1")
            trips.append(time.perf_counter() - before)
        memory = sum(procfs.pss_bytes(pid) for pid in _processes(container.sandbox_id))
    finally:
        before = time.perf_counter()
        await container.destroy()
        ended = time.perf_counter() - before
    findings = _judge(seen, dict(ready.get("protections", {})), isolation)
    missing = [item for item in findings if item.needed and not item.holds]
    return {
        "passed": not missing,
        "problem": "".join(f"It does not hold that {item.words}. " for item in missing).strip(),
        "start_ms": round(1000 * (started - begin), 1),
        "round_trip_ms": round(1000 * statistics.median(trips), 2),
        "destroy_ms": round(1000 * ended, 1),
        "pss_bytes": memory,
        "python": str(ready.get("python", ""))[:50],
        "executable": str(seen["executable"])[:500],
        "findings": [dataclasses.asdict(item) for item in findings],
    }


def _processes(sandbox_id: str) -> Sequence[int]:
    """A sandbox's processes: the child of this process that names it and all below, or, where an
    engine started it, those that name it."""
    own = [
        pid
        for pid in procfs.children(os.getpid())
        if sandbox_id.encode() in procfs.read(pid, "cmdline")
    ]
    if not own:
        return [pid for pid in procfs.pids() if sandbox_id.encode() in procfs.read(pid, "cmdline")]
    return [*own, *(below for pid in own for below in procfs.descendants(pid))]


def _judge(
    seen: dict[str, Any], protections: dict[str, Any], isolation: Isolation
) -> list[Finding]:
    supervised = (
        Finding(
            name="supervisor_hidden",
            words="the first process is hidden from the code beside it",
            holds=protections.get("dumpable") is True,
            mend=_MEND_LINUX,
        ),
        Finding(
            name="own_filter",
            words="the code is under a system call filter of its own",
            holds=protections.get("filter") is True and seen["seccomp"] == 2,
            mend=_MEND_LINUX,
        ),
        Finding(
            name="no_new_privileges",
            words="no program in it can gain rights",
            holds=seen["no_new_privileges"] == 1,
        ),
    )
    if isolation is Isolation.PROCESS:
        return list(supervised)
    return [
        *supervised,
        Finding(
            name="own_uid",
            words="the code has another uid than its supervisor",
            holds=protections.get("separate_uid") is True,
            needed=False,
            mend="run the host as root, which gives each sandbox two uids of its own",
        ),
        Finding(
            name="no_capabilities",
            words="the code has no capability",
            holds=seen["capabilities"] == 0,
        ),
        Finding(
            name="no_network",
            words="there is no network but its own loopback",
            holds=seen["interfaces"] in ([], ["lo"]),
        ),
        Finding(
            name="own_processes",
            words="it sees no process but its own",
            holds=seen["processes"] <= 2,
        ),
        Finding(
            name="read_only_root",
            words="its root file system is read-only",
            holds=seen["root_is_writable"] is False,
        ),
    ]
