"""The host over a real unix socket, with sandboxes that the test plays."""

from __future__ import annotations

import asyncio

import pytest

from hutch.v1 import cell_pb2, ending_pb2, host_pb2, invocation_service_pb2
from hutch.v1 import host_service_pb2 as pb
from tests.support.host import (
    READY,
    ScriptedDriver,
    content,
    done,
    failure,
    host,
    make_cell,
    refusal,
    started,
    until,
)

STDOUT = invocation_service_pb2.OUTPUT_STREAM_STDOUT


async def test_an_unknown_sandbox_with_a_spec_is_started_and_says_what_holds() -> None:
    driver = ScriptedDriver()
    async with host(driver) as it:
        talk = it.attach()
        greeting = await talk.greeting()
        assert (greeting.started, greeting.last_sequence) == (True, 0)
        container = await driver.next()
        assert container.request.limits.memory_limit_bytes == 512 << 20
        await container.say(READY)
        ready = await talk.next("ready")
        assert (ready.driver, ready.python_version) == ("scripted", "3.11.2")
        assert ready.isolation == host_pb2.ISOLATION_LEVEL_CONTAINER
        assert ready.enforcement[0].level == ending_pb2.LIMIT_LEVEL_SANDBOX
        assert (await it.sandboxes())["sbx_1"].state == host_pb2.SANDBOX_STATE_READY


async def test_a_cell_sent_at_once_waits_for_ready_and_runs_once() -> None:
    driver = ScriptedDriver()
    async with host(driver) as it:
        talk = it.attach()
        await talk.run("return 1", x=b"[1]")
        await talk.run("return 1", x=b"[1]")
        container = await driver.next()
        await container.say(READY)
        frame = await container.hear()
        assert frame.header["type"] == "cell"
        assert frame.header["timeout_ms"] == 0
        assert frame.header["output_limit"] == 1 << 30
        code, value = frame.header["code"], frame.header["inputs"][0]["value"]
        assert frame.payload[code["at"] : code["at"] + code["n"]] == b"return 1"
        assert frame.payload[value["at"] : value["at"] + value["n"]] == b"[1]"
        await container.say({"type": "started", "cell": "cell_1"})
        await container.say(done(outcome="returned", value={"at": 0, "n": 1}), b"1")
        await talk.greeting()
        await talk.next("ready")
        await talk.next("cell_started")
        completed = await talk.next("cell_completed")
        assert completed.value == content(b"1")
        assert completed.evidence.HasField("wall_time")
        # The repeated cell went nowhere: what comes next is the interrupt of a later one.
        await talk.run(cell="cell_2")
        await talk.send(interrupt=pb.CellInterrupt(cell_id="cell_2"))
        types = [(await container.hear()).header["type"] for _ in range(2)]
        assert types == ["cell", "interrupt"]


async def test_a_failed_cell_carries_what_the_host_measured() -> None:
    driver = ScriptedDriver()
    async with host(driver) as it:
        talk, container = await started(it, driver)
        await talk.run()
        await container.hear()
        await container.say({"type": "started", "cell": "cell_1"})
        container.measure_gate = asyncio.Event()
        container.measurement = type(container.measurement)(
            exit_code=5, oom_kill_count=2, memory_peak_bytes=99, cpu_seconds=1.5
        )
        await container.say(done(outcome="repl_died", signal=9, state_lost=True, killed=1))
        await container.say(
            {"type": "call", "call": "c1", "cell": "", "op": "await_child", "invocation": "inv_2"}
        )
        container.measure_gate.set()
        await talk.next("cell_started")
        completed = await talk.next("cell_completed")
        assert completed.outcome == cell_pb2.CELL_OUTCOME_REPL_DIED
        seen = completed.evidence
        assert (seen.signal, seen.oom_kill_count, seen.memory_peak_bytes) == (9, 2, 99)
        assert not seen.HasField("exit_code")
        assert (seen.limit, seen.limit_value) == ("memory", 512 << 20)
        assert seen.cpu_time.ToMilliseconds() == 1_500
        assert (await talk.next("call")).await_child.invocation_id == "inv_2"


async def test_a_spawn_reaches_the_controller_and_its_reply_the_sandbox_once() -> None:
    driver = ScriptedDriver()
    async with host(driver) as it:
        talk, container = await started(it, driver)
        await talk.run()
        await container.hear()
        await container.say({"type": "started", "cell": "cell_1"})
        await talk.next("cell_started")
        await container.say(
            {
                "type": "call",
                "call": "c1",
                "cell": "cell_1",
                "op": "spawn",
                "detached": False,
                "program": {"at": 0, "n": 8},
                "task": None,
                "inputs": [
                    {"name": "x", "value": {"at": 8, "n": 2}, "description": "a number"},
                ],
                "contract": {"schema": {"at": 10, "n": 2}, "max_failures": 0},
                "spawn": {"max_depth": 2**40},
                "resources": {"memory_limit_bytes": 1 << 28},
                "timeout_ms": 1500,
                "template": "",
                "label": "child",
                "artifact_patterns": ["a/**"],
                "retry_on_loss": True,
                "output_view_bytes": 0,
                "output_limit_bytes": 0,
                "tools": [],
            },
            b"return x42{}",
        )
        call = await talk.next("call")
        spec = call.spawn.spec
        assert (call.call_id, call.cell_id, spec.program) == ("c1", "cell_1", "return x")
        assert call.spawn.inputs[0].value == content(b"42")
        assert call.spawn.inputs[0].description == "a number"
        assert spec.contract.schema_json == b"{}"
        assert spec.spawn.max_depth == 2**32 - 1
        assert not spec.spawn.HasField("max_children")
        assert spec.resources.memory_limit_bytes == 1 << 28
        assert spec.timeout.ToMilliseconds() == 1_500
        await talk.send(reply=pb.CallReply(call_id="c0", value=content(b"0")))
        await talk.send(reply=pb.CallReply(call_id="c1", value=content(b"43")))
        await talk.send(reply=pb.CallReply(call_id="c1", value=content(b"44")))
        frame = await container.hear()
        assert frame.header == {"type": "reply", "call": "c1", "value": {"at": 0, "n": 2}}
        assert frame.payload == b"43"
        await container.say(
            {"type": "call", "call": "c2", "cell": "", "op": "await_child", "invocation": "inv_2"}
        )
        await talk.next("call")
        lost = ending_pb2.Failure(
            type_name="X", message="é" * 9_000, ending_kind=ending_pb2.ENDING_KIND_RETURNED
        )
        await talk.send(reply=pb.CallReply(call_id="c2", failure=lost))
        frame = await container.hear()
        assert frame.header["call"] == "c2"
        assert frame.header["failure"] == failure(
            type_name="X", message="é" * 8_000, ending="returned"
        )


async def test_contents_larger_than_a_frame_cross_both_ways_as_blobs() -> None:
    driver = ScriptedDriver()
    large = bytes(range(256)) * 3_000
    async with host(driver) as it:
        talk, container = await started(it, driver)
        for at in range(0, len(large), 190_000):
            piece = large[at : at + 190_000]
            last = at + 190_000 >= len(large)
            chunk = pb.BlobChunk(blob_id="b", offset=at, data=piece, last=last)
            await talk.send(blob=chunk)
        cell = make_cell("pass")
        named = pb.Content(blob_id="b", size_bytes=len(large))
        cell.inputs.append(pb.NamedContent(name="x", value=named))
        await talk.send(run_cell=cell)
        received, frame = b"", await container.hear()
        while frame.header["type"] == "blob":
            assert frame.header["offset"] == len(received)
            received += frame.payload
            frame = await container.hear()
        assert received == large
        assert frame.header["inputs"][0]["value"]["n"] == len(large)
        await container.say({"type": "started", "cell": "cell_1"})
        await talk.next("cell_started")
        for at in range(0, len(large), 250_000):
            last = at + 250_000 >= len(large)
            header = {"type": "blob", "blob": "mine", "offset": at, "last": last}
            await container.say(header, large[at : at + 250_000])
        value = {"blob": "mine", "n": len(large)}
        await container.say(done(outcome="returned", value=value))
        received = b""
        while True:
            chunk = await talk.next("blob")
            assert len(chunk.data) <= 192 * 1024
            assert chunk.offset == len(received)
            received += chunk.data
            if chunk.last:
                break
        assert received == large
        assert (await talk.next("cell_completed")).value == pb.Content(
            blob_id=chunk.blob_id, size_bytes=len(large)
        )


async def test_after_a_cut_the_events_after_a_sequence_come_again() -> None:
    driver = ScriptedDriver()
    async with host(driver) as it:
        talk, container = await started(it, driver)
        await talk.run()
        await container.hear()
        await container.say({"type": "started", "cell": "cell_1"})
        await talk.next("cell_started")
        await container.say(
            {"type": "call", "call": "c1", "cell": "", "op": "await_child", "invocation": "inv_2"}
        )
        await talk.next("call")
        talk.cut()
        for index in range(3):
            header = {"type": "output", "cell": "cell_1", "stream": "stdout", "offset": 2 * index}
            await container.say(header, b"ab")
        await until(lambda: it.running.table._sandboxes["sbx_1"].log.last_sequence == 6)
        again = it.attach(start=False, after=2)
        greeting = await again.greeting()
        assert not greeting.started
        assert list(greeting.open_call_ids) == ["c1"]
        assert (await again.next("call")).call_id == "c1"
        output = await again.next("output")
        assert (output.offset, output.data) == (0, b"ababab")
        await again.acknowledge(4)
        await again.send(reply=pb.CallReply(call_id="c1", value=content(b"1")))
        await container.hear()
        third = it.attach(after=4)
        greeting = await third.greeting()
        assert (greeting.started, greeting.last_sequence) == (False, 6)
        assert not greeting.open_call_ids
        assert (await third.next("output")).offset == 2
        too_late = it.attach(start=False, after=7)
        async with refusal("FIELD_INVALID", field="attach.after_sequence"):
            await too_late.greeting()
        # A controller that was started again knows no sequence; what it acknowledged is durable.
        fresh = it.attach()
        await fresh.greeting()
        fresh.last_sequence = 4
        output = await fresh.next("output")
        assert (output.offset, output.data) == (2, b"abab")


async def test_a_newer_stream_ends_the_older_one() -> None:
    driver = ScriptedDriver()
    async with host(driver) as it:
        talk, container = await started(it, driver)
        newer = it.attach(after=1)
        await newer.greeting()
        await talk.over()
        await newer.run()
        assert (await container.hear()).header["cell"] == "cell_1"


async def test_destroy_proves_it_gone_and_says_so_on_the_stream_too() -> None:
    driver = ScriptedDriver()
    async with host(driver) as it:
        talk, container = await started(it, driver)
        container.measurement = type(container.measurement)(memory_peak_bytes=77)
        container.survivors = 1
        evidence = await it.destroy("sbx_1")
        assert evidence.memory_peak_bytes == 77
        assert container.destroy_count == 2
        gone = await talk.next("gone")
        assert gone.cause == pb.GONE_CAUSE_DESTROYED
        assert gone.evidence == evidence
        assert (await it.sandboxes())["sbx_1"].state == host_pb2.SANDBOX_STATE_GONE
        # Not acknowledged yet: a controller that starts again hears of it.
        again = it.attach(after=1)
        await again.greeting()
        assert (await again.next("gone")).cause == pb.GONE_CAUSE_DESTROYED
        await again.acknowledge()
        await again.over()
        assert await it.sandboxes() == {}
        assert await it.destroy("sbx_1") == evidence
        async with refusal("SANDBOX_NOT_FOUND"):
            await it.attach().greeting()


async def test_destroying_what_is_gone_needs_no_acknowledgement() -> None:
    driver = ScriptedDriver()
    async with host(driver) as it:
        talk, container = await started(it, driver)
        container.exit(code=4)
        await talk.next("gone")
        evidence = await it.destroy("sbx_1")
        assert evidence.exit_code == 4
        assert await it.sandboxes() == {}
        assert await it.destroy("sbx_1") == evidence
        await talk.over()


async def test_a_sandbox_destroyed_before_it_was_asked_for_is_never_started() -> None:
    driver = ScriptedDriver()
    async with host(driver) as it:
        assert await it.destroy("sbx_late") == ending_pb2.Evidence()
        async with refusal("SANDBOX_NOT_FOUND"):
            await it.attach("sbx_late").greeting()
        async with refusal("SANDBOX_NOT_FOUND"):
            await it.attach("sbx_never", start=False).greeting()
        assert driver.made == {}


async def test_destroy_while_it_is_being_made_leaves_nothing() -> None:
    driver = ScriptedDriver()
    driver.gate = asyncio.Event()
    async with host(driver) as it:
        talk = it.attach()
        await talk.greeting()
        async with asyncio.TaskGroup() as group:
            group.create_task(it.destroy("sbx_1"))
            await until(lambda: it.running.table.live_count() == 1)
            driver.gate.set()
        assert (await talk.next("gone")).cause == pb.GONE_CAUSE_DESTROYED
        assert all(container.destroy_count for container in driver.made.values())


@pytest.mark.parametrize(("code", "signal"), [(3, None), (None, 9)])
async def test_a_supervisor_that_dies_is_told_with_how(
    code: int | None, signal: int | None
) -> None:
    driver = ScriptedDriver()
    async with host(driver) as it:
        talk, container = await started(it, driver)
        await talk.run()
        await container.hear()
        await container.say({"type": "started", "cell": "cell_1"})
        container.exit(code=code, signal=signal)
        await talk.next("cell_started")
        gone = await talk.next("gone")
        assert gone.cause == pb.GONE_CAUSE_DIED
        if code is not None:
            assert gone.evidence.exit_code == code
        else:
            assert gone.evidence.signal == signal
        assert container.destroy_count == 1


async def test_a_channel_that_ends_while_the_supervisor_lives_is_lost() -> None:
    driver = ScriptedDriver()
    async with host(driver, exit_drain_seconds=0.05) as it:
        talk, container = await started(it, driver)
        container.hang_up()
        assert (await talk.next("gone")).cause == pb.GONE_CAUSE_LOST


async def test_a_start_that_fails_says_why() -> None:
    driver = ScriptedDriver()
    driver.problem = "the kernel forbids it; run sysctl so-and-so"
    async with host(driver) as it:
        talk = it.attach()
        await talk.greeting()
        gone = await talk.next("gone")
        assert (gone.cause, gone.message) == (pb.GONE_CAUSE_START_FAILED, driver.problem)


async def test_a_supervisor_that_is_never_ready_is_a_failed_start() -> None:
    driver = ScriptedDriver()
    async with host(driver, start_timeout_seconds=0.05) as it:
        talk = it.attach()
        await talk.greeting()
        gone = await talk.next("gone")
        assert gone.cause == pb.GONE_CAUSE_START_FAILED
        assert (await driver.next()).destroy_count == 1


async def test_a_supervisor_that_dies_before_ready_is_a_failed_start() -> None:
    driver = ScriptedDriver()
    async with host(driver) as it:
        talk = it.attach()
        await talk.greeting()
        (await driver.next()).exit(code=1)
        gone = await talk.next("gone")
        assert gone.cause == pb.GONE_CAUSE_START_FAILED
        assert "code 1" in gone.message


async def test_half_closing_keeps_the_events_coming_until_it_is_gone() -> None:
    driver = ScriptedDriver()
    async with host(driver) as it:
        talk, container = await started(it, driver)
        await talk.run()
        await container.hear()
        await talk.call.done_writing()
        await container.say({"type": "started", "cell": "cell_1"})
        await talk.next("cell_started")
        await it.destroy("sbx_1")
        await talk.next("gone")
        await talk.over()
        assert "sbx_1" in await it.sandboxes()  # nobody acknowledged


async def test_files_are_asked_for_once_and_come_in_chunks() -> None:
    driver = ScriptedDriver()
    async with host(driver) as it:
        talk, container = await started(it, driver)
        request = pb.FileCapture(patterns=["artifacts/**"], max_files=2, max_bytes=1 << 20)
        await talk.send(capture=request)
        await talk.send(capture=request)
        frame = await container.hear()
        assert frame.header["patterns"] == ["artifacts/**"]
        name = "61ff2e747874"
        header = {"type": "file", "name_hex": name, "offset": 0, "last": False}
        await container.say(header, bytes(200_000))
        await container.say({**header, "offset": 200_000, "last": True}, b"end")
        await container.say({**header, "name_hex": "62", "last": True})
        refused = [{"name_hex": "63", "reason": "a link"}]
        await container.say({"type": "captured", "files": 2, "refused": refused})
        chunks = [await talk.next("file") for _ in range(4)]
        assert [chunk.offset for chunk in chunks] == [0, 196_608, 200_000, 0]
        assert [chunk.last for chunk in chunks] == [False, False, True, True]
        assert chunks[0].name == b"a\xff.txt"
        captured = await talk.next("capture_completed")
        assert captured.file_count == 2
        assert captured.refused[0].reason == "a link"
