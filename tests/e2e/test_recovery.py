"""`kill -9` at bad moments: nothing runs twice, nothing is lost, nothing is left."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

import hutch
from hutch.v1 import invocation_pb2
from hutch.v1 import invocation_service_pb2 as pb
from hutch.v1.invocation_service_pb2_grpc import InvocationServiceStub
from tests.support.stack import NotReady, Stack


def wait_for_state(client: hutch.Client, invocation_id: str, state: str) -> None:
    """Waits for the event, not for a time."""
    for event in client.watch_invocation(invocation_id):
        if event.kind == "state_changed" and getattr(event.detail, "state", "") == state:
            return
    raise AssertionError(f"ended before it was {state}")


def test_case_d7_a_controller_that_dies_mid_cell_loses_nothing_and_it_ran_once(
    own_stack: Stack,
) -> None:
    with hutch.connect(own_stack.target) as client:
        program = (
            "import time\n"
            "print('begin', flush=True)\n"
            "child = spawn(program='import time\\ntime.sleep(1.5)\\nreturn 7')\n"
            "time.sleep(1)\n"
            "print('end', flush=True)\n"
            "return [child.result(), invoke(program='return 1')]\n"
        )
        handle = client.spawn(program=program, cancel_on_disconnect=False)
        wait_for_state(client, handle.id, "running")
        own_stack.kill_controller()
        own_stack.start_controller()
        assert handle.result() == [7, 1]
        assert handle.output() == b"begin\nend\n"
        tree = client.list_invocations(tree_of=handle.id).invocations
        assert [(item.attempt, item.state) for item in tree] == [(1, "ended")] * 3


def test_case_d9_an_ending_stands_across_a_crash(own_stack: Stack) -> None:
    with hutch.connect(own_stack.target) as client:
        handle = client.spawn(program="return 'kept'")
        assert handle.result() == "kept"
        before = client.get_invocation(handle.id)
        own_stack.kill_controller()
        own_stack.start_controller()
        assert client.get_invocation(handle.id) == before


def test_case_d8_a_host_that_dies_is_reported_and_a_retry_runs_where_it_was_allowed(
    own_stack: Stack,
) -> None:
    with hutch.connect(own_stack.target) as client:
        plain = client.spawn(program="while True: pass", cancel_on_disconnect=False)
        retried = client.spawn(
            program="import time\ntime.sleep(2)\nreturn 'again'",
            cancel_on_disconnect=False,
            retry_on_loss=True,
        )
        for handle in (plain, retried):
            wait_for_state(client, handle.id, "running")
        own_stack.kill_host()
        own_stack.start_host()
        with pytest.raises(hutch.InvocationLost) as lost:
            plain.result()
        assert lost.value.ending == "host_lost"
        assert retried.result() == "again"
        assert client.get_invocation(retried.id).attempt == 2


def test_a_client_that_is_gone_takes_its_bound_invocations_with_it(own_stack: Stack) -> None:
    client = hutch.connect(own_stack.target)
    bound = client.spawn(program="while True: pass", cancel_on_disconnect=True)
    free = client.spawn(program="while True: pass", cancel_on_disconnect=False)
    client.close()
    with hutch.connect(own_stack.target) as other:
        while other.wait_invocation(bound.id).state != "ended":
            pass
        ending = other.get_invocation(bound.id).ending
        assert ending is not None
        assert (ending.kind, ending.cause) == ("cancelled", "disconnected")
        assert other.get_invocation(free.id).state == "running"
        other.cancel_invocation(free.id)


def test_a_session_that_is_not_open_yet_has_its_grace(own_stack: Stack) -> None:
    """A controller that died between a client's session and its request refuses nothing."""
    request = pb.CreateInvocationRequest(
        request_id="r" * 16,
        session_id="s" * 16,
        cancel_on_disconnect=True,
        spec=invocation_pb2.InvocationSpec(program="while True: pass"),
    )
    with grpc.insecure_channel(own_stack.target) as channel:
        stub: Any = InvocationServiceStub(channel)
        created = stub.CreateInvocation(request, timeout=30).invocation
        request.session_id, request.request_id = "", "q" * 16
        with pytest.raises(grpc.RpcError, match="needs a session"):
            stub.CreateInvocation(request, timeout=30)
    with hutch.connect(own_stack.target) as client:
        while client.wait_invocation(created.invocation_id).state != "ended":
            pass
        ending = client.get_invocation(created.invocation_id).ending
        assert ending is not None
        assert (ending.kind, ending.cause) == ("cancelled", "disconnected")


def test_a_second_controller_on_the_same_state_is_refused(own_stack: Stack) -> None:
    with pytest.raises(NotReady, match="a live controller owns the state directory"):
        own_stack.start_controller()


def test_a_damaged_state_is_named_and_not_overwritten(own_stack: Stack) -> None:
    own_stack.kill_controller()
    journal = own_stack.state / "journal.sqlite3"
    for name in ("journal.sqlite3-wal", "journal.sqlite3-shm"):
        (own_stack.state / name).unlink(missing_ok=True)
    journal.write_bytes(b"this is not a database" * 1000)
    with pytest.raises(NotReady, match=r"journal\.sqlite3"):
        own_stack.start_controller()
    assert journal.read_bytes() == b"this is not a database" * 1000


def test_a_cell_of_a_box_outlives_its_controller_and_runs_once(own_stack: Stack) -> None:
    with hutch.connect(own_stack.target) as client, client.sandbox() as box:
        box.run("runs = 0")
        code = (
            "import time\nruns += 1\nprint('begin', flush=True)\n"
            "time.sleep(1.5)\nprint('end')\nruns"
        )
        cell = box.submit(code)
        for chunk in cell.output(follow=True):
            assert chunk.data == b"begin\n"
            break
        own_stack.kill_controller()
        own_stack.start_controller()
        result = cell.result()
        assert (result.outcome, result.text) == ("completed", "1")
        assert result.stdout_view.text == "begin\nend\n"
        assert box.run("runs").text == "1"
