"""Samples of seconds and what is said about them. Called by the other modules of `bench`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured quantity."""

    name: str
    seconds: tuple[float, ...]

    def percentile(self, share: float) -> float:
        """The sample below which that share of all samples lies (nearest rank)."""
        ordered = sorted(self.seconds)
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    @property
    def p50(self) -> float:
        """The median."""
        return self.percentile(0.5)

    def summary(self) -> dict[str, float | int]:
        """What is written down, in milliseconds."""
        return {
            "samples": len(self.seconds),
            "p50_ms": round(1000 * self.p50, 3),
            "p90_ms": round(1000 * self.percentile(0.9), 3),
            "min_ms": round(1000 * min(self.seconds), 3),
            "max_ms": round(1000 * max(self.seconds), 3),
        }


def figure(name: str, seconds: Sequence[float]) -> Figure:
    """A figure from its samples.

    Raises:
        ValueError: there are none.
    """
    if not seconds:
        raise ValueError(f"{name}: no samples")
    return Figure(name=name, seconds=tuple(seconds))
