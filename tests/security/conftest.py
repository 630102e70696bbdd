"""One controller and host for all security tests; after each, nothing of it is left on the host."""

from __future__ import annotations

import time
from collections.abc import Iterator

import grpc
import pytest

import hutch
from hutch.v1 import host_service_pb2 as hs
from hutch.v1.host_service_pb2_grpc import HostServiceStub
from tests.support.stack import Stack, stack

PATIENCE_SECONDS = 10.0
STORED_BYTES = 8 * 1024 * 1024


@pytest.fixture(scope="session")
def attacked() -> Iterator[Stack]:
    """A controller and a bubblewrap host that hostile programs may try to break."""
    with stack(config=f"[controller.limits]\nstored_bytes = {STORED_BYTES}\n") as found:
        yield found


@pytest.fixture
def client(attacked: Stack) -> Iterator[hutch.Client]:
    """A client of it; whatever the test did, the next program runs and the host forgets all."""
    with hutch.connect(attacked.target) as found:
        yield found
        assert found.invoke(program="return 1", timeout_seconds=60) == 1
    assert remembered(attacked) == []


def remembered(attacked: Stack) -> list[str]:
    """What the host still holds of sandboxes, once their owner has had time to hear of all."""
    limit = time.monotonic() + PATIENCE_SECONDS
    with grpc.insecure_channel(f"unix:{attacked.folder / 'h.sock'}") as channel:
        host = HostServiceStub(channel)
        while True:
            held = host.ListSandboxes(hs.ListSandboxesRequest(), timeout=PATIENCE_SECONDS)
            names = [str(sandbox.sandbox_id) for sandbox in held.sandboxes]
            if not names or time.monotonic() > limit:
                return names
