"""What every journal does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controller.store.ports import (
    Batch,
    CursorInvalid,
    InvocationRow,
    Journal,
    StoreConflict,
    StoreUnavailable,
    cursor_of,
)
from tests.support.stores import TENANT, opened, record, records, request, row


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[Journal]:
    async with opened(tmp_path) as stores:
        yield stores.journal


async def ids(journal: Journal, **options: object) -> list[str]:
    found = await journal.list_invocations(TENANT, **options)  # type: ignore[arg-type]
    return [item.invocation_id for item in found]


async def test_what_was_appended_is_read_back_exactly(journal: Journal) -> None:
    batch = Batch(
        records=(record(1, payload=b'{"a": "\xc3\xa9"}'), record(2)),
        rows=(row("inv_tree", snapshot=b"\0\xff", value=b"v"),),
        requests=(request("r1"),),
    )
    await journal.append(batch)
    assert await journal.read_tree(TENANT, "inv_tree") == list(batch.records)
    assert await journal.get_invocation(TENANT, "inv_tree") == batch.rows[0]
    assert await journal.get_request(TENANT, "r1") == batch.requests[0]


async def test_what_is_unknown_is_none_or_empty(journal: Journal) -> None:
    assert await journal.read_tree(TENANT, "inv_none") == []
    assert await journal.get_invocation(TENANT, "../../etc/passwd") is None
    assert await journal.get_request(TENANT, "none") is None
    assert await journal.list_invocations(TENANT) == []
    assert await journal.live_records() == []


async def test_a_tree_is_read_by_pages(journal: Journal) -> None:
    await journal.append(records(1, 2, 5, 9))
    page = await journal.read_tree(TENANT, "inv_tree", after_sequence=1, limit=2)
    assert [item.sequence for item in page] == [2, 5]
    page = await journal.read_tree(TENANT, "inv_tree", after_sequence=5, limit=2)
    assert [item.sequence for item in page] == [9]


async def test_tenants_do_not_see_each_other(journal: Journal) -> None:
    await journal.append(
        Batch(
            records=(record(1), record(1, tenant="other")),
            rows=(row("inv_tree"), row("inv_tree", tenant="other", state="ended")),
            requests=(request("r"), request("r", tenant="other", digest="e")),
        )
    )
    mine = await journal.get_invocation(TENANT, "inv_tree")
    theirs = await journal.get_invocation("other", "inv_tree")
    assert mine is not None
    assert theirs is not None
    assert (mine.state, theirs.state) == ("running", "ended")
    assert len(await journal.list_invocations(TENANT)) == 1
    assert len(await journal.read_tree("other", "inv_tree")) == 1
    found = await journal.get_request("other", "r")
    assert found is not None
    assert found.content_digest == "e"
    assert await journal.get_invocation("third", "inv_tree") is None


async def test_the_newest_row_of_an_invocation_stands_and_keeps_its_value(
    journal: Journal,
) -> None:
    await journal.append(Batch(rows=(row("inv_a", state="queued"), row("inv_a", value=b"v"))))
    await journal.append(Batch(rows=(row("inv_a", state="ending"),)))
    await journal.append(Batch(rows=(row("inv_a", value=b"w"), row("inv_a", state="ended"))))
    found = await journal.get_invocation(TENANT, "inv_a")
    assert found is not None
    assert (found.state, found.value) == ("ended", b"w")


async def test_recovery_reads_the_live_trees_only(journal: Journal) -> None:
    await journal.append(records(1, 2, tree="inv_b"))
    await journal.append(records(1, tree="inv_a"))
    await journal.append(records(1, tree="inv_c"))
    ended = Batch(records=(record(2, tree="inv_c"),), ended_trees=((TENANT, "inv_c"),))
    await journal.append(ended)
    await journal.append(records(3, tree="inv_c"))  # a late record does not bring it back
    live = [(item.tree_id, item.sequence) for item in await journal.live_records()]
    assert live == [("inv_a", 1), ("inv_b", 1), ("inv_b", 2)]
    assert len(await journal.read_tree(TENANT, "inv_c")) == 3


async def test_a_sequence_or_request_that_exists_is_a_conflict_that_harms_no_other(
    journal: Journal,
) -> None:
    await journal.append(Batch(records=(record(1),), requests=(request("r"),)))
    batches = [
        records(2),
        Batch(records=(record(1, payload=b"[]"), record(3))),
        Batch(records=(record(4),), requests=(request("r"),)),
        records(5),
    ]
    tasks = [asyncio.create_task(journal.append(batch)) for batch in batches]
    await asyncio.wait(tasks)
    outcomes = [type(task.exception()) for task in tasks]
    assert outcomes == [type(None), StoreConflict, StoreConflict, type(None)]
    kept = await journal.read_tree(TENANT, "inv_tree")
    assert [(item.sequence, item.payload) for item in kept] == [(1, b"{}"), (2, b"{}"), (5, b"{}")]


async def test_appends_become_durable_in_their_order(journal: Journal) -> None:
    done: list[int] = []

    async def append(number: int) -> None:
        await journal.append(records(number))
        done.append(number)

    async with asyncio.TaskGroup() as group:
        for number in range(1, 301):
            group.create_task(append(number))
    assert done == sorted(done)
    assert len(await journal.read_tree(TENANT, "inv_tree")) == 300


async def test_lists_are_newest_first_and_paged_by_key(journal: Journal) -> None:
    times = {"inv_a": 5, "inv_b": 5, "inv_c": 4, "inv_d": 9, "inv_e": 1}
    await journal.append(Batch(rows=tuple(row(name, time_us=t) for name, t in times.items())))
    assert await ids(journal) == ["inv_d", "inv_b", "inv_a", "inv_c", "inv_e"]
    seen: list[str] = []
    after = ""
    while page := await journal.list_invocations(TENANT, after=after, limit=2):
        seen += [item.invocation_id for item in page]
        after = cursor_of(page[-1])
        # What is new comes before the cursor and moves nothing.
        await journal.append(Batch(rows=(row(f"inv_new{len(seen)}", time_us=100),)))
    assert seen == ["inv_d", "inv_b", "inv_a", "inv_c", "inv_e"]


async def test_a_tree_is_listed_by_ordinal(journal: Journal) -> None:
    rows = [row(f"inv_n{n}", ordinal=n, time_us=-n, parent="inv_p" if n else "") for n in range(5)]
    await journal.append(Batch(rows=tuple(reversed(rows))))
    await journal.append(Batch(rows=(row("inv_elsewhere", tree="inv_other"),)))
    first = await journal.list_invocations(TENANT, tree_id="inv_tree", limit=3)
    assert [item.ordinal for item in first] == [0, 1, 2]
    after = cursor_of(first[-1], tree_id="inv_tree")
    assert await ids(journal, tree_id="inv_tree", after=after) == ["inv_n3", "inv_n4"]


async def test_lists_are_filtered_by_state_and_by_root(journal: Journal) -> None:
    rows: tuple[InvocationRow, ...] = (
        row("inv_a", time_us=1),
        row("inv_b", time_us=2, parent="inv_a"),
        row("inv_c", time_us=3, state="ended"),
    )
    await journal.append(Batch(rows=rows))
    assert await ids(journal, roots_only=True) == ["inv_c", "inv_a"]
    assert await ids(journal, state="ended") == ["inv_c"]
    assert await ids(journal, state="running", roots_only=True) == ["inv_a"]


async def test_lists_do_not_carry_values(journal: Journal) -> None:
    await journal.append(Batch(rows=(row("inv_a", value=b"v" * 1000),)))
    assert [item.value for item in await journal.list_invocations(TENANT)] == [b""]


@pytest.mark.parametrize(
    "after", ["x", "n.", "n.1", "n.x.inv_a", "t.1.inv_a", "n.-1.inv_a", "n.1.inv_a' OR 1=1"]
)
async def test_a_cursor_of_another_kind_is_refused(journal: Journal, after: str) -> None:
    with pytest.raises(CursorInvalid):
        await journal.list_invocations(TENANT, after=after)


async def test_counters_rise_and_never_repeat(journal: Journal, tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(journal.counter_next("owner_epoch")) for _ in range(20)]
    assert sorted(task.result() for task in tasks) == list(range(1, 21))
    assert await journal.counter_next("other") == 1


async def test_a_journal_that_is_closed_says_so(journal: Journal) -> None:
    waiting = asyncio.create_task(journal.append(records(1)))
    await asyncio.sleep(0)
    await journal.close()
    await journal.close()
    await waiting  # what waited was finished
    with pytest.raises(StoreUnavailable):
        await journal.append(records(2))
    with pytest.raises(StoreUnavailable):
        await journal.read_tree(TENANT, "inv_tree")


async def test_everything_is_there_after_reopening(tmp_path: Path) -> None:
    async with opened(tmp_path) as stores:
        await stores.journal.append(records(1, 2))
        epoch = await stores.journal.counter_next("owner_epoch")
    async with opened(tmp_path) as stores:
        assert len(await stores.journal.live_records()) == 2
        assert await stores.journal.counter_next("owner_epoch") == epoch + 1
