"""Benchmarks: `make bench` runs `bench.run`; see docs/benchmarks.md for what each figure means."""
