"""Where a local controller is, whether it lives, and which directories are trusted."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hutch import local


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state directory that is not there yet; its sockets' folder has a short path."""
    base = Path(tempfile.gettempdir(), "pytest-of-all")
    base.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="s", dir=base) as folder:
        Path(folder, "run").mkdir(mode=0o700)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(Path(folder, "run")))
        yield Path(folder, "deep", "state")


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_directories_are_made_private(state: Path) -> None:
    paths = local.prepare(state)
    assert (mode_of(paths.state), mode_of(paths.runtime)) == (0o700, 0o700)
    assert local.prepare(state) == paths
    assert paths.runtime.parent.name == "run"


def test_the_same_state_by_another_way_is_the_same_controller(state: Path) -> None:
    paths = local.prepare(state)
    link = state.parent / "link"
    link.symlink_to(state)
    assert local.prepare(link) == paths


def test_the_default_state_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUTCH_STATE", "/a")
    assert local.default_state() == Path("/a")
    monkeypatch.delenv("HUTCH_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", "/b")
    assert local.default_state() == Path("/b/hutch")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", "/c")
    assert local.default_state() == Path("/c/.local/state/hutch")


def test_a_directory_that_is_open_to_others_is_refused_with_the_mend(state: Path) -> None:
    state.mkdir(parents=True)
    state.chmod(0o750)
    with pytest.raises(local.LocalControllerError, match="chmod 700"):
        local.prepare(state)


def test_a_file_in_the_directorys_place_is_refused(state: Path) -> None:
    state.parent.mkdir()
    state.write_text("")
    with pytest.raises(local.LocalControllerError, match="not a directory"):
        local.prepare(state)


def test_a_link_in_place_of_the_sockets_folder_is_refused(state: Path) -> None:
    """In a folder that others may write, such a link could be anybody's."""
    paths = local.prepare(state)
    paths.runtime.rmdir()
    paths.runtime.symlink_to(state)
    with pytest.raises(local.LocalControllerError, match="not a directory"):
        local.prepare(state)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_somebody_elses_directory_is_refused(state: Path) -> None:
    state.mkdir(parents=True, mode=0o700)
    os.chown(state, 12345, -1)
    with pytest.raises(local.LocalControllerError, match="belongs to user 12345"):
        local.prepare(state)


def test_a_socket_path_that_is_too_long_names_the_mend(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = state.parent.parent / ("d" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    with pytest.raises(local.LocalControllerError, match="XDG_RUNTIME_DIR"):
        local.prepare(state)


def test_a_process_is_alive_only_with_its_start_time() -> None:
    mine = local.process_start_time(os.getpid())
    assert mine is not None
    assert local.LiveProcess(pid=os.getpid(), start_time=mine, socket="").alive()
    assert not local.LiveProcess(pid=os.getpid(), start_time="1", socket="").alive()


def test_a_process_that_has_ended_but_was_not_reaped_is_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", ""], start_new_session=True)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert local.process_start_time(child.pid) is None
    child.wait()
    assert local.process_start_time(child.pid) is None


def test_a_live_process_must_also_answer(state: Path) -> None:
    paths = local.prepare(state)
    assert local.find_live(paths.controller_file) is None
    address = str(state / "s")
    about = {
        "pid": os.getpid(),
        "start_time": local.process_start_time(os.getpid()),
        "socket": address,
        "listen": "127.0.0.1:7",
    }
    paths.controller_file.write_text(json.dumps(about))
    assert local.find_live(paths.controller_file) is None
    paths.key_file.write_text("k\n")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        found = local.find_live(paths.controller_file)
        assert found is not None
        assert found.listen == "127.0.0.1:7"
        assert local.key_for("127.0.0.1:7", paths) == "k"
        assert local.key_for("127.0.0.1:8", paths) == ""


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x"}', '{"pid": 1}', "\udc80"])
def test_a_file_that_says_nothing_names_no_process(tmp_path: Path, text: str) -> None:
    path = tmp_path / "controller.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert local.read_process(path) is None


def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    first = local.lock_file(tmp_path / "l")
    assert first is not None
    assert local.lock_file(tmp_path / "l") is None
    first.close()
    second = local.lock_file(tmp_path / "l")
    assert second is not None
    second.close()


def spawn(tmp_path: Path, code: str) -> tuple[subprocess.Popen[bytes], int]:
    with local.open_log(tmp_path / "log") as log:
        return local.spawn_ready([sys.executable, "-I", "-S", "-c", code], log)


@pytest.mark.parametrize(
    ("code", "ready"),
    [
        ("import os,sys; os.write(int(sys.argv[-1]), b'{\"ready\": true}\\n')", {"ready": True}),
        ("import os,sys; os.write(int(sys.argv[-1]), b'nonsense\\n')", {}),
        ("pass", {}),
    ],
)
def test_a_started_process_says_whether_it_is_ready(
    tmp_path: Path, code: str, ready: dict[str, object]
) -> None:
    process, reader = spawn(tmp_path, code)
    try:
        assert local.wait_ready(reader, time.monotonic() + 30) == ready
    finally:
        os.close(reader)
        process.wait()
    assert mode_of(tmp_path / "log") == 0o600


def test_waiting_for_a_process_has_an_end(tmp_path: Path) -> None:
    process, reader = spawn(tmp_path, "import signal; signal.pause()")
    try:
        assert local.wait_ready(reader, time.monotonic() + 0.1) == {}
        assert os.getsid(process.pid) == process.pid
    finally:
        os.close(reader)
        process.send_signal(signal.SIGKILL)
        process.wait()


def test_a_ready_line_reaches_a_starter_that_is_there_or_not() -> None:
    reader, writer = os.pipe()
    local.write_ready(writer, {"socket": "/s"})
    assert local.wait_ready(reader, time.monotonic() + 5) == {"ready": True, "socket": "/s"}
    os.close(reader)
    reader, writer = os.pipe()
    os.close(reader)
    local.write_ready(writer, problem="p")
    local.write_ready(None)
