"""Ends containers until they are proved gone.

Called by each hosted sandbox and by the pool.
"""

from __future__ import annotations

from typing import Any

from sandbox.drivers.driver import Container, Measurement
from sandbox.host.workshop import Workshop

MAX_RETRY_SECONDS = 30.0
_MAX_PROBLEM = 2_000


async def dispose(container: Container, workshop: Workshop, log: Any) -> Measurement:
    """Destroys a container, however often that takes, and returns what was measured of it."""
    pause = workshop.config.destroy_retry_seconds
    while True:
        async with workshop.destroyers:
            try:
                return await container.destroy()
            except Exception as error:
                # It stays among the living, and holds its slot, until it is proved gone.
                log.error("destroy_failed", problem=str(error)[:_MAX_PROBLEM])
        await workshop.clock.sleep(pause)
        pause = min(MAX_RETRY_SECONDS, 2 * pause)
