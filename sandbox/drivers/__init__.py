"""Drivers: one module for each technology that can hold a sandbox.

Called by `sandbox.host`; each driver is imported only when it is asked for.
"""

from __future__ import annotations

from pathlib import Path

from sandbox.drivers.driver import Driver

NAMES = ("bubblewrap", "fake")


def make(name: str, owner: str, state: Path) -> Driver:
    """Makes the driver of that name; it does nothing until its `prepare` is called.

    Args:
        name: One of `NAMES`.
        owner: Whose sandboxes it holds: two hosts on one machine must give different owners.
        state: A folder of this owner alone, for what the driver keeps between starts.

    Raises:
        ValueError: There is no such driver.
    """
    match name:
        case "bubblewrap":
            from sandbox.drivers.bubblewrap import BubblewrapDriver

            return BubblewrapDriver(owner, state)
        case "fake":
            from sandbox.drivers.fake import FakeDriver

            return FakeDriver(owner, state)
    raise ValueError(f"no driver is named {name!r}; there are {', '.join(NAMES)}")
