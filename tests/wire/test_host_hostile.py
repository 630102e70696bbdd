"""Sandboxes that do not keep to the protocol, and owners that do not keep up."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import socket
from typing import Any

import pytest

from hutch.v1 import host_pb2
from hutch.v1 import host_service_pb2 as pb
from sandbox.host import outbound
from sandbox.runtime import frames
from tests.support.host import (
    READY,
    Conversation,
    ScriptedContainer,
    ScriptedDriver,
    content,
    done,
    host,
    make_spec,
    started,
    until,
)

MIB = 1 << 20
OUTPUT = {"type": "output", "cell": "cell_1", "stream": "stdout", "offset": 0}


def raw(header: bytes, payload: bytes = b"") -> bytes:
    """A frame with any header."""
    return len(header).to_bytes(4, "big") + len(payload).to_bytes(4, "big") + header + payload


GARBAGE = {
    "no JSON": raw(b"{'type'}"),
    "no UTF-8": raw(b'{"type":"\xff"}'),
    "no object": raw(b'["started"]'),
    "no type": raw(b"{}"),
    "two keys of one name": raw(b'{"type":"started","cell":"cell_1","cell":"cell_1"}'),
    "a number that is none": raw(b'{"type":"started","cell":NaN}'),
    "a number without end": raw(b'{"type":"started","cell":' + b"9" * 5_000 + b"}"),
    "deep nesting": raw(b'{"type":' + b"[" * 30_000 + b"]" * 30_000 + b"}"),
    "a lone surrogate": raw(b'{"type":"started","cell":"\\ud800"}'),
    "an over-long header": (65_537).to_bytes(4, "big") + bytes(4),
    "an over-long frame": (100).to_bytes(4, "big") + (262_144).to_bytes(4, "big"),
    "a header of nothing": bytes(8),
    "lengths of 4 GiB": b"\xff" * 8,
    "a pickle": b"\x80\x04\x95" + bytes(40),
    "a forged cell of the host": raw(b'{"type":"shutdown"}'),
    "a forged depth": raw(
        b'{"type":"call","call":"k","cell":"","op":"await_child","invocation":"i","depth":1}'
    ),
    "a second ready": frames.encode(READY),
}


@pytest.mark.parametrize("name", GARBAGE)
async def test_garbage_ends_a_sandbox_denied_and_touches_no_other(name: str) -> None:
    driver = ScriptedDriver()
    async with host(driver) as it:
        talk, container = await started(it, driver, "sbx_bad")
        good, neighbour = await started(it, driver, "sbx_good")
        await container.say_raw(GARBAGE[name])
        gone = await talk.next("gone")
        assert gone.cause == pb.GONE_CAUSE_DENIED, gone
        assert "frame protocol" in gone.message
        assert container.destroy_count == 1
        await good.run()
        assert (await neighbour.hear()).header["cell"] == "cell_1"


async def test_garbage_before_ready_ends_it_too() -> None:
    driver = ScriptedDriver()
    async with host(driver) as it:
        talk = it.attach()
        await talk.greeting()
        await (await driver.next()).say_raw(b"Fatal Python error: ....")
        assert (await talk.next("gone")).cause in (
            pb.GONE_CAUSE_DENIED,
            pb.GONE_CAUSE_START_FAILED,
        )


async def test_a_truncated_frame_is_denied_unless_a_signal_cut_it() -> None:
    driver = ScriptedDriver()
    frame = frames.encode({"type": "started", "cell": "cell_1"})
    for number, signal in enumerate((None, 9)):
        async with host(driver) as it:
            talk, container = await started(it, driver, f"sbx_{number}")
            await container.say_raw(frame[:-3])
            container.exit(code=0 if signal is None else None, signal=signal)
            gone = await talk.next("gone")
            expected = pb.GONE_CAUSE_DIED if signal else pb.GONE_CAUSE_DENIED
            assert gone.cause == expected


async def test_frames_cut_into_bytes_are_whole_again() -> None:
    driver = ScriptedDriver()
    async with host(driver) as it:
        talk, container = await started(it, driver)
        await talk.run()
        await container.hear()
        for index in range(3):
            header = {"type": "started", "cell": "cell_1"} if index == 0 else dict(OUTPUT)
            if index:
                header["offset"] = index - 1  # type: ignore[assignment]
            for byte in frames.encode(header, b"x" if index else b""):
                await container.say_raw(bytes([byte]))
        await talk.next("cell_started")
        assert await talk.printed(2) == b"xx"


async def test_events_before_a_breach_are_kept() -> None:
    driver = ScriptedDriver()
    async with host(driver) as it:
        talk, container = await started(it, driver)
        await talk.run()
        await container.hear()
        await container.say({"type": "started", "cell": "cell_1"})
        await talk.next("cell_started")
        await container.say(OUTPUT, b"abc")
        await container.say({**OUTPUT, "offset": 7}, b"abc")
        assert (await talk.next("output")).data == b"abc"
        assert (await talk.next("gone")).cause == pb.GONE_CAUSE_DENIED


async def flood(container: ScriptedContainer, sent: list[int]) -> None:
    """Spawns that nobody answers, each with its payload, without an end."""
    while True:
        header: dict[str, Any] = {
            "type": "call",
            "call": f"k{len(sent)}",
            "cell": "",
            "op": "save_artifact",
            "name": "x",
            "media_type": "",
            "content": {"at": 0, "n": 150_000},
        }
        sent.append(150_000)
        await container.say(header, bytes(150_000))


async def test_case_22_an_owner_that_never_acknowledges_stops_the_sandbox_not_the_host() -> None:
    """Scale: 2 MiB on the disk for 1 GiB, 1 MiB in memory for 4 MiB."""
    driver = ScriptedDriver()
    async with host(driver, event_memory_bytes=MIB, spill_limit_bytes=2 * MIB) as it:
        talk, container = await started(it, driver)
        sent: list[int] = []
        flooding = asyncio.get_running_loop().create_task(flood(container, sent))
        sandbox = it.running.table._sandboxes["sbx_1"]
        await until(lambda: sandbox.log.full)
        held = sandbox.log.last_sequence
        assert sandbox.log.memory_bytes <= MIB
        assert sandbox.log.spilled_bytes <= 3 * MIB
        # It can be destroyed, and others work, while it floods.
        good, neighbour = await started(it, driver, "sbx_good")
        await good.run()
        await neighbour.hear()
        assert sandbox.log.last_sequence - held <= 4
        # Acknowledging lets it go on, in order and without a gap.
        for _ in range(60):
            call = await talk.next("call")
            assert call.call_id == f"k{talk.last_sequence - 2}"
            await talk.acknowledge()
        flooding.cancel()
        await asyncio.wait({flooding})
        await it.destroy("sbx_1")
        assert container.destroy_count == 1


async def test_case_12_a_flood_of_output_flows_by_credit_and_is_complete() -> None:
    driver = ScriptedDriver()
    total = 12 * MIB
    async with host(driver, event_memory_bytes=MIB) as it:
        talk, container = await started(it, driver)
        await talk.run()
        await container.hear()
        await container.say({"type": "started", "cell": "cell_1"})
        await talk.next("cell_started")

        async def supervisor() -> None:
            credit = offset = 0
            while offset < total:
                if offset + 65_536 - credit > frames.CREDIT_WINDOW_BYTES:
                    frame = await container.hear()
                    assert frame.header["type"] == "credit"
                    assert frame.header["stream"] == "stdout"
                    credit = frame.header["offset"]
                    continue
                await container.say({**OUTPUT, "offset": offset}, bytes([offset >> 16]) * 65_536)
                offset += 65_536
            await container.say(done(stdout_bytes=total))

        async with asyncio.TaskGroup() as group:
            group.create_task(supervisor())
            at = 0
            while at < total:
                chunk = await talk.next("output")
                assert (chunk.offset, chunk.data[:1]) == (at, bytes([at >> 16]))
                at += len(chunk.data)
                await talk.acknowledge()
            assert (await talk.next("cell_completed")).stdout_bytes == total


async def round_trip(talk: Conversation, container: ScriptedContainer, cell: str) -> None:
    """Runs one cell from its order to its end."""
    await talk.run(cell=cell)
    await container.hear()
    await container.say({"type": "started", "cell": cell})
    await talk.next("cell_started")
    await container.say(done(cell))
    await talk.next("cell_completed")


def tiny_outputs(cell: str, count: int) -> bytes:
    """Many frames in few bytes."""
    headers = ({**OUTPUT, "cell": cell, "offset": offset} for offset in range(count))
    return b"".join(frames.encode(header, b"x") for header in headers)


async def test_a_flood_of_tiny_frames_gives_way_to_the_neighbours() -> None:
    driver = ScriptedDriver()
    count = 12_000
    async with host(driver) as it:
        talk, container = await started(it, driver)
        good, neighbour = await started(it, driver, "sbx_good")
        await talk.run()
        await container.hear()
        await container.say({"type": "started", "cell": "cell_1"})
        await talk.next("cell_started")
        flood = tiny_outputs("cell_1", count)
        flooding = asyncio.get_running_loop().create_task(container.say_raw(flood))
        log = it.running.table._sandboxes["sbx_1"].log
        await until(lambda: log.last_sequence > 10)
        for index in range(20):
            await round_trip(good, neighbour, f"cell_{index}")
        # Read whole buffers at a time, all of it would have been taken long before.
        assert log.last_sequence < count // 2
        assert await talk.printed(count) == b"x" * count
        await flooding


async def test_a_full_disk_holds_back_who_floods_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, full = ScriptedDriver(), True
    write = os.pwrite

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    async with host(driver, event_memory_bytes=MIB) as it:
        talk, container = await started(it, driver)
        sent: list[int] = []
        flooding = asyncio.get_running_loop().create_task(flood(container, sent))
        sandbox = it.running.table._sandboxes["sbx_1"]
        await until(lambda: sandbox.log.full)
        assert sandbox.log.memory_bytes < 2 * MIB
        assert sandbox.log.spilled_bytes == 0
        good, neighbour = await started(it, driver, "sbx_good")
        await round_trip(good, neighbour, "cell_1")
        full = False
        for _ in range(40):
            call = await talk.next("call")
            assert call.call_id == f"k{talk.last_sequence - 2}"
            await talk.acknowledge()
        flooding.cancel()
        await asyncio.wait({flooding})
        talk.cut()


async def test_contents_that_the_disk_does_not_take_end_their_sandbox_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class FullFile(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    driver = ScriptedDriver()
    async with host(driver) as it:
        talk, container = await started(it, driver)
        good, neighbour = await started(it, driver, "sbx_good")
        with monkeypatch.context() as patch:
            patch.setattr(outbound, "_spool", lambda directory: FullFile())
            await talk.send(blob=pb.BlobChunk(blob_id="b", data=b"x"))
            gone = await talk.next("gone")
        assert gone.cause == pb.GONE_CAUSE_LOST
        assert "disk" in gone.message
        assert container.destroy_count == 1
        await round_trip(good, neighbour, "cell_1")
        # What its owner had on the way does nothing, and the stream ends as usual.
        await talk.send(blob=pb.BlobChunk(blob_id="b", offset=1, data=b"x", last=True))
        await talk.acknowledge()
        await talk.over()
        talk, container = await started(it, driver, "sbx_next")
        await round_trip(talk, container, "cell_1")


async def test_a_sandbox_that_half_closes_is_lost_and_one_that_stalls_holds_up_nobody() -> None:
    driver = ScriptedDriver()
    async with host(driver, exit_drain_seconds=0.05) as it:
        talk, container = await started(it, driver)
        stalled, silent = await started(it, driver, "sbx_stalled")
        good, neighbour = await started(it, driver, "sbx_good")
        await silent.say_raw(frames.encode({"type": "started", "cell": "cell_1"})[:-1])
        await stalled.run()
        container._theirs.shutdown(socket.SHUT_WR)
        assert (await talk.next("gone")).cause == pb.GONE_CAUSE_LOST
        for index in range(3):
            await round_trip(good, neighbour, f"cell_{index}")
        await it.destroy("sbx_stalled")
        assert (await stalled.next("gone")).cause == pb.GONE_CAUSE_DESTROYED


async def test_a_sandbox_that_reads_nothing_stops_its_own_stream_only() -> None:
    driver = ScriptedDriver()
    async with host(driver, channel_queue_bytes=MIB) as it:
        talk, container = await started(it, driver)
        await talk.run()
        await container.hear()
        await container.say({"type": "started", "cell": "cell_1"})
        await talk.next("cell_started")
        for index in range(64):
            await container.say(
                {
                    "type": "call",
                    "call": f"k{index}",
                    "cell": "cell_1",
                    "op": "await_child",
                    "invocation": "inv_2",
                }
            )
            await talk.next("call")

        async def answer() -> None:
            value = content(b"1" * 190_000)
            for index in range(64):
                await talk.send(reply=pb.CallReply(call_id=f"k{index}", value=value))

        sandbox = it.running.table._sandboxes["sbx_1"]
        sending = asyncio.get_running_loop().create_task(answer())
        await until(lambda: not sandbox._channel._has_room.is_set())
        queued = sandbox._channel._queued_bytes
        assert queued <= 3 * MIB
        await it.destroy("sbx_1")
        assert (await talk.next("gone")).cause == pb.GONE_CAUSE_DESTROYED
        sending.cancel()
        await asyncio.wait({sending})


async def test_what_a_dead_supervisor_left_is_read_also_when_the_log_is_full() -> None:
    driver = ScriptedDriver()
    async with host(driver, unacknowledged_events=3) as it:
        talk, container = await started(it, driver)
        await talk.run()
        await container.hear()
        await container.say({"type": "started", "cell": "cell_1"})
        for offset in range(4):
            await container.say({**OUTPUT, "offset": offset}, b"x")
        container.exit(signal=9)
        await talk.next("cell_started")
        assert await talk.printed(4) == b"xxxx"
        assert (await talk.next("gone")).cause == pb.GONE_CAUSE_DIED


async def test_the_output_limit_of_the_spec_holds_whatever_the_supervisor_does() -> None:
    driver = ScriptedDriver()
    spec: host_pb2.SandboxSpec = make_spec(output_limit_bytes=5)
    async with host(driver) as it:
        talk = it.attach(spec=spec)
        await talk.run()
        container = await driver.next()
        await container.say(READY)
        assert (await container.hear()).header["output_limit"] == 5
        await container.say({"type": "started", "cell": "cell_1"})
        await container.say(OUTPUT, b"123456")
        await talk.greeting()
        await talk.next("ready")
        await talk.next("cell_started")
        assert (await talk.next("gone")).cause == pb.GONE_CAUSE_DENIED
