"""A sandbox that lives on from cell to cell, over a real unix socket, and what is asked of it."""

from __future__ import annotations

from typing import Any

from hutch.v1 import host_service_pb2 as pb
from hutch.v1 import invocation_pb2
from hutch.v1 import sandbox_file_pb2 as files
from tests.support.host import (
    Conversation,
    ScriptedContainer,
    ScriptedDriver,
    content,
    done,
    failure,
    host,
    make_cell,
    refusal,
    started,
)

OUTPUT = {"type": "output", "stream": "stdout"}
RESULT = {"type": "tool_result", "value": {"at": 0, "n": 1}}
OUTCOME = {
    "type": "file_outcome",
    "problem": "",
    "message": "",
    "entries": [],
    "more": False,
    "end": True,
}


async def begin(talk: Conversation, container: ScriptedContainer, cell: str) -> None:
    """Runs an interactive cell up to its start."""
    run = make_cell("x", cell)
    run.mode = invocation_pb2.INVOCATION_MODE_INTERACTIVE
    await talk.send(run_cell=run)
    assert (await container.hear()).header["cell"] == cell
    await container.say({"type": "started", "cell": cell})
    assert (await talk.next("cell_started")).cell_id == cell


async def test_cells_come_one_after_the_other_and_late_output_stays_with_its_cell() -> None:
    driver = ScriptedDriver()
    async with host(driver) as it:
        talk, container = await started(it, driver)
        await begin(talk, container, "cell_1")
        shown = {"media_type": "text/html", "content": {"at": 0, "n": 3}}
        header = {"type": "display", "cell": "cell_1", "index": 0, "result": True}
        await container.say({**header, "data": [shown]}, b"<b>")
        assert (await talk.next("display")).data[0].content.data == b"<b>"
        await container.say({**OUTPUT, "cell": "cell_1", "offset": 0}, b"abc")
        await container.say(done("cell_1", stdout_bytes=3, text={"at": 0, "n": 2}), b"42")
        assert (await talk.next("output")).data == b"abc"
        assert (await talk.next("cell_completed")).text == "42"
        await begin(talk, container, "cell_2")
        await container.say({**OUTPUT, "cell": "cell_1", "offset": 3}, b"late")
        await container.say({**OUTPUT, "cell": "cell_2", "offset": 0}, b"own")
        late, own = await talk.next("output"), await talk.next("output")
        assert (late.cell_id, late.offset, late.data) == ("cell_1", 3, b"late")
        assert (own.cell_id, own.offset) == ("cell_2", 0)
        await container.say(done("cell_2", stdout_bytes=3))
        await talk.next("cell_completed")
        # Neither of them runs again; the next one does.
        for cell in ("cell_1", "cell_2"):
            await talk.run(cell=cell)
        await begin(talk, container, "cell_3")


async def test_late_output_of_an_ended_cell_gets_credit() -> None:
    driver = ScriptedDriver()
    async with host(driver) as it:
        talk, container = await started(it, driver)
        await begin(talk, container, "cell_1")
        await container.say(done("cell_1"))
        await talk.next("cell_completed")
        for index in range(16):
            header = {**OUTPUT, "cell": "cell_1", "offset": index << 16}
            await container.say(header, bytes(1 << 16))
            await talk.next("output")
        await talk.acknowledge()
        credit = (await container.hear()).header
        assert credit == {"type": "credit", "cell": "cell_1", "stream": "stdout", "offset": 1 << 20}


async def test_cells_beyond_the_number_of_a_life_are_refused() -> None:
    """Scale: 2 cells for 100,000."""
    driver = ScriptedDriver()
    async with host(driver, cells=2) as it:
        talk, container = await started(it, driver)
        for cell in ("cell_1", "cell_2"):
            await begin(talk, container, cell)
            await container.say(done(cell))
            await talk.next("cell_completed")
        await talk.run(cell="cell_3")
        async with refusal("FIELD_INVALID", field="run_cell.cell_id"):
            await talk.next("cell_started")


async def test_input_survives_a_cut_stream_without_a_gap_and_without_a_double() -> None:
    driver = ScriptedDriver()
    async with host(driver) as it:
        talk, container = await started(it, driver)
        await talk.send(stdin=pb.StdinChunk(data=b"one\n"))
        frame = await container.hear()
        assert (frame.header["offset"], frame.payload) == (0, b"one\n")
        await container.say({"type": "stdin_taken", "offset": 4})
        assert (await talk.next("stdin_taken")).offset == 4
        talk.cut()
        again = it.attach(start=False, after=talk.last_sequence)
        assert (await again.greeting()).stdin_offset == 4
        await again.send(stdin=pb.StdinChunk(data=b"one\n"))
        await again.send(stdin=pb.StdinChunk(offset=2, data=b"e\ntwo\n", close=True))
        frame = await container.hear()
        assert frame.header == {"type": "stdin", "offset": 4, "close": True}
        assert frame.payload == b"two\n"


async def test_a_tool_call_is_delivered_once_and_its_result_comes_again_until_acknowledged() -> (
    None
):
    driver = ScriptedDriver()
    async with host(driver) as it:
        talk, container = await started(it, driver)
        delivery = pb.ToolDelivery(
            call_id="t1", tool_id="tool_1", method="add", arguments=content(b"{}")
        )
        for _ in range(2):
            await talk.send(tool=delivery)
        frame = await container.hear()
        assert frame.header == {
            "type": "tool_call",
            "call": "t1",
            "tool": "tool_1",
            "method": "add",
            "arguments": {"at": 0, "n": 2},
        }
        talk.cut()
        await container.say({**RESULT, "call": "t1"}, b"3")
        again = it.attach(start=False, after=talk.last_sequence)
        await again.send(tool=delivery)
        await again.greeting()
        assert (await again.next("tool_result")).value == content(b"3")
        again.cut()
        third = it.attach(start=False, after=talk.last_sequence)
        await third.greeting()
        assert (await third.next("tool_result")).call_id == "t1"
        await third.acknowledge()
        # A call that is answered is neither delivered nor cancelled again.
        await third.send(tool=delivery)
        await third.send(tool_cancel=pb.ToolCancel(call_id="t1"))
        await third.send(
            tool=pb.ToolDelivery(call_id="t2", tool_id="tool_1", arguments=content(b""))
        )
        await third.send(tool_cancel=pb.ToolCancel(call_id="t2"))
        assert (await container.hear()).header["call"] == "t2"
        assert (await container.hear()).header == {"type": "tool_cancel", "call": "t2"}
        lost = failure(type_name="ToolOutcomeUnknownError", reason="TOOL_OUTCOME_UNKNOWN")
        await container.say({"type": "tool_result", "call": "t2", "failure": lost})
        assert (await third.next("tool_result")).failure.reason == "TOOL_OUTCOME_UNKNOWN"


async def test_large_arguments_of_a_tool_come_as_a_blob() -> None:
    driver = ScriptedDriver()
    async with host(driver) as it:
        talk, container = await started(it, driver)
        for at in (0, 150_000):
            await talk.send(
                blob=pb.BlobChunk(blob_id="b", offset=at, data=bytes(150_000), last=at > 0)
            )
        named = pb.Content(blob_id="b", size_bytes=300_000)
        await talk.send(tool=pb.ToolDelivery(call_id="t1", tool_id="tool_1", arguments=named))
        blobs = [await container.hear() for _ in range(2)]
        assert sum(len(frame.payload) for frame in blobs) == 300_000
        header = (await container.hear()).header
        assert header["arguments"] == {"blob": blobs[0].header["blob"], "n": 300_000}


async def test_file_operations_reach_the_sandbox_one_by_one() -> None:
    driver = ScriptedDriver()
    async with host(driver, waiting_file_operations=2) as it:
        talk, container = await started(it, driver)
        for name in ("f1", "f2", "f2", "f3", "f4"):
            read = files.FileRead(offset=1, max_bytes=9)
            operation = files.FileOperation(operation_id=name, path="a/b", read=read)
            await talk.send(file_operation=operation)
        refused = await talk.next("file_outcome")
        assert (refused.operation_id, refused.problem) == ("f4", "busy")
        for name in ("f1", "f2", "f3"):
            header = (await container.hear()).header
            assert header == {
                "type": "file_op",
                "id": name,
                "op": "read",
                "path": "a/b",
                "offset": 1,
                "max_bytes": 9,
            }
            await container.say({**OUTCOME, "id": name}, b"bytes")
            outcome = await talk.next("file_outcome")
            assert (outcome.operation_id, outcome.data, outcome.end) == (name, b"bytes", True)
        write = files.FileWrite(upload_id="u1", data=b"xyz", last=True, executable=True)
        operation = files.FileOperation(operation_id="f5", path="a/b", write=write)
        await talk.send(file_operation=operation)
        frame = await container.hear()
        assert frame.payload == b"xyz"
        assert {key: frame.header[key] for key in ("upload", "last", "executable", "abandon")} == {
            "upload": "u1",
            "last": True,
            "executable": True,
            "abandon": False,
        }


async def test_answers_that_nobody_asked_for_end_it_denied_and_no_neighbour() -> None:
    driver = ScriptedDriver()
    forged: dict[str, tuple[dict[str, Any], bytes]] = {
        "result": ({**RESULT, "call": "t1"}, b"1"),
        "outcome": ({**OUTCOME, "id": "f1"}, b""),
        "taken": ({"type": "stdin_taken", "offset": 1}, b""),
        "display": ({"type": "display", "cell": "c", "index": 0, "result": True, "data": []}, b""),
    }
    async with host(driver) as it:
        good, neighbour = await started(it, driver, "sbx_good")
        for name, (header, payload) in forged.items():
            talk, container = await started(it, driver, f"sbx_{name}")
            await container.say(header, payload)
            assert (await talk.next("gone")).cause == pb.GONE_CAUSE_DENIED
        await begin(good, neighbour, "cell_1")
