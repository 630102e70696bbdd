"""A client that ends takes its event loop, its connection and all of gRPC's tasks with it."""

from __future__ import annotations

import logging

import pytest

import hutch
from tests.support.stack import Stack


def test_clients_one_after_the_other_leave_nothing_and_disturb_nobody(
    shared_stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a loop that was closed while gRPC's own tasks were still on it: they kept the
    connection open, and their wake-ups raised in the loops of other clients."""
    with caplog.at_level(logging.ERROR, logger="asyncio"):
        for _ in range(20):
            with hutch.connect(shared_stack.target) as client:
                assert client.invoke(int, program="return 1") == 1
    assert [record.getMessage() for record in caplog.records] == []
