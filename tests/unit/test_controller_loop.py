"""The loop: nothing that follows from a record happens before the record is durable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from controller.config import ControllerConfig
from controller.core.errors import Reason, Refused
from controller.core.ids import (
    LOCAL_TENANT,
    HostId,
    InvocationId,
    SessionId,
)
from controller.engine import commands as cmd
from controller.engine import events as ev
from controller.engine.state import Node
from controller.loop import Loop
from controller.rows import Rows
from controller.store.ports import Batch, StoredRecord, StoreFull, StoreUnavailable
from tests.support.engine_world import START_US, program


class GatedJournal:
    """A journal whose commits the test lets through one by one."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.gates: list[asyncio.Future[None]] = []

    def begin(self, batch: Batch) -> asyncio.Future[None]:
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.batches.append(batch)
        self.gates.append(gate)
        return gate

    async def live_records(self) -> list[StoredRecord]:
        return [record for batch in self.batches for record in batch.records]


class Recorder:
    """An executor that only notes what it was told."""

    def __init__(self) -> None:
        self.issued: list[cmd.Command] = []

    def issue(self, command: cmd.Command) -> None:
        self.issued.append(command)


@asynccontextmanager
async def running() -> AsyncIterator[tuple[Loop, GatedJournal, Recorder]]:
    journal, recorder = GatedJournal(), Recorder()
    loop = made(journal)
    loop.start(recorder)
    loop.post(
        ev.HostJoined(
            host_id=HostId("hst_1"),
            host_generation=1,
            capacity=16,
            statements=(),
        )
    )
    yield loop, journal, recorder


def made(journal: GatedJournal) -> Loop:
    def ended(_: Node) -> None:
        return

    return Loop(
        config=ControllerConfig(),
        journal=journal,  # type: ignore[arg-type]
        project=Rows(),
        now_us=lambda: START_US,
        ended=ended,
        changed=lambda: None,
    )


def request(number: int) -> ev.InvocationRequested:
    return ev.InvocationRequested(
        tenant_id=LOCAL_TENANT,
        invocation_id=InvocationId(f"inv_{number}"),
        spec=program(),
        request_id=f"r{number}",
        content_digest="d",
        session_id=SessionId(""),
        cancel_on_disconnect=False,
    )


async def turns(count: int = 5) -> None:
    """Lets everything that can run now run."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_commands_and_answers_wait_for_the_commit_and_keep_their_order() -> None:
    async with running() as (loop, journal, recorder):
        first, second = loop.post(request(1)), loop.post(request(2))
        await turns()
        assert len(journal.batches) == 2  # both wait for one commit
        assert not recorder.issued
        journal.gates[1].set_result(None)
        await turns()
        assert not second.done()
        journal.gates[0].set_result(None)
        await asyncio.gather(first, second)
        starts = [item for item in recorder.issued if isinstance(item, cmd.StartSandbox)]
        assert [item.invocation_id for item in starts] == ["inv_1", "inv_2"]


async def test_watchers_are_told_after_the_commit() -> None:
    async with running() as (loop, journal, _):
        changed = loop.watchers.subscribe(InvocationId("inv_1"))
        loop.post(request(1))
        await turns()
        assert not changed.is_set()
        journal.gates[0].set_result(None)
        await changed.wait()


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (StoreFull("full"), Reason.STORE_FULL),
        (StoreUnavailable("gone"), Reason.STORE_UNAVAILABLE),
    ],
)
async def test_a_journal_that_fails_answers_nobody_and_ends_the_process(
    problem: Exception, reason: Reason
) -> None:
    async with running() as (loop, journal, recorder):
        first = loop.post(request(1))
        await turns()
        journal.gates[0].set_exception(problem)
        with pytest.raises(Refused) as refused:
            await first
        assert refused.value.reason is reason
        assert not recorder.issued
        assert loop.failed.exception() is problem
        with pytest.raises(Refused) as later:
            loop.post(request(2))
        assert later.value.reason is Reason.STORE_UNAVAILABLE


async def test_a_refusal_is_journalled_nowhere_and_changes_nothing() -> None:
    async with running() as (loop, journal, _):
        with pytest.raises(Refused):
            loop.post(
                ev.InvocationRequested(
                    tenant_id=LOCAL_TENANT,
                    invocation_id=InvocationId("inv_9"),
                    spec=program(template="none"),
                    request_id="r9",
                    content_digest="d",
                    session_id=SessionId(""),
                    cancel_on_disconnect=False,
                )
            )
        await turns()
        assert not journal.batches
        assert not loop.state.nodes


async def test_case_d6_a_controller_that_died_before_a_start_starts_it_once_with_its_ids() -> None:
    async with running() as (loop, journal, _):
        loop.post(request(1))
        await turns()
        node = loop.state.nodes[InvocationId("inv_1")]
        recorder = Recorder()
        second = made(journal)
        await second.recover()
        second.start(recorder)
        starts = [item for item in recorder.issued if isinstance(item, cmd.StartSandbox)]
        assert [(item.sandbox_id, item.cell_id) for item in starts] == [
            (node.sandbox_id, node.cell_id)
        ]
