"""A disk that is really full under the controller's and the host's state."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import hutch
from tests.e2e.test_recovery import wait_for_state
from tests.support.stack import Stack

MIB = 1024 * 1024
CONFIG = f"[controller]\nstore_reserve_bytes = {8 * MIB}\n[host]\npool_size = 0\n"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")


@contextmanager
def small_disk(size_mib: int) -> Iterator[Path]:
    """A file system of its own, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="hutch-disk-") as name:
        folder = Path(name)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m,mode=0755", "disk", name]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip("mounting is not allowed here")
        try:
            yield folder
        finally:
            subprocess.run(["umount", name], check=True)


@pytest.fixture
def tight() -> Iterator[Stack]:
    """A stack whose state is on a disk of 64 MiB."""
    with small_disk(64) as folder:
        found = Stack(folder, "bubblewrap", CONFIG)
        try:
            found.start_host()
            found.start_controller()
            yield found
        finally:
            (folder / "filler").unlink(missing_ok=True)
            found.close()


def fill(stack: Stack) -> None:
    """Leaves no byte free."""
    with (stack.folder / "filler").open("wb", buffering=0) as file:
        piece = bytes(MIB)
        while piece:
            try:
                file.write(piece)
            except OSError:
                piece = piece[: len(piece) // 2]


def test_a_full_disk_refuses_new_work_loses_nothing_and_service_resumes(tight: Stack) -> None:
    assert tight.controller is not None
    with hutch.connect(tight.target, retry_seconds=0.1) as client:
        running = client.spawn(program="import time\ntime.sleep(2)\nprint('end')\nreturn 41")
        wait_for_state(client, running.id, "running")
        with client.sandbox() as box:
            assert box.run("x = 1").outcome == "completed"
            fill(tight)
            with pytest.raises(hutch.RequestRefused) as refused:
                client.spawn(program="return 1")
            assert refused.value.reason == "STORE_FULL"
            (tight.folder / "filler").unlink()
            assert running.result() == 41
            assert running.output() == b"end\n"
            assert box.run("x + 1").text == "2"
            assert client.invoke(program="return 2") == 2
            invocation = client.get_invocation(running.id)
            assert (invocation.attempt, invocation.state) == (1, "ended")
    assert tight.controller.poll() is None


def test_output_that_finds_no_room_is_held_back_and_complete_afterwards(tight: Stack) -> None:
    with hutch.connect(tight.target, retry_seconds=0.1) as client:
        program = (
            "import time\nprint('begin', flush=True)\ntime.sleep(1)\n"
            "for number in range(200):\n    print('x' * 9_999)\nreturn 'done'"
        )
        handle = client.spawn(program=program)
        for chunk in client.read_output(handle.id, follow=True):
            assert chunk.data == b"begin\n"
            break
        fill(tight)
        assert not client.wait_invocation(handle.id, timeout_seconds=3).ended
        (tight.folder / "filler").unlink()
        assert handle.result() == "done"
        printed = b"".join(chunk.data for chunk in client.read_output(handle.id))
        assert printed == b"begin\n" + (b"x" * 9_999 + b"\n") * 200


def test_a_large_value_that_finds_no_room_is_named_for_what_it_met(tight: Stack) -> None:
    with hutch.connect(tight.target, retry_seconds=0.1) as client:
        handle = client.spawn(
            program="import time\nprint('begin', flush=True)\ntime.sleep(1)\nreturn 'x' * 3_000_000"
        )
        for _ in client.read_output(handle.id, follow=True):
            break
        fill(tight)
        assert not client.wait_invocation(handle.id, timeout_seconds=3).ended
        (tight.folder / "filler").unlink()
        found = client.wait_invocation(handle.id)
        assert found.ending is not None
        if found.ending.kind == "raised":
            assert found.ending.failure is not None
            assert found.ending.failure.reason == "STORE_FULL"
            assert "TooLarge" not in found.ending.failure.type_name
        else:
            assert found.ending.kind == "returned"
