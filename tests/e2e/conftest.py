"""One controller and host for all end-to-end tests that do not kill them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import hutch
from tests.support.stack import Stack, stack


@pytest.fixture(scope="session")
def shared_stack() -> Iterator[Stack]:
    """A controller and a bubblewrap host that live as long as the test run."""
    with stack() as found:
        yield found


@pytest.fixture
def client(shared_stack: Stack) -> Iterator[hutch.Client]:
    """A client of the shared controller."""
    with hutch.connect(shared_stack.target) as found:
        yield found


@pytest.fixture
def own_stack() -> Iterator[Stack]:
    """A controller and host that the test may kill."""
    with stack() as found:
        yield found
