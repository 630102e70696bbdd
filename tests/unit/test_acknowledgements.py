"""When a host is told that it may forget events."""

from __future__ import annotations

import asyncio

from controller.hosts.acknowledgements import ACK_BYTES, Acknowledgements


async def test_bytes_that_become_durable_late_are_acknowledged_then() -> None:
    """Guards against a sandbox that waits for credit for ever: all its output was taken before any
    of it was written."""
    acks = Acknowledgements(lambda: None)
    written = [asyncio.get_running_loop().create_future() for _ in range(4)]
    for sequence, done in enumerate(written, start=1):
        acks.count(ACK_BYTES // 2)
        acks.add(sequence, done)
    assert acks.due == 0
    for done in written:
        done.set_result(None)
        await asyncio.sleep(0)
    assert acks.take() == 4
