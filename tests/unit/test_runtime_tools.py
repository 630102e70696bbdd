"""Tools in a sandbox: functions given to children, calls served, granted tools called."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.runtime import frames, values
from sandbox.runtime.frames import Frame
from tests.support.frame_client import FrameClient, Report, supervisor


@pytest.fixture
def client(tmp_path: Path) -> Iterator[FrameClient]:
    with supervisor(tmp_path, "--grace-milliseconds", "150") as (client, _):
        client.expect("ready")
        yield client


def returned(report: Report) -> object:
    assert report.outcome == "returned", report
    assert report.value is not None
    return values.decode(report.value)


class Owner:
    """Plays the host around a parent that waits for its child: calls the parent's tools."""

    def __init__(self, client: FrameClient) -> None:
        self.client = client
        self.spawn: Frame | None = None
        self.results: dict[str, dict[str, Any]] = {}
        self.count = 0

    def tool(self, name: str) -> dict[str, Any]:
        assert self.spawn is not None
        tools: list[dict[str, Any]] = self.spawn.header["tools"]
        return next(item for item in tools if item["name"] == name)

    def begin(self, name: str, *args: Any, method: str = "", call: str = "", **kwargs: Any) -> str:
        self.count += 1
        call = call or f"tc_{self.count}"
        header = {
            "type": "tool_call",
            "call": call,
            "tool": name if name.startswith("tool_") else self.tool(name)["tool"],
            "method": method,
            "arguments": self.client.part(values.encode({"args": list(args), "kwargs": kwargs})),
        }
        self.client.send(header)
        return call

    def result(self, call: str) -> dict[str, Any]:
        while call not in self.results:
            self.keep(self.client.expect("tool_result"))
        return self.results[call]

    def keep(self, frame: Frame) -> None:
        found = frame.header
        assert found["call"] not in self.results, "an outcome came twice"
        if "value" in found:
            data = self.client.content(found["value"], frame.payload)
            found["value"] = values.decode(data)
        self.results[found["call"]] = found

    def call(self, name: str, *args: Any, method: str = "", **kwargs: Any) -> dict[str, Any]:
        return self.result(self.begin(name, *args, method=method, **kwargs))

    def run(self, code: str) -> str:
        """Starts a cell and waits for its spawn; returns the cell."""
        cell = self.client.start(code)
        assert self.client.expect("started").header["cell"] == cell
        self.spawn = self.client.expect("call")
        assert self.spawn.header["op"] == "spawn"
        return cell


@pytest.fixture
def owner(client: FrameClient) -> Owner:
    return Owner(client)


def done(owner: Owner, cell: str, answer: Any = None) -> Report:
    assert owner.spawn is not None
    owner.client.reply(owner.spawn, values.encode(answer))
    while (frame := owner.client.receive()).type == "tool_result":
        owner.keep(frame)
    assert (frame.type, frame.header["cell"]) == ("done", cell)
    return Report(owner.client, frame)


DEFINED = '''
import hutch

def search(query: str, limit: int = 10, *more, key=None) -> "list[str]":
    """Finds things."""
    return [query] * limit
'''


def test_a_function_is_described_and_its_place_in_the_input_names_it(owner: Owner) -> None:
    cell = owner.run(DEFINED + "return hutch.invoke(program='', tools=[{'f': search}], g=search)")
    assert owner.spawn is not None
    (tool,) = owner.spawn.header["tools"]
    assert tool["tool"].startswith("tool_inv_test_")
    assert tool == {
        "tool": tool["tool"],
        "name": "search",
        "description": "Finds things.",
        "signature": "(query: str, limit: int = 10, *more, key=None) -> list[str]",
        "methods": [],
        "delegable": False,
        "timeout_ms": 0,
    }
    given = {
        item["name"]: owner.client.content(item["value"], owner.spawn.payload)
        for item in owner.spawn.header["inputs"]
    }
    handle = f'{{"$tool":"{tool["tool"]}"}}'
    assert given == {"tools": f'[{{"f":{handle}}}]'.encode(), "g": handle.encode()}
    assert owner.call("search", "a", limit=2)["value"] == ["a", "a"]
    assert returned(done(owner, cell, 5)) == 5


def test_an_object_is_given_by_its_methods(owner: Owner) -> None:
    cell = owner.run(
        "import hutch\n"
        "class Counter:\n"
        "    '''Counts.'''\n"
        "    limit = 3\n"
        "    def __init__(self): self.n = 0\n"
        "    def add(self, by: int = 1):\n"
        "        '''Adds.'''\n"
        "        self.n += by\n"
        "        return self.n\n"
        "    async def later(self): return -self.n\n"
        "    @staticmethod\n"
        "    def zero(): return 0\n"
        "    def _own(self): return 1\n"
        "    @property\n"
        "    def boom(self): raise RuntimeError\n"
        "counter = Counter()\n"
        "given = hutch.tool(counter, name='count', description='x', timeout_seconds=2,"
        " delegable=True)\n"
        "hutch.invoke(program='', counter=given)\n"
        "return counter.n"
    )
    tool = owner.tool("count")
    assert [item["name"] for item in tool["methods"]] == ["add", "later", "zero"]
    assert tool["methods"][0] == {
        "name": "add",
        "signature": "(by: int = 1)",
        "description": "Adds.",
    }
    assert (tool["description"], tool["timeout_ms"], tool["delegable"]) == ("x", 2000, True)
    assert owner.call("count", 4, method="add")["value"] == 4
    assert owner.call("count", method="later")["value"] == -4
    assert owner.call("count", method="zero")["value"] == 0
    for method in ("_own", "boom", "", "__init__"):
        assert "no such tool" in owner.call("count", method=method)["failure"]["message"]
    assert returned(done(owner, cell)) == 4


def test_the_same_function_keeps_its_id_and_another_has_another(owner: Owner) -> None:
    cell = owner.run(DEFINED + "hutch.invoke(program='', f=search, g=len)")
    first = owner.tool("search")["tool"], owner.tool("len")["tool"]
    done(owner, cell)
    cell = owner.run("hutch.invoke(program='', f=search, g=len)")
    assert (owner.tool("search")["tool"], owner.tool("len")["tool"]) == first
    assert first[0] != first[1]
    done(owner, cell)


def test_an_exception_arrives_with_class_text_and_the_tools_own_lines(owner: Owner) -> None:
    cell = owner.run(
        "import hutch\ndef look(k):\n    return {}[k]\nhutch.invoke(program='', look=look)"
    )
    failure = owner.call("look", "a")["failure"]
    assert (failure["type_name"], failure["message"]) == ("KeyError", "'a'")
    assert failure["reason"] == failure["ending"] == ""
    assert 'File "<cell 1>", line 3, in look' in failure["traceback"]
    assert "return {}[k]" in failure["traceback"]
    assert "serving.py" not in failure["traceback"]
    done(owner, cell)


@pytest.mark.parametrize(
    ("body", "type_name", "text"),
    [
        ("raise SystemExit(3)", "SystemExit", "3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", ""),
        ("return lambda: 1", "ValueEncodeError", "as inputs only"),
        ("return (x for x in [])", "ValueEncodeError", "a list of its items"),
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_whatever_a_tool_does_its_caller_is_told_and_the_next_call_is_served(
    owner: Owner, kind: str, body: str, type_name: str, text: str
) -> None:
    cell = owner.run(
        f"import hutch\n{kind} bad():\n    {body}\n{kind} good():\n    return 1\n"
        "hutch.invoke(program='', bad=bad, good=good)"
    )
    failure = owner.call("bad")["failure"]
    assert failure["type_name"] == type_name
    assert text in failure["message"]
    assert owner.call("good")["value"] == 1
    done(owner, cell)


def test_calls_run_at_once_also_between_cells(owner: Owner) -> None:
    code = (
        "import hutch, threading\n"
        "barrier = threading.Barrier(16, timeout=15)\n"
        "def meet(n):\n    barrier.wait()\n    return n\n"
        "hutch.spawn(program='', meet=meet)"
    )
    cell = owner.run(code)
    done(owner, cell, "inv_child")
    calls = [owner.begin("meet", n) for n in range(16)]
    assert [owner.result(call)["value"] for call in calls] == list(range(16))


def test_a_call_is_served_once_and_one_that_waits_can_be_cancelled(owner: Owner) -> None:
    cell = owner.run(
        "import hutch, threading\n"
        "gate, ran = threading.Event(), []\n"
        "def hold(n):\n    ran.append(n)\n    gate.wait(15)\n    return n\n"
        "def release():\n    gate.set()\n"
        "async def forever():\n    import asyncio\n    await asyncio.sleep(1000)\n"
        "hutch.invoke(program='', hold=hold, forever=forever)\n"
        "gate.set()"
    )
    # All places are taken, so the last one waits.
    calls = [owner.begin("hold", n) for n in range(32)]
    waiting = owner.begin("hold", 99)
    owner.begin("hold", 0, call=calls[0])
    owner.client.send({"type": "tool_cancel", "call": waiting})
    cell_end = done(owner, cell)
    assert cell_end.outcome == "completed"
    assert sorted(owner.result(call)["value"] for call in calls) == list(range(32))
    assert "cancelled" in owner.result(waiting)["failure"]["message"]
    forever = owner.begin("forever")
    owner.client.send({"type": "tool_cancel", "call": forever})
    assert "cancelled" in owner.result(forever)["failure"]["message"]
    report = owner.client.run("return sorted(ran)")
    assert returned(report) == list(range(32))


def test_tools_that_wait_for_children_leave_their_places_to_others(owner: Owner) -> None:
    cell = owner.run(
        "import hutch\n"
        "def outer(n):\n    return hutch.invoke(program='', n=n)\n"
        "def inner(n):\n    return n\n"
        "hutch.invoke(program='', outer=outer, inner=inner)"
    )
    root = owner.spawn
    calls = [owner.begin("outer", n) for n in range(40)]
    spawns = [owner.client.expect("call") for _ in range(40)]
    assert owner.call("inner", 7)["value"] == 7
    for spawn in spawns:
        owner.client.reply(spawn, b"1")
    assert [owner.result(call)["value"] for call in calls] == [1] * 40
    owner.spawn = root
    done(owner, cell)


def test_a_coroutine_runs_on_the_loop_that_gave_it(owner: Owner) -> None:
    cell = owner.run(
        "import asyncio, hutch\n"
        "here = asyncio.get_running_loop()\n"
        "async def same():\n    return asyncio.get_running_loop() is here\n"
        "await hutch.ainvoke(program='', same=same)"
    )
    assert owner.call("same")["value"] is True
    done(owner, cell)
    assert owner.call("same")["value"] is False


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("[1, gen]", "f[1] cannot cross: a generator function"),
        ("agen", "a generator function"),
        ("dict", "the class dict"),
        ("object()", "a object has no encoded form"),
        ("lock", "has no encoded form"),
        ("hutch.tool(lock.acquire) and hutch.tool(object())", "without public methods"),
    ],
)
def test_what_cannot_be_a_tool_is_refused_where_it_was_given(
    client: FrameClient, given: str, text: str
) -> None:
    report = client.run(
        "import hutch, threading\nlock = threading.Lock()\n"
        "def gen():\n    yield 1\nasync def agen():\n    yield 1\n"
        f"hutch.invoke(program='', f={given})"
    )
    assert report.failure["type_name"] == "ValueEncodeError"
    assert text in report.failure["message"]


def test_a_stopped_cell_ends_the_tools_that_it_serves_and_later_calls_are_served(
    owner: Owner,
) -> None:
    cell = owner.run(
        "import hutch, threading\n"
        "began = threading.Event()\n"
        "def spin():\n    began.set()\n    while True: pass\n"
        "def quick():\n    return 1\n"
        "async def later():\n    return 2\n"
        "child = hutch.spawn(program='', spin=spin, quick=quick, later=later)\n"
        "began.wait(20)\n"
        "while True: pass"
    )
    root = owner.spawn
    assert root is not None
    owner.client.reply(root, values.encode("inv_child"))
    assert owner.call("later")["value"] == 2
    spinning = owner.begin("spin")
    owner.client.send({"type": "interrupt", "cell": cell})
    while (frame := owner.client.receive()).type == "tool_result":
        owner.keep(frame)
    assert Report(owner.client, frame).outcome == "interrupted"
    assert not frame.header["state_lost"]
    assert owner.result(spinning)["failure"]["type_name"] in ("SystemExit", "KeyboardInterrupt")
    for _ in range(40):
        assert owner.call("quick")["value"] == 1
    assert owner.call("later")["value"] == 2


def test_what_a_tool_prints_is_output_of_its_owner(owner: Owner) -> None:
    cell = owner.run(
        "import hutch\n"
        "def say(text):\n    print(text)\n"
        "async def shout(text):\n    print(text, '!')\n"
        "hutch.invoke(program='', say=say, shout=shout)"
    )
    owner.call("say", "a")
    owner.call("shout", "b")
    assert done(owner, cell).stdout == b"a\nb !\n"


def test_more_than_can_be_told_of_tools_is_refused(client: FrameClient) -> None:
    report = client.run(
        "import hutch\n"
        "many = [hutch.tool(lambda: 1, description='x' * 2000) for _ in range(30)]\n"
        "hutch.invoke(program='', many=many)"
    )
    assert report.failure["type_name"] == "PayloadTooLargeError"
    assert report.failure["reason"] == "PAYLOAD_TOO_LARGE"
    assert "docstrings" in report.failure["message"]


def test_a_function_cannot_be_returned(client: FrameClient) -> None:
    report = client.run("def f(): pass\nreturn [f]")
    assert report.failure["type_name"] == "ValueEncodeError"
    assert report.failure["path"] == "result[0]"
    assert "as inputs only" in report.failure["message"]


# The side that was granted a tool.

GRANT = {
    "tool": "tool_inv_parent_1",
    "name": "search",
    "description": "Finds things.",
    "signature": "(query: str, /, limit=10, *, key: Key = None) -> list[str]",
    "methods": [],
    "delegable": True,
    "timeout_ms": 0,
}
OBJECT = {
    **GRANT,
    "tool": "tool_inv_parent_2",
    "name": "db",
    "signature": "",
    "methods": [{"name": "query", "signature": "(sql)", "description": "Asks."}],
}
INPUTS = {
    "search": b'{"$tool":"tool_inv_parent_1"}',
    "db": b'{"$tool":"tool_inv_parent_2"}',
}


def granted(client: FrameClient, code: str, answer: Any) -> Report:
    cell = client.start(code, inputs=INPUTS, tools=[GRANT, OBJECT])
    return client.finish(cell, answer)


class Answering:
    """Answers tool calls with what it is given in turn, and keeps them."""

    def __init__(self, client: FrameClient, *answers: Any) -> None:
        self.client = client
        self.answers = list(answers)
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, call: Frame) -> None:
        header = call.header
        assert header["op"] == "tool", header
        arguments = values.decode(self.client.content(header["arguments"], call.payload))
        self.calls.append(
            (header["tool"], header["method"], arguments["args"], arguments["kwargs"])
        )
        answer = self.answers.pop(0)
        if isinstance(answer, dict) and "failure" in answer:
            self.client.reply_failure(call, **answer["failure"])
        else:
            self.client.reply(call, values.encode(answer))


def test_a_granted_tool_is_called_like_a_function(client: FrameClient) -> None:
    answering = Answering(client, ["x"], {"n": 1}, 3)
    report = granted(
        client,
        "import inspect\n"
        "one = search('a', limit=2)\n"
        "two = db.query('s', key=(1, 2))\n"
        "three = await search.acall('b')\n"
        "return (one, two, three, search.__name__, search.__doc__, str(inspect.signature(search)),"
        " db.query.__doc__, hasattr(db, 'drop'))",
        answering,
    )
    assert returned(report) == (
        ["x"],
        {"n": 1},
        3,
        "search",
        "Finds things.",
        "(query: str, /, limit=10, *, key: Key = None) -> list[str]",
        "Asks.",
        False,
    )
    assert answering.calls == [
        ("tool_inv_parent_1", "", ["a"], {"limit": 2}),
        ("tool_inv_parent_2", "query", ["s"], {"key": (1, 2)}),
        ("tool_inv_parent_1", "", ["b"], {}),
    ]


@pytest.mark.parametrize(
    ("failure", "name", "text"),
    [
        ({"type_name": "KeyError", "message": "'a'"}, "ToolError", "search raised KeyError: 'a'"),
        ({"reason": "TOOL_OUTCOME_UNKNOWN", "message": "died"}, "ToolOutcomeUnknown", "died"),
        ({"reason": "TOOL_UNREACHABLE", "message": "gone"}, "ToolUnreachableError", "gone"),
        ({"reason": "TOOL_TIMED_OUT", "message": "late"}, "ToolTimeoutError", "late"),
        ({"reason": "GRANT_DENIED", "message": "no"}, "GrantDeniedError", "no"),
    ],
)
def test_what_kept_a_tool_from_a_value_is_an_exception_of_its_kind(
    client: FrameClient, failure: dict[str, str], name: str, text: str
) -> None:
    report = granted(client, "search('a')", Answering(client, {"failure": failure}))
    assert report.failure["type_name"] == name
    assert text in report.failure["message"]


def test_a_tool_error_has_the_exception_of_the_owner(client: FrameClient) -> None:
    failure = {"type_name": "KeyError", "message": "'a'", "traceback": "Traceback: there"}
    code = (
        "import hutch\n"
        "try:\n    search()\n"
        "except hutch.ToolError as error:\n"
        "    return error.failure.type_name, error.failure.traceback"
    )
    report = granted(client, code, Answering(client, {"failure": failure}))
    assert returned(report) == ("KeyError", "Traceback: there")


def test_a_granted_tool_is_passed_on_under_its_id(client: FrameClient) -> None:
    spawns: list[Frame] = []

    def answer(call: Frame) -> None:
        spawns.append(call)
        client.reply(call, b"null")

    granted(client, "import hutch\nhutch.invoke(program='', s=[search], d=db)", answer)
    assert [tool["tool"] for tool in spawns[0].header["tools"]] == [GRANT["tool"], OBJECT["tool"]]


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("search(search)", 'arguments["args"][0]'),
        ("search(key=lambda: 1)", 'arguments["kwargs"]["key"]'),
        ("import hutch\nhutch.invoke(program='', q=db.query)", "give the whole tool"),
        ("return db", "as inputs only"),
    ],
)
def test_tools_cross_as_inputs_only(client: FrameClient, code: str, text: str) -> None:
    report = granted(client, code, None)
    assert report.failure["type_name"] == "ValueEncodeError"
    assert text in report.failure["message"]


def test_sixteen_threads_of_a_cell_have_sixteen_calls_open_at_once(client: FrameClient) -> None:
    calls: list[Frame] = []

    def answer(call: Frame) -> None:
        calls.append(call)
        if len(calls) == 16:  # only now is any of them answered
            for one in reversed(calls):
                content = client.content(one.header["arguments"], one.payload)
                client.reply(one, values.encode(values.decode(content)["args"][0]))

    report = granted(
        client,
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(16) as pool:\n"
        "    return list(pool.map(search, range(16)))",
        answer,
    )
    assert returned(report) == list(range(16))


def test_a_forked_process_cannot_call_a_tool(client: FrameClient) -> None:
    report = granted(
        client,
        "import os\nread, write = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    try:\n        search(1)\n"
        "    except BaseException as error:\n        os.write(write, str(error).encode())\n"
        "    os._exit(0)\n"
        "os.wait()\nreturn os.read(read, 1000).decode()",
        None,
    )
    assert "forked process cannot call" in str(returned(report))


@pytest.mark.parametrize("call", [["x"], {}, 5, None, "nobodys"])
def test_a_repl_that_answers_no_open_call_is_ended(client: FrameClient, call: object) -> None:
    frame = frames.encode({"type": "tool_result", "call": call})
    report = client.run(
        "import os, socket, time\n"
        "for fd in range(3, 100):\n"
        "    try:\n        s = socket.socket(fileno=fd)\n    except OSError: continue\n"
        f"    s.send({frame!r})\ntime.sleep(60)"
    )
    assert (report.outcome, report.header["signal"]) == ("repl_died", 9)
    assert returned(client.run("return 1")) == 1
