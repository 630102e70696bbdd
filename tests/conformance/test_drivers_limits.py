"""What every driver must show of the limits that it holds."""

from __future__ import annotations

import asyncio
import errno
import textwrap

import pytest

from sandbox.drivers import gaps
from sandbox.drivers.driver import (
    Level,
    Measurement,
    StartFailed,
)
from tests.support.sandboxes import GUARD_SECONDS
from tests.support.subjects import Subject, mechanism


async def test_the_statement_names_every_limit_once(subject: Subject) -> None:
    limits = sorted(entry.limit for entry in subject.statement.enforcement)
    assert limits == ["cpu", "memory", "open_files", "pids", "tmpfs"]
    container, _ = await subject.start()
    stated = {entry.limit: entry.level for entry in container.enforcement}
    assert stated == {entry.limit: entry.level for entry in subject.statement.enforcement}


async def test_a_full_disk_does_not_kill_the_sandbox(subject: Subject) -> None:
    """Every writable folder is filled; they are sized so that the memory limit still holds."""
    subject.needs_container()
    container, speaker = await subject.start(
        memory_limit_bytes=128 << 20, tmpfs_limit_bytes=512 << 20
    )
    if subject.level("memory") is not Level.SANDBOX:
        pytest.skip("temporary folders are charged to memory only where a cgroup holds it")
    ran = await speaker.run(
        textwrap.dedent("""
        import os
        for top in ("/tmp", "/dev/shm", "/workspace"):
            with open(os.path.join(top, "big"), "wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(1 << 20))
                except OSError:
                    pass
        print(1)
        """)
    )
    assert ran.outcome == "completed", ran
    assert (await speaker.run("print(2)")).last == 2
    measured = await container.measure()
    assert measured.oom_kill_count == 0
    assert measured.disk_full_hits == (None if subject.has_gap(gaps.UNSEEN_DISK) else 3)
    entry = next(entry for entry in container.enforcement if entry.limit == "tmpfs")
    assert "bytes each" in entry.mechanism


async def test_a_file_system_is_full_only_while_it_is(subject: Subject) -> None:
    subject.needs_container()
    if subject.has_gap(gaps.UNSEEN_DISK):
        pytest.skip(gaps.UNSEEN_DISK)
    container, speaker = await subject.start(tmpfs_limit_bytes=4 << 20)
    assert (await container.measure()).disk_full_hits == 0
    fill = (
        "with open('/tmp/big', 'wb', buffering=0) as file:\n    while True: file.write(bytes(99))"
    )
    ran = await speaker.run(fill)
    assert (ran.outcome, ran.done["errno"]) == ("errored", errno.ENOSPC)
    assert (await container.measure()).disk_full_hits == 1
    await speaker.run("import os; os.unlink('/tmp/big')")
    assert (await container.measure()).disk_full_hits == 0


async def test_case_s19_files_without_end_are_held_by_the_memory_limit(subject: Subject) -> None:
    """bwrap mounts a tmpfs without a limit of inodes; the kernel charges each to the cgroup."""
    subject.needs_container()
    if subject.level("memory") is not Level.SANDBOX:
        pytest.skip("no cgroup holds the memory limit here")
    container, speaker = await subject.start(memory_limit_bytes=96 << 20, tmpfs_limit_bytes=1 << 20)
    try:
        await speaker.run(
            "import os\nnumber = 0\nwhile True:\n"
            "    os.close(os.open(f'/tmp/{number}', os.O_CREAT))\n    number += 1\n"
        )
    except EOFError:
        async with asyncio.timeout(GUARD_SECONDS):
            await container.wait()
    measured = await container.measure()
    assert measured.oom_kill_count or measured.disk_full_hits
    _check_peak(subject, measured, 96 << 20)


async def test_a_memory_limit_without_room_is_refused(subject: Subject) -> None:
    if subject.level("memory") is not Level.SANDBOX:
        pytest.skip("no cgroup holds the memory limit here")
    with pytest.raises(StartFailed, match="at least"):
        await subject.start(memory_limit_bytes=32 << 20)
    assert await subject.driver.list() == []


async def test_memory_beyond_the_limit_is_counted_or_a_memory_error(subject: Subject) -> None:
    container, speaker = await subject.start(
        memory_limit_bytes=128 << 20, tmpfs_limit_bytes=1 << 20
    )
    code = textwrap.dedent("""
        import sys
        try:
            held = [bytearray(8 << 20) for _ in range(64)]
        except MemoryError:
            print('"MemoryError"')
        else:
            print('"held"')
    """)
    if subject.level("memory") is Level.PROCESS:
        assert (await speaker.run(code)).last == "MemoryError"
        return
    try:
        ran = await speaker.run(code)
    except EOFError:
        async with asyncio.timeout(GUARD_SECONDS):
            await container.wait()
    else:
        assert ran.outcome == "repl_died"
    measured = await container.measure()
    assert measured.oom_kill_count is not None
    assert measured.oom_kill_count >= 1
    _check_peak(subject, measured, 128 << 20)


def _check_peak(subject: Subject, measured: Measurement, limit: int) -> None:
    if measured.memory_peak_bytes is None:
        assert subject.has_gap(gaps.COUNTERS_END)
    else:
        assert measured.memory_peak_bytes <= limit


async def test_case_43_a_child_killed_for_memory_is_counted_and_the_repl_lives(
    subject: Subject,
) -> None:
    if subject.level("memory") is not Level.SANDBOX:
        pytest.skip("no cgroup holds the memory limit here")
    if subject.has_gap(gaps.ENDS_WHOLE):
        pytest.skip(gaps.ENDS_WHOLE)
    container, speaker = await subject.start(
        memory_limit_bytes=128 << 20, tmpfs_limit_bytes=1 << 20
    )
    await speaker.run("kept = 5")
    ran = await speaker.run(
        "import subprocess, sys\n"
        "print(subprocess.run([sys.executable, '-c', 'b\"x\" * 10**10']).returncode)\n"
        "print(subprocess.run([sys.executable, '-c', 'b\"x\" * 2**28']).returncode)\n"
    )
    assert (ran.outcome, ran.last) == ("completed", -9)
    assert (await container.measure()).oom_kill_count
    assert (await speaker.run("print(kept)")).last == 5


async def test_case_42_a_fork_bomb_is_bounded_and_ends(subject: Subject) -> None:
    if subject.level("pids") is not Level.SANDBOX:
        pytest.skip(f"{subject.driver.name} does not hold the number of processes here")
    container, speaker = await subject.start(pids_limit=32)
    code = textwrap.dedent("""
    import os, signal
    number = 0
    try:
        while number < 500:
            if os.fork() == 0:
                signal.pause()
                os._exit(0)
            number += 1
    except OSError as error:
        print(error.errno)
    print(number)
    """)
    try:
        ran = await speaker.run(code)
    except EOFError:
        assert subject.has_gap(gaps.ENDS_WHOLE)
        async with asyncio.timeout(GUARD_SECONDS):
            await container.wait()
        await container.destroy()
        assert subject.outside(container) == []
        return
    assert ran.last <= 32
    measured = await container.measure()
    if mechanism(container.enforcement, "pids").startswith("cgroup"):
        assert measured.pids_limit_hits is not None
        assert measured.pids_limit_hits >= 1
    await container.destroy()
    assert subject.outside(container) == []


async def test_a_racing_fork_bomb_is_ended_by_destroy(subject: Subject) -> None:
    if subject.level("pids") is not Level.SANDBOX:
        pytest.skip(f"{subject.driver.name} does not hold the number of processes here")
    container, speaker = await subject.start(pids_limit=24)
    await speaker.start(
        "import os\n"
        "print('started', flush=True)\n"
        "while True:\n"
        "    try:\n"
        "        os.fork()\n"
        "    except OSError:\n"
        "        pass\n"
    )
    async with asyncio.timeout(GUARD_SECONDS):
        while (await speaker.receive())[0]["type"] != "output":
            pass
    await container.destroy()
    assert subject.outside(container) == []


async def test_a_cell_that_forks_and_exits_all_the_time_is_stopped_and_its_namespace_kept(
    subject: Subject,
) -> None:
    _, speaker = await subject.start()
    await speaker.run("kept = 5")
    cell = await speaker.start(
        "import os, signal, time\n"
        "if os.fork() == 0:\n"
        "    for number in (signal.SIGINT, signal.SIGTERM):\n"
        "        signal.signal(number, signal.SIG_IGN)\n"
        "    print('started', flush=True)\n"
        "    while True:\n"
        "        if os.fork():\n"
        "            os._exit(0)\n"
        "time.sleep(60)\n"
    )
    async with asyncio.timeout(GUARD_SECONDS):
        while (await speaker.receive())[0]["type"] != "output":
            pass
        await speaker.send({"type": "interrupt", "cell": cell})
        while (done := (await speaker.receive())[0])["type"] != "done":
            pass
    assert (done["outcome"], done["state_lost"]) == ("interrupted", False)
    assert done["killed"] >= 1
    ran = await speaker.run("print(kept)")
    assert (ran.last, ran.done["background"]) == (5, 0)


async def test_open_files_are_bounded(subject: Subject) -> None:
    _, speaker = await subject.start(open_files_limit=64)
    ran = await speaker.run(
        textwrap.dedent("""
        import errno, json, os
        held = []
        try:
            while len(held) < 1000:
                held.append(os.open("/dev/null", os.O_RDONLY))
            number = 0
        except OSError as error:
            number = error.errno
        for descriptor in held:
            os.close(descriptor)
        print(json.dumps([len(held) <= 64, number == errno.EMFILE]))
        """)
    )
    assert ran.last == [True, True]


async def test_case_42_the_cpu_count_inside_is_the_limit(subject: Subject) -> None:
    subject.needs_container()
    _, speaker = await subject.start(cpu_limit_millis=1000)
    assert (await speaker.run("import os; print(os.cpu_count())")).last == 1


async def test_cpu_time_is_held_and_measured(subject: Subject) -> None:
    """A fifth of a CPU: code that spins for a second of wall time gets well under that."""
    if subject.level("cpu") is not Level.SANDBOX:
        pytest.skip("no cgroup holds the CPU limit here")
    container, speaker = await subject.start(cpu_limit_millis=200)
    before = (await container.measure()).cpu_seconds
    ran = await speaker.run(
        "import json, time\n"
        "end = time.monotonic() + 1.0\n"
        "while time.monotonic() < end: pass\n"
        "print(json.dumps(time.process_time()))\n"
    )
    after = (await container.measure()).cpu_seconds
    assert before is not None
    assert after is not None
    assert 0.01 < after - before < 0.8
    assert ran.outcome == "completed", ran
