"""Owners of tools that forge what their tools gave: their child hears something typed or nothing is
made of it, and nobody else hears anything."""

from __future__ import annotations

import pytest

import hutch
from tests.support.hostile import hostile

GUARD_SECONDS = 60

# What the tool does when it is called: `call` is the id of the call that it serves.
OWNER = """
tools = sys.modules[hutch.tool.__module__]

def forge(number):
    call = tools.current.get().call_id
    def result(payload=b"", call=call, **keys):
        put({"type": "tool_result", "call": call, **keys}, payload)
    def value(payload, **keys):
        result(payload, value={"at": 0, "n": len(payload)}, **keys)
"""
CHILD = """
try:
    return ["value", t(1)]
except hutch.HutchError as error:
    return [type(error).__name__, str(error)[:200]]
"""


def owner(forgery: str) -> str:
    body = "".join(f"    {line}\n" for line in forgery.strip().splitlines())
    return hostile(
        f"{OWNER}{body}    time.sleep(30)\n"
        f"return invoke(program={'import hutch' + CHILD!r}, t=hutch.tool(forge, name='t'))"
    )


ENDED = {
    "of no call": "value(b'1', call='call_none')",
    "of a call with another form of id": "value(b'1', call=['x'])",
    "both a value and a failure": (
        "value(b'1', failure={'type_name': 'E', 'message': '', 'traceback': ''})"
    ),
    "neither": "result()",
    "a value outside of its payload": "result(b'1', value={'at': 0, 'n': 2**40})",
    "a payload that belongs to nothing": "result(b'12', value={'at': 0, 'n': 1})",
    "a blob that never came": "result(value={'blob': 'none', 'n': 5})",
    "a blob that has no end": (
        "put({'type': 'blob', 'blob': 'b', 'offset': 0, 'last': False}, b'12345')\n"
        "result(value={'blob': 'b', 'n': 5})"
    ),
    "a blob of another size": (
        "put({'type': 'blob', 'blob': 'b', 'offset': 0, 'last': True}, b'12345')\n"
        "result(value={'blob': 'b', 'n': 6})"
    ),
    "a key that no result has": "value(b'1', depth=1)",
    "twice": "value(b'1')\nvalue(b'2')",
}


@pytest.mark.parametrize("name", ENDED)
def test_a_result_that_no_repl_sends_ends_its_sender(client: hutch.Client, name: str) -> None:
    with pytest.raises(hutch.InvocationCrashed) as caught:
        client.invoke(program=owner(ENDED[name]), timeout_seconds=GUARD_SECONDS)
    assert caught.value.ending in ("denied", "crashed")


FAILURE = """
failure = sys.modules[hutch.HutchError.__module__].Failure(type_name='E' * 10, message='m')
failure.ending, failure.invocation_id, failure.reason = 'returned', 'inv_' + '0' * 32, 'INTERNAL'
result(failure=failure.to_dict())
"""
TOLD = {
    "no JSON": ("value(b'{')", "ValueDecodeError"),
    "deep nesting": ("value(b'[' * 5000 + b']' * 5000)", "ValueTooLargeError"),
    "a pickle": ("value(bytes([128, 4, 149]) + bytes(40))", "ValueDecodeError"),
    "a tool": ('value(b\'{"$tool": "tool_x_1"}\')', "FieldInvalidError"),
    "a file of somebody else": (
        "value(b'{\"$artifact\": \"art_' + b'0' * 32 + b'\"}')",
        "GrantDeniedError",
    ),
    "a failure that claims an ending": (FAILURE, ""),
}


@pytest.mark.parametrize("name", TOLD)
def test_a_result_that_is_no_value_is_a_typed_error_in_the_child(
    client: hutch.Client, name: str
) -> None:
    forgery, expected = TOLD[name]
    found = client.invoke(program=owner(forgery), timeout_seconds=GUARD_SECONDS)
    assert found[0] != "value"
    assert expected in ("", found[0])


def test_a_call_of_another_tree_cannot_be_answered(client: hutch.Client) -> None:
    """With its true id, which no code could know."""
    asked: list[str] = []

    def told(call_id: str) -> None:
        asked.append(call_id)

    honest = f"""
import hutch, sys, time
tools = sys.modules[hutch.tool.__module__]
def t(number):
    told(tools.current.get().call_id)
    while not told_on.wait(0.01):
        pass
    return "mine"
import threading
told_on = threading.Event()
threading.Timer(1.5, told_on.set).start()
return invoke(program={"import hutch" + CHILD!r}, t=t)
"""
    handle = client.spawn(program=honest, told=told, timeout_seconds=GUARD_SECONDS)
    while not asked:
        assert handle.status != "ended"
    with pytest.raises(hutch.InvocationCrashed):
        client.invoke(
            program=owner(f"value(b'\"forged\"', call={asked[0]!r})"),
            timeout_seconds=GUARD_SECONDS,
        )
    assert handle.result() == ["value", "mine"]
