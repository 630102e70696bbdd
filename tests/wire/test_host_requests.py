"""Whom the host serves, what it refuses, and what it says of itself: over a real unix socket."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hutch.v1 import host_pb2, invocation_pb2, invocation_service_pb2
from hutch.v1 import host_service_pb2 as pb
from tests.support.host import (
    ManualClock,
    ScriptedDriver,
    host,
    make_spec,
    refusal,
    started,
    until,
)

STDOUT = invocation_service_pb2.OUTPUT_STREAM_STDOUT


async def test_lower_epochs_and_other_generations_are_fenced_everywhere() -> None:
    driver = ScriptedDriver()
    async with host(driver) as it:
        talk, container = await started(it, driver)
        newer = it.attach(after=1, epoch=4)
        await newer.greeting()
        await talk.over()
        async with refusal("OWNER_FENCED"):
            await it.attach(after=1, epoch=3).greeting()
        async with refusal("OWNER_FENCED"):
            await it.attach(after=1, epoch=5, generation=6).greeting()
        async with refusal("OWNER_FENCED"):
            await it.destroy("sbx_1", epoch=3)
        async with refusal("OWNER_FENCED"):
            await it.destroy("sbx_1", epoch=9, generation=8)
        async with refusal("OWNER_FENCED"):
            watch = it.stub.WatchHost(pb.WatchHostRequest(owner_epoch=3, host_generation=7))
            await watch.read()
        assert container.destroy_count == 0
        # A refused request with another generation did not raise the epoch.
        assert (await it.destroy("sbx_1", epoch=4)).HasField("wall_time")


async def test_case_52_a_stream_of_a_succeeded_owner_can_do_nothing_more() -> None:
    driver = ScriptedDriver()
    async with host(driver) as it:
        talk, container = await started(it, driver)
        watch = it.stub.WatchHost(pb.WatchHostRequest(owner_epoch=4, host_generation=7))
        await watch.read()
        async with refusal("OWNER_FENCED"):
            await talk.run()
            await talk.next("cell_started")
        newer = it.attach(after=1, epoch=4)
        await newer.greeting()
        await newer.run(cell="cell_2")
        assert (await container.hear()).header["cell"] == "cell_2"
        watch.cancel()


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (make_spec(demanded_limits=["memory", "open_files"]), None),
        (make_spec(demanded_limits=["memory", "pids"]), "NOT_ENFORCEABLE"),
        (make_spec(demanded_limits=["moonlight"]), "FIELD_INVALID"),
        (make_spec(driver="docker"), "FIELD_INVALID"),
        (make_spec(template="exotic"), "FIELD_INVALID"),
        (make_spec(resources=invocation_pb2.ResourceLimits(pids_limit=1)), "FIELD_INVALID"),
    ],
)
async def test_a_spec_is_refused_never_weakened(
    spec: host_pb2.SandboxSpec, reason: str | None
) -> None:
    driver = ScriptedDriver()
    async with host(driver) as it:
        talk = it.attach(spec=spec)
        if reason is None:
            assert (await talk.greeting()).started
            return
        async with refusal(reason):
            await talk.greeting()
        assert await it.sandboxes() == {}
        assert driver.made == {}


async def test_a_full_host_says_when_to_try_again() -> None:
    async with host(capacity=1) as it:
        await it.attach("sbx_1").greeting()
        async with refusal("HOST_UNAVAILABLE"):
            await it.attach("sbx_2").greeting()
        await it.destroy("sbx_1")
        await it.attach("sbx_2").greeting()


async def test_first_things_must_come_first() -> None:
    async with host() as it:
        call = it.stub.AttachSandbox()
        await call.write(pb.AttachSandboxRequest(acknowledge=pb.EventAcknowledgement(sequence=1)))
        async with refusal("FIELD_INVALID", field="attach"):
            await call.read()
        async with refusal("FIELD_INVALID", field="sandbox_id"):
            await it.attach("../../etc").greeting()


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"acknowledge": pb.EventAcknowledgement(sequence=99)}, "acknowledge.sequence"),
        ({"run_cell": pb.RunCell()}, "run_cell.cell_id"),
        ({"run_cell": pb.RunCell(cell_id="c")}, "run_cell.mode"),
        ({"blob": pb.BlobChunk(blob_id="b", offset=5, data=b"x")}, "blob.offset"),
    ],
)
async def test_a_message_that_cannot_be_ends_the_stream_and_not_the_sandbox(
    message: dict[str, object], field: str
) -> None:
    driver = ScriptedDriver()
    async with host(driver) as it:
        talk, container = await started(it, driver)
        async with refusal("FIELD_INVALID", field=field):
            await talk.send(**message)
            await talk.next("gone")
        again = it.attach(after=1)
        await again.greeting()
        await again.run()
        await container.hear()


async def test_the_lease_that_lapsed_for_the_grace_ends_all_sandboxes() -> None:
    driver, clock = ScriptedDriver(), ManualClock()
    async with host(
        driver, clock=clock, lease_seconds=60.0, orphan_grace_seconds=600.0, report_seconds=0.01
    ) as it:
        talk, container = await started(it, driver)
        watch = it.stub.WatchHost(pb.WatchHostRequest(owner_epoch=3, host_generation=7))
        report = await watch.read()
        assert isinstance(report, pb.WatchHostResponse)
        assert report.live_sandboxes == 1
        assert report.lease.seconds == 60
        await clock.advance(10_000)
        assert container.destroy_count == 0
        watch.cancel()
        await until(lambda: it.running.lease.unwatched_seconds() == 0.0 and watch.done())
        await until(lambda: it.running.lease._streams == 0)
        await clock.advance(659)
        assert container.destroy_count == 0
        await clock.advance(2)
        gone = await talk.next("gone")
        assert "lease" in gone.message
        assert container.destroy_count == 1


async def test_stopping_the_host_tells_the_streams_and_leaves_nothing() -> None:
    driver = ScriptedDriver()
    async with host(driver) as it:
        talk, container = await started(it, driver)
        await it.stop()
        assert (await talk.next("gone")).cause == pb.GONE_CAUSE_LOST
        await talk.over()
        assert container.destroy_count == 1


async def test_get_host_states_everything_and_checks_the_version() -> None:
    async with host() as it:
        described = (await it.stub.GetHost(pb.GetHostRequest(controller_version="0.2.9"))).host
        assert (described.host_id, described.host_generation) == ("hst_test", 7)
        assert described.capacity == 8
        assert described.drivers[0].driver == "scripted"
        async with refusal("FIELD_INVALID", field="controller_version"):
            await it.stub.GetHost(pb.GetHostRequest(controller_version="0.3.0"))
        async with refusal("FIELD_INVALID", field="controller_version"):
            await it.stub.GetHost(pb.GetHostRequest(controller_version="1.1.0"))


async def test_a_message_over_the_limit_is_refused_by_the_server() -> None:
    driver = ScriptedDriver()
    async with host(driver) as it:
        talk, _ = await started(it, driver)
        await talk.run("x" * (2 << 20))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await talk.next("cell_started")
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_the_health_service_answers_for_the_host() -> None:
    async with host() as it:
        stub: Any = health_pb2_grpc.HealthStub(it.channel)
        for service in ("", "hutch.v1.HostService"):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_new_owner_is_told_that_nothing_follows_what_was_acknowledged() -> None:
    """It answers open calls once it has heard what the host had; it would wait for ever."""
    driver = ScriptedDriver()
    async with host(driver) as it:
        talk, container = await started(it, driver)
        await container.say(
            {"type": "call", "call": "c1", "cell": "", "op": "await_child", "invocation": "inv_2"}
        )
        await talk.next("call")
        await talk.acknowledge()
        log = it.running.table._sandboxes["sbx_1"].log
        await until(lambda: log.acknowledged == log.last_sequence)
        greeting = await it.attach().greeting()
        assert (greeting.last_sequence, list(greeting.open_call_ids)) == (0, ["c1"])
