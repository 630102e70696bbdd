"""The archive: compiled once for an interpreter, started from without being written again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from sandbox import packing
from sandbox.packing import PackingFailed, build_archive, run_plainly, start_arguments


def test_the_bundle_is_complete_and_written_whole(tmp_path: Path) -> None:
    bundle = build_archive(sys.executable, tmp_path / "a.bundle")
    script = (
        "import marshal, sys\n"
        "file = open(sys.argv[1], 'rb', 0)\n"
        "print(*marshal.loads(file.read(int(file.readline()))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script, str(bundle)], capture_output=True, check=True
    )
    stems = [name.removesuffix(".py") for name in packing.read_sources()]
    expected = {"hutch" if stem == "__init__" else f"hutch.{stem}" for stem in stems}
    assert set(done.stdout.decode().split()) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bundle", "a.bundle.key"]


def test_nothing_is_compiled_twice(tmp_path: Path) -> None:
    commands: list[Sequence[str]] = []

    def run(command: Sequence[str], given: bytes) -> bytes:
        commands.append(command)
        return run_plainly(command, given)

    target = tmp_path / "a.bundle"
    build_archive(sys.executable, target, run)
    first = target.read_bytes()
    assert len(commands) == 2
    build_archive(sys.executable, target, run)
    assert len(commands) == 3
    target.unlink()
    build_archive(sys.executable, target, run)
    assert target.read_bytes() == first


def test_an_archive_of_other_sources_is_built_anew(tmp_path: Path) -> None:
    target = tmp_path / "a.bundle"
    target.write_bytes(b"")
    Path(f"{target}.key").write_text("of something else")
    build_archive(sys.executable, target)
    assert target.stat().st_size > 10_000


def test_it_starts_and_says_ready(tmp_path: Path) -> None:
    bundle = str(build_archive(sys.executable, tmp_path / "a.bundle"))
    done = subprocess.run(
        [sys.executable, *start_arguments(bundle)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b'"type":"ready"' in done.stdout


def test_before_ready_only_c_modules_and_our_own_are_imported(tmp_path: Path) -> None:
    bundle = str(build_archive(sys.executable, tmp_path / "a.bundle"))
    script = packing.BOOT.replace(
        "main(sys.argv[2:])",
        "import hutch.linux\nhutch.linux.can_filter()\n"
        "for name in sorted(sys.modules):\n"
        "    file = getattr(sys.modules[name], '__file__', None) or ''\n"
        "    if file.endswith(('.py', '.pyc')): print(name)\n",
    )
    bare = [sys.executable, "-I", "-S", "-c", "import sys; print(*sys.modules, sep='\\n')"]
    before = subprocess.run(bare, capture_output=True, check=True).stdout.split()
    command = [sys.executable, "-I", "-S", "-c", script, bundle]
    done = subprocess.run(command, capture_output=True, check=True)
    assert set(done.stdout.split()) <= set(before)


@pytest.mark.parametrize(
    ("python", "said"),
    [("/nowhere/python", "could not be run"), ("/bin/false", "exited with 1")],
)
def test_an_interpreter_that_cannot_compile_is_named(
    tmp_path: Path, python: str, said: str
) -> None:
    with pytest.raises(PackingFailed, match=said):
        build_archive(python, tmp_path / "a.bundle")
    assert list(tmp_path.iterdir()) == []


def test_an_interpreter_that_talks_nonsense_is_named(tmp_path: Path) -> None:
    with pytest.raises(PackingFailed, match="no compiled code"):
        build_archive("python", tmp_path / "a.bundle", lambda command, given: b"nonsense")
    assert list(tmp_path.iterdir()) == []
