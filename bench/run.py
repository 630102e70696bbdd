"""Runs every benchmark and writes one JSON file; see docs/benchmarks.md.

Called by `make bench`: `python -m bench.run [--quick]`. It needs a machine on which the bubblewrap
driver works, makes all its state in temporary folders, and leaves nothing running.
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
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import hutch
from bench import boxes, floors, output, peers, sandboxes, starts
from bench.stack import stack
from bench.stats import Figure

RESULTS = Path(__file__).parent / "results"
BUILD = Path(__file__).parent.parent / "build" / "peers"
AT_ONCE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """One ratio, with what it should be."""

    name: str
    value: float
    goal: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether the goal is reached."""
        return self.value >= self.goal if self.at_least else self.value <= self.goal


@dataclass(slots=True)
class Results:
    """What one run has found."""

    figures: list[Figure] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)

    def p50(self, name: str) -> float:
        """The median of a figure, in seconds."""
        return next(figure.p50 for figure in self.figures if figure.name == name)

    def add_ratio(self, name: str, value: float, goal: float, *, at_least: bool = False) -> None:
        """Notes a ratio."""
        self.ratios.append(Ratio(name=name, value=round(value, 2), goal=goal, at_least=at_least))


async def measure_floors(found: Results, folder: Path, scale: int) -> None:
    """What the machine can do at all."""
    found.figures += [
        await floors.pingpong(folder, 100 * scale),
        await floors.commits(folder, 20 * scale, 1),
        await floors.commits(folder, 2 * scale, 64),
    ]


def measure_starts(found: Results, folder: Path, scale: int) -> None:
    """Whole invocations without a pool: each has a sandbox made for it."""
    with floors.bare_starts(folder) as bare_starts, stack() as running:
        with hutch.connect(running.target) as client:
            bare, cold, ratio = starts.cold_starts(client, bare_starts, 4 * scale)
            found.figures += [bare, cold, starts.children(client, 4 * scale)]
            found.add_ratio("cold_start / bare_start", ratio, 1.5)
            child = found.p50("child") / found.p50("cold_start")
            found.add_ratio("child / cold_start", child, 1.3)
            fresh, raw = starts.fan_out(client, bare_starts, 8 * scale, AT_ONCE)
            found.more["bare_starts_a_second"] = round(raw, 1)
            found.more["fan_out_children_a_second"] = round(fresh, 1)
            found.add_ratio("fan_out / bare starts a second", fresh / raw, 0.7, at_least=True)
            found.more["breakdown_of_a_cold_start_ms"] = starts.breakdown(client, 2 * scale)


def measure_cells(found: Results, folder: Path, scale: int) -> None:
    """Cells of a live box, and the same in an ipykernel."""
    with stack(pool_size=1) as running:
        figures, ratio = asyncio.run(boxes.cells(running, folder, 50 * scale))
        for name, slower in asyncio.run(boxes.beside(running, 50 * scale)).items():
            found.add_ratio(f"p99 of a cell beside {name} / quiet", slower, 2.0)
    found.figures += figures
    found.add_ratio("cell / F(1)", ratio, 3.0)
    if (peer := peers.ipykernel(BUILD)) is not None:
        found.figures.append(peer[0])
        found.more["ipykernel_idle_mb"] = round(peer[1] / 1e6, 1)
        found.add_ratio("cell / ipykernel's", found.p50("cell") / peer[0].p50, 0.25)
        own = found.more["idle_sandbox_mb"]
        found.add_ratio("idle sandbox / idle ipykernel", own * 1e6 / peer[1], 0.3)


def measure_children(found: Results, scale: int) -> None:
    """Children from a warm pool: alone, many at once, and while the pool refills."""
    count = 4 * scale
    floor = 2 * found.p50("cell_pingpong") + 2 * found.p50("cell_commit")
    with stack(pool_size=2 * count + 2) as running:
        running.until_quiet()
        warm = boxes.children(running, count)
        running.until_quiet()
        many = boxes.children_at_once(running, count, 20)
    with stack(pool_size=4) as running:
        running.until_quiet()
        refilled = boxes.refilling(running, count)
    found.figures += [warm, many, refilled]
    found.add_ratio("warm child / F(2)", warm.p50 / floor, 5.0)
    found.add_ratio("p99 of 20 at once / p50", many.percentile(0.99) / many.p50, 4.0)
    found.add_ratio("child while refilling / warm child", refilled.p50 / warm.p50, 2.0)
    if (peer := peers.jaz(BUILD)) is not None:
        found.figures.append(peer)
        found.more["warm_child / jaz_child"] = round(warm.p50 / peer.p50, 2)


def measure_output(found: Results, scale: int) -> None:
    """A large output to a client that follows it."""
    with stack(pool_size=1) as running, hutch.connect(running.target) as client:
        printed = output.follow(client, running.folder / "state", 20 * scale)
    found.more["output"] = printed.summary()
    found.add_ratio(
        "output, MB/s",
        printed.megabytes_a_second,
        output.GOAL_MEGABYTES_A_SECOND,
        at_least=True,
    )
    grown = max(printed.controller_growth_mib, printed.host_growth_mib)
    found.add_ratio("growth by output, MiB", grown, output.GOAL_GROWTH_MIB)


def report(found: Results) -> dict[str, Any]:
    """What is written down."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": hutch.__version__,
        "machine": {
            "system": platform.platform(),
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "root": os.geteuid() == 0,
        },
        "figures": {figure.name: figure.summary() for figure in found.figures},
        "ratios": [{**asdict(ratio), "met": ratio.met} for ratio in found.ratios],
        **found.more,
    }


def show(found: Results, path: Path) -> None:
    """Prints the tables for people."""
    for figure in found.figures:
        summary = figure.summary()
        print(f"{figure.name:34} p50 {summary['p50_ms']:9.3f} ms   p90 {summary['p90_ms']:9.3f} ms")
    for ratio in found.ratios:
        bound = "at least" if ratio.at_least else "at most"
        word = "met" if ratio.met else "missed"
        print(f"{ratio.name:34} {ratio.value:8.2f} (goal: {bound} {ratio.goal:g}, {word})")
    for name, value in found.more.items():
        if isinstance(value, dict):
            print(f"{name}:")
            for step, number in value.items():
                print(f"    {step:30} {number:8.2f}")
        else:
            print(f"{name:34} {value}")
    print(f"written to {path}")


def main() -> int:
    """Measures, writes and shows."""
    parser = argparse.ArgumentParser(description="Measure Hutch on this machine.")
    parser.add_argument("--quick", action="store_true", help="a fifth of the samples")
    scale = 2 if parser.parse_args().quick else 10
    BUILD.mkdir(parents=True, exist_ok=True)
    found = Results()
    with tempfile.TemporaryDirectory(prefix="hutch-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # sandboxes run as other users
        asyncio.run(measure_floors(found, folder, scale))
        alone, steps, idle = asyncio.run(sandboxes.lives(folder, 4 * scale))
        found.figures.append(alone)
        found.more["steps_of_a_sandbox_alone_ms"] = steps
        found.more["idle_sandbox_mb"] = round(idle / 1e6, 1)
        measure_starts(found, folder, scale)
        measure_cells(found, folder, scale)
        measure_children(found, scale)
        measure_output(found, scale)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.json"
    path.write_text(json.dumps(report(found), indent=2) + "\n", encoding="utf-8")
    show(found, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
