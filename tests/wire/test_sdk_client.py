"""What the clients say on the wire, and what becomes of the answers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from google.rpc import code_pb2  # type: ignore[import-untyped]

import hutch
from hutch import types
from hutch.calls import make_call
from hutch.v1 import event_pb2
from hutch.v1 import invocation_service_pb2 as pb
from tests.support.scripted_controller import (
    ScriptedController,
    ended,
    refusal,
    returned,
    serve,
)


@pytest.fixture
async def script(tmp_path: Path) -> AsyncIterator[tuple[ScriptedController, str]]:
    controller = ScriptedController()
    target = f"unix:{tmp_path}/c.sock"
    server = await serve(controller, target)
    yield controller, target
    await server.stop(None)


Script = tuple[ScriptedController, str]


@dataclass
class Row:
    """A class that a value becomes."""

    name: str
    size: int


async def test_invoke_gives_back_the_value_as_its_declared_type(script: Script) -> None:
    controller, target = script
    controller.finish = returned(b'[{"$object":{"class":"Row","fields":{"name":"a","size":1}}}]')
    async with hutch.AsyncClient(target) as client:
        rows = await client.invoke(list[Row], program="return rows", label="sizes", n=3)
    assert rows == [Row(name="a", size=1)]
    request = next(iter(controller.created.values()))
    assert request.spec.program == "return rows"
    assert request.spec.label == "sizes"
    assert [(item.name, item.value.json) for item in request.spec.inputs] == [("n", b"3")]
    assert b'"additionalProperties":false' in request.spec.contract.schema_json
    assert request.cancel_on_disconnect
    assert request.session_id == controller.sessions[0]


async def test_a_call_without_a_type_accepts_any_value_and_sends_no_contract(
    script: Script,
) -> None:
    controller, target = script
    controller.finish = returned(b'{"$tuple":[1,2]}')
    async with hutch.AsyncClient(target) as client:
        assert await client.invoke(program="return 1, 2") == (1, 2)
    assert not next(iter(controller.created.values())).spec.HasField("contract")


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("raised", hutch.InvocationRaised),
        ("contract_violated", hutch.ReturnTypeError),
        ("deadline_exceeded", hutch.DeadlineExceededError),
        ("memory_exceeded", hutch.ResourceExceededError),
        ("cancelled", hutch.InvocationCancelled),
        ("crashed", hutch.InvocationCrashed),
        ("host_lost", hutch.InvocationLost),
    ],
)
async def test_an_ending_without_a_value_is_an_exception_of_its_kind(
    script: Script, kind: str, error: type[hutch.InvocationFailed]
) -> None:
    controller, target = script
    controller.finish = ended(kind, type_name="KeyError", message="'x'")
    async with hutch.AsyncClient(target) as client:
        with pytest.raises(error) as caught:
            await client.invoke(program="x")
    assert caught.value.ending == kind
    assert caught.value.child_id == "inv_1"
    assert caught.value.failure.type_name == "KeyError"


async def test_a_misfit_says_path_expected_and_got(script: Script) -> None:
    controller, target = script

    def finish(request: object, invocation: object) -> None:
        ended("contract_violated", type_name="ReturnTypeError")(request, invocation)  # type: ignore[arg-type]
        mismatch = invocation.ending.failure.mismatch  # type: ignore[attr-defined]
        mismatch.path, mismatch.expected, mismatch.got = "result[0]", "integer", '"a"'

    controller.finish = finish
    async with hutch.AsyncClient(target) as client:
        with pytest.raises(hutch.ReturnTypeError) as caught:
            await client.invoke(list[int], program="return ['a']")
    found = caught.value
    assert (found.path, found.expected, found.got) == ("result[0]", "integer", '"a"')


@pytest.mark.parametrize(
    ("code", "reason", "error"),
    [
        (code_pb2.INVALID_ARGUMENT, "FIELD_INVALID", hutch.FieldInvalidError),
        (code_pb2.INVALID_ARGUMENT, "PAYLOAD_TOO_LARGE", hutch.PayloadTooLargeError),
        (code_pb2.UNAUTHENTICATED, "CREDENTIAL_INVALID", hutch.CredentialInvalidError),
        (code_pb2.PERMISSION_DENIED, "GRANT_DENIED", hutch.GrantDeniedError),
        (code_pb2.ALREADY_EXISTS, "REQUEST_ID_REUSED", hutch.RequestIdReusedError),
        (code_pb2.FAILED_PRECONDITION, "NOT_ENFORCEABLE", hutch.NotEnforceableError),
        (code_pb2.UNAVAILABLE, "STORE_FULL", hutch.UnavailableError),
        (code_pb2.INTERNAL, "INTERNAL", hutch.InternalError),
        (code_pb2.UNIMPLEMENTED, "NOT_BUILT", hutch.NotBuiltError),
    ],
)
async def test_a_refusal_is_an_exception_of_its_reason_and_is_not_sent_again(
    script: Script, code: int, reason: str, error: type[hutch.RequestRefused]
) -> None:
    controller, target = script
    controller.faults["CreateInvocation"] = deque([refusal(code, reason, "no", field="spec.x")])
    async with hutch.AsyncClient(target) as client:
        with pytest.raises(error, match="no") as caught:
            await client.invoke(program="x")
    assert caught.value.reason == reason
    assert caught.value.details == {"field": "spec.x"}
    assert controller.calls["CreateInvocation"] == 1


async def test_a_lost_answer_is_asked_for_again_with_the_same_request_id(script: Script) -> None:
    controller, target = script
    controller.lose_answer["CreateInvocation"] = 2
    async with hutch.AsyncClient(target) as client:
        await client.invoke(program="return 1")
    assert controller.calls["CreateInvocation"] == 3
    assert len(controller.created) == 1


async def test_a_controller_that_drains_is_asked_again(script: Script) -> None:
    controller, target = script
    controller.faults["CreateInvocation"] = deque(
        [refusal(code_pb2.UNAVAILABLE, "CONTROLLER_DRAINING", "ending")]
    )
    async with hutch.AsyncClient(target) as client:
        await client.invoke(program="return 1")
    assert controller.calls["CreateInvocation"] == 2


async def test_patience_has_an_end(script: Script) -> None:
    controller, target = script
    controller.faults["GetInvocation"] = deque([grpc.StatusCode.UNAVAILABLE] * 1000)
    async with hutch.AsyncClient(target, retry_seconds=0.3) as client:
        with pytest.raises(hutch.ConnectionLostError):
            await client.get_invocation("inv_1")
    assert controller.calls["GetInvocation"] > 1


async def test_nobody_at_the_target_is_an_error_within_the_time(tmp_path: Path) -> None:
    with pytest.raises(hutch.ConnectionLostError):
        async with hutch.AsyncClient(f"unix:{tmp_path}/none.sock", connect_timeout_seconds=0.3):
            pass


@pytest.mark.parametrize("target", ["http://x", "unix:", "host", "host:99999", "unix:" + "a" * 200])
async def test_a_target_that_is_none_is_refused(target: str) -> None:
    with pytest.raises(hutch.FieldInvalidError):
        async with hutch.AsyncClient(target):
            pass


async def test_a_key_is_not_sent_in_clear_text_across_a_network() -> None:
    with pytest.raises(hutch.FieldInvalidError, match="clear text"):
        async with hutch.AsyncClient("example.org:4000", api_key="k"):
            pass


async def test_a_broken_session_is_taken_up_again_under_its_id(script: Script) -> None:
    controller, target = script
    controller.faults["session-end"] = deque([True])
    async with hutch.AsyncClient(target):
        async with asyncio.timeout(10):
            while len(controller.sessions) < 2 or not controller.open_sessions:
                await asyncio.sleep(0)
    assert len(set(controller.sessions)) == 1


async def test_closing_a_client_ends_its_session_at_once(script: Script) -> None:
    controller, target = script
    async with hutch.AsyncClient(target):
        assert controller.open_sessions
    async with asyncio.timeout(10):
        while controller.open_sessions:
            await asyncio.sleep(0)


async def test_a_cancelled_invoke_cancels_what_it_started(script: Script) -> None:
    controller, target = script
    controller.finish = None
    async with hutch.AsyncClient(target) as client:
        task = asyncio.create_task(client.run(make_call(program="x")))
        async with asyncio.timeout(10):
            while not controller.calls["WaitInvocation"]:
                await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert controller.cancelled == ["inv_1"]


async def test_an_invoke_that_is_cancelled_while_it_is_asked_for_leaves_nothing_running(
    script: Script,
) -> None:
    controller, target = script
    controller.finish = None
    controller.lose_answer["CreateInvocation"] = 3
    async with hutch.AsyncClient(target) as client:
        task = asyncio.create_task(client.run(make_call(program="x")))
        async with asyncio.timeout(10):
            while not controller.calls["CreateInvocation"]:
                await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert controller.cancelled == ["inv_1"]


async def test_a_client_that_is_closed_ends_its_calls_with_an_error(script: Script) -> None:
    controller, target = script
    controller.finish = None
    client = hutch.AsyncClient(target)
    await client.connect()
    handle = await client.start(make_call(program="x"))
    waiting = asyncio.create_task(handle.result())
    async with asyncio.timeout(10):
        while not controller.calls["WaitInvocation"]:
            await asyncio.sleep(0)
    await client.close()
    with pytest.raises(hutch.ConnectionLostError):
        await waiting
    with pytest.raises(hutch.ConnectionLostError):
        await client.get_invocation("inv_1")


async def test_a_spawned_invocation_is_watched_waited_for_and_cancelled(script: Script) -> None:
    controller, target = script
    controller.finish = None
    controller.output = {pb.OUTPUT_STREAM_STDOUT: b"hello", pb.OUTPUT_STREAM_STDERR: b"oh"}
    async with hutch.AsyncClient(target) as client:
        handle = await client.spawn(int, program="return 1")
        assert not controller.created[handle.id].cancel_on_disconnect
        assert await handle.status() == "running"
        with pytest.raises(hutch.ResultTimeoutError):
            await handle.result(timeout_seconds=0.05)
        assert await handle.output() == b"hello"
        assert await handle.output("stderr", offset=1) == b"h"
        controller.publish("a", b"1", invocation_id=handle.id)
        assert [artifact.name for artifact in await handle.artifacts()] == ["a"]
        await controller.end(handle.id, returned(b"1"))
        assert await handle.result() == 1
        assert (await handle.cancel()).ending == types.Ending(kind="returned")


async def test_an_unknown_id_is_not_found(script: Script) -> None:
    _, target = script
    async with hutch.AsyncClient(target) as client:
        with pytest.raises(hutch.NotFoundError) as caught:
            await client.get_invocation("inv_none")
    assert caught.value.reason == "INVOCATION_NOT_FOUND"


async def test_a_cut_watch_resumes_without_gap_or_repetition(script: Script) -> None:
    controller, target = script
    controller.events = [
        event_pb2.InvocationEvent(sequence=n * 2, invocation_id="inv_1") for n in range(1, 8)
    ]
    controller.cut_after = 2
    async with hutch.AsyncClient(target) as client:
        await client.invoke(program="x")
        seen = [event.sequence async for event in client.watch_invocation("inv_1", tree=True)]
    assert seen == [2, 4, 6, 8, 10, 12, 14]
    assert controller.calls["WatchInvocation"] == 4


async def test_cut_output_resumes_at_its_byte(script: Script) -> None:
    controller, target = script
    controller.output = {pb.OUTPUT_STREAM_STDOUT: bytes(range(256)) * 4}
    controller.cut_after = 300
    async with hutch.AsyncClient(target) as client:
        await client.invoke(program="x")
        chunks = [chunk async for chunk in client.read_output("inv_1", offset=10, max_bytes=900)]
    assert b"".join(chunk.data for chunk in chunks) == (bytes(range(256)) * 4)[10:910]


async def test_a_cut_download_resumes_and_its_digest_is_checked(script: Script) -> None:
    controller, target = script
    content = bytes(range(256)) * 5
    controller.cut_after = 500
    artifact = controller.publish("a", content)
    async with hutch.AsyncClient(target) as client:
        parts = [part async for part in client.get_artifact(artifact.artifact_id)]
        assert b"".join(parts) == content
        rest = [part async for part in client.get_artifact(artifact.artifact_id, offset=1000)]
        assert b"".join(rest) == content[1000:]
        controller.stored[artifact.artifact_id] = (artifact, content[:-1] + b"x")
        with pytest.raises(hutch.InternalError, match="digest"):
            async for _ in client.get_artifact(artifact.artifact_id):
                pass


async def test_large_inputs_are_stored_once_and_large_values_are_fetched(script: Script) -> None:
    """Values over 1 MiB move as artifacts, and so does what is too much for one request."""
    controller, target = script
    large, half = "x" * 2**20, "y" * 900_000

    def echo(request: pb.CreateInvocationRequest, invocation: object) -> None:
        returned(b"")(request, invocation)  # type: ignore[arg-type]
        value = next(item.value for item in request.spec.inputs if item.name == "large")
        invocation.value.CopyFrom(value)  # type: ignore[attr-defined]

    controller.finish = echo
    async with hutch.AsyncClient(target) as client:
        for _ in range(3):
            value = await client.invoke(
                str, program="return large", large=large, a=half, b=half + "b", c=half + "c"
            )
            assert value == large
    assert controller.calls["PutArtifact"] == 2  # the large one, and one of those that are too much
    for request in controller.created.values():
        assert len(request.SerializeToString()) < 4 * 1024 * 1024


async def test_a_file_is_put_as_it_is(script: Script, tmp_path: Path) -> None:
    controller, target = script
    path = tmp_path / "data.bin"
    path.write_bytes(b"\0\1" * 300_000)
    async with hutch.AsyncClient(target) as client:
        artifact = await client.put_artifact(path, name="data.bin", media_type="x/y")
        assert artifact == await client.stat_artifact(artifact.artifact_id)
    assert controller.stored[artifact.artifact_id][1] == path.read_bytes()


async def test_a_task_is_said_to_be_not_built(script: Script) -> None:
    controller, target = script
    controller.faults["CreateInvocation"] = deque(
        [refusal(code_pb2.UNIMPLEMENTED, "NOT_BUILT", "agent mode is not built yet")]
    )
    async with hutch.AsyncClient(target) as client:
        with pytest.raises(hutch.NotBuiltError, match="agent mode is not built yet"):
            await client.invoke(task="do it")
    assert isinstance(hutch.NotBuiltError("x"), NotImplementedError)


async def test_many_more_waits_than_the_cap_all_end(script: Script) -> None:
    """The cap on long calls neither locks up nor keeps a cancellation from being sent."""
    controller, target = script
    controller.finish = None

    async def outcome(client: hutch.AsyncClient) -> object:
        try:
            return await client.invoke(int, program="x")
        except hutch.InvocationCancelled:
            return "cancelled"

    async with hutch.AsyncClient(target) as client, asyncio.TaskGroup() as group:
        tasks = [group.create_task(outcome(client)) for _ in range(220)]
        while len(controller.created) < 220 or controller.calls["WaitInvocation"] < 200:
            await asyncio.sleep(0.01)
        first, *others = controller.created
        await client.cancel_invocation(first)
        for key in others:
            await controller.end(key, returned(b"7"))
    assert sorted(str(task.result()) for task in tasks) == ["7"] * 219 + ["cancelled"]
