"""The smaller parts of the host: settings, identity, lease, frames to a sandbox, errors."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from hutch.v1 import ending_pb2, error_reason_pb2, invocation_pb2
from hutch.v1 import host_service_pb2 as pb
from sandbox.drivers.driver import Limits, Measurement
from sandbox.host import errors, evidence
from sandbox.host.config import ConfigError, HostConfig, load
from sandbox.host.errors import HostError
from sandbox.host.evidence import templates
from sandbox.host.identity import StateDamaged, check_version, next_identity
from sandbox.host.lease import Lease
from sandbox.host.nursery import Nursery
from sandbox.host.outbound import Outbound, StreamContents
from sandbox.runtime import frames
from tests.support.host import ManualClock, content, make_cell

LIMITS = Limits(
    memory_limit_bytes=100,
    pids_limit=10,
    cpu_limit_millis=1,
    tmpfs_limit_bytes=1,
    open_files_limit=1,
)


def test_settings_come_from_the_file_and_the_command_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "hutch.toml"
    path.write_text('[host]\ncapacity = 3\ntemplates = ["default", "data"]\nlease_seconds = 5\n')
    config = load(path, capacity=4, driver=None)
    assert (config.capacity, config.templates) == (4, ("default", "data"))
    assert (config.lease_seconds, config.driver) == (5.0, "bubblewrap")
    assert load(None) == HostConfig()


def test_a_template_is_named_by_its_table_and_the_default_one_is_always_there(
    tmp_path: Path,
) -> None:
    path = tmp_path / "hutch.toml"
    image = f"sha256:{'0' * 64}"
    path.write_text(f'[templates.data]\nimage = "{image}"\nruntime = "runsc"\n')
    config = load(path)
    assert config.templates == ("default", "data")
    own, walled = templates(config, "bubblewrap")
    assert (own.name, own.driver, own.image, own.runtime) == ("default", "bubblewrap", "", "")
    assert (walled.name, walled.driver) == ("data", "docker-runsc")
    assert (walled.image, walled.runtime) == (image, "runsc")


def test_case_s32_a_template_names_its_image_by_digest(tmp_path: Path) -> None:
    path = tmp_path / "hutch.toml"
    for image in ("hutch/data", "hutch/data:latest"):
        path.write_text(f'[templates.data]\nimage = "{image}"\n')
        with pytest.raises(ConfigError, match="names no digest"):
            load(path)


@pytest.mark.parametrize(
    "text",
    [
        "[host]\ncolour = 1",
        "[host]\ncapacity = 'x'",
        "[host]\ncapacity = true",
        "host = 1",
        "[",
        "[host]\ncapacity = -1",
        "[host]\ntemplates = 'default'",
    ],
)
def test_settings_that_cannot_be_used_are_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "hutch.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"hutch\.toml"):
        load(path)


def test_the_id_is_kept_and_the_generation_rises(tmp_path: Path) -> None:
    first, second = next_identity(tmp_path), next_identity(tmp_path)
    assert first.host_id == second.host_id
    assert (first.generation, second.generation) == (1, 2)
    assert (tmp_path / "identity.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["", "[]", '{"host_id": 1, "host_generation": 1}', "{"])
def test_a_damaged_identity_is_named_and_not_overwritten(tmp_path: Path, text: str) -> None:
    path = tmp_path / "identity.json"
    path.write_text(text)
    with pytest.raises(StateDamaged, match=r"identity\.json"):
        next_identity(tmp_path)
    assert path.read_text() == text


def test_versions_one_minor_apart_work() -> None:
    for theirs in ("", "1.2.3", "1.1.9", "1.3.0.dev1"):
        check_version(theirs, "1.2.0")
    for theirs in ("1.4.0", "2.2.0", "1.0.0", "x", "1", "1.2" + "0" * 200):
        with pytest.raises(HostError):
            check_version(theirs, "1.2.0")


async def test_the_lease_lapses_only_while_nobody_watches() -> None:
    clock = ManualClock()
    lease, ended = Lease(clock), 0

    async def end() -> None:
        nonlocal ended
        ended += 1

    async with Nursery() as nursery:
        nursery.start(lease.run_orphan_watch(100, end), "orphans")
        await asyncio.sleep(0)
        await clock.advance(99)
        lease.open()
        await clock.advance(500)
        assert ended == 0
        lease.close()
        await clock.advance(99)
        assert ended == 0
        await clock.advance(2)
        assert ended == 1


async def test_an_unwatched_idle_host_leaves_and_a_busy_one_stays() -> None:
    clock = ManualClock()
    lease, idle, left = Lease(clock), False, asyncio.Event()
    async with Nursery() as nursery:
        nursery.start(lease.run_exit_watch(5, lambda: idle, left.set), "exit")
        await asyncio.sleep(0)
        await clock.advance(60)
        assert not left.is_set()
        idle = True
        await clock.advance(1)
        assert left.is_set()


async def test_a_task_that_fails_takes_no_sibling_with_it() -> None:
    done = asyncio.Event()

    async def fail() -> None:
        raise ValueError("on purpose")

    async def work() -> None:
        done.set()

    async with Nursery() as nursery:
        nursery.start(fail(), "fails")
        nursery.start(work(), "works")
        async with asyncio.timeout(5):
            await done.wait()


def contents(tmp_path: Path, **limits: int) -> StreamContents:
    """The contents of one stream."""
    return StreamContents(tmp_path, **{"content_bytes": 1 << 22, "total_bytes": 1 << 23, **limits})


def test_small_contents_go_with_the_frame_and_large_ones_before_it(tmp_path: Path) -> None:
    stream = contents(tmp_path)
    cell = make_cell("x" * 100_000, a=b"1" * 150_000, b=b"2")
    message = Outbound(77).cell(cell, stream)
    sent = frames.Decoder().feed(b"".join(message.frames))
    assert [frame.header["type"] for frame in sent] == ["blob", "cell"]
    header, payload = sent[1].header, sent[1].payload
    assert header["output_limit"] == 77
    assert header["inputs"][0]["value"] == {"blob": sent[0].header["blob"], "n": 150_000}
    assert sent[0].payload == b"1" * 150_000
    code = header["code"]
    assert payload[code["at"] :][: code["n"]] == b"x" * 100_000


def test_many_large_contents_come_one_after_the_other(tmp_path: Path) -> None:
    cell = make_cell("x")
    for index in range(20):
        cell.inputs.add(name=f"i{index}", value=content(bytes(190_000)))
    message = Outbound(1).cell(cell, contents(tmp_path))
    sent = frames.Decoder().feed(b"".join(message.frames))
    assert [frame.header["type"] for frame in sent] == ["blob"] * 19 + ["cell"]
    assert all(frame.header["last"] for frame in sent[:-1])


def test_timeouts_are_whole_milliseconds_and_never_none_by_rounding(tmp_path: Path) -> None:
    for nanos, expected in ((1, 1), (1_000_000, 1), (1_000_001, 2)):
        cell = make_cell("x")
        cell.timeout.nanos = nanos
        frame = frames.Decoder().feed(next(Outbound(1).cell(cell, contents(tmp_path)).frames))[0]
        assert frame.header["timeout_ms"] == expected


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        ([pb.BlobChunk(blob_id="", data=b"x")], "FIELD_INVALID"),
        ([pb.BlobChunk(blob_id="b", offset=1, data=b"x")], "FIELD_INVALID"),
        ([pb.BlobChunk(blob_id="b", data=b"x", last=True)] * 2, "FIELD_INVALID"),
        ([pb.BlobChunk(blob_id="b", data=bytes(11))], "PAYLOAD_TOO_LARGE"),
        ([pb.BlobChunk(blob_id=n, data=bytes(9)) for n in "abc"], "PAYLOAD_TOO_LARGE"),
    ],
)
def test_chunks_out_of_order_or_too_many_are_refused(
    tmp_path: Path, chunks: list[pb.BlobChunk], reason: str
) -> None:
    stream = contents(tmp_path, content_bytes=10, total_bytes=20)
    for chunk in chunks[:-1]:
        stream.chunk(chunk)
    with pytest.raises(HostError) as caught:
        stream.chunk(chunks[-1])
    assert caught.value.reason == reason
    stream.close()


@pytest.mark.parametrize(
    "named",
    [
        pb.Content(data=b"abc", size_bytes=2),
        pb.Content(blob_id="never", size_bytes=1),
        pb.Content(blob_id="open", size_bytes=1),
        pb.Content(blob_id="full", size_bytes=9),
    ],
)
def test_a_content_must_be_what_it_says(tmp_path: Path, named: pb.Content) -> None:
    stream = contents(tmp_path)
    stream.chunk(pb.BlobChunk(blob_id="open", data=b"x"))
    stream.chunk(pb.BlobChunk(blob_id="full", data=b"x", last=True))
    with pytest.raises(HostError):
        stream.use(named, "x")
    stream.close()


def test_contents_of_a_message_that_does_nothing_are_forgotten(tmp_path: Path) -> None:
    stream = contents(tmp_path, total_bytes=10)
    for _ in range(3):
        stream.chunk(pb.BlobChunk(blob_id="b", data=bytes(8), last=True))
        stream.discard([pb.Content(blob_id="b", size_bytes=8)])


def test_a_cell_says_its_mode_its_tools_and_whether_it_reads_input(tmp_path: Path) -> None:
    cell = make_cell("x")
    cell.mode = invocation_pb2.INVOCATION_MODE_INTERACTIVE
    cell.stdin = True
    tool = cell.tools.add(tool_id="tool_1", name="add", signature="(a, b)", delegable=True)
    tool.methods.add(name="m", signature="()", description="it")
    tool.timeout.seconds = 2
    header = (
        frames.Decoder().feed(next(Outbound(1).cell(cell, contents(tmp_path)).frames))[0].header
    )
    assert (header["mode"], header["stdin"]) == ("interactive", True)
    assert header["tools"] == [
        {
            "tool": "tool_1",
            "name": "add",
            "description": "",
            "signature": "(a, b)",
            "methods": [{"name": "m", "signature": "()", "description": "it"}],
            "delegable": True,
            "timeout_ms": 2_000,
        }
    ]


def test_a_cell_without_a_mode_is_refused(tmp_path: Path) -> None:
    cell = make_cell("x")
    cell.mode = invocation_pb2.INVOCATION_MODE_UNSPECIFIED
    with pytest.raises(HostError):
        Outbound(1).cell(cell, contents(tmp_path))


def test_a_failure_too_long_for_a_header_is_cut_until_it_fits(tmp_path: Path) -> None:
    lost = ending_pb2.Failure(message="\U0001f600" * 8_000, traceback="\U0001f600" * 16_000)
    message = Outbound(1).reply(pb.CallReply(call_id="k", failure=lost), contents(tmp_path))
    frame = frames.Decoder().feed(b"".join(message.frames))[0]
    assert len(frame.header["failure"]["message"]) == 8_000


def test_a_reply_needs_an_outcome(tmp_path: Path) -> None:
    with pytest.raises(HostError):
        Outbound(1).reply(pb.CallReply(call_id="k"), contents(tmp_path))
    Outbound(1).reply(pb.CallReply(call_id="k", value=content(b"")), contents(tmp_path))


@pytest.mark.parametrize(
    ("measured", "limit"),
    [
        (Measurement(oom_kill_count=1, pids_limit_hits=1), ("memory", 100)),
        (Measurement(oom_kill_count=0, pids_limit_hits=4), ("pids", 10)),
        (Measurement(), ("", 0)),
    ],
)
def test_evidence_names_the_limit_that_a_counter_says_was_broken(
    measured: Measurement, limit: tuple[str, int]
) -> None:
    found = evidence.measured(measured, limits=LIMITS, held=(), wall_seconds=2.5)
    assert (found.limit, found.limit_value) == limit
    assert found.HasField("oom_kill_count") == (measured.oom_kill_count is not None)
    assert found.wall_time.ToMilliseconds() == 2_500


def test_evidence_since_an_earlier_measurement_counts_what_came_between() -> None:
    before = Measurement(oom_kill_count=2, pids_limit_hits=None)
    later = Measurement(oom_kill_count=3, pids_limit_hits=4, memory_peak_bytes=9, signal=9)
    found = evidence.since(later, before)
    assert (found.oom_kill_count, found.pids_limit_hits) == (1, 4)
    assert (found.memory_peak_bytes, found.signal) == (9, 9)
    assert evidence.since(Measurement(), before).oom_kill_count is None
    assert evidence.since(later, later).oom_kill_count == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.field_invalid("f", "m"), grpc.StatusCode.INVALID_ARGUMENT),
        (errors.payload_too_large("p", 5), grpc.StatusCode.INVALID_ARGUMENT),
        (errors.owner_fenced("m"), grpc.StatusCode.FAILED_PRECONDITION),
        (errors.sandbox_not_found("s"), grpc.StatusCode.NOT_FOUND),
        (errors.not_enforceable(["pids"], "d"), grpc.StatusCode.FAILED_PRECONDITION),
        (errors.host_unavailable("m"), grpc.StatusCode.UNAVAILABLE),
        (errors.internal(), grpc.StatusCode.INTERNAL),
    ],
)
def test_every_refusal_is_one_status_with_one_reason_of_the_contract(
    error: HostError, code: grpc.StatusCode
) -> None:
    assert error.code == code
    assert f"ERROR_REASON_{error.reason}" in error_reason_pb2.ErrorReason.keys()
    ((key, data),) = error.trailing_metadata()
    assert key == "grpc-status-details-bin"
    status = status_pb2.Status.FromString(data)
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (status.code, info.domain) == (code.value[0], "hutch.v1")
    has_hint = any(detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in status.details)
    assert has_hint == (code == grpc.StatusCode.UNAVAILABLE)


def test_a_statement_is_plain_json() -> None:
    from sandbox.drivers.driver import Isolation, Statement
    from sandbox.host.offers import as_document
    from tests.support.host import HELD

    stated = Statement(driver="d", isolation=Isolation.KERNEL, enforcement=HELD)
    assert json.loads(json.dumps(as_document(stated)))["enforcement"][0]["level"] == "sandbox"
