"""Seeded runs of the real engine in a fake world: every invariant holds, and each of the rules that
keep bounded capacity from locking up is needed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from controller.core.model import EndingKind
from controller.engine.scheduler import Rules
from tests.simulation.clock import SECOND
from tests.simulation.world import LockedUp, Options, World, options_of

RUNS = 200
GROUPS = 8
KEPT = [
    int(line.split()[0])
    for line in Path(__file__).with_name("seeds.txt").read_text("utf-8").splitlines()
    if line and not line.startswith("#")
]


def simulate(seed: int) -> World:
    try:
        return World(seed, options_of(seed)).run()
    except Exception as problem:
        problem.add_note(f"seed {seed}; run it again: make sim SEED={seed} RUNS=1")
        raise


@pytest.mark.parametrize("group", range(GROUPS))
def test_every_invariant_holds_in_every_run(group: int) -> None:
    for seed in range(1 + group, 1 + RUNS, GROUPS):
        simulate(seed)


@pytest.mark.parametrize("seed", KEPT)
def test_what_once_failed_holds(seed: int) -> None:
    simulate(seed)


@pytest.mark.parametrize("seed", [3, 7])
def test_one_seed_is_one_run_byte_for_byte(seed: int) -> None:
    first, again = (simulate(seed).journal.stored for _ in range(2))
    assert first == again
    assert first


@pytest.mark.parametrize("capacities", [(8,), (5, 3)])
def test_case_d19_200_waiting_parents_on_8_slots_all_return(capacities: tuple[int, ...]) -> None:
    options = Options(capacities=capacities, roots=200, depth=4, waiting_threads=1)
    world = World(19, options).run()
    endings = [item.ending.kind for item in world.journal.decided.values()]
    assert endings == [EndingKind.RETURNED] * 200 * 4
    assert world.checks.most_live == 8


CROWDED = Options(capacities=(6,), roots=8, budget=14, depth=3, boxes=False, client_tools=False)
RULES_OFF = {
    "borrowed slots do not count at admission": replace(
        CROWDED, roots=3, waiting_threads=4, rules=Rules(count_borrowed=False)
    ),
    "a tool's own invoke takes a plain child's slot": replace(
        CROWDED, capacities=(4,), rules=Rules(tool_levels=False)
    ),
    "a client's tool asks for a root of its own": replace(
        CROWDED, capacities=(4,), client_tools=True, naive_tools=True
    ),
    "a host that held only idle reserved slots is lost": replace(
        CROWDED,
        capacities=(6, 2),
        roots=2,
        depth=4,
        waiting_threads=1,
        within_us=SECOND // 80,
        faults=1,
        grace_us=SECOND // 1000,
        for_good=True,
        rules=Rules(drop_excess=False),
    ),
}


@pytest.mark.parametrize("rule", RULES_OFF)
def test_without_a_rule_the_executor_locks_up_and_with_it_it_does_not(rule: str) -> None:
    """The worlds are the same ones; only the rule differs."""
    off = RULES_OFF[rule]
    on = replace(off, rules=Rules(), naive_tools=False)
    locked = []
    for seed in range(60):
        try:
            World(seed, off).run()
        except LockedUp:
            locked.append(seed)
        World(seed, on).run()
        if len(locked) == 2:
            break
    assert locked
