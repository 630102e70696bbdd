"""A host that is killed with sandboxes: the next one finds and ends them."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from hutch.v1 import host_service_pb2 as pb
from hutch.v1 import host_service_pb2_grpc
from tests.support.host import make_cell, make_spec
from tests.support.leaks import is_alive
from tests.wire.test_host_process import start

SANDBOXES = 4


def processes_of(names: list[str]) -> set[int]:
    """Processes that name one of the sandboxes in their command line."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if any(name.encode() in line for name in names):
                found.add(int(entry.name))
    return found


@pytest.mark.parametrize("driver", ["fake", "bubblewrap"])
def test_case_50_what_a_killed_host_leaves_is_gone_once_the_next_one_is_ready(
    tmp_path: Path, driver: str
) -> None:
    """Scale: 4 sandboxes for 50."""
    state = tmp_path / "host"
    names = [f"sbx_{tmp_path.name[-20:]}_{index}" for index in range(SANDBOXES)]
    with start(state, driver=driver) as first:
        if not first.line["ready"]:
            pytest.skip(first.line["problem"])
        with grpc.insecure_channel(f"unix:{first.line['socket']}") as channel:
            stub: Any = host_service_pb2_grpc.HostServiceStub(channel)
            for name in names:
                attach = pb.SandboxAttach(
                    sandbox_id=name, owner_epoch=1, host_generation=1, spec=make_spec()
                )
                cell = make_cell("import time; time.sleep(600)")
                requests = [
                    pb.AttachSandboxRequest(attach=attach),
                    pb.AttachSandboxRequest(run_cell=cell),
                ]
                stream = stub.AttachSandbox(iter(requests))
                kinds = [next(stream).WhichOneof("event") for _ in range(3)]
                assert kinds == ["attached", "ready", "cell_started"]
        assert len(processes_of(names)) >= SANDBOXES
        assert first.end(signal.SIGKILL) == -signal.SIGKILL
    begin = time.monotonic()
    with start(state, driver=driver) as second:
        assert second.line["ready"] is True
        assert time.monotonic() - begin < 10
        assert processes_of(names) == set()
        with grpc.insecure_channel(f"unix:{second.line['socket']}") as channel:
            stub = host_service_pb2_grpc.HostServiceStub(channel)
            assert not stub.ListSandboxes(pb.ListSandboxesRequest()).sandboxes
        assert second.end() == 0


def descendants(ancestor: int) -> set[int]:
    """The processes below one."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
    found, layer = set(), {ancestor}
    while layer:
        layer = {pid for pid, parent in parents.items() if parent in layer}
        found |= layer
    return found


@pytest.mark.parametrize("made", range(1, 6))
def test_a_host_that_is_killed_while_it_makes_sandboxes_ahead_leaves_none_of_them(
    tmp_path: Path, made: int
) -> None:
    """At five moments, one process later each. They are nobody's yet: the next host finds them by
    what they are."""
    state, config = tmp_path / "host", tmp_path / "hutch.toml"
    config.write_text("[host]\npool_size = 4\npool_spare_memory_bytes = 0\n")
    options = ("--config", str(config))
    with start(state, *options, driver="bubblewrap") as first:
        if not first.line["ready"]:
            pytest.skip(first.line["problem"])
        with grpc.insecure_channel(f"unix:{first.line['socket']}") as channel:
            stub: Any = host_service_pb2_grpc.HostServiceStub(channel)
            attach = pb.SandboxAttach(
                sandbox_id="sbx_first", owner_epoch=1, host_generation=1, spec=make_spec()
            )
            stream = stub.AttachSandbox(iter([pb.AttachSandboxRequest(attach=attach)]))
            kinds = [next(stream).WhichOneof("event") for _ in range(2)]
            assert kinds == ["attached", "ready"]
            while len(left := descendants(first.process.pid)) < made:
                pass
            assert first.end(signal.SIGKILL) == -signal.SIGKILL
    with start(state, *options, driver="bubblewrap") as second:
        assert second.line["ready"] is True
        assert not [pid for pid in left if is_alive(pid)]
        assert second.end() == 0
