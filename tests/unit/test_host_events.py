"""The event log: numbers, acknowledgements, the disk, the limits."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from hutch.v1 import host_service_pb2 as pb
from hutch.v1 import invocation_service_pb2 as isv
from sandbox.host.events import EventLog, OutputMark
from sandbox.host.spill import Spill


def event(size: int, index: int = 0) -> pb.AttachSandboxResponse:
    """An event of about that size."""
    return pb.AttachSandboxResponse(output=pb.OutputChunk(offset=index, data=bytes(size)))


def is_full(log: EventLog) -> bool:
    """Asks again each time."""
    return log.full


def make(folder: Path, **limits: int) -> tuple[EventLog, Spill]:
    """A small log over small segments."""
    spill = Spill(folder, "sbx", segment_bytes=3_000)
    values = {"memory_bytes": 4_000, "spill_bytes": 10_000, "max_events": 100, **limits}
    return EventLog(spill, **values), spill


def test_events_are_numbered_and_read_until_acknowledged(tmp_path: Path) -> None:
    log, _ = make(tmp_path)
    assert [log.append(event(10, index)) for index in range(3)] == [1, 2, 3]
    assert log.read(2).output.offset == 1
    assert log.read(2).sequence == 2
    log.acknowledge(2)
    assert log.append(event(10, 3)) == 4
    assert [log.read(sequence).sequence for sequence in (3, 4)] == [3, 4]
    for sequence in (2, 5):
        with pytest.raises(IndexError):
            log.read(sequence)
    with pytest.raises(IndexError):
        log.acknowledge(5)
    log.acknowledge(1)
    assert (log.acknowledged, log.last_sequence) == (2, 4)


def test_what_is_too_much_for_memory_goes_to_the_disk_and_comes_back(tmp_path: Path) -> None:
    log, spill = make(tmp_path, spill_bytes=1 << 20)
    for index in range(40):
        log.append(event(1_000, index))
    assert log.memory_bytes <= 4_000
    assert log.spilled_bytes > 30_000
    assert [log.read(index + 1).output.offset for index in range(40)] == list(range(40))
    assert list(tmp_path.iterdir()) == [], "spilled files have no names"
    log.acknowledge(20)
    assert [log.read(index + 1).output.offset for index in range(20, 40)] == list(range(20, 40))
    log.append(event(1_000, 40))
    assert log.read(41).output.offset == 40
    log.acknowledge(41)
    assert (log.memory_bytes, spill.live_bytes) == (0, 0)
    log.close()


def test_the_log_says_when_it_is_full_by_bytes_and_by_count(tmp_path: Path) -> None:
    log, _ = make(tmp_path)
    while not is_full(log):
        log.append(event(1_000))
    assert 10_000 <= log.spilled_bytes < 12_000
    log.acknowledge(log.last_sequence)
    assert not is_full(log)
    for _ in range(100):
        log.append(event(0))
    assert is_full(log)
    assert log.acknowledge(log.last_sequence) == []
    assert log.last_sequence - log.acknowledged == 0
    log.close()


def test_a_disk_that_takes_nothing_makes_the_log_full_not_wrong(tmp_path: Path) -> None:
    log, _ = make(tmp_path / "missing")
    for index in range(8):
        log.append(event(1_000, index))
    assert is_full(log)
    assert [log.read(index + 1).output.offset for index in range(8)] == list(range(8))
    log.acknowledge(8)
    assert not is_full(log)


def test_acknowledging_says_how_far_each_stream_was_taken(tmp_path: Path) -> None:
    log, _ = make(tmp_path)
    for end in (5, 9):
        log.append(event(1), OutputMark(cell_id="c", stream=1, end=end))
    log.append(event(1), OutputMark(cell_id="c", stream=2, end=4))
    log.append(event(1))
    taken = {(mark.stream, mark.end) for mark in log.acknowledge(4)}
    assert taken == {(1, 9), (2, 4)}


async def test_a_reader_waits_for_the_next_event(tmp_path: Path) -> None:
    log, _ = make(tmp_path)
    log.append(event(1))
    await log.wait_past(0)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(log.wait_past(1))
        await asyncio.sleep(0)
        assert not waiting.done()
        log.append(event(1))
    async with asyncio.TaskGroup() as group:
        group.create_task(log.wait_past(2))
        await asyncio.sleep(0)
        log.wake()


def test_consecutive_output_of_one_stream_goes_out_as_one_event(tmp_path: Path) -> None:
    log = EventLog(Spill(tmp_path, "s"), memory_bytes=1000, spill_bytes=1 << 20, max_events=100)

    def printed(cell_id: str, stream: isv.OutputStream.ValueType, offset: int, data: bytes) -> None:
        chunk = pb.OutputChunk(cell_id=cell_id, stream=stream, offset=offset, data=data)
        mark = OutputMark(cell_id=cell_id, stream=stream, end=offset + len(data))
        log.append(pb.AttachSandboxResponse(output=chunk), mark)

    for number in range(5):
        printed("c1", isv.OUTPUT_STREAM_STDOUT, number * 600, b"%d" % number * 600)
    printed("c1", isv.OUTPUT_STREAM_STDERR, 0, b"e")
    printed("c2", isv.OUTPUT_STREAM_STDERR, 0, b"f")
    log.append(pb.AttachSandboxResponse(ready=pb.SandboxReady()))

    event, last = log.read_joined(2)
    assert (event.sequence, last, event.output.offset) == (5, 5, 600)
    assert event.output.data == b"".join(b"%d" % number * 600 for number in range(1, 5))
    assert [log.read_joined(sequence)[1] for sequence in (6, 7, 8)] == [6, 7, 8]
    assert log.read_joined(6)[0].output.data == b"e"
    log.close()


async def test_the_start_of_a_cell_is_left_out_when_its_end_is_there(tmp_path: Path) -> None:
    log, _ = make(tmp_path)
    started = pb.AttachSandboxResponse(cell_started=pb.CellStarted(cell_id="cell_1"))
    ended = pb.AttachSandboxResponse(cell_completed=pb.CellCompleted(cell_id="cell_1"))
    reader = asyncio.create_task(log.wait_past(0))
    await asyncio.sleep(0)
    log.append(started)
    await asyncio.sleep(0)
    assert not reader.done(), "a start waits for what follows"
    log.append(ended)
    await reader
    event, last = log.read_joined(1)
    assert (event.WhichOneof("event"), event.sequence, last) == ("cell_completed", 2, 2)
    log.acknowledge(2)
    assert log.last_sequence == log.acknowledged == 2


async def test_the_start_of_a_cell_that_goes_on_is_told(tmp_path: Path) -> None:
    log, _ = make(tmp_path)
    reader = asyncio.create_task(log.wait_past(0))
    await asyncio.sleep(0)
    log.append(pb.AttachSandboxResponse(cell_started=pb.CellStarted(cell_id="cell_1")))
    await reader
    event, last = log.read_joined(1)
    assert (event.WhichOneof("event"), event.sequence, last) == ("cell_started", 1, 1)
