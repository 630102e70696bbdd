"""The leak check finds what it is there to find."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from pathlib import Path

from tests.support import leaks


def test_an_orphan_is_found_and_ended(tmp_path: Path) -> None:
    before = leaks.take_census(tmp_path)
    subprocess.run(["sh", "-c", "sleep 600 & exit 0"], check=True)
    found = leaks.find_leaks(before, tmp_path, patience_seconds=0)
    assert len(found) == 1
    assert "sleep 600" in found[0]
    leaks.end_processes(before)
    assert leaks.find_leaks(before, tmp_path) == []


def test_an_open_descriptor_is_found(tmp_path: Path) -> None:
    before = leaks.take_census(tmp_path)
    path = tmp_path / "open"
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    path.unlink()
    found = leaks.find_leaks(before, tmp_path, patience_seconds=0)
    os.close(descriptor)
    assert [line.split()[0] for line in found] == ["descriptor"]


def test_a_temporary_folder_is_found(tmp_path: Path) -> None:
    before = leaks.take_census(tmp_path)
    folder = Path(tempfile.mkdtemp(dir=tmp_path, prefix="hutch-"))
    found = leaks.find_leaks(before, tmp_path, patience_seconds=0)
    folder.rmdir()
    assert found == [f"temporary {folder.name}"]


def test_a_process_that_ended_unreaped_is_not_alive() -> None:
    child = subprocess.Popen(["sleep", "600"])
    assert leaks.is_alive(child.pid)
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not leaks.is_alive(child.pid)
    child.wait()
