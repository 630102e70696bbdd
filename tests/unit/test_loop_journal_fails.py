"""A journal that fails: nothing follows from what was not written, and the loop says so."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from controller.config import ControllerConfig
from controller.core.errors import Refused
from controller.core.ids import LOCAL_TENANT, HostId, InvocationId, SessionId
from controller.engine import commands as cmd
from controller.engine import events as ev
from controller.loop import Loop
from controller.rows import Rows
from controller.store.ports import Batch, StoreError, StoreFull, StoreUnavailable
from tests.support.engine_world import program


class _Journal:
    """Keeps nothing; fails when told to."""

    def __init__(self) -> None:
        self.problem: StoreError | None = None

    def begin(self, batch: Batch) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.problem is not None:
            done.set_exception(self.problem)
        else:
            done.set_result(None)
        return done


class _Executor:
    def __init__(self) -> None:
        self.issued: list[cmd.Command] = []

    def issue(self, command: cmd.Command) -> None:
        self.issued.append(command)


class _World:
    def __init__(self) -> None:
        self.journal = _Journal()
        self.executor = _Executor()
        self.loop = Loop(
            config=ControllerConfig(),
            journal=cast("Any", self.journal),
            project=Rows(),
            now_us=lambda: 1_000_000,
            ended=lambda node: None,
            changed=lambda: None,
        )
        self.loop.start(self.executor)

    def request(self, number: int) -> asyncio.Future[None]:
        return self.loop.post(
            ev.InvocationRequested(
                tenant_id=LOCAL_TENANT,
                invocation_id=InvocationId(f"inv_{number}"),
                spec=program(),
                request_id=f"request-{number}",
                content_digest="",
                session_id=SessionId(""),
                cancel_on_disconnect=False,
            )
        )


@pytest.fixture
async def world() -> _World:
    found = _World()
    await found.loop.post(
        ev.HostJoined(
            host_id=HostId("hst_1"),
            host_generation=1,
            capacity=16,
            statements=(),
        )
    )
    return found


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (StoreFull("no space"), "STORE_FULL"),
        (StoreUnavailable("fsync failed"), "STORE_UNAVAILABLE"),
    ],
)
async def test_what_was_not_written_is_answered_as_refused_and_has_no_effect(
    world: _World, problem: StoreError, reason: str
) -> None:
    world.journal.problem = problem
    waiting = [world.request(number) for number in (1, 2)]
    for future in waiting:
        with pytest.raises(Refused) as refused:
            await future
        assert refused.value.reason == reason
    assert world.executor.issued == []
    with pytest.raises(type(problem)):
        await world.loop.failed


async def test_after_a_failure_every_fact_is_refused(world: _World) -> None:
    world.journal.problem = StoreUnavailable("fsync failed")
    with pytest.raises(Refused):
        await world.request(1)
    world.journal.problem = None
    with pytest.raises(Refused) as refused:
        world.request(2)
    assert refused.value.reason == "STORE_UNAVAILABLE"
    assert isinstance(world.loop.failed.exception(), StoreUnavailable)
