"""Every ending that this release has, produced for real, with its evidence."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import pytest

import hutch
from hutch import ReturnType, types
from tests.e2e.test_recovery import wait_for_state
from tests.support.stack import Stack, stack

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A program and what the host must have measured of it."""

    program: str
    options: dict[str, Any] = field(default_factory=dict)
    evidence: dict[str, Any] = field(default_factory=dict)
    message: str = ""
    needs: str = ""  # the limit that must be held for the whole sandbox


ENDINGS = {
    "returned": Case(program="return 1"),
    "raised": Case(program="[][0]", message="IndexError"),
    "contract_violated": Case(program="return 'x'", options={"contract": ReturnType(int)}),
    "deadline_exceeded": Case(
        program="while True: pass",
        options={"timeout_seconds": 0.5},
        evidence={"limit": "timeout", "limit_value": 1},
    ),
    "memory_exceeded": Case(
        program="block = b'x' * (400 * 1024 * 1024)",
        options={"memory_limit_bytes": 128 * MIB},
        evidence={"limit": "memory", "limit_value": 128 * MIB},
        needs="memory",
    ),
    "pids_exceeded": Case(
        program="import os, time\nwhile True:\n    os.fork() or time.sleep(60)",
        options={"pids_limit": 24},
        message="BlockingIOError",
        needs="pids",
    ),
    "disk_exceeded": Case(
        program="open('big', 'wb').write(b'x' * (64 * 1024 * 1024))",
        options={"tmpfs_limit_bytes": 16 * MIB},
        message="No space left",
    ),
    "output_exceeded": Case(
        program="while True: print('x' * 1000)", options={"output_limit_bytes": 100_000}
    ),
    "crashed": Case(
        program="import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", evidence={"signal": 11}
    ),
    "exited": Case(program="import os\nos._exit(7)", evidence={"exit_code": 7}),
}


def ended(client: hutch.Client, **options: Any) -> types.Invocation:
    """An invocation that has ended, whatever its ending."""
    handle = client.spawn(*([options.pop("contract")] if "contract" in options else []), **options)
    return client.wait_invocation(handle.id)


def ending_of(invocation: types.Invocation) -> types.Ending:
    assert invocation.ending is not None
    return invocation.ending


@pytest.mark.parametrize("kind", ENDINGS)
def test_each_ending_is_produced_and_its_evidence_measured(client: hutch.Client, kind: str) -> None:
    case = ENDINGS[kind]
    if case.needs and os.geteuid() != 0:
        pytest.skip(f"this host does not hold {case.needs} for the whole sandbox")
    found = ended(client, program=case.program, **case.options)
    ending = ending_of(found)
    assert ending.kind == kind, ending
    assert case.message in ending.message
    evidence = ending.evidence
    assert evidence is not None
    for name, value in case.evidence.items():
        assert getattr(evidence, name) == value, name
    levels = {item.limit: item.level for item in found.enforcement}
    assert set(levels) == {"memory", "pids", "cpu", "tmpfs", "open_files"}


def test_counters_of_the_kernel_are_in_the_evidence(client: hutch.Client) -> None:
    if os.geteuid() != 0:
        pytest.skip("counters are the control group's")
    memory = ending_of(
        ended(client, program=ENDINGS["memory_exceeded"].program, memory_limit_bytes=128 * MIB)
    )
    assert memory.evidence is not None
    assert memory.evidence.oom_kill_count
    assert memory.evidence.memory_peak_bytes
    pids = ending_of(ended(client, program=ENDINGS["pids_exceeded"].program, pids_limit=24))
    assert pids.evidence is not None
    assert pids.evidence.pids_limit_hits
    disk = ending_of(
        ended(client, program=ENDINGS["disk_exceeded"].program, tmpfs_limit_bytes=16 * MIB)
    )
    assert disk.evidence is not None
    assert disk.evidence.disk_full_hits


def test_a_limit_that_is_caught_is_no_ending(client: hutch.Client) -> None:
    program = (
        "try:\n    open('big', 'wb').write(b'x' * (64 * 1024 * 1024))\n"
        "except OSError as error:\n    return error.errno\n"
    )
    assert client.invoke(program=program, tmpfs_limit_bytes=16 * MIB) == 28


def test_an_errno_without_a_full_disk_is_only_raised(client: hutch.Client) -> None:
    found = ended(client, program="raise OSError(28, 'No space left on device')")
    assert ending_of(found).kind == "raised"


def test_a_client_cancels_and_a_parent_that_ends_cancels(client: hutch.Client) -> None:
    handle = client.spawn(program="spawn(program='while True: pass')\nwhile True: pass")
    wait_for_state(client, handle.id, "running")
    children: list[types.Invocation] = []
    while not children:
        children = [
            item
            for item in client.list_invocations(tree_of=handle.id).invocations
            if item.parent_id
        ]
    handle.cancel()
    own = ending_of(client.get_invocation(handle.id))
    assert (own.kind, own.cause) == ("cancelled", "client")
    child = ending_of(client.get_invocation(children[0].invocation_id))
    assert (child.kind, child.cause) == ("cancelled", "parent_ended")


def test_an_idle_box_ends(client: hutch.Client) -> None:
    with client.sandbox(idle_timeout_seconds=0.3) as box:
        box.run("x = 1")
        found = client.wait_invocation(box.id)
    ending = ending_of(found)
    assert ending.kind == "idle_timeout"
    assert ending.evidence is not None
    assert ending.evidence.limit == "idle_timeout"


def test_a_sandbox_that_does_not_get_ready_is_a_failed_start() -> None:
    with stack(config="[host]\nstart_timeout_seconds = 0.001\npool_size = 0\n") as found:
        with hutch.connect(found.target) as client:
            ending = ending_of(ended(client, program="return 1"))
            assert ending.kind == "start_failed"
            assert "ready" in ending.message


def test_a_box_that_its_host_refuses_to_serve_on_is_lost_and_no_failed_start() -> None:
    with stack(config="[host]\ncells = 2\n") as found, hutch.connect(found.target) as client:
        with client.sandbox() as box:
            assert [box.run(str(number)).text for number in range(2)] == ["0", "1"]
            with pytest.raises(hutch.InvocationLost) as caught:
                box.run("2")
            assert caught.value.ending == "sandbox_lost"
            assert "has had 2 cells" in str(caught.value)
            assert ending_of(client.wait_invocation(box.id)).kind == "sandbox_lost"


def test_trees_beyond_a_shrunken_capacity_end_the_youngest_first(own_stack: Stack) -> None:
    with hutch.connect(own_stack.target) as client:
        program = "import time\ntime.sleep(1)\nreturn 'done'"
        handles = [client.spawn(program=program, max_depth=4, retry_on_loss=True) for _ in range(2)]
        for handle in handles:
            wait_for_state(client, handle.id, "running")
        own_stack.kill_host()
        own_stack.start_host("--capacity", "4")
        assert handles[0].result() == "done"
        younger = ending_of(client.wait_invocation(handles[1].id))
        assert younger.kind == "capacity_lost"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("memory_limit_bytes", 9 * 1024 * MIB),
        ("pids_limit", 5000),
        ("tmpfs_limit_bytes", 5 * 1024 * MIB),
        ("open_files_limit", 70_000),
        ("timeout_seconds", 86_401),
        ("max_depth", 17),
        ("max_children", 10_001),
        ("output_limit_bytes", 17 * 1024 * MIB),
    ],
)
def test_case_47_a_limit_over_its_maximum_is_refused_and_says_the_maximum(
    client: hutch.Client, option: str, value: int
) -> None:
    options: dict[str, Any] = {option: value}
    with pytest.raises(hutch.RequestRefused) as caught:
        client.spawn(program="return 1", **options)
    assert caught.value.reason == "FIELD_INVALID"


def test_case_47_maxima_and_defaults_are_the_operators() -> None:
    config = (
        "[controller.limits]\ntimeout_seconds = { default = 5, maximum = 600 }\n"
        "pids_limit = { default = 32, maximum = 64 }\n"
    )
    with stack(config=config) as found, hutch.connect(found.target) as client:
        with pytest.raises(hutch.RequestRefused, match="600"):
            client.spawn(program="return 1", timeout_seconds=3600)
        invocation = ended(client, program="return 1")
        assert invocation.resources.pids_limit == 32
