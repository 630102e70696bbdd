"""Children in real sandboxes: spawned from code, bounded by the controller."""

from __future__ import annotations

import hutch
from hutch import RecursionLimit, ReturnType


def test_case_d1_a_child_is_linked_to_its_parents_call_and_returns_its_value(
    client: hutch.Client,
) -> None:
    handle = client.spawn(program="return invoke(program='return n * 2', n=21)")
    assert handle.result() == 42
    tree = client.list_invocations(tree_of=handle.id).invocations
    assert [item.depth for item in tree] == [1, 2]
    child = tree[1]
    assert child.parent_id == handle.id
    assert child.lineage == (handle.id,)
    assert child.spawned_by.startswith("cell_")


def test_a_child_sees_exactly_its_inputs(client: hutch.Client) -> None:
    program = (
        "secret = 1\n"
        "return invoke(program='return sorted(n for n in globals() if not n.startswith(\"_\"))',"
        " a=1, b=2)"
    )
    names = client.invoke(program=program)
    assert {"a", "b"} <= set(names)
    assert "secret" not in names


def test_inputs_are_copies(client: hutch.Client) -> None:
    program = "x = [1]\ninvoke(program='x.append(2)', x=x)\nreturn x"
    assert client.invoke(program=program) == [1]


def test_endless_recursion_meets_the_depth_limit_as_an_ordinary_exception(
    client: hutch.Client,
) -> None:
    program = (
        "import hutch\n"
        "source = '''\n"
        "import hutch\n"
        "try:\n"
        "    return 1 + hutch.invoke(program=source, source=source)\n"
        "except hutch.RecursionLimitError as stop:\n"
        "    return 1\n"
        "'''\n"
        "return 1 + hutch.invoke(program=source, source=source)\n"
    )
    with client, RecursionLimit(max_depth=3):
        assert hutch.invoke(program=program) == 3


def test_a_childs_exception_is_caught_like_any_other(client: hutch.Client) -> None:
    program = (
        "import hutch\n"
        "try:\n"
        "    invoke(program='raise KeyError(1)')\n"
        "except hutch.InvocationFailed as failed:\n"
        "    return [failed.ending, failed.failure.type_name, failed.child_id[:4]]\n"
    )
    assert client.invoke(program=program) == ["raised", "KeyError", "inv_"]


def test_a_childs_contract_is_its_callers(client: hutch.Client) -> None:
    program = (
        "import hutch\n"
        "try:\n"
        "    invoke(hutch.ReturnType(list[int]), program='return [1, None]')\n"
        "except hutch.ReturnTypeError as wrong:\n"
        "    return [wrong.path, wrong.expected, wrong.got]\n"
    )
    path, expected, got = client.invoke(program=program)
    assert path == "result[1]"
    assert expected == "int"
    assert "null" in got or "None" in got


def test_threads_and_asyncio_run_children_concurrently(client: hutch.Client) -> None:
    program = (
        "import asyncio, hutch\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(4) as pool:\n"
        "    squares = list(pool.map(lambda n: invoke(program='return n * n', n=n), range(4)))\n"
        "more = await asyncio.gather(*(ainvoke(program='return n + 1', n=n) for n in range(4)))\n"
        "return squares + list(more)\n"
    )
    assert client.invoke(program=program) == [0, 1, 4, 9, 1, 2, 3, 4]


def test_a_handle_shows_its_child_and_cancels_it(client: hutch.Client) -> None:
    program = (
        "import hutch\n"
        "child = spawn(program='print(\"hello\")\\nreturn 5')\n"
        "value = child.result()\n"
        "stuck = spawn(program='while True: pass')\n"
        "stuck.cancel()\n"
        "try:\n"
        "    stuck.result()\n"
        "except hutch.InvocationCancelled as cancelled:\n"
        "    return [value, child.output(), child.status, cancelled.ending]\n"
    )
    value, output, status, ending = client.invoke(program=program)
    assert value == 5
    assert output in (b"hello\n", "hello\n")
    assert (status, ending) == ("ended", "cancelled")


def test_a_parent_that_returns_leaves_no_child(client: hutch.Client) -> None:
    handle = client.spawn(program="spawn(program='while True: pass')\nreturn 1")
    assert handle.result() == 1
    tree = client.list_invocations(tree_of=handle.id).invocations
    endings = [item.ending for item in tree]
    assert [ending.kind if ending else "" for ending in endings] == ["returned", "cancelled"]
    assert endings[1] is not None
    assert endings[1].cause == "parent_ended"


def test_case_d2_a_child_that_asks_for_more_is_refused_before_anything_starts(
    client: hutch.Client,
) -> None:
    program = (
        "import hutch\n"
        "try:\n"
        "    invoke(program='return 1', memory_limit_bytes=2**32)\n"
        "except hutch.GrantDeniedError as denied:\n"
        "    return str(denied)\n"
    )
    handle = client.spawn(program=program)
    assert "memory_limit_bytes" in handle.result()
    assert len(client.list_invocations(tree_of=handle.id).invocations) == 1


def test_cancelling_a_tree_ends_all_of_it(client: hutch.Client) -> None:
    program = "invoke(program='invoke(program=\"while True: pass\")')"
    handle = client.spawn(program=program)
    for event in handle.events(tree=True):
        if event.kind == "state_changed":
            invocation = client.get_invocation(event.invocation_id)
            if (invocation.depth, invocation.state) == (3, "running"):
                break
    handle.cancel()
    tree = client.list_invocations(tree_of=handle.id).invocations
    assert [item.state for item in tree] == ["ended"] * 3
    assert {item.ending.kind for item in tree if item.ending} == {"cancelled"}


def test_return_types_bind_one_invocation_only(client: hutch.Client) -> None:
    program = "invoke(program='return \"text\"')\nreturn 3"
    assert client.invoke(ReturnType(int), program=program) == 3


def test_a_scope_gives_its_values_to_every_call_in_it(client: hutch.Client) -> None:
    with client, hutch.scope(factor=3):
        assert hutch.invoke(program="return factor * n", n=2) == 6


def test_case_d18_no_more_than_max_concurrent_run_at_once(client: hutch.Client) -> None:
    program = (
        "handles = [spawn(program='return 1') for _ in range(6)]\n"
        "return sum(handle.result() for handle in handles)"
    )
    assert client.invoke(program=program, max_concurrent=2) == 6


def test_one_hundred_children_at_once_all_return(client: hutch.Client) -> None:
    program = (
        "handles = [spawn(program='return n', n=n) for n in range(100)]\n"
        "return sum(h.result() for h in handles)\n"
    )
    assert client.invoke(program=program, timeout_seconds=100.0) == sum(range(100))
