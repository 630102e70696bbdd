"""The contract checker with its real worker processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from controller.contracts import (
    CheckerConfig,
    CheckerUnavailable,
    ContractChecker,
    ContractInvalid,
    Mismatch,
    Outcome,
)
from tests.support import leaks

MIB = 1024 * 1024


def dump(value: Any) -> bytes:
    return json.dumps(value).encode()


def slow_contract() -> tuple[bytes, bytes]:
    """A schema within all limits, and a value with which it takes practically for ever.

    The recursion offers two ways at each level, both of which fail only at the very end.
    """
    node = {"items": {"anyOf": [{"$ref": "#/$defs/n"}, {"$ref": "#/$defs/n"}]}, "type": "array"}
    value: Any = 1
    for _ in range(60):
        value = [value]
    return dump({"$ref": "#/$defs/n", "$defs": {"n": node}}), dump(value)


@pytest.fixture
async def checker() -> AsyncIterator[ContractChecker]:
    async with ContractChecker(CheckerConfig(check_seconds=1.0)) as checker:
        yield checker


def workers() -> list[int]:
    """The worker processes of this process."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            line = Path(f"/proc/{int(name)}/cmdline").read_bytes().split(b"\0")
            if b"controller.contract_worker" in line and str(os.getpid()).encode() in line:
                found.append(int(name))
    return found


async def test_a_value_that_fits_is_accepted(checker: ContractChecker) -> None:
    verdict = await checker.check(dump({"type": "integer"}), b"3")
    assert verdict.accepted
    assert (verdict.artifact_ids, verdict.tool_ids) == ((), ())


async def test_a_misfit_says_where_what_and_which(checker: ContractChecker) -> None:
    verdict = await checker.check(dump({"items": {"type": "integer"}}), dump([1, True]))
    assert verdict.outcome is Outcome.MISMATCH
    assert verdict.mismatch == Mismatch(path="result[1]", expected="int", got="True (bool)")


async def test_a_value_in_a_file_is_checked_there(checker: ContractChecker, tmp_path: Path) -> None:
    path = tmp_path / "value"
    path.write_bytes(dump(["x" * MIB] * 10))
    verdict = await checker.check(dump({"items": {"type": "string"}}), path)
    assert verdict.accepted


async def test_a_value_is_checked_without_a_contract(checker: ContractChecker) -> None:
    verdict = await checker.check_value(dump([{"$artifact": "art_1"}, {"$tool": "tool_inv_1_1"}]))
    assert verdict.accepted
    assert (verdict.artifact_ids, verdict.tool_ids) == (("art_1",), ("tool_inv_1_1",))
    verdict = await checker.check_value(b"[" * 200 + b"]" * 200)
    assert (verdict.outcome, verdict.limit) == (Outcome.VALUE_INVALID, "depth 100")
    verdict = await checker.check_value(b'{"$nope": 1}')
    assert (verdict.outcome, verdict.limit) == (Outcome.VALUE_INVALID, "")


async def test_schemas_are_validated_ahead(checker: ContractChecker) -> None:
    await checker.validate_schema(dump({"type": "integer"}))
    with pytest.raises(ContractInvalid, match="linear time"):
        await checker.validate_schema(dump({"pattern": "(?=a)"}))
    with pytest.raises(ContractInvalid, match="2020-12"):
        await checker.check(dump({"$schema": "x"}), b"1")


async def test_a_ref_to_a_listener_and_to_a_file_see_no_access(
    checker: ContractChecker, tmp_path: Path
) -> None:
    path = tmp_path / "schema.json"
    path.write_bytes(dump({"type": "integer"}))
    os.utime(path, ns=(1, path.stat().st_mtime_ns))  # any read after this raises the access time
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/schema.json"
        for reference in (address, path.as_uri()):
            for schema in (
                {"$ref": reference},
                {"items": {"$ref": reference}},
                {"$id": reference, "$ref": "more.json"},
                {"$defs": {"a": {"$ref": reference}}},
                {"$schema": reference},
                {"$dynamicRef": reference},
            ):
                with pytest.raises(ContractInvalid):
                    await checker.validate_schema(dump(schema))
                with pytest.raises(ContractInvalid):
                    await checker.check(dump(schema), b"1")
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert path.stat().st_atime_ns == 1


async def test_the_doubling_schema_is_refused_at_once(checker: ContractChecker) -> None:
    names = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
    with pytest.raises(ContractInvalid, match="10,000 nodes"):
        await checker.validate_schema(dump({"$defs": {**names, "d40": {}}, "$ref": "#/$defs/d0"}))


async def test_a_backtracking_pattern_takes_linear_time(checker: ContractChecker) -> None:
    verdict = await checker.check(dump({"pattern": "^(a|a)*(a+)+$"}), dump("a" * 200_000 + "b"))
    assert verdict.outcome is Outcome.MISMATCH


async def test_a_check_without_end_is_ended_and_costs_nobody_else_anything(
    checker: ContractChecker,
) -> None:
    schema, value = slow_contract()
    async with asyncio.TaskGroup() as group:
        slow = [group.create_task(checker.check(schema, value, owner="hostile")) for _ in range(2)]
        for _ in range(20):
            verdict = await checker.check(dump({"type": "integer"}), b"3", owner="other")
            assert verdict.accepted
        assert not any(task.done() for task in slow), "the others had to wait"
    assert [task.result().outcome for task in slow] == [Outcome.TIMED_OUT] * 2
    assert (await checker.check(dump({}), b"1", owner="hostile")).accepted


async def test_a_check_that_needs_too_much_memory_is_ended() -> None:
    async with ContractChecker(CheckerConfig(memory_limit_bytes=128 * MIB)) as checker:
        verdict = await checker.check_value(b"[" + b'{"abc":[]},' * 400_000 + b"1]")
        assert verdict.outcome is Outcome.EXHAUSTED
        assert (await checker.check_value(b"1")).accepted


async def test_a_worker_that_is_killed_is_replaced(checker: ContractChecker) -> None:
    await checker.check_value(b"1")
    (pid,) = workers()
    os.kill(pid, signal.SIGKILL)
    assert (await checker.check_value(b"1")).accepted
    assert workers() != [pid]


async def test_cancelling_a_check_frees_its_place(checker: ContractChecker) -> None:
    schema, value = slow_contract()
    tasks = [asyncio.create_task(checker.check(schema, value)) for _ in range(4)]
    while len(workers()) < 2:
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)
    assert (await checker.check_value(b"1")).accepted


async def test_closing_ends_checks_and_workers() -> None:
    checker = ContractChecker()
    schema, value = slow_contract()
    tasks = [asyncio.create_task(checker.check(schema, value)) for _ in range(3)]
    while len(workers()) < 2:
        await asyncio.sleep(0)
    await checker.close()
    await asyncio.wait(tasks)
    for task in tasks:
        with pytest.raises(CheckerUnavailable):
            task.result()
    assert workers() == []
    with pytest.raises(CheckerUnavailable):
        await checker.check_value(b"1")


_PARENT = """
import asyncio, os, sys
from controller.contracts import ContractChecker
async def main():
    checker = ContractChecker()
    task = asyncio.create_task(checker.check(sys.argv[1].encode(), sys.argv[2].encode()))
    while not checker._all:
        await asyncio.sleep(0.01)
    print(next(iter(checker._all))._process.pid, flush=True)
    await task
asyncio.run(main())
"""


def test_workers_end_with_a_controller_that_is_killed_even_in_a_check() -> None:
    schema, value = slow_contract()
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, schema.decode(), value.decode()], stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    while leaks.is_alive(pid):
        os.sched_yield()  # the test's own time limit ends this if it never comes true


def test_a_worker_has_no_descriptor_and_no_variable_of_the_controller() -> None:
    async def main() -> tuple[list[str], bytes]:
        async with ContractChecker() as checker:
            await checker.check_value(b"1")
            (pid,) = workers()
            links = [os.readlink(f"/proc/{pid}/fd/{n}") for n in os.listdir(f"/proc/{pid}/fd")]
            return links, Path(f"/proc/{pid}/environ").read_bytes()

    os.environ["HUTCH_TEST_SECRET"] = "secret"
    with open("/etc/passwd", "rb") as file:
        os.set_inheritable(file.fileno(), True)
        links, environment = asyncio.run(main())
    del os.environ["HUTCH_TEST_SECRET"]
    assert "/etc/passwd" not in links
    assert len(links) == 3
    assert environment == b"LC_ALL=C.UTF-8\0"
