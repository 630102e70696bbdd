"""Tools across real sandboxes: of a parent's REPL and of the client's process."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import hutch
from tests.support.stack import Stack, stack


def test_a_child_calls_a_function_of_its_parent_which_runs_there(client: hutch.Client) -> None:
    program = (
        "asked = []\n"
        "def search(query, limit=2):\n"
        "    asked.append(query)\n"
        "    return [query] * limit\n"
        'found = invoke(program=\'return search("a"), search("b", limit=1)\', search=search)\n'
        "return found, asked\n"
    )
    assert client.invoke(program=program) == ((["a", "a"], ["b"]), ["a", "b"])


def test_an_object_of_the_parent_keeps_its_state_between_calls(client: hutch.Client) -> None:
    program = (
        "import hutch\n"
        "class Counter:\n"
        "    def __init__(self): self.n = 0\n"
        "    def add(self, by=1):\n"
        "        self.n += by\n"
        "        return self.n\n"
        "counter = Counter()\n"
        "seen = invoke(program='return [c.add(), c.add(by=5)]', c=hutch.tool(counter))\n"
        "return seen, counter.n\n"
    )
    assert client.invoke(program=program) == ([1, 6], 6)


def test_case_20_sixteen_threads_of_a_cell_call_one_tool_at_once(client: hutch.Client) -> None:
    program = (
        "import threading\n"
        "barrier = threading.Barrier(16, timeout=60)\n"
        "def meet(n):\n"
        "    barrier.wait()  # nobody leaves before all sixteen are here\n"
        "    return n\n"
        "return invoke(program='''\n"
        "    from concurrent.futures import ThreadPoolExecutor\n"
        "    with ThreadPoolExecutor(16) as pool:\n"
        "        return list(pool.map(meet, range(16)))\n"
        "    ''', meet=meet)\n"
    )
    assert client.invoke(program=program) == list(range(16))


def test_case_20_sixteen_threads_call_a_function_of_the_client_at_once(
    client: hutch.Client,
) -> None:
    barrier = threading.Barrier(16, timeout=60)

    def meet(number: int) -> int:
        barrier.wait()
        return number

    program = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(16) as pool:\n"
        "    return list(pool.map(meet, range(16)))\n"
    )
    assert client.invoke(program=program, meet=meet) == list(range(16))


def test_what_a_tool_raises_is_caught_in_the_child_and_leaves_it_uncaught(
    client: hutch.Client,
) -> None:
    def look(key: str) -> int:
        return {"b": 1}[key]

    caught = (
        "import hutch\n"
        "try:\n"
        "    look('a')\n"
        "except hutch.ToolError as error:\n"
        "    return error.failure.type_name, error.failure.message, error.failure.traceback\n"
    )
    type_name, message, trace = client.invoke(program=caught, look=look)
    assert (type_name, message) == ("KeyError", "'a'")
    assert 'return {"b": 1}[key]' in trace
    with pytest.raises(hutch.InvocationRaised, match="the tool look raised KeyError"):
        client.invoke(program="look('a')", look=look)


def test_an_exception_of_the_parents_tool_has_the_parents_lines(client: hutch.Client) -> None:
    program = (
        "def look(k):\n"
        "    return {}[k]\n"
        "return invoke(program='''\n"
        "    import hutch\n"
        "    try:\n"
        "        look('a')\n"
        "    except hutch.ToolError as error:\n"
        "        return error.failure.type_name, error.failure.traceback\n"
        "    ''', look=look)\n"
    )
    type_name, trace = client.invoke(program=program)
    assert type_name == "KeyError"
    assert "return {}[k]" in trace


def test_a_tool_that_takes_too_long_is_waited_for_no_longer(client: hutch.Client) -> None:
    gate = threading.Event()
    program = (
        "import hutch\n"
        "try:\n"
        "    hold()\n"
        "except hutch.ToolTimeoutError:\n"
        "    return 'late', quick()\n"
    )
    hold = hutch.tool(lambda: gate.wait(60), name="hold", timeout_seconds=0.3)
    try:
        assert client.invoke(program=program, hold=hold, quick=lambda: 1) == ("late", 1)
    finally:
        gate.set()


def test_coroutines_are_tools_on_both_sides(client: hutch.Client) -> None:
    async def double(number: int) -> int:
        return number * 2

    program = (
        "import asyncio\n"
        "async def add(number):\n"
        "    await asyncio.sleep(0)\n"
        "    return await double.acall(number) + 1\n"
        "return await ainvoke(program='return await add.acall(20)', add=add)\n"
    )
    assert client.invoke(program=program, double=double) == 41


def test_a_tool_serves_between_the_statements_of_its_owner(client: hutch.Client) -> None:
    program = (
        "import hutch, threading\n"
        "here = threading.Event()\n"
        "child = spawn(program='tell(); return 1', tell=here.set)\n"
        "told = here.wait(60)  # the owner waits for no child meanwhile\n"
        "return told, child.result()\n"
    )
    assert client.invoke(program=program) == (True, 1)


def test_a_clients_tool_that_invokes_makes_a_child_of_the_caller(client: hutch.Client) -> None:
    def outer(number: int) -> Any:
        return hutch.invoke(program="return n + 1", n=number)

    handle = client.spawn(program="return outer(4)", outer=outer)
    assert handle.result() == 5
    tree = client.list_invocations(tree_of=handle.id).invocations
    assert [item.parent_id for item in tree] == ["", handle.id]


def test_a_parents_tool_that_invokes_is_served_while_its_child_waits(
    client: hutch.Client,
) -> None:
    program = (
        "def outer(n):\n"
        "    return invoke(program='return n + 1', n=n)\n"
        "return invoke(program='return outer(4)', outer=outer)\n"
    )
    assert client.invoke(program=program) == 5


def test_case_d2_a_tool_is_passed_on_only_when_it_is_delegable(client: hutch.Client) -> None:
    inner = "return invoke(program='return t(2)', t=t)"
    assert client.invoke(program=inner, t=hutch.tool(lambda n: n * 3, delegable=True)) == 6
    handle = client.spawn(program=inner, t=lambda n: n)
    with pytest.raises(hutch.InvocationRaised, match="not the caller's to give") as caught:
        handle.result()
    assert caught.value.failure.type_name == "GrantDeniedError"
    assert len(client.list_invocations(tree_of=handle.id).invocations) == 1


def test_a_tool_that_was_not_granted_is_not_there(client: hutch.Client) -> None:
    program = (
        "import hutch\n"
        "def mine(): return 1\n"
        "try:\n"
        "    invoke(program='return mine()', other=[mine])\n"
        "except hutch.InvocationRaised as failed:\n"
        "    return failed.failure.type_name, invoke(program='return other[0]()', other=[mine])\n"
    )
    assert client.invoke(program=program) == ("NameError", 1)


def test_large_arguments_and_values_cross(client: hutch.Client) -> None:
    program = "return len(double('x' * 3_000_000))"
    assert client.invoke(program=program, double=lambda text: text * 2) == 6_000_000


def test_calls_of_tools_are_in_the_story(client: hutch.Client) -> None:
    handle = client.spawn(program="return t.go(1)", t=hutch.tool(_Thing(), name="thing"))
    assert handle.result() == 1
    events = list(handle.events())
    called = next(event for event in events if event.kind == "tool_called")
    answered = next(event for event in events if event.kind == "tool_answered")
    assert called.invocation_id == answered.invocation_id == handle.id
    assert "thing" in repr(called)


class _Thing:
    """Has one method."""

    def go(self, number: int) -> int:
        """Gives it back."""
        return number


def test_a_controller_that_dies_while_a_tool_runs_learns_the_outcome_once(
    own_stack: Stack,
) -> None:
    runs, began, gate = [], threading.Event(), threading.Event()

    def hold(number: int) -> int:
        runs.append(number)
        began.set()
        gate.wait(60)
        return number

    with hutch.connect(own_stack.target) as client:
        handle = client.spawn(program="return hold(3)", hold=hold)
        assert began.wait(60)
        own_stack.kill_controller()
        own_stack.start_controller()
        gate.set()
        assert handle.result(60) == 3
    assert runs == [3]


def test_when_the_client_is_gone_open_calls_are_unknown_and_new_ones_unreachable() -> None:
    began, gate = threading.Event(), threading.Event()

    def hold() -> None:
        began.set()
        gate.wait(60)

    program = (
        "import hutch\n"
        "try:\n"
        "    hold()\n"
        "except hutch.ToolOutcomeUnknown:\n"
        "    pass\n"
        "try:\n"
        "    hold()\n"
        "except hutch.ToolUnreachableError as gone:\n"
        "    return gone.reason\n"
    )
    with stack(config="session_grace_seconds = 0.3\n") as found:
        with hutch.connect(found.target) as owner:
            call_id = owner.spawn(program=program, hold=hold, cancel_on_disconnect=False).id
            assert began.wait(60)
        try:
            with hutch.connect(found.target) as other:
                ended = other.wait_invocation(call_id, 60)
                assert ended.value is not None
                assert ended.value.json == b'"TOOL_UNREACHABLE"'
        finally:
            gate.set()


def test_calls_of_a_cut_stream_go_on(own_stack: Stack) -> None:
    """A call that comes while no controller is there is made once there is one again."""
    seen: list[int] = []
    gate = threading.Event()

    def note(number: int) -> int:
        seen.append(number)
        if number == 0:
            gate.set()
        return number

    program = "return [note(n) for n in range(50)]"
    with hutch.connect(own_stack.target) as client:
        handle = client.spawn(program=program, note=note)
        assert gate.wait(60)
        own_stack.kill_controller()
        own_stack.start_controller()
        assert handle.result(60) == list(range(50))
    assert seen == list(range(50))


def test_a_box_calls_tools_of_its_client_and_serves_its_own_between_cells(
    client: hutch.Client,
) -> None:
    program = "return [ask(n) for n in range(3)]"
    with client.sandbox(double=lambda n: n * 2, max_depth=2) as box:
        assert box.run("double(4)").text == "8"
        box.run("import hutch\nseen = []\ndef ask(n):\n    seen.append(n)\n    return n + 1")
        box.run(f"child = hutch.spawn(program={program!r}, ask=ask)")
        assert box.run("child.result(), seen").text == "([1, 2, 3], [0, 1, 2])"


def test_a_repl_that_died_while_it_served_leaves_the_outcome_unknown(
    client: hutch.Client,
) -> None:
    program = (
        "import hutch\n"
        "found = []\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        die()\n"
        "    except hutch.HutchError as error:\n"
        "        found.append(type(error).__name__)\n"
        "return found\n"
    )
    with client.sandbox(max_depth=2) as box:
        box.run("import hutch, os\ndef die():\n    os._exit(3)")
        box.run(f"child = hutch.spawn(program={program!r}, die=die)")
        tree = client.list_invocations(tree_of=box.id).invocations
        ended = client.wait_invocation(tree[1].invocation_id, 60)
        # The new REPL has no such tool, whatever its own are called.
        assert ended.value is not None
        assert ended.value.json == b'["ToolOutcomeUnknown","ToolUnreachableError"]'
        assert box.run("1 + 1").state_lost


def test_a_forged_tool_can_neither_be_called_nor_given(client: hutch.Client) -> None:
    program = (
        "import hutch\n"
        "from hutch import tools\n"
        "found = []\n"
        "for forged in ids:\n"
        "    fake = tools.Tool(t._port, tools.Grant(forged))\n"
        "    for use in (fake, lambda: invoke(program='return 1', fake=fake)):\n"
        "        try:\n"
        "            found.append(use())\n"
        "        except hutch.HutchError as error:\n"
        "            found.append(type(error).__name__)\n"
        "return found\n"
    )
    calls: list[int] = []

    def secret() -> int:
        calls.append(1)
        return 1

    with client.sandbox(secret=secret) as other:
        (granted,) = other.run("secret.__hutch_tool__ and secret._grant.tool_id").text.split()
        ids = [granted.strip("'"), "tool_" + "a" * 32 + "_1", "x" * 300]
        found = client.invoke(program=program, ids=ids, t=lambda: 1)
    assert set(found) <= {"GrantDeniedError", "FieldInvalidError"}
    assert len(found) == 6
    assert not calls
