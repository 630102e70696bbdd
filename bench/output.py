"""Output from a cell's `print` to a client that follows: megabytes a second, and what it costs in
memory.

Called by `bench.run`; calls the public SDK, and looks at the processes of the controller and the
host in /proc.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import hutch

MEGABYTE = 1_000_000
GOAL_MEGABYTES_A_SECOND = 100.0
GOAL_GROWTH_MIB = 32.0
_PRINT = """
import sys

line = "x" * 99 + "\\n"
block = line * 1000
for _ in range(blocks):
    sys.stdout.write(block)
return None
"""
_BLOCK_BYTES = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFigures:
    """What was measured.

    Attributes:
        megabytes: How much was printed.
        megabytes_a_second: From the first byte at the client to the last.
        controller_growth_mib: The peak of the controller's resident memory above where it was.
        host_growth_mib: The same of the host.
    """

    megabytes: float
    megabytes_a_second: float
    controller_growth_mib: float
    host_growth_mib: float

    def summary(self) -> dict[str, float]:
        """What is written down."""
        return {
            "megabytes": round(self.megabytes, 1),
            "megabytes_a_second": round(self.megabytes_a_second, 1),
            "controller_growth_mib": round(self.controller_growth_mib, 1),
            "host_growth_mib": round(self.host_growth_mib, 1),
        }


def follow(client: hutch.Client, state: Path, megabytes: int) -> OutputFigures:
    """A program prints, and a client follows it from the first byte to the last.

    Args:
        client: Connected to a controller of its own.
        state: The state directory of that controller.
        megabytes: How much to print.
    """
    client.invoke(program="return 1")  # what grows at the first use only
    pids = (controller_pid(state), host_pid(state))
    before = [reset_peak(pid) for pid in pids]
    blocks = megabytes * MEGABYTE // _BLOCK_BYTES
    target = json.loads((state / "controller.json").read_text())["socket"]
    # A process of its own, as a client is.
    reader = [sys.executable, "-m", "bench.output", f"unix:{target}", str(blocks)]
    ended = subprocess.run(reader, check=True, capture_output=True, text=True)
    seconds, count = json.loads(ended.stdout)
    if count != blocks * _BLOCK_BYTES:
        raise SystemExit(f"{count} bytes of {blocks * _BLOCK_BYTES} came")
    growth = [(peak(pid) - start) / 2**20 for pid, start in zip(pids, before, strict=True)]
    return OutputFigures(
        megabytes=count / MEGABYTE,
        megabytes_a_second=count / MEGABYTE / seconds,
        controller_growth_mib=growth[0],
        host_growth_mib=growth[1],
    )


async def _read(target: str, blocks: int) -> tuple[float, int]:
    count, first = 0, 0.0
    async with hutch.AsyncClient(target) as client:
        handle = await client.spawn(program=_PRINT, blocks=blocks)
        async for chunk in client.read_output(handle.id, follow=True):
            if not count:
                first = time.perf_counter()
            count += len(chunk.data)
        last = time.perf_counter()
        await handle.result()
    return last - first, count


def controller_pid(state: Path) -> int:
    """The controller that owns a state directory."""
    return int(json.loads((state / "controller.json").read_text())["pid"])


def host_pid(state: Path) -> int:
    """The host that owns the `host` folder of a state directory."""
    wanted = [b"sandbox.host", b"--state", str(state / "host").encode()]
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if all(word in words for word in wanted):
            return int(entry.name)
    raise SystemExit(f"no host has its state in {state / 'host'}")


def reset_peak(pid: int) -> int:
    """Forgets a process's peak; returns its resident bytes now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _field(pid, "VmRSS")


def peak(pid: int) -> int:
    """A process's peak of resident bytes."""
    return _field(pid, "VmHWM")


def _field(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"process {pid} has no {name}")


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_read(sys.argv[1], int(sys.argv[2])))))
