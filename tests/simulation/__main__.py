"""Runs the simulator: `make sim SEED= RUNS=`. The first seed that fails is shown and ends it."""

from __future__ import annotations

import sys
import traceback

from tests.simulation.world import World, options_of


def main() -> int:
    """Runs seeds, one after the other."""
    first, runs = int(sys.argv[1]), int(sys.argv[2])
    for seed in range(first, first + runs):
        try:
            World(seed, options_of(seed)).run()
        except Exception:
            traceback.print_exc()
            sys.stdout.write(f"\nseed {seed} fails with {options_of(seed)}\n")
            sys.stdout.write(f"again: make sim SEED={seed} RUNS=1; keep it in seeds.txt\n")
            return 1
    sys.stdout.write(f"{runs} runs from seed {first}: every invariant held\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
