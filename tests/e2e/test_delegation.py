"""What a child is given, and what the same request means again."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

import hutch
from hutch.v1 import invocation_pb2
from hutch.v1 import invocation_service_pb2 as pb
from hutch.v1.invocation_service_pb2_grpc import InvocationServiceStub
from tests.support.stack import Stack


@pytest.fixture
def stub(shared_stack: Stack) -> Any:
    with grpc.insecure_channel(shared_stack.target) as channel:
        yield InvocationServiceStub(channel)


def test_case_d4_the_same_request_after_the_end_gives_the_same_ids_and_runs_nothing(
    client: hutch.Client, stub: Any
) -> None:
    program = "from hutch import artifacts\nartifacts.save(b'x', 'kept.txt')\nreturn 41"
    request = pb.CreateInvocationRequest(
        request_id="again-after-the-end", spec=invocation_pb2.InvocationSpec(program=program)
    )
    first = stub.CreateInvocation(request).invocation
    ended = client.wait_invocation(first.invocation_id)
    kept = client.list_artifacts(first.invocation_id).artifacts
    before = len(client.list_invocations(page_size=1000).invocations)
    again = stub.CreateInvocation(request).invocation
    assert again.invocation_id == first.invocation_id
    assert client.wait_invocation(again.invocation_id) == ended
    assert client.list_artifacts(again.invocation_id).artifacts == kept
    assert len(client.list_invocations(page_size=1000).invocations) == before


def test_case_21_a_child_sees_exactly_the_inputs_that_are_named(client: hutch.Client) -> None:
    program = """
secret = "the parent's own"
names = invoke(program='''
return sorted(name for name in globals() if not name.startswith("_"))
''', given=1)
try:
    invoke(program="return secret", given=1)
except Exception as error:
    return names, error.failure.type_name
"""
    names, error = client.invoke(program=program, handed=2)
    empty = client.invoke(
        program="return sorted(name for name in globals() if not name.startswith('_'))"
    )
    assert set(names) - set(empty) == {"given"}
    assert error == "NameError"


def test_a_childs_failure_is_told_to_its_parent_as_to_a_client(client: hutch.Client) -> None:
    program = """
try:
    invoke(program="raise ValueError('why')")
except Exception as error:
    return str(error).partition(" ")[2], error.failure.type_name, error.failure.message
"""
    with pytest.raises(hutch.InvocationRaised) as caught:
        client.invoke(program="raise ValueError('why')")
    failure = caught.value.failure
    told = str(caught.value).partition(" ")[2], failure.type_name, failure.message
    assert told == ("raised ValueError: why", "ValueError", "why")
    assert client.invoke(program=program) == told
