"""Runs every benchmark and writes one JSON file; see docs/benchmarks.md.

Called by `make bench`: `python -m bench.run [--quick]`. It needs a machine on which the bubblewrap
driver works, makes all its state in a temporary folder, and leaves nothing running.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import hutch
from bench import floors, output, peers, sandboxes, starts
from bench.stack import stack
from bench.stats import Figure

RESULTS = Path(__file__).parent / "results"
BUILD = Path(__file__).parents[1] / "build"
COLD_START_GOAL = 1.5  # times a bare start
CHILD_GOAL = 1.3  # times a cold start
FAN_OUT_GOAL = 0.7  # at least, times the rate of bare starts
IDLE_GOAL = 0.3  # times an idle ipykernel
AT_ONCE = 8


async def measure_floors(folder: Path, scale: int) -> list[Figure]:
    """What the machine can do at all."""
    return [
        await floors.pingpong(folder, 100 * scale),
        await floors.commits(folder, 20 * scale, 1),
        await floors.commits(folder, 2 * scale, 64),
    ]


def measure_invocations(folder: Path, scale: int) -> tuple[list[Figure], dict[str, Any]]:
    """Whole invocations, with a controller and a host that live for this only and no warm pool."""
    with (
        floors.bare_starts(folder) as bare_starts,
        stack() as running,
        hutch.connect(running.target) as client,
    ):
        bare, cold, ratio = starts.cold_starts(client, bare_starts, 4 * scale)
        figures = [bare, cold, starts.children(client, 4 * scale)]
        rate, bare_rate = starts.fan_out(client, bare_starts, 8 * scale, AT_ONCE)
        more = {
            "cold_start / bare_start": ratio,
            "fan_out": {"children_a_second": rate, "bare_starts_a_second": bare_rate},
            "breakdown_of_a_cold_start_ms": starts.breakdown(client, 2 * scale),
        }
    with hutch.connect(state=folder / "state") as client:
        more["output"] = output.follow(client, folder / "state", 20 * scale).summary()
    return figures, more


def compare_idle(idle_bytes: int, kernel: tuple[Figure, int] | None) -> dict[str, Any]:
    """The memory of an idle sandbox beside that of an idle ipykernel, where there is one."""
    found: dict[str, Any] = {"sandbox_pss_bytes": idle_bytes, "ipykernel_pss_bytes": None}
    if kernel is not None:
        found["ipykernel_pss_bytes"] = kernel[1]
    return found


def report(figures: list[Figure], more: dict[str, Any]) -> dict[str, Any]:
    """What is written down."""
    p50 = {figure.name: figure.p50 for figure in figures}
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": hutch.__version__,
        "machine": {
            "system": platform.platform(),
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "root": os.geteuid() == 0,
        },
        "figures": {figure.name: figure.summary() for figure in figures},
        "ratios": {
            "cold_start / bare_start": round(more.pop("cold_start / bare_start"), 2),
            "child / cold_start": round(p50["child"] / p50["cold_start"], 2),
        },
        "goals": {
            "cold_start / bare_start": COLD_START_GOAL,
            "child / cold_start": CHILD_GOAL,
        },
        **more,
    }


def show(result: dict[str, Any], path: Path) -> None:
    """Prints the table for people."""
    for name, figure in result["figures"].items():
        print(f"{name:24} p50 {figure['p50_ms']:9.3f} ms   p90 {figure['p90_ms']:9.3f} ms")
    rate, bare = result["fan_out"].values()
    print(
        f"{'fan-out':24} {rate:.1f} children a second, {rate / bare:.2f} of bare starts"
        f" (goal: at least {FAN_OUT_GOAL}, {'met' if rate / bare >= FAN_OUT_GOAL else 'missed'})"
    )
    mine, kernel = result["idle"].values()
    beside = f", {mine / kernel:.2f} of an ipykernel (goal: at most {IDLE_GOAL})" if kernel else ""
    print(f"{'an idle sandbox':24} {mine / 2**20:.1f} MiB{beside}")
    for name, ratio in result["ratios"].items():
        goal = result["goals"][name]
        print(
            f"{name:24} {ratio:.2f} (goal: at most {goal}, {'met' if ratio <= goal else 'missed'})"
        )
    printed = result["output"]
    print(
        f"{'output to a client':24} {printed['megabytes_a_second']:.1f} MB/s"
        f" (goal: at least {output.GOAL_MEGABYTES_A_SECOND:.0f});"
        f" the controller grew by {printed['controller_growth_mib']:.1f} MiB, the host by"
        f" {printed['host_growth_mib']:.1f} (goal: at most {output.GOAL_GROWTH_MIB:.0f})"
    )
    for title, key in (
        ("where a cold start goes, in ms:", "breakdown_of_a_cold_start_ms"),
        ("the steps of a sandbox alone, in ms:", "steps_of_a_sandbox_alone_ms"),
    ):
        print(title)
        for name, milliseconds in result[key].items():
            print(f"    {name:28} {milliseconds:8.2f}")
    print(f"written to {path}")


def main() -> int:
    """Measures, writes and shows."""
    parser = argparse.ArgumentParser(description="Measure Hutch on this machine.")
    parser.add_argument("--quick", action="store_true", help="a fifth of the samples")
    scale = 2 if parser.parse_args().quick else 10
    with tempfile.TemporaryDirectory(prefix="hutch-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # sandboxes run as other users
        figures = asyncio.run(measure_floors(folder, scale))
        alone, steps, idle_bytes = asyncio.run(sandboxes.lives(folder, 4 * scale))
        invocations, more = measure_invocations(folder, scale)
        more["steps_of_a_sandbox_alone_ms"] = steps
        more["idle"] = compare_idle(idle_bytes, peers.ipykernel(BUILD))
        result = report([*figures, alone, *invocations], more)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    show(result, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
