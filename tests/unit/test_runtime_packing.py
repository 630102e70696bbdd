"""The archive: compiled once for an interpreter, started from without being written again."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from sandbox import packing
from sandbox.packing import PackingFailed, build_archive, run_plainly, start_arguments


def test_the_archive_is_stored_compiled_and_complete(tmp_path: Path) -> None:
    archive = build_archive(sys.executable, tmp_path / "a.zip")
    with zipfile.ZipFile(archive) as opened:
        entries = opened.infolist()
    assert {entry.compress_type for entry in entries} == {zipfile.ZIP_STORED}
    names = {entry.filename for entry in entries}
    assert names == {"__main__.py"} | {f"hutch/{name}c" for name in packing.read_sources()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zip", "a.zip.key"]


def test_nothing_is_compiled_twice(tmp_path: Path) -> None:
    commands: list[Sequence[str]] = []

    def run(command: Sequence[str], given: bytes) -> bytes:
        commands.append(command)
        return run_plainly(command, given)

    target = tmp_path / "a.zip"
    build_archive(sys.executable, target, run)
    first = target.read_bytes()
    assert len(commands) == 2
    build_archive(sys.executable, target, run)
    assert len(commands) == 3
    target.unlink()
    build_archive(sys.executable, target, run)
    assert target.read_bytes() == first


def test_an_archive_of_other_sources_is_built_anew(tmp_path: Path) -> None:
    target = tmp_path / "a.zip"
    target.write_bytes(b"")
    Path(f"{target}.key").write_text("of something else")
    build_archive(sys.executable, target)
    assert zipfile.is_zipfile(target)


def test_both_ways_to_start_it_work(tmp_path: Path) -> None:
    archive = str(build_archive(sys.executable, tmp_path / "a.zip"))
    for command in ([*start_arguments(archive)], ["-I", "-S", archive]):
        done = subprocess.run(
            [sys.executable, *command], stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert b'"type":"ready"' in done.stdout


def test_before_ready_only_c_modules_and_our_own_are_imported(tmp_path: Path) -> None:
    archive = str(build_archive(sys.executable, tmp_path / "a.zip"))
    script = (
        "import sys; before = set(sys.modules); sys.path.insert(0, sys.argv[1])\n"
        "import hutch.supervisor, hutch.linux\nhutch.linux.can_filter()\n"
        "for name in sorted(set(sys.modules) - before):\n"
        "    file = getattr(sys.modules[name], '__file__', None) or ''\n"
        "    if file.endswith(('.py', '.pyc')) and not name.startswith('hutch'): print(name)\n"
    )
    command = [sys.executable, "-I", "-S", "-c", script, archive]
    done = subprocess.run(command, capture_output=True, check=True)
    assert done.stdout == b""


@pytest.mark.parametrize(
    ("python", "said"),
    [("/nowhere/python", "could not be run"), ("/bin/false", "exited with 1")],
)
def test_an_interpreter_that_cannot_compile_is_named(
    tmp_path: Path, python: str, said: str
) -> None:
    with pytest.raises(PackingFailed, match=said):
        build_archive(python, tmp_path / "a.zip")
    assert list(tmp_path.iterdir()) == []


def test_an_interpreter_that_talks_nonsense_is_named(tmp_path: Path) -> None:
    with pytest.raises(PackingFailed, match="no compiled code"):
        build_archive("python", tmp_path / "a.zip", lambda command, given: b"nonsense")
    assert list(tmp_path.iterdir()) == []
