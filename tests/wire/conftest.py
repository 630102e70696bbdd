"""What holds for tests that speak gRPC in the test process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import grpc.aio
import pytest


@pytest.fixture(autouse=True, scope="session")
def grpc_poller() -> Iterator[None]:
    """Keeps gRPC's poller for all tests.

    Otherwise it is made and dropped with the first and the last object that uses it, whenever the
    collector finds that one, and its sockets look like a test's leak. It wants an event loop.
    """

    async def begin() -> None:
        grpc.aio.init_grpc_aio()

    async def end() -> None:
        grpc.aio.shutdown_grpc_aio()

    with asyncio.Runner() as runner:
        runner.run(begin())
        yield
        runner.run(end())
