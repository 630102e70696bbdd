"""What the host exchanges with a live sandbox besides cells: tool calls and standard input."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.runtime.frames import Frame
from tests.support.frame_client import FrameClient, supervisor

# Tools proper are of another layer; here the channel alone answers, with what it was given.
ECHO = """
import _thread, hutch
from hutch.channel import Place
channel = hutch.invoke.__self__._channel
seen = []
def on_tool(header, contents):
    seen.append((header, contents))
    if header["type"] == "tool_call" and header["method"] != "never":
        answer = {"type": "tool_result", "call": header["call"], "value": Place(0)}
        _thread.start_new_thread(channel.send, (answer, [contents[0] * 2]))
channel.on_tool = on_tool
"""


@pytest.fixture
def client(tmp_path: Path) -> Iterator[FrameClient]:
    with supervisor(tmp_path, "--grace-milliseconds", "150") as (client, _):
        client.expect("ready")
        yield client


def call_tool(client: FrameClient, call: str, arguments: bytes, method: str = "") -> None:
    header = {"type": "tool_call", "call": call, "tool": "tool_inv_1", "method": method}
    client.send({**header, "arguments": client.part(arguments)})


def result(client: FrameClient) -> tuple[str, object]:
    frame = client.expect("tool_result")
    return frame.header["call"], value_of(client, frame)


def value_of(client: FrameClient, frame: Frame) -> object:
    if "failure" in frame.header:
        return frame.header["failure"]["reason"]
    return client.content(frame.header["value"], frame.payload)


def test_calls_of_tools_pass_between_cells_and_while_one_runs(client: FrameClient) -> None:
    client.run(ECHO)
    call_tool(client, "k1", b"small")
    assert result(client) == ("k1", b"smallsmall")
    call_tool(client, "k2", b"x" * 1_000_000)
    assert result(client) == ("k2", b"x" * 2_000_000)
    cell = client.start("hutch.spawn(program='pass')\nimport time\ntime.sleep(60)")
    client.expect("started")
    client.reply(client.expect("call"), b'"inv_1"')
    call_tool(client, "k3", b"busy")
    assert result(client) == ("k3", b"busybusy")
    client.send({"type": "interrupt", "cell": cell})
    client.finish(cell)
    call_tool(client, "k4", b"after")
    assert result(client) == ("k4", b"afterafter")
    report = client.run("print([(h['type'], h['call']) for h, _ in seen])")
    assert report.stdout.count(b"tool_call") == 4


def test_the_same_call_of_a_tool_is_passed_once_and_cancelled(client: FrameClient) -> None:
    client.run(ECHO)
    call_tool(client, "k1", b"", "never")
    call_tool(client, "k1", b"", "never")
    client.send({"type": "tool_cancel", "call": "k1"})
    report = client.run("print([h['type'] for h, _ in seen])")
    assert report.stdout == b"['tool_call', 'tool_cancel']\n"


def test_calls_of_tools_that_nobody_has_are_answered(client: FrameClient) -> None:
    call_tool(client, "k1", b"x")
    assert result(client) == ("k1", "TOOL_UNREACHABLE")
    client.run(ECHO)
    call_tool(client, "k2", b"x", "never")
    cell = client.start("import os; os._exit(1)")
    client.expect("started")
    assert result(client) == ("k2", "TOOL_OUTCOME_UNKNOWN")
    client.finish(cell)
    call_tool(client, "k3", b"x")
    assert result(client) == ("k3", "TOOL_UNREACHABLE")


def test_a_result_that_nobody_asked_for_ends_the_repl(client: FrameClient) -> None:
    report = client.run(
        ECHO + "channel.send({'type': 'tool_result', 'call': 'k1', 'value': None}, [])\n"
        "import time\ntime.sleep(60)"
    )
    assert report.outcome == "repl_died"


# Standard input


def feed(client: FrameClient, offset: int, data: bytes, *, close: bool = False) -> None:
    client.send({"type": "stdin", "offset": offset, "close": close}, data)


def taken(client: FrameClient) -> int:
    return int(client.expect("stdin_taken").header["offset"])


def test_case_13_attached_input_is_read_over_many_cells(client: FrameClient) -> None:
    cell = client.start("x = input('name? ')\nprint(x)", stdin=True)
    client.expect("started")
    feed(client, 0, "né\nsecond\nthird\n".encode())
    assert taken(client) == 17
    assert client.finish(cell).stdout == "name? né\n".encode()
    report = client.run("import sys\nprint(sys.stdin.readline())", stdin=True)
    assert report.stdout == b"second\n\n"
    assert client.run("input()").failure["type_name"] == "EOFError"
    assert client.run("print(sys.stdin.read() == '')").stdout == b"True\n"
    assert client.run("print(input())", stdin=True).stdout == b"third\n"
    feed(client, 17, b"last", close=True)
    assert taken(client) == 21
    report = client.run("import subprocess\nsubprocess.run(['cat'])\ninput()", stdin=True)
    assert report.stdout == b"last"
    assert report.failure["type_name"] == "EOFError"


def test_input_that_nobody_reads_waits_and_outlives_a_repl(client: FrameClient) -> None:
    feed(client, 0, b"a" * 65_536)
    assert taken(client) == 65_536
    feed(client, 65_536, b"b" * 65_535 + b"\n")
    assert client.run("import os; os._exit(1)", stdin=True).outcome == "repl_died"
    cell = client.start("len(input())", stdin=True, mode="interactive")
    client.expect("started")
    while taken(client) < 131_072:
        pass
    assert client.finish(cell).text == "131071"


def test_an_interrupt_ends_a_cell_that_waits_for_input(client: FrameClient) -> None:
    cell = client.start("x = 1\ninput('on')", stdin=True)
    client.wait_output(cell, b"on")
    client.send({"type": "interrupt", "cell": cell})
    report = client.finish(cell)
    assert (report.outcome, report.header["state_lost"]) == ("interrupted", False)
    feed(client, 0, b"later\n")
    taken(client)
    assert client.run("print(x, input())", stdin=True).stdout == b"1 later\n"


def test_case_38_a_child_that_writes_before_it_reads(client: FrameClient) -> None:
    size = 1024 * 1024
    cell = client.start(
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', '''\n"
        f"import sys\nsys.stdout.write('o' * {size}); sys.stdout.flush()\n"
        f"print(len(sys.stdin.read({size})))'''])",
        stdin=True,
    )
    sent = done = 0
    while done < size:
        while sent < size and sent - done < 4 * 65_536:
            feed(client, sent, b"i" * 65_536)
            sent += 65_536
        frame = client.receive()
        if frame.type == "stdin_taken":
            done = frame.header["offset"]
        else:
            assert frame.type == "started"
    report = client.finish(cell)
    assert report.stdout == b"o" * size + f"{size}\n".encode()
