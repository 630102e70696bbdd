"""The blocking client, bare calls, and which client they go to."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import hutch
from hutch import types
from hutch.v1 import event_pb2
from hutch.v1 import invocation_service_pb2 as pb
from tests.support.scripted_controller import Served, returned, serve_in_thread


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serve_in_thread(tmp_path) as found:
        yield found


def test_invoke_inside_connect_goes_to_that_client(served: Served) -> None:
    served.script.finish = returned(b"6")
    with hutch.connect(served.target) as client:
        assert client.info == types.ServerInfo(
            version="0.1.0", drivers=("fake",), capacity=4, disconnect_grace_seconds=0.0
        )
        assert hutch.invoke(int, program="return sum(items)", items=[1, 2, 3]) == 6
    request = served.script.created["inv_1"]
    assert request.spec.inputs[0].value.json == b"[1,2,3]"


def test_threads_started_inside_connect_use_that_client(served: Served) -> None:
    """Threads of a pool do not have the context variables of whoever started them."""
    served.script.finish = returned(b"1")
    with hutch.connect(served.target), ThreadPoolExecutor(4) as pool:
        values = list(pool.map(lambda n: hutch.invoke(int, program="return 1", n=n), range(12)))
    assert values == [1] * 12
    assert len(served.script.created) == 12


def test_the_target_of_the_environment_serves_bare_calls(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUTCH_TARGET", served.target)
    served.script.finish = returned(b'"x"')
    with hutch.connect():
        assert hutch.invoke(str, program="return 'x'") == "x"


async def test_ainvoke_uses_a_blocking_client_from_another_loop(tmp_path: Path) -> None:
    with serve_in_thread(tmp_path) as served:
        served.script.finish = returned(b"2")
        client = await asyncio.to_thread(hutch.connect, served.target)
        with client:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one()) for _ in range(5)]
            assert [task.result() for task in tasks] == [2] * 5
            handle = await hutch.aspawn(int, program="return 2")
            assert await handle.result() == 2
            assert [event async for event in handle.events()] == []


async def one() -> object:
    return await hutch.ainvoke(int, program="return 2")


async def test_a_blocking_call_inside_an_async_client_says_what_to_do(tmp_path: Path) -> None:
    with serve_in_thread(tmp_path) as served:
        async with hutch.AsyncClient(served.target):
            with pytest.raises(hutch.HutchError, match="ainvoke"):
                hutch.invoke(program="x")


def test_a_handle_shows_everything_without_a_loop(served: Served) -> None:
    served.script.output = {pb.OUTPUT_STREAM_STDOUT: b"hi"}
    served.script.events = [event_pb2.InvocationEvent(sequence=1, invocation_id="inv_1")]
    served.script.finish = returned(b"null")
    with hutch.connect(served.target) as client:
        handle = hutch.spawn(program="print('hi')", label="l")
        assert handle.result() is None
        assert handle.status == "ended"
        assert handle.output() == b"hi"
        assert [event.sequence for event in handle.events()] == [1]
        assert handle.invocation().label == "l"
        served.run(publish(served, handle.id))
        assert [artifact.name for artifact in handle.artifacts] == ["a", "b", "c"]
        artifact = handle.artifacts[0]
        assert b"".join(client.get_artifact(artifact.artifact_id)) == b"1"
        assert client.list_invocations().invocations[0].invocation_id == handle.id
        assert handle.cancel().ended
        assert b"".join(chunk.data for chunk in client.read_output(handle.id)) == b"hi"


async def publish(served: Served, invocation_id: str) -> None:
    for name in "abc":
        served.script.publish(name, b"1", invocation_id=invocation_id)


def test_an_iterator_that_is_left_early_ends_its_stream(served: Served) -> None:
    served.script.events = [
        event_pb2.InvocationEvent(sequence=n, invocation_id="i") for n in (1, 2, 3)
    ]
    served.script.finish = None
    with hutch.connect(served.target) as client:
        handle = client.spawn(program="x")
        events = handle.events()
        assert next(events).sequence == 1
        events.close()  # type: ignore[attr-defined]


def test_scope_and_recursion_limits_bind_the_calls_inside(served: Served) -> None:
    with hutch.connect(served.target):
        with hutch.scope(currency="EUR", amount=1), hutch.RecursionLimit(max_depth=3):
            hutch.invoke(program="x", amount=2)
            hutch.invoke(hutch.RecursionLimit(max_depth=2), program="x", max_depth=5)
        hutch.invoke(program="x")
    first, second, third = served.script.created.values()
    assert {i.name: i.value.json for i in first.spec.inputs} == {
        "currency": b'"EUR"',
        "amount": b"2",
    }
    assert first.spec.spawn.max_depth == 3
    assert second.spec.spawn.max_depth == 2
    assert not third.spec.inputs
    assert not third.spec.HasField("spawn")


def test_an_interrupted_invoke_cancels_what_it_started(served: Served) -> None:
    """Ctrl-C in a blocking call: the invocation is cancelled before KeyboardInterrupt goes on."""
    served.script.finish = None
    with hutch.connect(served.target) as client:
        waited = threading.Thread(target=interrupt_when_waiting, args=(served,))
        waited.start()
        with pytest.raises(KeyboardInterrupt):
            client.invoke(program="x")
        waited.join()
        assert served.script.cancelled == ["inv_1"]


def interrupt_when_waiting(served: Served) -> None:
    while not served.script.calls["WaitInvocation"]:
        threading.Event().wait(0.01)
    os.kill(os.getpid(), signal.SIGINT)


def test_a_closed_client_refuses_calls(served: Served) -> None:
    client = hutch.connect(served.target)
    client.close()
    client.close()
    with pytest.raises(hutch.ConnectionLostError):
        client.invoke(program="x")


def test_a_blocking_client_logs_nothing_of_its_loop(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), hutch.connect(served.target), ThreadPoolExecutor(8) as p:
        list(p.map(lambda n: hutch.invoke(program="x", n=n), range(60)))
    assert [record.message for record in caplog.records] == []
