"""Code in a sandbox that abuses the calls it may make: the controller answers, and stays small."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import hutch
from tests.support.hostile import hostile
from tests.support.stack import Stack

HIGHEST = 2**63 - 1
GUARD_SECONDS = 40.0


def peak_bytes(stack: Stack) -> int:
    """The most memory that the controller has had."""
    assert stack.controller is not None
    status = Path(f"/proc/{stack.controller.pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def forget_peak(stack: Stack) -> None:
    """Begins the measure of `peak_bytes` anew."""
    assert stack.controller is not None
    Path(f"/proc/{stack.controller.pid}/clear_refs").write_text("5")


def test_an_offset_that_no_file_has_is_the_end_of_the_file(client: hutch.Client) -> None:
    program = f"""
artifact = json.loads(save(b"five!").result())["artifact_id"]
child = spawn(program="print('x')")
child.result()
far = {{"offset": {HIGHEST}, "max_bytes": {HIGHEST}}}
seen = [
    ask("read_artifact", artifact=artifact, **far),
    ask("inspect_child", invocation=child.id, view="output", stream="stdout", **far),
]
return [json.loads(pending.result()) for pending in seen]
"""
    views = client.invoke(program=hostile(program), timeout_seconds=GUARD_SECONDS)
    nothing = {"$bytes": ""}
    assert [(view["data"], view["total_bytes"]) for view in views] == [(nothing, 5), (nothing, 2)]


def test_large_contents_of_refused_calls_are_forgotten(client: hutch.Client) -> None:
    """More of them than may wait, and afterwards output still flows by credit."""
    program = """
reasons = set()
for number in range(20):
    reasons.add(save(bytes(300_000), name="../up").failure.reason)
for number in range(300):
    os.write(1, bytes(65_536))
return sorted(reasons)
"""
    handle = client.spawn(program=hostile(program), timeout_seconds=GUARD_SECONDS)
    assert handle.result(timeout_seconds=GUARD_SECONDS) == ["FIELD_INVALID"]
    assert handle.invocation().stdout_bytes == 300 * 65_536


def test_a_program_that_takes_no_answers_does_not_fill_the_controller(
    client: hutch.Client, attacked: Stack
) -> None:
    program = """
artifact = json.loads(save(os.urandom(1024 * 1024)).result())["artifact_id"]
call = {"type": "call", "op": "read_artifact", "artifact": artifact}
for number in range(4000):
    put(call | {"call": f"read{number}", "offset": 0, "max_bytes": 1048576})
time.sleep(60)
"""
    forget_peak(attacked)
    before = peak_bytes(attacked)
    began = time.monotonic()
    handle = client.spawn(program=hostile(program), timeout_seconds=4)
    with pytest.raises(hutch.InvocationFailed) as caught:
        handle.result(timeout_seconds=GUARD_SECONDS)
    assert caught.value.ending == "deadline_exceeded"
    assert time.monotonic() - began < GUARD_SECONDS
    assert peak_bytes(attacked) - before < 100 * 1024 * 1024


def test_refusals_do_not_make_the_journal_grow(client: hutch.Client, attacked: Stack) -> None:
    program = """
reasons = {ask("await_child", invocation="inv_of_nobody").failure.reason for _ in range(300)}
for number in range(50):
    try:
        invoke(program="return 1", max_depth=99)
    except hutch.RequestRefused as refused:
        reasons.add(refused.reason)
return sorted(reasons)
"""
    handle = client.spawn(program=hostile(program), timeout_seconds=GUARD_SECONDS)
    assert handle.result() == ["GRANT_DENIED", "INVOCATION_NOT_FOUND"]
    assert len(list(client.watch_invocation(handle.id))) < 60


def test_the_bytes_that_one_program_saves_are_limited(client: hutch.Client) -> None:
    program = """
part = bytes(60 * 1024 * 1024)
answers = [save(part + bytes([number]), name=f"part{number}") for number in range(5)]
return [None if answer.failure is None else answer.failure.reason for answer in answers]
"""
    answers = client.invoke(
        program=hostile(program), timeout_seconds=GUARD_SECONDS, memory_limit_bytes=2**30
    )
    assert answers == [None, None, None, None, "QUOTA_EXCEEDED"]


def test_the_large_inputs_of_refused_children_do_not_fill_the_store(client: hutch.Client) -> None:
    program = """
reasons = []
for number in range(8):
    try:
        invoke(program="return 1", max_depth=99, text=str(number) * 2_000_000)
    except hutch.RequestRefused as refused:
        reasons.append(refused.reason)
return reasons
"""
    reasons = client.invoke(program=hostile(program), timeout_seconds=GUARD_SECONDS)
    assert reasons == ["GRANT_DENIED"] * 4 + ["QUOTA_EXCEEDED"] * 4
