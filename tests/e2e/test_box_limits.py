"""Boxes and programs that use more than they may: what is told, and what lives on."""

from __future__ import annotations

import os

import pytest

import hutch

MIB = 1024 * 1024

needs_groups = pytest.mark.skipif(
    os.geteuid() != 0, reason="only the kernel's counter of a control group tells"
)


@needs_groups
def test_case_3_a_box_that_dies_for_memory_says_so_and_the_next_cell_that_its_state_is_lost(
    client: hutch.Client,
) -> None:
    with client.sandbox(memory_limit_bytes=128 * MIB) as box:
        box.run("kept = 1")
        died = box.run("block = b'x' * (400 * 1024 * 1024)")
        assert died.outcome == "repl_died"
        assert died.state_lost
        evidence = died.evidence
        assert evidence is not None
        assert evidence.oom_kill_count
        assert evidence.memory_peak_bytes
        assert (evidence.limit, evidence.limit_value) == ("memory", 128 * MIB)
        after = box.run("kept")
        assert after.outcome == "errored"
        assert after.failure is not None
        assert after.failure.type_name == "NameError"
        assert box.run("1 + 1").text == "2"


@needs_groups
def test_case_43_a_child_process_killed_for_memory_is_counted_and_the_box_lives(
    client: hutch.Client,
) -> None:
    with client.sandbox(memory_limit_bytes=128 * MIB) as box:
        box.run("kept = 1")
        result = box.run(
            "import subprocess, sys\n"
            "code = \"block = b'x' * (400 * 1024 * 1024)\"\n"
            "subprocess.run([sys.executable, '-c', code]).returncode"
        )
        assert result.text == "-9"
        assert not result.state_lost
        assert box.run("kept").text == "1"
        failed = box.run("subprocess.run([sys.executable, '-c', code], check=True)")
        assert failed.outcome == "errored"
        assert failed.evidence is not None
        assert failed.evidence.oom_kill_count == 1


CHILD_KILLED_FOR_MEMORY = """
import ctypes, os, subprocess, sys
code = "block = b'x' * (400 * 1024 * 1024)"
assert subprocess.run([sys.executable, '-c', code]).returncode == -9
"""


@needs_groups
@pytest.mark.parametrize("quickly", [True, False])
def test_a_crash_after_a_child_was_killed_for_memory_is_a_crash(
    client: hutch.Client, quickly: bool
) -> None:
    """In a later cell, at once and after a while; what an earlier cell did is not its evidence."""
    with client.sandbox(memory_limit_bytes=128 * MIB) as box:
        box.run(CHILD_KILLED_FOR_MEMORY).raise_for_failure()
        if not quickly:
            box.run("import time; time.sleep(0.3)")
        died = box.run("ctypes.string_at(0)")
        assert died.outcome == "repl_died"
        assert died.evidence is not None
        assert died.evidence.signal == 11
        if not quickly:
            assert (died.evidence.oom_kill_count, died.evidence.limit) == (0, "")
        again = box.run("raise ValueError")
        assert again.evidence is not None
        assert (again.evidence.oom_kill_count, again.evidence.limit) == (0, "")


@needs_groups
@pytest.mark.parametrize(
    ("last", "ending"), [("ctypes.string_at(0)", "crashed"), ("os._exit(3)", "exited")]
)
def test_a_program_that_dies_after_its_child_was_killed_for_memory_ends_as_it_does(
    client: hutch.Client, last: str, ending: str
) -> None:
    with pytest.raises(hutch.InvocationCrashed) as caught:
        client.invoke(program=CHILD_KILLED_FOR_MEMORY + last, memory_limit_bytes=128 * MIB)
    assert caught.value.ending == ending


@needs_groups
def test_case_42_memory_without_end_ends_typed(client: hutch.Client) -> None:
    with pytest.raises(hutch.InvocationFailed) as caught:
        client.invoke(program="block = b'x' * 10**10")
    assert caught.value.ending == "memory_exceeded"


@needs_groups
def test_case_42_forks_without_end_are_bounded_and_the_box_lives(client: hutch.Client) -> None:
    with client.sandbox(pids_limit=32) as box:
        bomb = box.run("import os\nwhile True: os.fork()", timeout_seconds=1)
        assert bomb.outcome in ("timed_out", "errored", "repl_died")
        assert box.run("1 + 1").text == "2"
