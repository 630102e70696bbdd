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
