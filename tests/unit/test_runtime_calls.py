"""What the guest asks for and how it takes the answers: children, artifacts, blobs, threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.runtime import values
from sandbox.runtime.frames import Frame
from tests.support.frame_client import FrameClient, Report, supervisor


@pytest.fixture
def client(tmp_path: Path) -> Iterator[FrameClient]:
    with supervisor(tmp_path, "--grace-milliseconds", "150") as (client, _):
        client.expect("ready")
        yield client


class Answers:
    """Answers calls in turn and keeps them."""

    def __init__(self, client: FrameClient, *answers: Any) -> None:
        self._client = client
        self._answers = list(answers)
        self.calls: list[dict[str, Any]] = []
        self.frames: list[Frame] = []

    def __call__(self, call: Frame) -> None:
        self.calls.append(call.header)
        self.frames.append(call)
        answer = self._answers.pop(0)
        if isinstance(answer, dict) and "failure" in answer:
            self._client.reply_failure(call, **answer["failure"])
        else:
            self._client.reply(call, values.encode(answer))


def returned(report: Report) -> object:
    assert report.outcome == "returned", report
    assert report.value is not None
    return values.decode(report.value)


def test_invoke_sends_all_that_it_was_given_and_returns_the_value(client: FrameClient) -> None:
    answers = Answers(client, [1, 2])
    cell = client.start(
        "import hutch\n"
        "return hutch.invoke(hutch.ReturnType(list[int]),"
        " program='''\n    x = 1\n    return x\n''',"
        " inputs={'label': 7}, items=(1, 2), label='name', timeout_seconds=1.5, max_depth=3,"
        " max_children=5, memory_limit_bytes=1000, artifact_patterns=['a/*'], retry_on_loss=True)"
    )
    report = client.finish(cell, answers)
    assert returned(report) == [1, 2]
    header, payload = answers.calls[0], answers.frames[0].payload
    assert client.content(header.pop("program"), payload) == b"\nx = 1\nreturn x\n"
    sent = {i["name"]: client.content(i["value"], payload) for i in header.pop("inputs")}
    assert sent == {"label": b"7", "items": b'{"$tuple":[1,2]}'}
    contract = header.pop("contract")
    schema = b'{"type":"array","items":{"type":"integer"}}'
    assert client.content(contract["schema"], payload) == schema
    assert contract["max_failures"] == 0
    call = header.pop("call")
    assert isinstance(call, str)
    assert 0 < len(call) <= 64
    assert header == {
        "type": "call",
        "cell": cell,
        "op": "spawn",
        "detached": False,
        "task": None,
        "spawn": {"max_depth": 3, "max_children": 5},
        "resources": {"memory_limit_bytes": 1000},
        "tools": [],
        "timeout_ms": 1500,
        "template": "",
        "label": "name",
        "artifact_patterns": ["a/*"],
        "retry_on_loss": True,
        "output_view_bytes": 0,
        "output_limit_bytes": 0,
    }


def test_the_value_becomes_the_declared_type(client: FrameClient) -> None:
    answers = Answers(client, {"name": "a", "size": 1.0})
    cell = client.start(
        "from dataclasses import dataclass\nfrom hutch import invoke\n"
        "@dataclass\nclass Row:\n    name: str\n    size: int\n"
        "row = invoke(Row, program='pass')\n"
        "return type(row) is Row, row.size, type(row.size).__name__"
    )
    assert returned(client.finish(cell, answers)) == (True, 1, "int")


def test_blocks_give_inputs_and_depth_to_every_call(client: FrameClient) -> None:
    answers = Answers(client, None, None)
    cell = client.start(
        "import hutch\n"
        "with hutch.scope(a=1, b=2), hutch.RecursionLimit(max_depth=3):\n"
        "    with hutch.RecursionLimit(max_depth=5):\n"
        "        hutch.invoke(program='pass', b=3)\n"
        "hutch.invoke(program='pass')"
    )
    client.finish(cell, answers)
    inside, outside = answers.calls
    payload = answers.frames[0].payload
    given = {i["name"]: client.content(i["value"], payload) for i in inside["inputs"]}
    assert given == {"a": b"1", "b": b"3"}
    assert inside["spawn"] == {"max_depth": 3}
    assert (outside["inputs"], outside["spawn"]) == ([], {})


FAILURES = [
    ({"reason": "DEPTH_LIMIT_REACHED", "message": "no"}, "RecursionLimitError", "no"),
    ({"reason": "GRANT_DENIED", "message": "memory"}, "GrantDeniedError", "memory"),
    ({"reason": "NOT_BUILT", "message": "later"}, "NotBuiltError", "later"),
    (
        {
            "ending": "contract_violated",
            "invocation_id": "inv_1",
            "path": "result[0]",
            "expected": "integer",
            "got": "'x'",
        },
        "ReturnTypeError",
        "inv_1 returned a value that its contract refuses at result[0]: expected integer, got 'x'",
    ),
    (
        {"ending": "raised", "invocation_id": "inv_1", "type_name": "ValueError", "message": "m"},
        "InvocationRaised",
        "inv_1 raised ValueError: m",
    ),
    (
        {"ending": "deadline_exceeded", "invocation_id": "inv_1"},
        "DeadlineExceededError",
        "inv_1 ended deadline_exceeded",
    ),
    (
        {"ending": "crashed", "invocation_id": "inv_1", "message": "signal 11"},
        "InvocationCrashed",
        "inv_1 ended crashed: signal 11",
    ),
]


@pytest.mark.parametrize(("failure", "name", "text"), FAILURES, ids=[row[1] for row in FAILURES])
def test_a_failure_is_an_ordinary_exception(
    client: FrameClient, failure: dict[str, str], name: str, text: str
) -> None:
    answers = Answers(client, {"failure": failure}, {"failure": failure})
    cell = client.start(
        "import hutch\ntry:\n    invoke(program='pass')\n"
        f"except hutch.{name} as e:\n    return str(e), isinstance(e, hutch.errors.HutchError)"
    )
    assert returned(client.finish(cell, answers)) == (text, True)
    report = client.finish(client.start("invoke(program='pass')"), answers)
    assert (report.outcome, report.failure["type_name"]) == ("errored", name)
    for key in ("ending", "invocation_id", "path", "expected", "got"):
        assert report.failure[key] == failure.get(key, "")
    assert report.failure["reason"] == failure.get("reason", "")


REFUSED = [
    ("invoke()", "FieldInvalidError", "exactly one of program= and task="),
    ("invoke(program='', task='')", "FieldInvalidError", "exactly one"),
    ("invoke(program=5)", "FieldInvalidError", "not a text"),
    ("invoke(program='\\ud800')", "FieldInvalidError", "lone surrogates"),
    ("invoke(int, str, program='')", "FieldInvalidError", "two return types"),
    ("invoke(program='', inputs={'a b': 1})", "FieldInvalidError", "'a b'"),
    ("invoke(program='', inputs={'class': 1})", "FieldInvalidError", "'class'"),
    ("invoke(program='', inputs=[1])", "FieldInvalidError", "inputs is a list"),
    ("invoke('return 1')", "FieldInvalidError", "program="),
    ("invoke(program='', artifact_patterns='*.csv')", "FieldInvalidError", "a list"),
    ("invoke(program='', timeout_seconds=0)", "FieldInvalidError", "timeout_seconds"),
    ("invoke(program='', max_depth=-1)", "FieldInvalidError", "max_depth"),
    ("invoke(program='', rows=[1, {'f': iter(())}])", "ValueEncodeError", 'rows[1]["f"]'),
    ("invoke(type, program='')", "HintError", "type cannot be expressed"),
    ("invoke(program='', label='x' * 70_000)", "PayloadTooLargeError", "frame"),
]


@pytest.mark.parametrize(("code", "name", "text"), REFUSED, ids=[row[0] for row in REFUSED])
def test_what_cannot_be_asked_is_refused_before_anything_is_sent(
    client: FrameClient, code: str, name: str, text: str
) -> None:
    report = client.run(code)
    assert report.failure["type_name"] == name
    assert text in report.failure["message"]


def test_large_inputs_and_values_travel_as_blobs(client: FrameClient) -> None:
    received = {}

    def answer(call: Frame) -> None:
        for item in call.header["inputs"]:
            received[item["name"]] = client.content(item["value"], call.payload)
        client.reply(call, values.encode("y" * 3_000_000))

    cell = client.start("return len(invoke(program='', a='x' * 2_000_000, b=1, c='z' * 300_000))")
    assert returned(client.finish(cell, answer)) == 3_000_000
    assert received == {
        "a": values.encode("x" * 2_000_000),
        "b": b"1",
        "c": values.encode("z" * 300_000),
    }


def test_threads_call_at_the_same_time(client: FrameClient) -> None:
    """Case 20: sixteen threads of one cell each get their own answer."""
    calls: list[Frame] = []

    def answer(call: Frame) -> None:
        calls.append(call)
        if len(calls) == 16:
            for waiting in reversed(calls):
                (item,) = waiting.header["inputs"]
                client.reply(waiting, client.content(item["value"], waiting.payload))

    cell = client.start(
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(16) as pool:\n"
        "    return list(pool.map(lambda n: invoke(program='return n', n=n), range(16)))"
    )
    assert returned(client.finish(cell, answer)) == list(range(16))


def test_coroutines_call_at_the_same_time(client: FrameClient) -> None:
    calls: list[Frame] = []

    def answer(call: Frame) -> None:
        calls.append(call)
        if len(calls) == 3:
            for waiting in calls:
                (item,) = waiting.header["inputs"]
                client.reply(waiting, client.content(item["value"], waiting.payload))

    cell = client.start(
        "import asyncio, hutch\n"
        "return await asyncio.gather(*(hutch.ainvoke(program='return n', n=n) for n in range(3)))"
    )
    assert returned(client.finish(cell, answer)) == [0, 1, 2]


def test_a_handle_does_what_it_says(client: FrameClient) -> None:
    artifact = {"artifact_id": "art_1", "name": "a", "sha256": "00", "size_bytes": 3}
    answers = Answers(
        client,
        "inv_child",
        {"state": "running", "ending": None},
        {"offset": 0, "data": b"printed", "total_bytes": 7},
        {"artifacts": [artifact]},
        None,
        {"failure": {"ending": "cancelled", "invocation_id": "inv_child"}},
    )
    cell = client.start("import hutch\nchild = hutch.spawn(int, program='pass')")
    assert client.finish(cell, answers).outcome == "completed"
    cell = client.start(
        "seen = [child.id, child.status, child.output('stderr', 2, 5)]\n"
        "seen.append([a.name for a in child.artifacts])\nchild.cancel()\n"
        "try:\n    child.result()\nexcept hutch.InvocationCancelled as e:\n"
        "    return seen, e.child_id"
    )
    report = client.finish(cell, answers)
    assert returned(report) == (["inv_child", "running", b"printed", ["a"]], "inv_child")
    operations = [(call["op"], call.get("view", "")) for call in answers.calls]
    assert operations == [
        ("spawn", ""),
        ("inspect_child", "status"),
        ("inspect_child", "output"),
        ("inspect_child", "artifacts"),
        ("cancel_child", ""),
        ("await_child", ""),
    ]
    assert answers.calls[0]["detached"] is True
    view = answers.calls[2]
    assert (view["stream"], view["offset"], view["max_bytes"]) == ("stderr", 2, 5)


def test_a_wait_that_is_too_short_goes_on_later(client: FrameClient) -> None:
    calls: list[Frame] = []

    def answer(call: Frame) -> None:
        calls.append(call)
        if call.header["op"] == "spawn":
            client.reply(call, b'"inv_child"')

    cell = client.start(
        "import hutch\nchild = hutch.spawn(program='pass')\n"
        "try:\n    child.result(timeout_seconds=0.05)\n"
        "except hutch.ResultTimeoutError as e:\n    return str(e)"
    )
    assert returned(client.finish(cell, answer)) == "inv_child has not ended after 0.05 s"
    client.reply(calls[-1], b"9")
    assert returned(client.run("return child.result(), child.result(0)")) == (9, 9)


def test_an_async_handle_is_awaitable(client: FrameClient) -> None:
    answers = Answers(client, "inv_child", 5, {"state": "ended"})
    cell = client.start(
        "import hutch\nchild = await hutch.aspawn(program='pass')\n"
        "return await child.result(), await child.status()"
    )
    assert returned(client.finish(cell, answers)) == (5, "ended")


def test_an_interrupt_reaches_a_waiting_call(client: FrameClient) -> None:
    cell = client.start(
        "try:\n    invoke(program='pass')\nexcept KeyboardInterrupt:\n    return 'out'"
    )
    client.expect("started")
    call = client.expect("call")
    client.send({"type": "interrupt", "cell": cell})
    assert returned(client.finish(cell)) == "out"
    client.reply(call, b"1")
    assert returned(client.run("return 2")) == 2


def test_a_thread_of_an_earlier_cell_still_gets_its_answer(client: FrameClient) -> None:
    cell = client.start(
        "import threading\nfound = []\nsent = threading.Event()\n"
        "def work():\n    sent.wait()\n    found.append(invoke(program='pass'))\n"
        "thread = threading.Thread(target=work)\nthread.start()"
    )
    assert client.finish(cell).outcome == "completed"
    cell = client.start("import time\nsent.set()\nthread.join()\nreturn found")
    answers = Answers(client, 7)
    assert returned(client.finish(cell, answers)) == [7]


def test_a_call_between_cells_names_no_cell(client: FrameClient) -> None:
    client.run(
        "import threading\nfound = []\n"
        "threading.Timer(0.2, lambda: found.append(invoke(program='pass'))).start()"
    )
    call = client.expect("call")
    assert call.header["cell"] == ""
    client.reply(call, b"3")
    cell = client.start("import time\nwhile not found: time.sleep(0.01)\nreturn found")
    assert returned(client.finish(cell)) == [3]


def test_answers_to_a_dead_repl_are_dropped(client: FrameClient) -> None:
    cell = client.start(
        "import os, threading\nthreading.Thread(target=invoke, kwargs={'program': ''}).start()\n"
        "import time\nwhile not os.path.exists('/nowhere'): time.sleep(0.01)"
    )
    client.expect("started")
    call = client.expect("call")
    client.send({"type": "interrupt", "cell": cell})
    assert client.finish(cell).outcome == "interrupted"
    assert client.run("os._exit(1)").outcome == "repl_died"
    client.reply(call, b"1")
    answers = Answers(client, 2)
    assert returned(client.finish(client.start("return invoke(program='pass')"), answers)) == 2
    assert answers.calls[0]["call"] != call.header["call"]


def test_code_that_never_calls_may_fork_without_a_second_thread(client: FrameClient) -> None:
    report = client.run("return len(__import__('os').listdir('/proc/self/task'))")
    assert returned(report) == 1


def test_artifacts_are_saved_and_read_in_pieces(client: FrameClient) -> None:
    saved: list[bytes] = []
    described = {"artifact_id": "art_1", "name": "big", "sha256": "ab", "size_bytes": 700_000}

    def answer(call: Frame) -> None:
        header = call.header
        if header["op"] == "save_artifact":
            saved.append(client.content(header["content"], call.payload))
            client.reply(call, values.encode({**described, "name": header["name"]}))
        else:
            offset = header["offset"]
            piece = saved[0][offset : offset + 400_000]
            view = {"offset": offset, "data": piece, "total_bytes": len(saved[0])}
            client.reply(call, values.encode(view))

    cell = client.start(
        "import hutch\na = hutch.artifacts.save(b'x' * 700_000, name='big')\n"
        "open('note.txt', 'w').write('hello')\nb = hutch.artifacts.save('note.txt')\n"
        "return a, a.size_bytes, b.name, a.read() == b'x' * 700_000"
    )
    report = client.finish(cell, answer)
    assert report.value is not None
    value = values.decode(report.value, artifact=str)
    assert value == ("art_1", 700_000, "note.txt", True)
    assert saved == [b"x" * 700_000, b"hello"]


def test_an_artifact_given_as_an_input_is_a_handle(client: FrameClient) -> None:
    report = client.run("return [a.id, a]", inputs={"a": b'{"$artifact":"art_9"}'})
    assert report.value == b'["art_9",{"$artifact":"art_9"}]'
