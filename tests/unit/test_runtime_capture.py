"""The capture: what matches is sent by name, what is hostile is refused one by one."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.runtime.capture import matches
from tests.support.frame_client import FrameClient, supervisor


@pytest.fixture
def client(tmp_path: Path) -> Iterator[FrameClient]:
    with supervisor(tmp_path) as (client, _):
        client.expect("ready")
        yield client


def capture(
    client: FrameClient, *patterns: str, max_files: int = 256, max_bytes: int = 1 << 28
) -> tuple[dict[bytes, bytes], dict[bytes, str]]:
    """Captures and returns the files and the refusals, by name."""
    header: dict[str, Any] = {"type": "capture", "patterns": list(patterns)}
    client.send({**header, "max_files": max_files, "max_bytes": max_bytes})
    files: dict[bytes, bytes] = {}
    done: set[bytes] = set()
    while (frame := client.receive()).type == "file":
        name = bytes.fromhex(frame.header["name_hex"])
        assert name not in done
        assert frame.header["offset"] == len(files.setdefault(name, b""))
        files[name] += frame.payload
        if frame.header["last"]:
            done.add(name)
    assert frame.type == "captured"
    assert done == set(files)
    assert frame.header["files"] == len(files)
    refused = frame.header["refused"]
    return files, {bytes.fromhex(item["name_hex"]): item["reason"] for item in refused}


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir(exist_ok=True)
    return folder


def test_files_are_sent_sorted_and_whole(client: FrameClient, workspace: Path) -> None:
    (workspace / "artifacts" / "deep" / "er").mkdir(parents=True)
    (workspace / "artifacts" / "b").write_bytes(b"")
    (workspace / "artifacts" / "a.bin").write_bytes(bytes(range(256)) * 2_000)
    (workspace / "artifacts" / "deep" / "er" / "c").write_bytes(b"c")
    (workspace / "other").write_bytes(b"no")
    files, refused = capture(client, "artifacts/**")
    assert files == {
        b"artifacts/a.bin": bytes(range(256)) * 2_000,
        b"artifacts/b": b"",
        b"artifacts/deep/er/c": b"c",
    }
    assert list(files) == sorted(files)
    assert refused == {}


def test_hostile_files_are_refused_one_by_one(client: FrameClient, workspace: Path) -> None:
    folder = workspace / "artifacts"
    folder.mkdir()
    outside = workspace.parent / "secret"
    outside.mkdir()
    (outside / "key").write_text("secret")
    (folder / "good").write_text("good")
    (folder / "link").symlink_to(outside / "key")
    (folder / "folder").symlink_to(outside)
    os.link(folder / "good", folder / "hard")
    os.mkfifo(folder / "fifo")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.path.relpath(folder / "sock"))
    listener.close()
    (folder / "line\nbreak").write_text("x")
    (folder / "esc\x1b[31m").write_text("x")
    (Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xfe"))).write_text("x")
    long = Path("d" * 200) / ("e" * 200) / ("f" * 200)
    (folder / long).mkdir(parents=True)
    (folder / long / "file").write_text("x")
    files, refused = capture(client, "artifacts/**")
    assert files == {b"artifacts/good": b"good", b"artifacts/hard": b"good"}
    reasons = {name.partition(b"/")[2][:8]: reason for name, reason in refused.items()}
    assert reasons == {
        b"link": "a symbolic link",
        b"folder": "a symbolic link",
        b"fifo": "a fifo",
        b"sock": "a socket",
        b"line\nbre": "a name with control characters",
        b"esc\x1b[31m": "a name with control characters",
        b"\xff\xfe": "a name that is not UTF-8",
        b"dddddddd": "a name of over 512 bytes",
    }


def test_limits_refuse_what_is_over_them(client: FrameClient, workspace: Path) -> None:
    for name in "abcd":
        (workspace / name).write_bytes(b"x" * 10)
    (workspace / "b").write_bytes(b"x" * 1000)
    files, refused = capture(client, "*", max_files=2, max_bytes=100)
    assert sorted(files) == [b"a", b"c"]
    assert refused == {b"b": "too many bytes", b"d": "too many files"}


def test_many_refusals_still_fit_into_one_frame(client: FrameClient, workspace: Path) -> None:
    for number in range(300):
        (workspace / (f"{number:03}" + "y" * 240)).symlink_to("/nowhere")
    files, refused = capture(client, "**")
    assert files == {}
    assert len(refused) == 256


def test_every_process_is_ended_first_and_no_cell_runs_after(
    client: FrameClient, workspace: Path
) -> None:
    report = client.run(
        "import subprocess\nsubprocess.Popen(['sh', '-c', 'trap \"\" TERM HUP INT; "
        "while :; do echo x >> grows; sleep 0.01; done'], start_new_session=True)\n"
        "import os, time\nwhile not os.path.exists('grows'): time.sleep(0.01)"
    )
    assert report.header["background"] >= 1
    files, _ = capture(client, "grows")
    size = (workspace / "grows").stat().st_size
    assert len(files[b"grows"]) == size


def test_a_capture_ends_a_running_cell(client: FrameClient, workspace: Path) -> None:
    cell = client.start("open('made', 'w').write('x')\nprint('go')\nwhile True: pass")
    client.wait_output(cell, b"go\n")
    client.send({"type": "capture", "patterns": ["made"], "max_files": 9, "max_bytes": 9})
    report = client.finish(cell)
    assert (report.outcome, report.header["state_lost"]) == ("interrupted", True)
    assert client.expect("file").payload == b"x"
    assert client.expect("captured").header["files"] == 1


def test_a_workspace_that_is_gone_is_an_empty_capture(client: FrameClient, workspace: Path) -> None:
    workspace.rmdir()
    files, refused = capture(client, "**")
    assert files == {}
    assert refused == {b".": "the workspace cannot be opened: No such file or directory"}


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("artifacts/**", "artifacts/a", True),
        ("artifacts/**", "artifacts/a/b/c", True),
        ("artifacts/**", "artifacts", False),
        ("**", "a/b", True),
        ("**/*.csv", "a.csv", True),
        ("**/*.csv", "x/y/a.csv", True),
        ("**/*.csv", "x/y/a.txt", False),
        ("*", "a/b", False),
        ("a?c", "abc", True),
        ("a?c", "ac", False),
        ("*.*", "a.b.c", True),
        ("a*b*c", "aXbYc", True),
        ("a*b*c", "aXbY", False),
        ("[a]", "a", False),
        ("a/**/b", "a/b", True),
        ("a/**/b", "a/x/y/b", True),
    ],
)
def test_patterns(pattern: str, name: str, fits: bool) -> None:
    parts = [part.encode() for part in pattern.split("/")]
    assert matches(parts, [part.encode() for part in name.split("/")]) is fits


def test_a_pattern_of_many_stars_takes_no_long_time() -> None:
    assert not matches([b"*a" * 50 + b"b"], [b"a" * 500])
