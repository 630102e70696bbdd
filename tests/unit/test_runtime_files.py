"""Operations on files of a live sandbox: as the code could do them, and never in its way."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.runtime import fileops, frames
from tests.support.frame_client import FrameClient, supervisor


@pytest.fixture
def client(tmp_path: Path) -> Iterator[FrameClient]:
    with supervisor(tmp_path, "--grace-milliseconds", "100") as (client, _):
        client.expect("ready")
        yield client


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir(exist_ok=True)
    return folder


def ask(client: FrameClient, op: str, path: str, payload: bytes = b"", **keys: Any) -> Any:
    """Asks for one operation; returns the outcome's header, with its payload as `data`."""
    client.send({"type": "file_op", "id": "f1", "op": op, "path": path, **keys}, payload)
    frame = client.expect("file_outcome")
    assert frame.header.pop("id") == "f1"
    return {**frame.header, "data": frame.payload}


def write(client: FrameClient, path: str, payload: bytes = b"", **keys: Any) -> Any:
    whole = {"upload": "u1", "offset": 0, "last": True, "executable": False, "abandon": False}
    return ask(client, "write", path, payload, **{**whole, **keys})


def test_a_file_is_written_whole_and_read_again(client: FrameClient, workspace: Path) -> None:
    content = os.urandom(1_000_000)
    for offset in range(0, len(content), frames.CHUNK_BYTES):
        piece = content[offset : offset + frames.CHUNK_BYTES]
        last = offset + len(piece) == len(content)
        assert not (workspace / "a/b/c.bin").exists()
        assert write(client, "a/b/c.bin", piece, offset=offset, last=last)["problem"] == ""
    assert (workspace / "a/b/c.bin").read_bytes() == content
    assert os.listdir(workspace / "a/b") == ["c.bin"]
    found, at_end = b"", False
    while not at_end:
        outcome = ask(client, "read", "a/b/c.bin", offset=len(found), max_bytes=frames.CHUNK_BYTES)
        found, at_end = found + outcome["data"], outcome["end"]
    assert hashlib.sha256(found).digest() == hashlib.sha256(content).digest()
    assert write(client, "a/b/c.bin", b"#!/bin/sh\n", executable=True)["problem"] == ""
    [entry] = ask(client, "stat", "a/b/c.bin")["entries"]
    assert (entry["name"], entry["kind"], entry["size"]) == ("c.bin", "file", 10)
    assert entry["mode"] == 0o755
    assert client.run("open('a/b/c.bin').read()", mode="interactive").text == "'#!/bin/sh\\n'"


def test_a_repeated_piece_changes_nothing_and_a_gap_is_refused(
    client: FrameClient, workspace: Path
) -> None:
    assert write(client, "f", b"one", last=False)["problem"] == ""
    assert write(client, "f", b"two", offset=3, last=False)["problem"] == ""
    assert write(client, "f", b"two", offset=3, last=False)["problem"] == ""
    assert write(client, "f", b"!", offset=9)["problem"] == "invalid"
    assert write(client, "f", b"end", offset=6)["problem"] == ""
    assert (workspace / "f").read_bytes() == b"onetwoend"


def test_an_abandoned_upload_leaves_nothing(client: FrameClient, workspace: Path) -> None:
    write(client, "f", b"one", last=False)
    assert write(client, "f", abandon=True)["problem"] == ""
    assert write(client, "f", abandon=True)["problem"] == ""
    assert os.listdir(workspace) == []
    assert write(client, "f", b"late", offset=3)["problem"] == "not_found"


def test_what_an_upload_left_is_not_listed_or_captured(
    client: FrameClient, workspace: Path
) -> None:
    write(client, "artifacts/f", b"one", last=False)
    assert len(os.listdir(workspace / "artifacts")) == 1
    assert ask(client, "list", "artifacts", after="", max_entries=5)["entries"] == []
    header = {"type": "capture", "patterns": ["artifacts/**"], "max_files": 5, "max_bytes": 500}
    client.send(header)
    assert client.expect("captured").header["files"] == 0
    assert ask(client, "stat", "f")["message"] == "the sandbox is ending"


def test_a_folder_is_listed_in_pages(client: FrameClient, workspace: Path) -> None:
    names = sorted(f"{'n' * 200}{number:04}" for number in range(600))
    for name in names:
        (workspace / name).touch()
    (workspace / "a folder").mkdir()
    (workspace / "a link").symlink_to("nowhere")
    (workspace / os.fsdecode(b"a name \xff")).touch()
    os.mkfifo(workspace / "a pipe")
    found: list[dict[str, Any]] = []
    more = True
    while more:
        after = found[-1]["name"] if found else ""
        outcome = ask(client, "list", ".", after=after, max_entries=500)
        found, more = found + outcome["entries"], outcome["more"]
    first = [(entry["name"], entry["kind"]) for entry in found[:4]]
    assert first == [
        ("a folder", "folder"),
        ("a link", "link"),
        ("a name \\xff", "file"),
        ("a pipe", "other"),
    ]
    assert [entry["name"] for entry in found[4:]] == names


def _seconds_to_list(folder: Path) -> float:
    listed = fileops.Listed()
    began, after, count, more = time.process_time(), "", 0, True
    while more:
        header = {"id": "f1", "op": "list", "path": ".", "after": after, "max_entries": 100}
        outcome, _ = fileops.answer(frames.Frame(header), str(folder), listed)
        count, more = count + len(outcome["entries"]), outcome["more"]
        after = outcome["entries"][-1]["name"]
    assert count == len(os.listdir(folder))
    return time.process_time() - began


def test_a_large_folder_is_listed_in_time_that_grows_with_it(tmp_path: Path) -> None:
    """Sixteen times the files take about sixteen times as long; read anew for each page it would
    be two hundred and fifty times."""
    small, large = tmp_path / "small", tmp_path / "large"
    for folder, count in ((small, 1_000), (large, 16_000)):
        folder.mkdir()
        for number in range(count):
            (folder / f"{number:06}").touch()
    ratio = min(_seconds_to_list(large) / _seconds_to_list(small) for _ in range(3))
    assert ratio < 48


def test_a_folder_that_changes_between_two_pages_is_read_again(tmp_path: Path) -> None:
    listed = fileops.Listed()
    for name in "abcd":
        (tmp_path / name).touch()
    assert [name for name, _ in listed.after(str(tmp_path), "")] == ["a", "b", "c", "d"]
    (tmp_path / "cc").touch()
    os.utime(tmp_path, (1, 1))  # whatever the clock's steps are
    (tmp_path / "d").unlink()
    assert [name for name, _ in listed.after(str(tmp_path), "b")] == ["c", "cc"]


PROBLEMS = [
    ("read", "none", "not_found"),
    ("read", "folder", "not_a_file"),
    ("read", "file/x", "not_a_folder"),
    ("read", "pipe", "not_a_file"),
    ("read", "loop", "invalid"),
    ("read", "x" * 300, "invalid"),
    ("read", "a\0b", "invalid"),
    ("read", "/dev/zero", "not_a_file"),
    ("list", "file", "not_a_folder"),
    ("list", "none", "not_found"),
    ("stat", "none", "not_found"),
    ("write", "folder", "not_a_file"),
    ("write", "pipe", "not_a_file"),
    ("write", "file/x", "not_a_folder"),
    ("write", "/proc/x", "not_found"),
    ("write", "/dev/full", "not_a_file"),
]


@pytest.mark.parametrize(("op", "path", "problem"), PROBLEMS)
def test_what_cannot_be_done_says_why(
    client: FrameClient, workspace: Path, op: str, path: str, problem: str
) -> None:
    (workspace / "folder").mkdir()
    (workspace / "file").touch()
    os.mkfifo(workspace / "pipe")
    (workspace / "loop").symlink_to("loop")
    keys: dict[str, dict[str, Any]] = {
        "read": {"offset": 0, "max_bytes": 10},
        "list": {"after": "", "max_entries": 10},
        "stat": {},
    }
    outcome = write(client, path) if op == "write" else ask(client, op, path, **keys[op])
    assert (outcome["problem"], outcome["entries"], outcome["data"]) == (problem, [], b"")
    assert outcome["message"]
    assert ask(client, "stat", "file")["problem"] == ""


def test_a_link_is_followed_by_reads_and_writes_and_not_by_stat(
    client: FrameClient, workspace: Path
) -> None:
    (workspace / "real").write_text("old")
    (workspace / "link").symlink_to("real")
    assert ask(client, "stat", "link")["entries"][0]["kind"] == "link"
    assert write(client, "link", b"new")["problem"] == ""
    assert (workspace / "link").is_symlink()
    outcome = ask(client, "read", "link", offset=0, max_bytes=10)
    assert (outcome["data"], outcome["end"]) == (b"new", True)


def test_a_write_says_what_was_made_where_a_link_led(client: FrameClient, workspace: Path) -> None:
    (workspace / "dangling").symlink_to("folder/target")
    outcome = write(client, "dangling", b"12345", last=False)
    assert (outcome["problem"], outcome["entries"]) == ("", [])
    [made] = write(client, "dangling", b"678", offset=5)["entries"]
    assert (made["name"], made["kind"], made["size"]) == ("target", "file", 8)
    assert (workspace / "folder" / "target").read_bytes() == b"12345678"


def test_a_file_without_a_size_is_read_to_its_end(client: FrameClient) -> None:
    outcome = ask(client, "read", "/proc/self/comm", offset=0, max_bytes=100)
    assert (outcome["problem"], outcome["end"]) == ("", False)
    outcome = ask(client, "read", "/proc/self/comm", offset=len(outcome["data"]), max_bytes=100)
    assert (outcome["data"], outcome["end"]) == (b"", True)


KILL_HELPER = """
import os, signal, time
def helpers():
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir('/proc'))):
        try:
            stat = open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()
        except OSError:
            continue
        if int(stat[1]) == os.getppid() and pid != os.getpid() and stat[0] != 'Z':
            found.append(pid)
    return found
"""


def test_files_are_worked_on_while_a_cell_runs_and_after_one_was_killed(
    client: FrameClient, workspace: Path
) -> None:
    cell = client.start("while True: pass")
    client.expect("started")
    assert write(client, "f", b"one", last=False)["problem"] == ""
    client.send({"type": "interrupt", "cell": cell})
    report = client.finish(cell)
    assert (report.header["killed"], report.header["background"]) == (0, 0)
    assert client.run(KILL_HELPER + "len(helpers())", mode="interactive").text == "1"
    assert write(client, "f", b"two", offset=3)["problem"] == ""
    assert (workspace / "f").read_bytes() == b"onetwo"


def test_a_helper_that_the_code_kills_is_replaced(client: FrameClient, workspace: Path) -> None:
    assert write(client, "f", b"one", last=False)["problem"] == ""
    report = client.run(KILL_HELPER + "for pid in helpers(): os.kill(pid, signal.SIGKILL)")
    assert report.outcome == "completed"
    assert write(client, "f", b"two", offset=3)["problem"] == ""
    assert (workspace / "f").read_bytes() == b"onetwo"


def test_the_code_cannot_trace_the_helper(client: FrameClient) -> None:
    ask(client, "stat", ".")
    report = client.run(
        KILL_HELPER + "[pid] = helpers()\nos.getuid(), open(f'/proc/{pid}/mem', 'rb')",
    )
    if report.outcome == "completed":
        pytest.skip("root may open everything; with a uid of its own the code may not")
    assert report.header["errno"] == 13
