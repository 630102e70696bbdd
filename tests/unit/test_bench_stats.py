"""Figures of the benchmarks say what their samples say."""

from __future__ import annotations

import pytest

from bench.stats import figure


def test_percentiles_are_samples_by_nearest_rank() -> None:
    measured = figure("x", [0.004, 0.001, 0.003, 0.002])
    assert measured.p50 == 0.002
    assert measured.percentile(0.9) == 0.004
    assert measured.percentile(0.0) == 0.001
    assert measured.summary() == {
        "samples": 4,
        "p50_ms": 2.0,
        "p90_ms": 4.0,
        "min_ms": 1.0,
        "max_ms": 4.0,
    }


def test_a_figure_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="x: no samples"):
        figure("x", [])
