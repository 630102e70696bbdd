"""One controller and host for all security tests, with limits small enough to reach."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import hutch
from tests.support.stack import Stack, stack


@pytest.fixture(scope="session")
def attacked() -> Iterator[Stack]:
    """A controller and a bubblewrap host that hostile programs may try to break."""
    with stack() as found:
        yield found


@pytest.fixture
def client(attacked: Stack) -> Iterator[hutch.Client]:
    """A client of it; whatever the test did, the next program still runs."""
    with hutch.connect(attacked.target) as found:
        yield found
        assert found.invoke(program="return 1", timeout_seconds=60) == 1
