"""What the host lets out of a sandbox: one sound exchange, and every way to break it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hutch.v1 import host_service_pb2 as pb
from hutch.v1 import sandbox_file_pb2
from sandbox.host.events import OutputMark
from sandbox.host.fields import ProtocolBreach
from sandbox.host.inbound import Inbound
from sandbox.runtime import frames
from tests.support.host import READY, done, failure

MIB = 1 << 20
STARTED = {"type": "started", "cell": "c"}
OUTPUT = {"type": "output", "cell": "c", "stream": "stdout", "offset": 0}
CALL = {"type": "call", "call": "k", "cell": "c", "op": "await_child", "invocation": "inv_1"}
FILE = {"type": "file", "name_hex": "61", "offset": 0, "last": True}
DISPLAY = {
    "type": "display",
    "cell": "c",
    "index": 0,
    "result": False,
    "data": [{"media_type": "text/plain", "content": {"at": 0, "n": 1}}],
}
CAPTURED = {"type": "captured", "files": 0, "refused": []}
SPAWN: dict[str, Any] = {
    "type": "call",
    "call": "k",
    "cell": "c",
    "op": "spawn",
    "detached": False,
    "program": None,
    "task": "look",
    "inputs": [],
    "contract": None,
    "spawn": {},
    "resources": {},
    "timeout_ms": 0,
    "template": "",
    "label": "",
    "artifact_patterns": [],
    "retry_on_loss": False,
    "output_view_bytes": 0,
    "output_limit_bytes": 0,
    "tools": [],
}
SAVE = {
    "type": "call",
    "call": "k",
    "cell": "c",
    "op": "save_artifact",
    "name": "x",
    "media_type": "",
    "content": {"at": 0, "n": 3},
}


def fresh(*headers: dict[str, Any]) -> Inbound:
    """A sandbox that was given cell `c` and has sent these frames."""
    inbound = Inbound(open_calls=3, output_limit_bytes=8 * MIB)
    inbound.cells.expect("c", interactive=True)
    for header in headers:
        inbound.accept(frames.Frame(header))
    return inbound


def running() -> Inbound:
    """A sandbox whose cell `c` runs and of which files were asked."""
    inbound = fresh(READY, STARTED)
    inbound.expect_capture(max_files=2, max_bytes=10)
    return inbound


def blob(**changes: Any) -> dict[str, Any]:
    """A `blob` frame."""
    return {"type": "blob", "blob": "b", "offset": 0, "last": True, **changes}


BREACHES: dict[str, tuple[dict[str, Any], bytes]] = {
    "ready twice": (READY, b""),
    "unknown type": ({"type": "root"}, b""),
    "type of the host": ({"type": "shutdown"}, b""),
    "started twice": (STARTED, b""),
    "additional key": ({**CALL, "depth": 1}, b""),
    "missing key": ({"type": "started"}, b""),
    "text for a number": ({**OUTPUT, "offset": "0"}, b"x"),
    "boolean for a number": ({**OUTPUT, "offset": False}, b"x"),
    "number for a boolean": ({**FILE, "last": 1}, b"x"),
    "unknown cell": ({**OUTPUT, "cell": "other"}, b"x"),
    "cell that is no text": ({**OUTPUT, "cell": ["c"]}, b"x"),
    "unknown stream": ({**OUTPUT, "stream": "stdin"}, b"x"),
    "output gap": ({**OUTPUT, "offset": 1}, b"x"),
    "empty output": (OUTPUT, b""),
    "long output": (OUTPUT, bytes(65_537)),
    "payload where none is": (CALL, b"x"),
    "call of an unknown cell": ({**CALL, "cell": "other"}, b""),
    "call without an id": ({**CALL, "call": ""}, b""),
    "call with a long id": ({**CALL, "call": "k" * 65}, b""),
    "call with a control character": ({**CALL, "call": "k\n"}, b""),
    "unknown operation": ({**CALL, "op": "exec"}, b""),
    "long text": ({**CALL, "invocation": "i" * 8_193}, b""),
    "task and program": ({**SPAWN, "program": {"at": 0, "n": 1}}, b"x"),
    "program that is not UTF-8": ({**SPAWN, "task": None, "program": {"at": 0, "n": 1}}, b"\xff"),
    "spawn limit unknown": ({**SPAWN, "spawn": {"depth": 1}}, b""),
    "spawn limit no number": ({**SPAWN, "spawn": {"max_depth": None}}, b""),
    "resources missing": ({k: v for k, v in SPAWN.items() if k != "resources"}, b""),
    "parent named": ({**SPAWN, "parent_id": "inv_other"}, b""),
    "tenant named": ({**SPAWN, "tenant": "other"}, b""),
    "pattern no text": ({**SPAWN, "artifact_patterns": [1]}, b""),
    "contract as a blob": (
        {**SPAWN, "contract": {"schema": {"blob": "b", "n": 1}, "max_failures": 0}},
        b"",
    ),
    "part outside": ({**SAVE, "content": {"at": 1, "n": 3}}, b"abc"),
    "part not all": ({**SAVE, "content": {"at": 0, "n": 2}}, b"abc"),
    "part of both kinds": ({**SAVE, "content": {"at": 0, "n": 3, "blob": "b"}}, b"abc"),
    "part of no kind": ({**SAVE, "content": {"n": 3}}, b"abc"),
    "part that is no object": ({**SAVE, "content": "abc"}, b"abc"),
    "blob that never came": ({**SAVE, "content": {"blob": "b", "n": 3}}, b""),
    "blob gap": (blob(offset=1), b"x"),
    "blob chunk of nothing": (blob(last=False), b""),
    "done with another count": (done("c", stdout_bytes=1), b""),
    "done of an unknown cell": (done("other"), b""),
    "returned without a value": (done("c", outcome="returned"), b""),
    "completed with a value": (done("c", value={"at": 0, "n": 1}), b"1"),
    "raised without a failure": (done("c", outcome="raised"), b""),
    "unknown outcome": (done("c", outcome="won"), b""),
    "exit code of a REPL that lives": (done("c", exit_code=0), b""),
    "unknown ending": (done("c", outcome="raised", failure=failure(ending="won")), b""),
    "ending in capitals": (done("c", outcome="raised", failure=failure(ending="RAISED")), b""),
    "long message": (done("c", outcome="raised", failure=failure(message="m" * 8_001)), b""),
    "long traceback": (done("c", outcome="raised", failure=failure(traceback="t" * 16_001)), b""),
    "failure with more": (done("c", outcome="raised", failure={**failure(), "x": ""}), b""),
    "evidence forged": ({**done("c"), "oom_kill_count": 1}, b""),
    "errno of another type": (done("c", errno="ENOSPC"), b""),
    "file name not hexadecimal": ({**FILE, "name_hex": "zz"}, b"x"),
    "file name with spaces": ({**FILE, "name_hex": "61 62"}, b"x"),
    "file without a name": ({**FILE, "name_hex": ""}, b"x"),
    "file gap": ({**FILE, "offset": 1}, b"x"),
    "file too large": (FILE, b"x" * 11),
    "captured others": ({**CAPTURED, "files": 1}, b""),
    "captured with many refused": (
        {**CAPTURED, "refused": [{"name_hex": "61", "reason": ""}] * 257},
        b"",
    ),
}


@pytest.mark.parametrize("name", BREACHES)
def test_a_frame_that_no_sandbox_may_send_is_a_breach(name: str) -> None:
    header, payload = BREACHES[name]
    with pytest.raises(ProtocolBreach):
        running().accept(frames.Frame(header, payload))


@pytest.mark.parametrize(
    "header",
    [
        READY,
        STARTED,
        CALL,
        SPAWN,
        done("c"),
        CAPTURED,
        done("c", outcome="raised", failure=failure(ending="raised", invocation_id="inv_2")),
    ],
)
def test_the_sound_frames_of_which_the_breaches_were_made_are_taken(
    header: dict[str, Any],
) -> None:
    inbound = fresh() if header is READY else running()
    if header is STARTED:
        inbound = fresh(READY)
    assert inbound.accept(frames.Frame(header)).events


@pytest.mark.parametrize("header", [STARTED, CALL, done("c"), blob(), OUTPUT])
def test_nothing_comes_before_ready(header: dict[str, Any]) -> None:
    with pytest.raises(ProtocolBreach):
        fresh().accept(frames.Frame(header, b"x"))


@pytest.mark.parametrize(
    "changes", [{"version": 2}, {"protections": {}}, {"python": 3}, {"protections": None}]
)
def test_ready_of_another_form_is_a_breach(changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolBreach):
        fresh().accept(frames.Frame({**READY, **changes}))


def test_files_that_nobody_asked_for_are_a_breach() -> None:
    for header in (FILE, CAPTURED):
        with pytest.raises(ProtocolBreach):
            fresh(READY).accept(frames.Frame(header))


def test_a_capture_ends_once_and_is_asked_for_once() -> None:
    inbound = running()
    assert not inbound.expect_capture(1, 1)
    inbound.accept(frames.Frame(FILE, b"x"))
    inbound.accept(frames.Frame({**CAPTURED, "files": 1}))
    with pytest.raises(ProtocolBreach):
        inbound.accept(frames.Frame({**CAPTURED, "files": 1}))


def test_a_file_within_a_file_is_a_breach() -> None:
    inbound = running()
    inbound.accept(frames.Frame({**FILE, "last": False}, b"x"))
    with pytest.raises(ProtocolBreach):
        inbound.accept(frames.Frame({**FILE, "name_hex": "62"}, b"x"))


def test_a_cell_ends_once_and_only_its_late_output_comes_after() -> None:
    for header in (done("c"), STARTED, DISPLAY):
        inbound = running()
        inbound.accept(frames.Frame(done("c")))
        with pytest.raises(ProtocolBreach):
            inbound.accept(frames.Frame(header, b"x" if header is DISPLAY else b""))


def test_late_output_goes_on_in_its_cells_stream_by_credit_and_within_the_limit() -> None:
    inbound = fresh(READY, STARTED)
    inbound.accept(frames.Frame(OUTPUT, b"abc"))
    inbound.accept(frames.Frame(done("c", stdout_bytes=3)))
    inbound.cells.expect("d", interactive=True)
    inbound.accept(frames.Frame({**STARTED, "cell": "d"}))
    late = inbound.accept(frames.Frame({**OUTPUT, "offset": 3}, b"d")).events[0].output
    assert (late.cell_id, late.offset) == ("c", 3)
    inbound.accept(frames.Frame({**OUTPUT, "cell": "d"}, b"e"))
    with pytest.raises(ProtocolBreach):
        inbound.accept(frames.Frame(OUTPUT, b"again from the start"))
    inbound = fresh(READY, STARTED)
    inbound.accept(frames.Frame(done("c")))
    for index in range(64):
        inbound.accept(frames.Frame({**OUTPUT, "offset": index * 65_536}, bytes(65_536)))
    with pytest.raises(ProtocolBreach):
        inbound.accept(frames.Frame({**OUTPUT, "offset": 4 * MIB}, b"x"))
    inbound = fresh(READY, STARTED)
    for kind in ("stdout", "stderr"):  # the limit is of both streams together
        for index in range(64):
            header = {**OUTPUT, "stream": kind, "offset": index * 65_536}
            inbound.accept(frames.Frame(header, bytes(65_536)))
    inbound.cells.take_output(OutputMark(cell_id="c", stream=1, end=4 * MIB))
    with pytest.raises(ProtocolBreach, match="limit"):
        inbound.accept(frames.Frame({**OUTPUT, "offset": 4 * MIB}, b"x"))


def test_a_repl_may_die_before_its_cell_began_and_while_it_was_stopped() -> None:
    assert fresh(READY).accept(frames.Frame(done("c", outcome="repl_died", signal=9))).events
    assert running().accept(frames.Frame(done("c", outcome="timed_out", signal=9))).events


def test_an_errno_that_no_kernel_has_is_none() -> None:
    header = done("c", outcome="raised", failure=failure(), errno=2**40)
    completed = running().accept(frames.Frame(header)).events[0].cell_completed
    assert not completed.HasField("failure_errno")


def test_a_file_that_was_cut_short_counts_for_nothing() -> None:
    inbound = running()
    inbound.accept(frames.Frame({**FILE, "last": False}, b"x"))
    refused = [{"name_hex": "", "reason": "the capture was cut short"}]
    event = inbound.accept(frames.Frame({**CAPTURED, "refused": refused})).events[0]
    assert event.capture_completed.file_count == 0


def test_output_beyond_its_credit_is_a_breach_and_credit_comes_by_the_mebibyte() -> None:
    inbound = running()
    marks = []
    for index in range(64):
        received = inbound.accept(frames.Frame({**OUTPUT, "offset": index * 65_536}, bytes(65_536)))
        assert received.mark is not None
        marks.append(received.mark)
    with pytest.raises(ProtocolBreach):
        inbound.accept(frames.Frame({**OUTPUT, "offset": 4 * MIB}, b"x"))
    inbound = running()
    for index in range(64):
        inbound.accept(frames.Frame({**OUTPUT, "offset": index * 65_536}, bytes(65_536)))
    assert [inbound.cells.take_output(mark) for mark in marks[:16]] == [False] * 15 + [True]
    inbound.accept(frames.Frame({**OUTPUT, "offset": 4 * MIB}, b"x"))


def test_case_28_output_beyond_its_limit_is_a_breach() -> None:
    inbound = Inbound(open_calls=1, output_limit_bytes=10)
    inbound.cells.expect("c", interactive=True)
    for header in (READY, STARTED):
        inbound.accept(frames.Frame(header))
    inbound.accept(frames.Frame(OUTPUT, b"x" * 10))
    with pytest.raises(ProtocolBreach):
        inbound.accept(frames.Frame({**OUTPUT, "offset": 10}, b"x"))


def test_call_ids_are_used_once_and_open_calls_are_counted() -> None:
    inbound = running()
    inbound.accept(frames.Frame(CALL))
    with pytest.raises(ProtocolBreach):
        inbound.accept(frames.Frame(CALL))
    inbound.answer("k")
    assert not inbound.call_is_open("k")
    with pytest.raises(ProtocolBreach):
        inbound.accept(frames.Frame(CALL))
    for name in ("k1", "k2", "k3"):
        inbound.accept(frames.Frame({**CALL, "call": name}))
    with pytest.raises(ProtocolBreach):
        inbound.accept(frames.Frame({**CALL, "call": "k4"}))


def test_blobs_are_few_used_once_and_of_the_size_they_say() -> None:
    inbound = running()
    inbound.accept(frames.Frame(blob(), b"abc"))
    with pytest.raises(ProtocolBreach):
        inbound.accept(frames.Frame({**SAVE, "content": {"blob": "b", "n": 4}}))
    inbound = running()
    inbound.accept(frames.Frame(blob(last=False), b"ab"))
    with pytest.raises(ProtocolBreach):
        inbound.accept(frames.Frame({**SAVE, "content": {"blob": "b", "n": 2}}))
    inbound = running()
    inbound.accept(frames.Frame(blob(), b"abc"))
    inbound.accept(frames.Frame({**SAVE, "content": {"blob": "b", "n": 3}}))
    with pytest.raises(ProtocolBreach):
        inbound.accept(frames.Frame({**SAVE, "call": "k2", "content": {"blob": "b", "n": 3}}))
    inbound = running()
    for index in range(frames.MAX_OPEN_BLOBS):
        inbound.accept(frames.Frame(blob(blob=f"done{index}"), b"x"))
        inbound.accept(frames.Frame(blob(blob=f"b{index}", last=False), b"x"))
    with pytest.raises(ProtocolBreach):
        inbound.accept(frames.Frame(blob(blob="one_more"), b"x"))


def test_a_frame_cannot_make_the_host_send_more_than_it_got() -> None:
    part = {"at": 0, "n": 100}
    inputs = [{"name": f"x{index}", "value": part, "description": ""} for index in range(500)]
    with pytest.raises(ProtocolBreach):
        running().accept(frames.Frame({**SPAWN, "inputs": inputs}, bytes(100)))


def test_an_inline_part_too_large_for_one_message_comes_in_chunks() -> None:
    size = 250_000
    header = {**SAVE, "content": {"at": 0, "n": size}}
    events = running().accept(frames.Frame(header, bytes(size))).events
    chunks = [event.blob for event in events[:-1]]
    assert [len(chunk.data) for chunk in chunks] == [196_608, size - 196_608]
    assert events[-1].call.save_artifact.content == pb.Content(
        blob_id=chunks[0].blob_id, size_bytes=size
    )


TOOL = {
    "tool": "tool_1",
    "name": "add",
    "description": "",
    "signature": "(a, b)",
    "methods": [{"name": "m", "signature": "()", "description": ""}],
    "delegable": False,
    "timeout_ms": 1_500,
}
TOOL_USE = {
    "type": "call",
    "call": "k",
    "cell": "",
    "op": "tool",
    "tool": "tool_1",
    "method": "",
    "arguments": {"at": 0, "n": 1},
}
TOOL_RESULT = {"type": "tool_result", "call": "t", "value": {"at": 0, "n": 1}}
FILE_OUTCOME = {
    "type": "file_outcome",
    "id": "f",
    "problem": "",
    "message": "",
    "entries": [{"name": "a", "kind": "file", "size": 0, "modified_us": 0, "mode": 0}],
    "more": False,
    "end": False,
}


def asked() -> Inbound:
    """As `running`, with a tool call, a file operation and standard input on their way."""
    inbound = running()
    inbound.tools.expect("t")
    listing = sandbox_file_pb2.FileList(max_entries=2)
    inbound.files.ask(sandbox_file_pb2.FileOperation(operation_id="f", path="x", list=listing))
    inbound.files.next_frame()
    inbound.stdin.frame(pb.StdinChunk(data=b"abc"))
    return inbound


def test_tools_are_called_and_granted_by_frames() -> None:
    call = running().accept(frames.Frame(TOOL_USE, b"1")).events[0].call
    assert (call.tool.tool_id, call.tool.arguments.data) == ("tool_1", b"1")
    call = running().accept(frames.Frame({**SPAWN, "tools": [TOOL]})).events[0].call
    (tool,) = call.spawn.spec.tools
    assert (tool.tool_id, tool.methods[0].name) == ("tool_1", "m")
    assert tool.timeout.ToMilliseconds() == 1_500
    for broken in ({**TOOL, "owner": "inv_2"}, {**TOOL, "methods": [{"name": "m"}]}, "tool_1"):
        with pytest.raises(ProtocolBreach):
            running().accept(frames.Frame({**SPAWN, "tools": [broken]}))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2**63 - 1) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
SOUND: list[dict[str, Any]] = [READY, STARTED, OUTPUT, CALL, SPAWN, SAVE, FILE, CAPTURED]
SOUND += [DISPLAY, TOOL_USE, TOOL_RESULT, FILE_OUTCOME, {"type": "stdin_taken", "offset": 1}]
SOUND += [{**SPAWN, "tools": [TOOL]}, done("c", text={"at": 0, "n": 1})]
SOUND += [blob(), done("c"), done("c", outcome="raised", failure=failure())]


@given(data=st.data(), header=st.sampled_from(SOUND), payload=st.binary(max_size=8))
def test_case_s7_whatever_a_field_holds_the_answer_is_events_or_a_breach(
    data: st.DataObject, header: dict[str, Any], payload: bytes
) -> None:
    key = data.draw(st.sampled_from(sorted(header)))
    changed = {**header, key: data.draw(JSON)}
    try:
        received = asked().accept(frames.Frame(changed, payload))
    except ProtocolBreach:
        return
    for event in received.events:
        event.SerializeToString()


STREAM = b"".join(
    frames.encode(header, b"1" if "content" in str(header) or header in (OUTPUT, FILE) else b"")
    for header in SOUND
)


@given(
    changes=st.lists(
        st.tuples(st.integers(0, len(STREAM)), st.integers(0, 8), st.binary(max_size=8)),
        max_size=6,
    ),
    cut=st.integers(1, 5_000),
)
def test_case_s7_whatever_bytes_come_the_answer_is_events_or_a_breach(
    changes: list[tuple[int, int, bytes]], cut: int
) -> None:
    data = bytearray(STREAM)
    for at, removed, put in changes:
        data[at : at + removed] = put
    inbound, decoder = asked(), frames.Decoder()
    inbound.ready = False
    try:
        for at in range(0, len(data), cut):
            decoder.push(data[at : at + cut])
            while (frame := decoder.pop()) is not None:
                for event in inbound.accept(frame).events:
                    event.SerializeToString()
            assert decoder.buffered_bytes <= frames.MAX_FRAME_BYTES
    except (ProtocolBreach, frames.FrameError):
        return
