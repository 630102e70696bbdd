"""The host as a process: how it starts, whom it refuses, how it ends."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from hutch.v1 import host_service_pb2, host_service_pb2_grpc

SECONDS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProcess:
    """A host that was started, and the line it wrote when it was ready."""

    process: subprocess.Popen[bytes]
    line: dict[str, Any]
    state: Path

    def describe(self) -> Any:
        """Asks it who it is."""
        with grpc.insecure_channel(f"unix:{self.line['socket']}") as channel:
            stub: Any = host_service_pb2_grpc.HostServiceStub(channel)
            request = host_service_pb2.GetHostRequest(controller_version=self.line["version"])
            return stub.GetHost(request, timeout=SECONDS).host

    def end(self, number: int = signal.SIGTERM) -> int:
        """Signals it and returns its exit code."""
        self.process.send_signal(number)
        return self.process.wait(SECONDS)


@contextmanager
def start(state: Path, *arguments: str, driver: str = "fake") -> Iterator[HostProcess]:
    """Starts a host and waits for its line; kills it at the end if it still runs."""
    reader, writer = os.pipe()
    command = [
        sys.executable,
        "-I",
        "-m",
        "sandbox.host",
        "--state",
        str(state),
        "--driver",
        driver,
    ]
    if "--socket" not in arguments:
        command += ["--socket", str(state.parent / "h.sock")]
    process = subprocess.Popen(
        [*command, *arguments, "--ready-fd", str(writer)],
        pass_fds=(writer,),
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(writer)
    try:
        with os.fdopen(reader, encoding="utf-8") as pipe:
            text = pipe.read()
        assert text.count("\n") == 1, text
        yield HostProcess(process=process, line=json.loads(text), state=state)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(SECONDS)


def test_a_host_says_when_it_is_ready_and_leaves_nothing_at_its_end(tmp_path: Path) -> None:
    state = tmp_path / "host"
    with start(state) as host:
        assert host.line["ready"] is True
        described = host.describe()
        assert described.host_id == host.line["host_id"]
        assert described.host_generation == host.line["host_generation"] == 1
        assert described.drivers[0].driver == "fake"
        document = json.loads((state / "host.json").read_text())
        stat_line = Path(f"/proc/{host.process.pid}/stat").read_text()
        assert document["start_time"] == stat_line.rpartition(")")[2].split()[19]
        assert document["pid"] == host.process.pid
        assert stat.S_IMODE(state.stat().st_mode) == 0o700
        assert stat.S_IMODE(os.stat(document["socket"]).st_mode) == 0o600
        assert host.end() == 0
        assert not (state / "host.json").exists()
        assert not Path(document["socket"]).exists()


def test_a_second_host_of_one_state_folder_is_refused_and_disturbs_nothing(
    tmp_path: Path,
) -> None:
    state = tmp_path / "host"
    with start(state) as first:
        with start(state) as second:
            assert second.line["ready"] is False
            assert "live host" in second.line["problem"]
            assert second.process.wait(SECONDS) == 2
        assert first.describe().host_generation == 1
        assert first.end() == 0


def test_case_56_the_generation_rises_also_after_a_kill(tmp_path: Path) -> None:
    state = tmp_path / "host"
    with start(state) as first:
        host_id = first.line["host_id"]
        assert first.end(signal.SIGKILL) == -signal.SIGKILL
        assert (state / "host.json").exists()
    with start(state) as second:
        assert (second.line["host_id"], second.line["host_generation"]) == (host_id, 2)
        assert second.describe().host_generation == 2
        assert second.end(signal.SIGINT) == 0


def test_a_host_that_nobody_watches_exits_by_itself(tmp_path: Path) -> None:
    with start(tmp_path / "host", "--exit-when-unwatched", "0.2") as host:
        assert host.process.wait(SECONDS) == 0


@pytest.mark.parametrize(
    ("arguments", "driver", "problem"),
    [
        (("--socket", "/tmp/" + "x" * 110), "fake", "107"),
        ((), "teleport", "teleport"),
        (("--config", "/nonexistent.toml"), "fake", "nonexistent"),
    ],
)
def test_a_host_that_cannot_start_says_why(
    tmp_path: Path, arguments: tuple[str, ...], driver: str, problem: str
) -> None:
    with start(tmp_path / "host", *arguments, driver=driver) as host:
        assert host.line["ready"] is False
        assert problem in host.line["problem"]
        assert host.process.wait(SECONDS) == 2


def test_a_damaged_state_folder_is_named_and_kept(tmp_path: Path) -> None:
    state = tmp_path / "host"
    state.mkdir()
    (state / "identity.json").write_text("{")
    with start(state) as host:
        assert host.line["ready"] is False
        assert "identity.json" in host.line["problem"]
        assert host.process.wait(SECONDS) == 2
    assert (state / "identity.json").read_text() == "{"


def test_folders_named_like_ours_in_the_working_directory_are_never_run(tmp_path: Path) -> None:
    evil = tmp_path / "sandbox"
    evil.mkdir()
    (evil / "__init__.py").write_text("import os; os._exit(66)")
    command = [sys.executable, "-I", "-m", "sandbox.host", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=SECONDS, check=False)
    assert done.returncode == 0


def test_the_check_states_every_real_driver_as_json(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-m", "sandbox.host", "--check", "--json"]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    drivers = json.loads(done.stdout)["drivers"]
    assert [item["driver"] for item in drivers] == ["bubblewrap", "docker", "docker-runsc"]
    assert done.returncode == (0 if drivers[0]["usable"] else 2)
    assert drivers[0]["usable"] or drivers[0]["problem"]
