"""The controller's wall clock. The engine never reads it: times come in with events."""

from __future__ import annotations

import time


def now_us() -> int:
    """Microseconds since the epoch."""
    return time.time_ns() // 1000
