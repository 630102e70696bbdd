"""The host with real supervisors: what a controller sees of real code in real sandboxes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from hutch.v1 import cell_pb2, ending_pb2, invocation_pb2, invocation_service_pb2
from hutch.v1 import host_service_pb2 as pb
from hutch.v1 import sandbox_file_pb2 as files
from sandbox import drivers
from sandbox.drivers import procfs
from sandbox.drivers.driver import Driver, Level, SandboxRequest, Statement
from sandbox.host.offers import prepare
from tests.support.host import (
    Conversation,
    HostUnderTest,
    content,
    host,
    make_cell,
    make_spec,
    until,
)

STDOUT = invocation_service_pb2.OUTPUT_STREAM_STDOUT
NAMES = ("fake", "bubblewrap")


class Watched:
    """A driver that remembers its containers for the test."""

    def __init__(self, driver: Driver, statement: Statement) -> None:
        """Wraps a prepared driver."""
        self._driver = driver
        self.statement = statement
        self.name = driver.name
        self.made: dict[str, Any] = {}

    async def prepare(self) -> Any:
        """The driver's own statement, once."""
        return self.statement

    async def create(self, request: SandboxRequest) -> Any:
        """Makes one and remembers it."""
        container = await self._driver.create(request)
        self.made[request.sandbox_id] = container
        return container

    def __getattr__(self, name: str) -> Any:
        """Everything else is the driver's."""
        return getattr(self._driver, name)


@contextlib.asynccontextmanager
async def real_host(name: str, **settings: Any) -> AsyncIterator[tuple[HostUnderTest, Watched]]:
    """A host with one real driver, or a skip that says what is missing."""
    with tempfile.TemporaryDirectory(prefix="real-") as folder:
        os.chmod(folder, 0o755)
        driver = drivers.make(name, f"test-{os.getpid()}", Path(folder))
        watched = Watched(driver, await prepare(driver, 60.0))
        if not watched.statement.usable:
            await watched.close()
            pytest.skip(f"{name} is not usable here: {watched.statement.problem}")
        async with host(watched, **settings) as it:
            yield it, watched
        assert await watched.list() == []


async def ready(it: HostUnderTest, code: str, **inputs: bytes) -> Conversation:
    """Starts a sandbox, runs a cell and reads on to its start."""
    talk = it.attach()
    await talk.run(code, "cell_1", **inputs)
    await talk.greeting()
    await talk.next("ready")
    await talk.next("cell_started")
    return talk


async def rest(talk: Conversation) -> tuple[bytes, pb.CellCompleted]:
    """Reads what the cell prints to standard output, and its end."""
    printed = b""
    while True:
        event = await talk._read()
        assert event.sequence > talk.last_sequence
        talk.last_sequence = event.sequence
        kind = event.WhichOneof("event")
        if kind == "cell_completed":
            return printed, event.cell_completed
        assert kind == "output", event
        if event.output.stream == STDOUT:
            assert event.output.offset == len(printed)
            printed += event.output.data


@pytest.mark.parametrize("name", NAMES)
async def test_a_program_prints_returns_raises_and_dies(name: str) -> None:
    async with real_host(name) as (it, _):
        talk = await ready(it, "print('hello', x)\nreturn x + 1", x=b"41")
        printed, completed = await rest(talk)
        assert printed == b"hello 41\n"
        assert completed.outcome == cell_pb2.CELL_OUTCOME_RETURNED
        assert json.loads(completed.value.data) == 42
        assert (completed.stdout_bytes, completed.stderr_bytes) == (9, 0)
        await talk.run("raise ValueError('no')", "cell_2")
        await talk.next("cell_started")
        _, completed = await rest(talk)
        assert completed.outcome == cell_pb2.CELL_OUTCOME_RAISED
        assert completed.failure.type_name == "ValueError"
        await talk.run("import os; os._exit(3)", "cell_3")
        await talk.next("cell_started")
        _, completed = await rest(talk)
        assert completed.outcome == cell_pb2.CELL_OUTCOME_REPL_DIED
        assert completed.evidence.exit_code == 3
        assert completed.state_lost


@pytest.mark.parametrize("name", NAMES)
async def test_a_spawn_and_its_large_reply_and_a_large_value_back(name: str) -> None:
    async with real_host(name) as (it, _):
        talk = await ready(
            it,
            "import hutch\n"
            "value = hutch.invoke(program='return 1', data=[0, 1, 2])\n"
            "return [len(value), 'y' * 600_000]",
        )
        call = await talk.next("call")
        assert call.spawn.spec.program == "return 1"
        assert [item.name for item in call.spawn.inputs] == ["data"]
        assert json.loads(call.spawn.inputs[0].value.data) == [0, 1, 2]
        large = json.dumps("z" * 700_000).encode()
        for at in range(0, len(large), 190_000):
            chunk = large[at : at + 190_000]
            last = at + 190_000 >= len(large)
            await talk.send(blob=pb.BlobChunk(blob_id="r", offset=at, data=chunk, last=last))
        value = pb.Content(blob_id="r", size_bytes=len(large))
        await talk.send(reply=pb.CallReply(call_id=call.call_id, value=value))
        received = b""
        while True:
            event = await talk._read()
            if event.WhichOneof("event") == "cell_completed":
                break
            assert event.blob.offset == len(received)
            received += event.blob.data
        assert event.cell_completed.outcome == cell_pb2.CELL_OUTCOME_RETURNED, event
        assert event.cell_completed.value.size_bytes == len(received)
        assert json.loads(received) == [700_000, "y" * 600_000]


@pytest.mark.parametrize("name", NAMES)
async def test_a_refused_spawn_is_an_ordinary_exception(name: str) -> None:
    async with real_host(name) as (it, _):
        talk = await ready(
            it,
            "import hutch\n"
            "try:\n"
            "    hutch.invoke(program='return 1')\n"
            "except Exception as error:\n"
            "    return type(error).__name__\n",
        )
        call = await talk.next("call")
        refused = ending_pb2.Failure(
            type_name="RecursionLimitError", message="too deep", reason="DEPTH_LIMIT_REACHED"
        )
        await talk.send(reply=pb.CallReply(call_id=call.call_id, failure=refused))
        _, completed = await rest(talk)
        assert json.loads(completed.value.data) == "RecursionLimitError"


@pytest.mark.parametrize("name", NAMES)
async def test_files_are_captured_after_the_code_has_ended(name: str) -> None:
    async with real_host(name) as (it, _):
        talk = await ready(
            it,
            "import os\n"
            "os.makedirs('artifacts/deep')\n"
            "open('artifacts/deep/a.bin', 'wb').write(bytes(range(256)) * 2000)\n"
            "os.symlink('/etc/passwd', 'artifacts/link')\n",
        )
        await rest(talk)
        request = pb.FileCapture(patterns=["artifacts/**"], max_files=10, max_bytes=1 << 20)
        await talk.send(capture=request)
        received = b""
        while True:
            event = await talk._read()
            if event.WhichOneof("event") == "capture_completed":
                break
            assert event.file.name == b"artifacts/deep/a.bin"
            received += event.file.data
        assert received == bytes(range(256)) * 2000
        assert event.capture_completed.file_count == 1
        assert [item.name for item in event.capture_completed.refused] == [b"artifacts/link"]


@pytest.mark.parametrize("name", NAMES)
async def test_a_flood_with_a_slow_reader_is_bounded_and_complete(name: str) -> None:
    """Scale: 20 MiB for 5 GiB, with 1 MiB in memory."""
    total = 20 << 20
    async with real_host(name, event_memory_bytes=1 << 20) as (it, _):
        talk = await ready(
            it, f"import os\nfor _ in range({total >> 16}): os.write(1, b'x' * 65536)"
        )
        sandbox = it.running.table._sandboxes["sbx_1"]
        printed = peak = acknowledged = 0
        while True:
            event = await talk._read()
            talk.last_sequence = event.sequence
            if event.WhichOneof("event") == "cell_completed":
                break
            assert event.output.offset == printed
            printed += len(event.output.data)
            peak = max(peak, sandbox.log.memory_bytes + sandbox.log.spilled_bytes)
            if event.sequence >= acknowledged + 8:
                await talk.acknowledge()
                acknowledged = event.sequence
        assert printed == total == event.cell_completed.stdout_bytes
        assert peak < 8 << 20


@pytest.mark.parametrize("name", NAMES)
async def test_an_interrupt_ends_an_endless_loop_and_the_sandbox_lives(name: str) -> None:
    async with real_host(name) as (it, _):
        talk = await ready(it, "while True: pass")
        await talk.send(interrupt=pb.CellInterrupt(cell_id="cell_1"))
        _, completed = await rest(talk)
        assert completed.outcome == cell_pb2.CELL_OUTCOME_INTERRUPTED
        await talk.run("return 1", "cell_2")
        await talk.next("cell_started")
        _, completed = await rest(talk)
        assert completed.outcome == cell_pb2.CELL_OUTCOME_RETURNED


@pytest.mark.parametrize("name", NAMES)
async def test_a_controller_that_was_cut_off_finds_all_again(name: str) -> None:
    async with real_host(name) as (it, _):
        talk = await ready(it, "import hutch\nprint(1)\nreturn hutch.invoke(program='return 2')")
        talk.cut()
        again = it.attach(start=False, after=2)
        await again.greeting()
        seen = {}
        while "call" not in seen:
            event = await again._read()
            seen[event.WhichOneof("event")] = event
        call = seen["call"].call
        third = it.attach(start=False, after=seen["call"].sequence)
        assert list((await third.greeting()).open_call_ids) == [call.call_id]
        await third.send(reply=pb.CallReply(call_id=call.call_id, value=content(b"2")))
        _, completed = await rest(third)
        assert json.loads(completed.value.data) == 2


@pytest.mark.parametrize("name", NAMES)
async def test_a_supervisor_killed_from_outside_is_told_with_its_signal(name: str) -> None:
    async with real_host(name) as (it, driver):
        talk = await ready(it, "import time\ntime.sleep(600)")
        container = driver.made["sbx_1"]
        os.kill(supervisor_pid(container), signal.SIGKILL)
        gone = await talk.next("gone")
        assert gone.cause == pb.GONE_CAUSE_DIED, gone
        assert gone.evidence.signal == signal.SIGKILL
        assert await driver.list() == []


@pytest.mark.parametrize("name", NAMES)
async def test_destroying_ends_a_sandbox_that_resists(name: str) -> None:
    async with real_host(name) as (it, driver):
        talk = await ready(
            it,
            "import os, signal, subprocess, sys\n"
            "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):\n"
            "    signal.signal(number, signal.SIG_IGN)\n"
            "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],\n"
            "                 start_new_session=True)\n"
            "print('up', flush=True)\n"
            "while True: pass\n",
        )
        await talk.next("output")
        evidence = await it.destroy("sbx_1")
        assert evidence.wall_time.ToNanoseconds() > 0
        assert (await talk.next("gone")).cause == pb.GONE_CAUSE_DESTROYED
        await until(lambda: it.running.table.live_count() == 0)
        assert await driver.list() == []


def supervisor_pid(container: Any) -> int:
    """The supervisor's pid as the machine counts."""
    pid = int(container._child.pid)
    # bwrap stays outside; the supervisor is its child.
    inside = procfs.children(pid) if b"bwrap" in procfs.read(pid, "cmdline").split(b"\0")[0] else ()
    return next(iter(inside), pid)


@pytest.mark.parametrize("name", NAMES)
async def test_case_s16_code_that_speaks_for_its_supervisor_ends_denied(name: str) -> None:
    """The code finds the socket to its supervisor and claims a depth and a parent of its own."""
    code = """
import json, os, socket, stat
header = {"type": "call", "call": "c99", "cell": "", "op": "await_child", "invocation": "inv_1",
          "depth": 1, "parent_id": "inv_other"}
text = json.dumps(header).encode()
frame = len(text).to_bytes(4, "big") + (0).to_bytes(4, "big") + text
for number in range(3, 64):
    try:
        if stat.S_ISSOCK(os.fstat(number).st_mode):
            socket.socket(fileno=number).send(frame)
    except OSError:
        pass
import time
time.sleep(600)
"""
    async with real_host(name) as (it, driver):
        talk = await ready(it, code)
        gone = await talk.next("gone")
        assert gone.cause == pb.GONE_CAUSE_DENIED, gone
        assert await driver.list() == []


@pytest.mark.parametrize("name", NAMES)
async def test_output_over_its_limit_is_cut_cleanly(name: str) -> None:
    async with real_host(name) as (it, _):
        talk = it.attach(spec=make_spec(output_limit_bytes=200_000))
        await talk.run("while True: print('0123456789', end='')")
        await talk.greeting()
        await talk.next("ready")
        await talk.next("cell_started")
        printed, completed = await rest(talk)
        assert printed == b"0123456789" * 20_000
        assert completed.output_cut


async def test_case_43_memory_death_is_named_by_the_kernels_counter() -> None:
    async with real_host("bubblewrap") as (it, driver):
        levels = {item.limit: item.level for item in driver.statement.enforcement}
        if levels["memory"] is not Level.SANDBOX:
            pytest.skip("the memory limit is not held for the whole sandbox here")
        spec = make_spec(demanded_limits=["memory"])
        spec.resources.memory_limit_bytes = 192 << 20
        spec.resources.tmpfs_limit_bytes = 16 << 20
        talk = it.attach(spec=spec)
        await talk.run("keep = [bytes(1 << 20) + b'x' for _ in range(4000)]")
        await talk.greeting()
        await talk.next("ready")
        await talk.next("cell_started")
        _, completed = await rest(talk)
        assert completed.outcome == cell_pb2.CELL_OUTCOME_REPL_DIED
        assert completed.evidence.signal == signal.SIGKILL
        assert completed.evidence.oom_kill_count >= 1
        assert (completed.evidence.limit, completed.evidence.limit_value) == ("memory", 192 << 20)
        assert completed.evidence.memory_peak_bytes > 150 << 20


@pytest.mark.parametrize("name", NAMES)
async def test_a_box_shows_reads_input_answers_tool_calls_and_its_files_are_at_hand(
    name: str,
) -> None:
    async with real_host(name, pool_size=1, pool_tmpfs_limit_bytes=64 << 20) as (it, _):
        await until(lambda: it.running.table.pool.ready_count == 1)
        talk = it.attach()

        async def run(cell: str, code: str, **inputs: bytes) -> dict[str, Any]:
            order = make_cell(code, cell, **inputs)
            order.mode, order.stdin = invocation_pb2.INVOCATION_MODE_INTERACTIVE, True
            await talk.send(run_cell=order)
            return await until_completed(talk)

        await talk.send(stdin=pb.StdinChunk(data=b"Ada\n"))
        seen = await run("cell_1", "name = input()\nname.upper()")
        assert seen["cell_completed"].text == "'ADA'"
        assert seen["stdin_taken"].offset == 4
        rich = "class Rich:\n    def _repr_html_(self): return '<b>'\n"
        seen = await run("cell_2", f"open('note', 'w').write(name)\n{rich}Rich()")
        assert "Rich" in seen["cell_completed"].text
        shown = {item.media_type: item.content.data for item in seen["display"].data}
        assert seen["display"].is_result
        assert shown["text/html"] == b"<b>"
        read = files.FileRead(max_bytes=100)
        operation = files.FileOperation(operation_id="f1", path="note", read=read)
        await talk.send(file_operation=operation)
        outcome = await talk.next("file_outcome")
        assert (outcome.problem, outcome.data, outcome.end) == ("", b"Ada", True)
        # A tool that no living REPL has.
        call = pb.ToolDelivery(call_id="t1", tool_id="tool_x_1", arguments=content(b"{}"))
        await talk.send(tool=call)
        result = await talk.next("tool_result")
        assert (result.call_id, result.failure.reason) == ("t1", "TOOL_UNREACHABLE")


async def until_completed(talk: Conversation) -> dict[str, Any]:
    """Reads up to a cell's end and returns the last event of each kind."""
    seen: dict[str, Any] = {}
    while "cell_completed" not in seen:
        event = await talk._read()
        talk.last_sequence = event.sequence
        kind = str(event.WhichOneof("event"))
        seen[kind] = getattr(event, kind)
    return seen
