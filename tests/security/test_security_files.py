"""Files and names that a sandbox leaves: what is regular is kept, the rest refused one by one."""

from __future__ import annotations

import time

import hutch
from tests.support.hostile import hostile

GUARD_SECONDS = 30.0


def test_case_s9_links_devices_and_bad_names_are_refused_and_the_rest_is_kept(
    client: hutch.Client,
) -> None:
    program = """
import socket
os.makedirs("artifacts/closed")
for name in (b"plain", b"\\xff\\xfe", b"a\\nb", b"\\x1b[31m", b"..\\\\up"):
    open(b"artifacts/" + name, "wb").close()
for name in ("e\\u0301", "\\u00e9"):
    open("artifacts/" + name, "wb").close()
os.link("artifacts/plain", "artifacts/twin")
os.symlink("/etc/passwd", "artifacts/link")
os.symlink("/", "artifacts/root")
os.mkfifo("artifacts/fifo")
socket.socket(socket.AF_UNIX).bind("artifacts/socket")
with open("artifacts/sparse", "wb") as file:
    file.truncate(1 << 40)
os.chmod("artifacts/closed", 0)
folder = "artifacts"
for _ in range(80):
    folder += "/d"
    os.mkdir(folder)
open(folder + "/deep", "w").close()
return 1
"""
    handle = client.spawn(program=hostile(program), timeout_seconds=GUARD_SECONDS)
    assert handle.result(timeout_seconds=GUARD_SECONDS) == 1
    names = sorted(artifact.name for artifact in handle.artifacts)
    assert names == ["artifacts/e\u0301", "artifacts/plain", "artifacts/twin", "artifacts/\u00e9"]


def test_case_s10_a_name_that_is_no_path_below_the_workspace_is_refused(
    client: hutch.Client,
) -> None:
    program = r"""
names = ["a\r\nb", "../x", "/x", "a/../b", "a//b", "", ".", "a\\b", "x" * 4096, "\x1b]0;x\x07"]
return [answer.failure.reason if answer.failure else name
        for name in names for answer in [save(b"x", name=name)]]
"""
    reasons = client.invoke(program=hostile(program), timeout_seconds=GUARD_SECONDS)
    assert reasons == ["FIELD_INVALID"] * 10


def test_a_pattern_of_many_folders_holds_no_ending_back(client: hutch.Client) -> None:
    program = """
os.makedirs("a/" * 60)
open("a/" * 60 + "a", "w").close()
return 1
"""
    began = time.monotonic()
    pattern = "**/a/" * 14 + "z"
    kept = client.invoke(program=hostile(program), artifact_patterns=[pattern])
    assert kept == 1
    assert time.monotonic() - began < GUARD_SECONDS


def test_folders_that_are_exchanged_meanwhile_lead_nowhere_else(client: hutch.Client) -> None:
    program = """
os.makedirs("artifacts/x")
open("artifacts/x/hostname", "w").write("own")
if os.fork() == 0:
    for number in range(1, 32):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            pass
    while True:
        os.rename("artifacts/x", "artifacts/y")
        os.symlink("/etc", "artifacts/x")
        os.unlink("artifacts/x")
        os.rename("artifacts/y", "artifacts/x")
return 1
"""
    handle = client.spawn(program=hostile(program), timeout_seconds=GUARD_SECONDS)
    assert handle.result(timeout_seconds=GUARD_SECONDS) == 1
    for artifact in handle.artifacts:
        assert b"".join(client.get_artifact(artifact.artifact_id)) == b"own"


EXCHANGED = """
import os, threading
os.mkdir('w')
with open('w/plain', 'wb') as file: file.write(b'P' * 1000)
os.symlink('/etc/passwd', 'w/link')
os.symlink('/dev/zero', 'w/device')
os.symlink('/proc/1/environ', 'w/other')
os.symlink('x', 'w/loop')
os.mkfifo('w/fifo')
os.mkdir('w/folder')
def exchange():
    while True:
        for name in ('plain', 'link', 'device', 'other', 'loop', 'fifo', 'folder'):
            try:
                os.rename(f'w/{name}', 'w/x')
                os.stat('w')
                os.rename('w/x', f'w/{name}')
            except OSError:
                pass
threading.Thread(target=exchange, daemon=True).start()
"""


def test_a_name_that_becomes_another_thing_at_any_moment_is_read_and_written_as_one(
    client: hutch.Client,
) -> None:
    """A file, a link out of the workspace, a device, a fifo, a folder: nothing waits, nothing else
    than a regular file that the code may read is read, and a write is there whole or not at all."""
    contents: set[bytes] = set()
    refused: set[str] = set()
    with client.sandbox() as box:
        box.run(EXCHANGED).raise_for_failure()
        for number in range(150):
            try:
                contents.add(box.files.read("w/x"))
                box.files.write("w/x", b"new" * number)
            except hutch.RequestRefused as refusal:
                refused.add(refusal.reason)
        own = box.files.read("/etc/passwd")
        assert box.run("sorted(os.listdir('w'))").outcome == "completed"
    assert contents <= {b"P" * 1000, own, *(b"new" * number for number in range(150))}
    assert refused <= {"FIELD_INVALID", "FILE_NOT_FOUND"}


LEFT = """
import os
os.makedirs('artifacts/deep')
with open('artifacts/sparse', 'wb') as file: file.truncate(2**40)
os.link('artifacts/sparse', 'artifacts/hard')
for name in (b'two\\nlines', b'\\xff\\xfe', b'x' * 255, b'..', b'..sound', b' '):
    try:
        open(b'artifacts/' + name, 'w').close()
    except OSError:
        pass
os.chdir('artifacts/deep')
for _ in range(5_000):
    os.mkdir('d')
    os.chdir('d')
open('bottom', 'w').close()
"""


def test_names_sizes_and_depths_that_no_tree_should_have_are_refused_one_by_one(
    client: hutch.Client,
) -> None:
    handle = client.spawn(program=LEFT)
    assert handle.result() is None
    names = [item.name for item in handle.artifacts]
    assert names == ["artifacts/ ", "artifacts/..sound", f"artifacts/{'x' * 255}"]
    refused = {item.name: item.reason for item in client.list_artifacts(handle.id).refusals}
    assert "too many bytes" in refused["artifacts/sparse"]
    assert "too many bytes" in refused["artifacts/hard"]
    assert sum("nested too deeply" in reason for reason in refused.values()) == 1
    assert sum("control" in reason for reason in refused.values()) == 1
    assert sum("UTF-8" in reason for reason in refused.values()) == 1


def test_a_large_sparse_file_is_read_from_any_byte(client: hutch.Client) -> None:
    with client.sandbox() as box:
        box.run("with open('sparse', 'wb') as file: file.truncate(2**40)").raise_for_failure()
        assert box.files.stat("sparse").size_bytes == 2**40
        assert box.files.read("sparse", offset=2**40 - 3) == bytes(3)
        assert box.files.read("sparse", offset=2**39, max_bytes=300_000) == bytes(300_000)
        assert box.files.read("sparse", offset=2**41) == b""
