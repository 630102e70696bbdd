"""Displays, standard input, tool calls and file operations: sound ones, and broken ones."""

from __future__ import annotations

from typing import Any

import pytest

from hutch.v1 import host_service_pb2 as pb
from hutch.v1 import sandbox_file_pb2 as files
from sandbox.host.errors import HostError
from sandbox.host.exchanges import FileOperations, Stdin
from sandbox.host.fields import ProtocolBreach
from sandbox.host.inbound import Inbound
from sandbox.runtime import frames
from tests.support.host import READY, done, failure

TEXT = {"media_type": "text/plain", "content": {"at": 0, "n": 1}}
DISPLAY: dict[str, Any] = {
    "type": "display",
    "cell": "c",
    "index": 0,
    "result": True,
    "data": [TEXT],
}
RESULT = {"type": "tool_result", "call": "t", "value": {"at": 0, "n": 1}}
ENTRY = {"name": "a", "kind": "file", "size": 1, "modified_us": 2, "mode": 0o644}
OUTCOME: dict[str, Any] = {
    "type": "file_outcome",
    "id": "f",
    "problem": "",
    "message": "",
    "entries": [],
    "more": False,
    "end": False,
}
STAT = files.FileOperation(operation_id="f", path="x", stat=files.FileStat())
LIST = files.FileOperation(operation_id="f", path="x", list=files.FileList(max_entries=2))
READ = files.FileOperation(operation_id="f", path="x", read=files.FileRead(max_bytes=4))
WRITE = files.FileOperation(
    operation_id="f", path="x", write=files.FileWrite(upload_id="u", data=b"x", last=True)
)


def running(*, interactive: bool = True, limit: int = 1 << 20) -> Inbound:
    """A sandbox whose cell `c` runs."""
    inbound = Inbound(open_calls=3, output_limit_bytes=limit, waiting_file_operations=1)
    inbound.cells.expect("c", interactive=interactive)
    inbound.accept(frames.Frame(READY))
    inbound.accept(frames.Frame({"type": "started", "cell": "c"}))
    return inbound


def accept(inbound: Inbound, header: dict[str, Any], payload: bytes = b"") -> Any:
    """The one event that a frame means."""
    (event,) = inbound.accept(frames.Frame(header, payload)).events
    return getattr(event, str(event.WhichOneof("event")))


def test_displays_come_in_order_with_all_their_media_types() -> None:
    inbound = running()
    picture = {"media_type": "image/png", "content": {"at": 1, "n": 3}}
    shown = accept(inbound, {**DISPLAY, "data": [TEXT, picture]}, b"1png")
    assert (shown.cell_id, shown.index, shown.is_result) == ("c", 0, True)
    assert [(item.media_type, item.content.data) for item in shown.data] == [
        ("text/plain", b"1"),
        ("image/png", b"png"),
    ]
    assert accept(inbound, {**DISPLAY, "index": 1}, b"2").index == 1


@pytest.mark.parametrize(
    ("changes", "payload"),
    [
        ({"cell": "other"}, b"1"),
        ({"index": 1}, b"1"),
        ({"index": 256}, b"1"),
        ({"result": 1}, b"1"),
        ({"data": []}, b""),
        ({"data": [TEXT] * 9}, b"1" * 9),
        ({"data": [{**TEXT, "media_type": ""}]}, b"1"),
        ({"data": [{**TEXT, "media_type": "text/html\r\nX: y"}]}, b"1"),
        ({"data": [{**TEXT, "media_type": "t" * 101}]}, b"1"),
        ({"data": [{**TEXT, "alt": ""}]}, b"1"),
        ({"data": [TEXT]}, b"12"),
        ({"data": [{**TEXT, "content": {"at": 0, "n": 11}}]}, b"1" * 11),
    ],
)
def test_a_display_of_another_form_is_a_breach(changes: dict[str, Any], payload: bytes) -> None:
    with pytest.raises(ProtocolBreach):
        accept(running(limit=10), {**DISPLAY, **changes}, payload)


def test_a_cell_shows_256_things_and_no_more_bytes_than_it_may_print() -> None:
    inbound = running(limit=256)
    for index in range(256):
        accept(inbound, {**DISPLAY, "index": index}, b"1")
    with pytest.raises(ProtocolBreach):
        accept(inbound, {**DISPLAY, "index": 256}, b"1")
    inbound = running(limit=2)
    for index in range(2):
        accept(inbound, {**DISPLAY, "index": index}, b"1")
    with pytest.raises(ProtocolBreach, match="limit"):
        accept(inbound, {**DISPLAY, "index": 2}, b"1")


def test_the_text_of_a_result_is_of_interactive_cells_and_bounded() -> None:
    text = {"at": 0, "n": 2}
    assert accept(running(), done("c", text=text), b"42").text == "42"
    for interactive, size, data in (
        (False, 2, b"42"),
        (True, 65_537, bytes(65_537)),
        (True, 1, b"\xff"),
    ):
        header = done("c", text={"at": 0, "n": size})
        with pytest.raises(ProtocolBreach):
            accept(running(interactive=interactive), header, data)


def test_input_goes_on_where_it_ended_and_what_came_before_is_dropped() -> None:
    stdin = Stdin()

    def send(offset: int, data: bytes, close: bool = False) -> frames.Frame | None:
        chunk = pb.StdinChunk(offset=offset, data=data, close=close)
        frame = stdin.frame(chunk)
        return frames.Decoder().feed(frame)[0] if frame is not None else None

    first = send(0, b"abc")
    assert first == frames.Frame({"type": "stdin", "offset": 0, "close": False}, b"abc")
    assert send(0, b"abc") is None
    again = send(1, b"bcde", close=True)
    assert again == frames.Frame({"type": "stdin", "offset": 3, "close": True}, b"de")
    assert send(1, b"bcde", close=True) is None
    assert stdin.offset == 5
    for offset, data in ((6, b"x"), (5, b"x"), (0, bytes(65_537))):
        with pytest.raises(HostError):
            send(offset, data)


def test_at_most_256_kib_of_input_are_on_their_way() -> None:
    inbound = running()
    for index in range(4):
        inbound.stdin.frame(pb.StdinChunk(offset=index << 16, data=bytes(1 << 16)))
    with pytest.raises(HostError):
        inbound.stdin.frame(pb.StdinChunk(offset=1 << 18, data=b"x"))
    assert accept(inbound, {"type": "stdin_taken", "offset": 5}).offset == 5
    assert inbound.stdin.frame(pb.StdinChunk(offset=1 << 18, data=b"12345"))
    for offset in (4, (1 << 18) + 6):
        with pytest.raises(ProtocolBreach):
            accept(inbound, {"type": "stdin_taken", "offset": offset})


def test_a_tool_answers_what_it_was_asked_and_once() -> None:
    inbound = running()
    assert inbound.tools.expect("t") is None
    assert inbound.tools.is_open("t")
    assert accept(inbound, RESULT, b"1").value.data == b"1"
    assert inbound.tools.knows("t")
    assert not inbound.tools.is_open("t")
    for header in (RESULT, {**RESULT, "call": "never"}):
        with pytest.raises(ProtocolBreach):
            accept(inbound, header, b"1")
    inbound.tools.expect("t2")
    failed = {
        "type": "tool_result",
        "call": "t2",
        "failure": failure(reason="TOOL_OUTCOME_UNKNOWN"),
    }
    assert accept(inbound, failed).failure.reason == "TOOL_OUTCOME_UNKNOWN"


@pytest.mark.parametrize(
    "header",
    [
        {"type": "tool_result", "call": "t"},
        {**RESULT, "failure": failure()},
        {**RESULT, "value": None},
        {"type": "tool_result", "call": "t", "failure": {}},
        {**RESULT, "value": {"blob": "b", "n": 1}},
    ],
)
def test_a_tools_result_of_another_form_is_a_breach(header: dict[str, Any]) -> None:
    inbound = running()
    inbound.tools.expect("t")
    with pytest.raises(ProtocolBreach):
        accept(inbound, header, b"1")


def test_one_call_of_a_tool_too_many_is_answered_by_the_host() -> None:
    inbound = running()
    assert [inbound.tools.expect(f"t{index}") for index in range(3)] == [None] * 3
    refused = inbound.tools.expect("t3")
    assert refused is not None
    assert refused.failure.reason == "QUOTA_EXCEEDED"
    assert inbound.tools.knows("t3")
    with pytest.raises(HostError):
        inbound.tools.expect("")


def test_ids_of_answered_calls_are_remembered_without_growing() -> None:
    inbound = Inbound(open_calls=3, output_limit_bytes=1, remembered_ids=10)
    inbound.accept(frames.Frame(READY))
    for index in range(1_000):
        inbound.tools.expect(f"t{index}")
        accept(inbound, {**RESULT, "call": f"t{index}"}, b"1")
    assert sum(inbound.tools.knows(f"t{index}") for index in range(1_000)) == 10
    assert inbound.tools.knows("t999")


@pytest.mark.parametrize(
    ("operation", "changes", "payload"),
    [
        (STAT, {"entries": [ENTRY]}, b""),
        (LIST, {"entries": [ENTRY, {**ENTRY, "kind": "link"}], "more": True}, b""),
        (LIST, {}, b""),
        (READ, {"end": True}, b"1234"),
        (READ, {}, b"1"),
        (WRITE, {"entries": [ENTRY]}, b""),
        (READ, {"problem": "not_found", "message": "there is no x"}, b""),
    ],
)
def test_operations_on_files_have_their_outcomes(
    operation: files.FileOperation, changes: dict[str, Any], payload: bytes
) -> None:
    inbound = running()
    assert inbound.files.ask(operation) is None
    frame = inbound.files.next_frame()
    assert frame is not None
    header = frames.Decoder().feed(frame)[0].header
    assert (header["type"], header["id"], header["path"]) == ("file_op", "f", "x")
    outcome = accept(inbound, {**OUTCOME, **changes}, payload)
    assert (outcome.operation_id, outcome.data) == ("f", payload)
    assert len(outcome.entries) == len(changes.get("entries", []))
    with pytest.raises(ProtocolBreach):
        accept(inbound, {**OUTCOME, **changes}, payload)


@pytest.mark.parametrize(
    ("operation", "changes", "payload"),
    [
        (STAT, {"id": "other", "entries": [ENTRY]}, b""),
        (STAT, {}, b""),
        (STAT, {"entries": [ENTRY, ENTRY]}, b""),
        (STAT, {"entries": [{**ENTRY, "kind": "door"}]}, b""),
        (STAT, {"entries": [{**ENTRY, "owner": 0}]}, b""),
        (STAT, {"entries": [{**ENTRY, "mode": 2**32}]}, b""),
        (STAT, {"entries": [ENTRY]}, b"x"),
        (STAT, {"problem": "gone"}, b""),
        (STAT, {"problem": "not_found", "entries": [ENTRY]}, b""),
        (LIST, {"entries": [ENTRY] * 3}, b""),
        (LIST, {"more": True}, b""),
        (READ, {"end": True}, b"12345"),
        (READ, {"end": False}, b""),
        (READ, {"problem": "denied"}, b"1"),
        (WRITE, {"entries": [ENTRY]}, b"x"),
        (WRITE, {}, b""),
        (STAT, {"problem": "busy"}, b""),
    ],
)
def test_an_outcome_of_another_form_is_a_breach(
    operation: files.FileOperation, changes: dict[str, Any], payload: bytes
) -> None:
    inbound = running()
    inbound.files.ask(operation)
    inbound.files.next_frame()
    with pytest.raises(ProtocolBreach):
        accept(inbound, {**OUTCOME, **changes}, payload)


def test_an_outcome_that_nobody_asked_for_is_a_breach() -> None:
    inbound = running()
    inbound.files.ask(WRITE)  # it waits here: the sandbox does not have it yet
    with pytest.raises(ProtocolBreach):
        accept(inbound, OUTCOME)


def test_operations_wait_for_the_one_before_and_few_may_wait() -> None:
    inbound = running()
    operations = [
        files.FileOperation(operation_id=f"f{index}", path="x", stat=files.FileStat())
        for index in range(3)
    ]
    assert inbound.files.ask(operations[0]) is None
    assert inbound.files.next_frame()
    assert inbound.files.ask(operations[0]) is None
    assert inbound.files.ask(operations[1]) is None
    assert inbound.files.next_frame() is None
    refused = inbound.files.ask(operations[2])
    assert refused is not None
    assert refused.problem == "busy"
    accept(inbound, {**OUTCOME, "id": "f0", "problem": "not_found"})
    assert inbound.files.next_frame()
    accept(inbound, {**OUTCOME, "id": "f1", "problem": "not_found"})
    # Each id acts once, however it ended.
    assert [inbound.files.ask(operation) for operation in operations] == [None] * 3
    assert inbound.files.next_frame() is None


@pytest.mark.parametrize(
    "operation",
    [
        files.FileOperation(path="x", stat=files.FileStat()),
        files.FileOperation(operation_id="f", stat=files.FileStat()),
        files.FileOperation(operation_id="f", path="x" * 4_097, stat=files.FileStat()),
        files.FileOperation(operation_id="f", path="x"),
        files.FileOperation(operation_id="f", path="x", list=files.FileList()),
        files.FileOperation(operation_id="f", path="x", list=files.FileList(max_entries=501)),
        files.FileOperation(
            operation_id="f", path="x", list=files.FileList(max_entries=1, after="x" * 4_097)
        ),
        files.FileOperation(operation_id="f", path="x", read=files.FileRead()),
        files.FileOperation(operation_id="f", path="x", read=files.FileRead(max_bytes=196_609)),
        files.FileOperation(operation_id="f", path="x", write=files.FileWrite(upload_id="../x")),
        files.FileOperation(
            operation_id="f", path="x", write=files.FileWrite(upload_id="u", data=bytes(196_609))
        ),
    ],
)
def test_operations_that_no_frame_can_carry_are_refused(operation: files.FileOperation) -> None:
    with pytest.raises(HostError):
        FileOperations(max_waiting=1, remembered=1).ask(operation)


def test_what_is_kept_of_100_000_cells_is_little() -> None:
    inbound = Inbound(open_calls=3, output_limit_bytes=10)
    inbound.accept(frames.Frame(READY))
    for index in range(100_000):
        inbound.cells.expect(f"cell_{index}", interactive=True)
        inbound.accept(frames.Frame(done(f"cell_{index}")))
    assert not inbound.busy()
    assert "cell_0" in inbound.cells
    late = {"type": "output", "cell": "cell_0", "stream": "stderr", "offset": 0}
    assert accept(inbound, late, b"late").cell_id == "cell_0"
