"""The client's tools on the wire: given, called, answered until acknowledged, taken up again."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.rpc import code_pb2  # type: ignore[import-untyped]

import hutch
from hutch import values
from hutch.v1 import invocation_service_pb2 as pb
from tests.support.scripted_controller import (
    ScriptedController,
    Served,
    refusal,
    returned,
    serve,
    serve_in_thread,
)


@pytest.fixture
async def script(tmp_path: Path) -> AsyncIterator[tuple[ScriptedController, str]]:
    controller = ScriptedController()
    controller.finish = None
    target = f"unix:{tmp_path}/c.sock"
    server = await serve(controller, target)
    yield controller, target
    await server.stop(None)


Script = tuple[ScriptedController, str]


class Plot:
    """What an invocation does with the tools that it was given."""

    def __init__(self, controller: ScriptedController, number: int = 1) -> None:
        self.controller = controller
        self.invocation_id = f"inv_{number}"
        self.count = 0

    async def request(self) -> pb.CreateInvocationRequest:
        async with asyncio.timeout(20), self.controller.changed:
            await self.controller.changed.wait_for(
                lambda: self.invocation_id in self.controller.created
            )
        return self.controller.created[self.invocation_id]

    async def begin(self, *args: Any, call_id: str = "", method: str = "", **kwargs: Any) -> str:
        """Calls the first tool."""
        request = await self.request()
        self.count += 1
        call = pb.ToolCall(
            call_id=call_id or f"tc_{self.count}",
            tool_id=request.spec.tools[0].tool_id,
            method=method,
            invocation_id=self.invocation_id,
        )
        call.arguments.json = values.encode({"args": list(args), "kwargs": kwargs})
        await self.controller.tools.say(call=call)
        return call.call_id

    async def outcome(self, call_id: str) -> pb.ToolCallOutcome:
        return await self.controller.tools.outcome(call_id)

    async def call(self, *args: Any, method: str = "", **kwargs: Any) -> pb.ToolCallOutcome:
        return await self.outcome(await self.begin(*args, method=method, **kwargs))

    async def value(self, *args: Any, method: str = "", **kwargs: Any) -> Any:
        outcome = await self.call(*args, method=method, **kwargs)
        assert outcome.WhichOneof("outcome") == "value", outcome
        return values.decode(outcome.value.json)

    async def end(self, value: Any = None) -> None:
        await self.controller.end(self.invocation_id, returned(values.encode(value)))


def search(query: str, limit: int = 3) -> list[str]:
    """Finds things."""
    return [query] * limit


async def test_a_function_given_as_an_input_is_served(script: Script) -> None:
    controller, target = script
    plot = Plot(controller)
    async with hutch.AsyncClient(target) as client, asyncio.TaskGroup() as group:
        task = group.create_task(client.invoke(program="x", given=[search], again=search, n=1))
        assert await plot.value("a", limit=2) == ["a", "a"]
        assert await plot.value("b") == ["b", "b", "b"]
        await plot.end(7)
        assert await task == 7
    request = controller.created["inv_1"]
    (tool,) = request.spec.tools
    assert tool.tool_id == f"tool_{controller.tools.server_ids[0]}_1"
    assert (tool.name, tool.description) == ("search", "Finds things.")
    assert tool.signature == "(query: str, limit: int = 3) -> list[str]"
    assert not tool.delegable
    assert not tool.HasField("timeout")
    inputs = {item.name: json.loads(item.value.json) for item in request.spec.inputs}
    handle = {"$tool": tool.tool_id}
    assert inputs == {"given": [handle], "again": handle, "n": 1}


async def test_a_client_without_tools_serves_none(script: Script) -> None:
    controller, target = script
    controller.finish = returned(b"1")
    async with hutch.AsyncClient(target) as client:
        assert await client.invoke(program="return 1") == 1
    assert controller.calls["ServeTools"] == 0


class Account:
    """An account."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, amount: int) -> int:
        """Adds."""
        self.total += amount
        return self.total

    async def show(self) -> int:
        """Shows."""
        return self.total


async def test_an_object_is_served_by_its_methods(script: Script) -> None:
    controller, target = script
    plot = Plot(controller)
    account = Account()
    given = hutch.tool(account, name="account", timeout_seconds=1.5, delegable=True)
    async with hutch.AsyncClient(target) as client, asyncio.TaskGroup() as group:
        group.create_task(client.invoke(program="x", account=given))
        assert await plot.value(5, method="add") == 5
        assert await plot.value(method="show") == 5
        refused = await plot.call(method="__init__")
        assert "no such tool" in refused.failure.message
        await plot.end()
    (tool,) = controller.created["inv_1"].spec.tools
    assert [method.name for method in tool.methods] == ["add", "show"]
    assert tool.delegable
    assert tool.timeout.ToTimedelta().total_seconds() == 1.5
    assert account.total == 5


async def test_an_exception_is_the_outcome_with_the_tools_own_lines(script: Script) -> None:
    controller, target = script
    plot = Plot(controller)

    def look(key: str) -> int:
        return {"b": 1}[key]

    async with hutch.AsyncClient(target) as client, asyncio.TaskGroup() as group:
        group.create_task(client.invoke(program="x", look=look))
        failure = (await plot.call("a")).failure
        await plot.end()
    assert (failure.type_name, failure.message, failure.reason) == ("KeyError", "'a'", "")
    assert 'return {"b": 1}[key]' in failure.traceback
    assert "serving.py" not in failure.traceback


async def test_an_outcome_is_sent_until_it_is_acknowledged_and_the_tool_runs_once(
    script: Script,
) -> None:
    controller, target = script
    plot = Plot(controller)
    runs: list[int] = []
    async with hutch.AsyncClient(target) as client, asyncio.TaskGroup() as group:
        group.create_task(client.invoke(program="x", run=runs.append))
        call_id = await plot.begin(1)
        await plot.outcome(call_id)
        controller.tools.outcomes.clear()
        await controller.tools.cut()
        await plot.begin(1, call_id=call_id)  # the controller does not know yet how it came out
        await plot.outcome(call_id)
        await controller.tools.say(acknowledged=pb.ToolCallAcknowledged(call_id=call_id))
        other = await plot.begin(2)
        await plot.outcome(other)
        controller.tools.outcomes.clear()
        await controller.tools.cut()
        await plot.outcome(other)
        assert call_id not in controller.tools.outcomes
        await plot.end()
    assert runs == [1, 2]
    assert len(controller.tools.server_ids) == 3
    assert len(set(controller.tools.server_ids)) == 1


async def test_the_outcome_of_a_cancelled_call_is_dropped(script: Script) -> None:
    controller, target = script
    plot = Plot(controller)
    gate, began = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hold(waits: bool) -> str:
        if waits:
            loop.call_soon_threadsafe(began.set)
            gate.wait(20)
        return "ran"

    async with hutch.AsyncClient(target) as client, asyncio.TaskGroup() as group:
        group.create_task(client.invoke(program="x", hold=hold))
        call_id = await plot.begin(True)
        async with asyncio.timeout(20):
            await began.wait()
        await controller.tools.say(cancelled=pb.ToolCallCancelled(call_id=call_id))
        assert await plot.value(False) == "ran"
        gate.set()
        assert await plot.value(False) == "ran"
        await plot.end()
    assert call_id not in controller.tools.outcomes


async def test_calls_run_at_once(script: Script) -> None:
    controller, target = script
    plot = Plot(controller)
    barrier = threading.Barrier(16, timeout=20)

    def meet(number: int) -> int:
        barrier.wait()
        return number

    async with hutch.AsyncClient(target) as client, asyncio.TaskGroup() as group:
        group.create_task(client.invoke(program="x", meet=meet))
        calls = [await plot.begin(n) for n in range(16)]
        outcomes = [await plot.outcome(call) for call in calls]
        await plot.end()
    assert [json.loads(one.value.json) for one in outcomes] == list(range(16))


async def test_large_arguments_and_values_move_as_artifacts(script: Script) -> None:
    controller, target = script
    plot = Plot(controller)
    large = "x" * (2 * 1024 * 1024)

    async with hutch.AsyncClient(target) as client, asyncio.TaskGroup() as group:
        group.create_task(client.invoke(program="x", double=lambda text: text + "y"))
        request = await plot.request()
        stored = controller.publish("a", values.encode({"args": [large], "kwargs": {}}))
        call = pb.ToolCall(call_id="tc_big", tool_id=request.spec.tools[0].tool_id)
        call.arguments.artifact.artifact_id = stored.artifact_id
        call.arguments.artifact.sha256 = stored.sha256
        call.arguments.artifact.size_bytes = stored.size_bytes
        await controller.tools.say(call=call)
        outcome = await plot.outcome("tc_big")
        await plot.end()
    kept = controller.stored[outcome.value.artifact.artifact_id][1]
    assert values.decode(kept) == large + "y"


async def test_a_tool_that_invokes_says_which_call_it_serves(script: Script) -> None:
    controller, target = script
    plot, inner = Plot(controller), Plot(controller, 2)

    async def outer(number: int) -> Any:
        return await hutch.ainvoke(program="y", n=number)

    async with hutch.AsyncClient(target) as client, asyncio.TaskGroup() as group:
        group.create_task(client.invoke(program="x", outer=outer))
        call_id = await plot.begin(3)
        assert (await inner.request()).tool_call_id == call_id
        await inner.end(9)
        assert json.loads((await plot.outcome(call_id)).value.json) == 9
        await plot.end()
    assert controller.created["inv_1"].tool_call_id == ""


async def test_a_controller_that_will_not_be_served_refuses_the_call(script: Script) -> None:
    controller, target = script
    no = refusal(code_pb2.INVALID_ARGUMENT, "FIELD_INVALID", "server_id: no")
    controller.faults["ServeTools"] = deque([no])
    async with hutch.AsyncClient(target) as client:
        with pytest.raises(hutch.FieldInvalidError, match="server_id: no"):
            await client.invoke(program="x", search=search)
        assert controller.calls["CreateInvocation"] == 0
        controller.finish = returned(b"1")
        assert await client.invoke(program="x", search=search) == 1


@pytest.mark.parametrize("given", [Account, iter(()), object()])
async def test_what_cannot_be_a_tool_is_refused_before_anything_is_sent(
    script: Script, given: object
) -> None:
    controller, target = script
    async with hutch.AsyncClient(target) as client:
        with pytest.raises(hutch.ValueEncodeError, match=r'given\["a"\]'):
            await client.invoke(program="x", given={"a": given})
    assert controller.calls["CreateInvocation"] == controller.calls["ServeTools"] == 0


async def test_more_than_can_be_told_of_tools_is_refused(script: Script) -> None:
    controller, target = script
    many = [hutch.tool(lambda: 1, description="x" * 2000) for _ in range(30)]
    async with hutch.AsyncClient(target) as client:
        with pytest.raises(hutch.PayloadTooLargeError, match="docstrings") as caught:
            await client.invoke(program="x", many=many)
    assert caught.value.details == {"limit": "49152"}
    assert controller.calls["CreateInvocation"] == controller.calls["ServeTools"] == 0


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serve_in_thread(tmp_path) as served:
        served.script.finish = None
        yield served


def beside(work: Callable[[], Any]) -> Callable[[], Any]:
    """Runs work in a thread; called, it gives the result."""
    outcome: list[Any] = []
    thread = threading.Thread(target=lambda: outcome.append(work()))
    thread.start()

    def result() -> Any:
        thread.join(30)
        return outcome[0]

    return result


def test_tools_of_a_blocking_client_invoke_within_the_callers_tree(served: Served) -> None:
    plot, inner = Plot(served.script), Plot(served.script, 2)

    def outer(number: int) -> Any:
        return hutch.invoke(program="y", n=number)

    client = hutch.connect(served.target)  # bound by nothing: its tools find it all the same
    try:
        result = beside(lambda: client.invoke(program="x", outer=outer))
        call_id = served.run(plot.begin(3))
        assert served.run(inner.request()).tool_call_id == call_id
        served.run(inner.end(9))
        assert json.loads(served.run(plot.outcome(call_id)).value.json) == 9
        served.run(plot.end(4))
        assert result() == 4
    finally:
        client.close()


def test_coroutines_of_a_blocking_client_have_a_loop_of_their_own(served: Served) -> None:
    plot = Plot(served.script)

    async def name() -> str:
        return threading.current_thread().name

    with hutch.connect(served.target) as client:
        result = beside(lambda: client.invoke(program="x", name=name))
        assert served.run(plot.value()) == "hutch-tool-loop"
        served.run(plot.end())
        result()
    for thread in threading.enumerate():
        if thread.name == "hutch-tool-loop":
            thread.join(10)
            assert not thread.is_alive()
