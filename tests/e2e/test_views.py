"""Bounded views of what an invocation did, for its client and for its parent's code."""

from __future__ import annotations

import json

import grpc
import pytest

import hutch
from hutch.v1 import invocation_service_pb2 as isv
from hutch.v1.invocation_service_pb2_grpc import InvocationServiceStub
from tests.support.stack import Stack

MANY = """
from hutch import artifacts
for number in range(12):
    artifacts.save(b"x", f"{number}.txt")
return 1
"""
WIDE = "from hutch import artifacts\nartifacts.save(b'x', 'é' * 100 + '.txt')\nreturn 1"


def test_case_d16_the_last_events_come_with_a_cursor_that_walks_the_rest(
    client: hutch.Client,
) -> None:
    handle = client.spawn(program=MANY)
    handle.result()
    whole = [event.sequence for event in client.watch_invocation(handle.id)]
    assert len(whole) > 15
    page = client.list_events(handle.id, max_events=5)
    assert [item.sequence for item in page.events] == whole[-5:]
    walked, earlier = list(page.events), page.truncated
    assert earlier
    while earlier:
        page = client.list_events(handle.id, max_events=5, before_sequence=page.before_sequence)
        assert len(page.events) <= 5
        walked, earlier = [*page.events, *walked], page.truncated
    assert [item.sequence for item in walked] == whole
    assert walked[-1].kind == "ended"
    assert json.loads(walked[-1].text)["ending"]["kind"] == "ENDING_KIND_RETURNED"


def test_case_d16_a_long_event_is_cut_at_a_character_and_marked(client: hutch.Client) -> None:
    handle = client.spawn(program=WIDE)
    handle.result()
    for limit in range(60, 70):
        page = client.list_events(handle.id, max_bytes=limit)
        shown = [item for item in page.events if item.kind == "artifact_published"]
        (event,) = shown
        assert event.truncated
        assert len(event.text.encode()) in (limit, limit - 1)
        assert event.total_bytes > 200
        assert "�" not in event.text


def test_case_d16_a_parent_sees_its_childs_events_and_nobody_elses(client: hutch.Client) -> None:
    program = """
import hutch

child = spawn(program=many)
child.result()
view = child.events(max_events=3)
kinds = [item["kind"] for item in view["events"]]
earlier = child.events(max_events=3, before_sequence=view["before_sequence"])
try:
    type(child)(child._channel, "inv_" + "0" * 32, None).events()
except hutch.RequestRefused as refused:
    reason = refused.reason
return kinds, view["truncated"], len(earlier["events"]), reason
"""
    kinds, truncated, earlier, reason = client.invoke(program=program, many=MANY)
    assert kinds[-1] == "ended"
    assert (truncated, earlier, reason) == (True, 3, "INVOCATION_NOT_FOUND")


@pytest.mark.parametrize("field", ["max_events", "max_bytes"])
def test_more_than_a_view_may_hold_is_refused(client: hutch.Client, field: str) -> None:
    handle = client.spawn(program="return 1")
    handle.result()
    with pytest.raises(hutch.FieldInvalidError):
        client.list_events(handle.id, **{field: 100_000})


def test_numbers_that_nothing_has_are_refused(shared_stack: Stack, client: hutch.Client) -> None:
    with client.sandbox() as box, grpc.insecure_channel(shared_stack.target) as channel:
        invocations = InvocationServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            invocations.ListInvocations(isv.ListInvocationsRequest(state=99))  # type: ignore[arg-type]
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        attach = isv.AttachBox(invocation_id=box.id, after_sequence=2**63)
        with pytest.raises(grpc.RpcError) as caught:
            list(invocations.AttachInvocation(iter([isv.AttachInvocationRequest(attach=attach)])))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
