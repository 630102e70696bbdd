"""What every output log does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controller.store.ports import NameInvalid, OutputGap, OutputLog, StoreUnavailable
from tests.support.stores import TENANT, opened

INV = "inv_a"


@pytest.fixture
async def outputs(tmp_path: Path) -> AsyncIterator[OutputLog]:
    async with opened(tmp_path) as stores:
        yield stores.outputs


async def put(
    outputs: OutputLog, stream: str, offset: int, data: bytes, output_id: str = INV
) -> int:
    """Appends, waits until it is written, and gives the size."""
    await (await outputs.append(TENANT, output_id, stream, offset, data))
    return await outputs.size(TENANT, output_id, stream)


async def test_output_is_appended_and_read_from_any_byte(outputs: OutputLog) -> None:
    assert await put(outputs, "stdout", 0, b"hello ") == 6
    assert await put(outputs, "stdout", 6, b"\xff\0") == 8
    assert await put(outputs, "stderr", 0, b"e") == 1
    assert await outputs.size(TENANT, INV, "stdout") == 8
    assert await outputs.read(TENANT, INV, "stdout", 4, 3) == b"o \xff"
    assert await outputs.read(TENANT, INV, "stdout", 8, 10) == b""
    assert await outputs.read(TENANT, INV, "stderr", 0, 10) == b"e"


async def test_output_that_nobody_wrote_is_empty(outputs: OutputLog) -> None:
    assert await outputs.size(TENANT, INV, "stdout") == 0
    assert await outputs.read(TENANT, INV, "stdout", 0, 10) == b""
    assert await outputs.sync(TENANT, INV) == (0, 0)


async def test_bytes_that_are_there_are_ignored_when_sent_again(outputs: OutputLog) -> None:
    await put(outputs, "stdout", 0, b"abcdef")
    assert await put(outputs, "stdout", 2, b"cd") == 6
    assert await put(outputs, "stdout", 0, b"XXXXXX") == 6
    assert await put(outputs, "stdout", 4, b"efgh") == 8
    assert await put(outputs, "stdout", 8, b"") == 8
    assert await outputs.read(TENANT, INV, "stdout", 0, 100) == b"abcdefgh"


async def test_a_gap_is_an_error_that_names_the_next_byte(outputs: OutputLog) -> None:
    await put(outputs, "stdout", 0, b"abc")
    with pytest.raises(OutputGap) as caught:
        await put(outputs, "stdout", 4, b"x")
    assert (caught.value.expected, caught.value.offset) == (3, 4)
    assert await outputs.size(TENANT, INV, "stdout") == 3


async def test_appends_that_do_not_wait_for_each_other_stay_in_order(outputs: OutputLog) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(200):
            data = b"%04d" % number
            group.create_task(put(outputs, "stdout", number * 4, data))
    expected = b"".join(b"%04d" % number for number in range(200))
    assert await outputs.read(TENANT, INV, "stdout", 0, 10_000) == expected


async def test_cancelling_one_append_harms_no_other(outputs: OutputLog) -> None:
    await outputs.size(TENANT, INV, "stdout")
    tasks = [asyncio.create_task(put(outputs, "stdout", n * 2, b"%02d" % n)) for n in range(20)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    tasks[7].cancel()
    await asyncio.wait(tasks)
    assert await tasks[19] == 40
    expected = b"".join(b"%02d" % n for n in range(20))
    assert await outputs.read(TENANT, INV, "stdout", 0, 100) == expected


async def test_a_follower_hears_of_more_and_of_the_end(outputs: OutputLog) -> None:
    follower = asyncio.create_task(outputs.changed(TENANT, INV, "stdout", 0))
    await put(outputs, "stdout", 0, b"abc")
    assert await follower == 3
    assert await outputs.changed(TENANT, INV, "stdout", 2) == 3  # at once
    follower = asyncio.create_task(outputs.changed(TENANT, INV, "stdout", 3))
    await asyncio.sleep(0)
    outputs.wake(TENANT, INV)
    assert await follower == 3


async def test_the_sizes_are_found_again_after_reopening(tmp_path: Path) -> None:
    async with opened(tmp_path) as stores:
        await put(stores.outputs, "stdout", 0, b"abc")
        await put(stores.outputs, "stderr", 0, b"e")
        assert await stores.outputs.sync(TENANT, INV) == (3, 1)
    async with opened(tmp_path) as stores:
        assert await put(stores.outputs, "stdout", 0, b"abcd") == 4
        assert await stores.outputs.sync(TENANT, INV) == (4, 1)


async def test_many_streams_are_kept_with_few_open_files(outputs: OutputLog) -> None:
    for number in range(1200):
        await put(outputs, "stdout", 0, b"x", f"inv_{number}")
    assert await put(outputs, "stdout", 1, b"y", "inv_0") == 2


@pytest.mark.parametrize(
    ("tenant_id", "invocation_id", "stream"),
    [
        ("..", INV, "stdout"),
        (TENANT, "..", "stdout"),
        (TENANT, "inv_a/../../x", "stdout"),
        (TENANT, "inv_a\n", "stdout"),
        (TENANT, "", "stdout"),
        (TENANT, INV, "../stdout"),
    ],
)
async def test_what_may_be_no_path_is_refused(
    outputs: OutputLog, tenant_id: str, invocation_id: str, stream: str
) -> None:
    with pytest.raises(NameInvalid):
        await outputs.append(tenant_id, invocation_id, stream, 0, b"x")
    with pytest.raises(NameInvalid):
        await outputs.read(tenant_id, invocation_id, stream, 0, 1)


async def test_closing_ends_followers_and_refuses_more(outputs: OutputLog) -> None:
    follower = asyncio.create_task(outputs.changed(TENANT, INV, "stdout", 0))
    await outputs.size(TENANT, INV, "stdout")
    await outputs.close()
    assert await follower == 0
    with pytest.raises(StoreUnavailable):
        await put(outputs, "stdout", 0, b"x")


async def test_a_small_output_costs_one_file_and_an_empty_one_nothing(
    tmp_path: Path, outputs: OutputLog
) -> None:
    for number in range(300):
        await put(outputs, "stdout", 0, b"few", f"inv_a{number}")
        assert await outputs.sync(TENANT, f"inv_a{number}") == (3, 0)
        assert await outputs.sync(TENANT, f"inv_b{number}") == (0, 0)
    entries = list((tmp_path / "output" / TENANT).rglob("*"))
    assert sum(entry.is_file() for entry in entries) == 300
    assert sum(entry.is_dir() for entry in entries) <= 256


async def test_output_that_comes_after_a_sync_is_kept_and_told(outputs: OutputLog) -> None:
    await put(outputs, "stdout", 0, b"abc")
    assert await outputs.sync(TENANT, INV) == (3, 0)
    outputs.wake(TENANT, INV)
    follower = asyncio.create_task(outputs.changed(TENANT, INV, "stdout", 3))
    await put(outputs, "stdout", 3, b"late")
    assert await follower == 7
    assert await outputs.sync(TENANT, INV) == (7, 0)


async def test_an_append_waits_while_much_waits_to_be_written(outputs: OutputLog) -> None:
    """The bytes of a slow disk wait at their sender."""
    piece, count = b"x" * 65536, 200
    promises = [
        await outputs.append(TENANT, INV, "stdout", number * len(piece), piece)
        for number in range(count)
    ]
    # All but what may wait is written by the time the last one was taken.
    written = sum(promise.done() for promise in promises)
    assert (count - written) * len(piece) <= 5 * 1024 * 1024
    await promises[-1]
    assert await outputs.size(TENANT, INV, "stdout") == count * len(piece)


@pytest.mark.parametrize("piece", [100, 1_500, 4_096, 5_000])
async def test_a_small_output_reads_the_same_while_it_grows_and_from_the_disk(
    tmp_path: Path, piece: int
) -> None:
    """What is small may be told from memory; what it tells is what the disk holds."""
    expected = b""
    async with opened(tmp_path) as stores:
        for number in range(6):
            data = bytes([65 + number]) * piece
            await put(stores.outputs, "stdout", len(expected), data)
            expected += data
            for offset in (0, 1, piece, len(expected) - 1, len(expected)):
                read = await stores.outputs.read(TENANT, INV, "stdout", offset, 3_000)
                assert read == expected[offset : offset + 3_000]
        assert await stores.outputs.sync(TENANT, INV, ["stdout"]) == (len(expected),)
    async with opened(tmp_path) as stores:
        assert await stores.outputs.read(TENANT, INV, "stdout", 0, 1 << 20) == expected
        await put(stores.outputs, "stdout", len(expected), b"end")
        read = await stores.outputs.read(TENANT, INV, "stdout", len(expected) - 2, 10)
        assert read == expected[-2:] + b"end"
