"""What every driver must do with a sandbox's life, run on each by factory.

What only some can do is asked of their own statement: a limit's level, the isolation, whether this
host is root. What this machine cannot show is skipped with its reason.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from sandbox.drivers import gaps, procfs
from sandbox.drivers.bubblewrap import BubblewrapDriver
from sandbox.drivers.driver import (
    StartFailed,
)
from tests.support.sandboxes import GUARD_SECONDS, Speaker, request
from tests.support.subjects import (
    WITHOUT_CGROUPS,
    Subject,
    make_driver,
    processes_with,
)


async def test_a_sandbox_becomes_ready_and_runs_cells(subject: Subject) -> None:
    _, speaker = await subject.start()
    ran = await speaker.run("print(6 * 7)")
    assert ran.outcome == "completed"
    assert ran.last == 42


async def test_every_gap_that_is_stated_is_documented(subject: Subject) -> None:
    known = gaps.BY_DRIVER[subject.driver.name]
    stated = subject.statement.gaps
    assert [text for text in stated if not any(gap.is_stated_by(text) for gap in known)] == []
    always = [gap.words for gap in known if gap.when == "always"]
    assert set(always) <= set(stated)


async def test_destroy_ends_daemons_that_ignore_signals_and_left_their_session(
    subject: Subject,
) -> None:
    mark = f"hutch-test-{secrets.token_hex(8)}"
    container, speaker = await subject.start()
    ran = await speaker.run(
        textwrap.dedent(f"""
        import os, signal, subprocess, sys
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                signal.signal(signal.SIGHUP, signal.SIG_IGN)
                subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c",
                     "import signal; signal.signal(15, signal.SIG_IGN);"
                     "print('here', flush=True); signal.pause()", "{mark}"],
                    stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.DEVNULL,
                )
            os._exit(0)
        os.close(writer)
        print(len(os.read(reader, 10)))
        """)
    )
    assert ran.outcome == "completed", ran.output
    assert processes_with(mark) or subject.has_own_kernel
    assert subject.outside(container)
    await container.destroy()
    assert processes_with(mark) == []
    assert subject.outside(container) == []
    assert await subject.driver.list() == []


async def test_destroy_is_idempotent_and_safe_to_call_twice_at_once(subject: Subject) -> None:
    container, _ = await subject.start()
    async with asyncio.timeout(GUARD_SECONDS), asyncio.TaskGroup() as group:
        waiting = group.create_task(container.wait())
        first = group.create_task(container.destroy())
        second = group.create_task(container.destroy())
    assert first.result() == second.result() == await container.destroy()
    assert waiting.result() is not None
    assert await subject.driver.list() == []


async def test_destroy_right_after_create_leaves_nothing(subject: Subject) -> None:
    for _ in range(5):
        container = await subject.driver.create(request())
        await container.destroy()
        assert await subject.driver.list() == []
        assert subject.outside(container) == []


async def test_destroy_after_the_outer_process_was_killed(subject: Subject) -> None:
    container, speaker = await subject.start()
    await speaker.run("import subprocess; subprocess.Popen(['sleep', '1000'])")
    named = {pid: procfs.process(pid) for pid in subject.outside(container)}
    for pid, found in named.items():
        if found is not None and found.parent not in named:
            os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(GUARD_SECONDS):
        await container.wait()
    await container.destroy()
    assert subject.outside(container) == []
    assert await subject.driver.list() == []


async def test_wait_says_how_the_supervisor_ended(subject: Subject) -> None:
    container, speaker = await subject.start()
    await speaker.send({"type": "shutdown"})
    async with asyncio.timeout(GUARD_SECONDS):
        measured = await container.wait()
    assert (measured.exit_code, measured.signal) == (0, None)


async def test_an_end_by_destroy_is_no_evidence_of_a_crash(subject: Subject) -> None:
    container, _ = await subject.start()
    measured = await container.destroy()
    assert (measured.exit_code, measured.signal) == (None, None)


async def test_list_names_what_exists(subject: Subject) -> None:
    one, _ = await subject.start()
    two, _ = await subject.start()
    assert sorted(await subject.driver.list()) == sorted([one.sandbox_id, two.sandbox_id])
    await one.destroy()
    assert await subject.driver.list() == [two.sandbox_id]


async def test_a_name_in_use_is_refused_and_the_first_lives_on(subject: Subject) -> None:
    container, speaker = await subject.start()
    with pytest.raises(StartFailed):
        await subject.driver.create(request(container.sandbox_id))
    assert (await speaker.run("print(1)")).last == 1


async def test_a_name_that_leaves_its_folder_is_refused(subject: Subject) -> None:
    for name in ("../x", "a/b", "", ".", "a\0b", "a" * 300):
        bad = dataclasses.replace(request(), sandbox_id=name)
        with pytest.raises(StartFailed):
            await subject.driver.create(bad)
    assert await subject.driver.list() == []


CRASHING_HOST = """
import asyncio, os, sys
from pathlib import Path
from tests.support.sandboxes import Speaker, request
from tests.support.subjects import make_driver

async def main():
    driver = make_driver(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    statement = await driver.prepare()
    assert statement.usable, statement
    for name in sys.argv[4:]:
        container = await driver.create(request(name))
        speaker = Speaker(container)
        await speaker.ready()
        await speaker.run("import subprocess; subprocess.Popen(['sleep', '1000'])")
    print("made", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_killed_hosts_sandboxes_are_removed_by_the_next_and_nobody_elses(
    subject: Subject, folder: Path
) -> None:
    """A host is killed with SIGKILL; the next one of the same owner finds a clean machine."""
    theirs, speaker = await subject.start()
    owner, names = secrets.token_hex(8), [f"sbx_{secrets.token_hex(6)}" for _ in range(2)]
    place = folder / "second"
    place.mkdir()
    host = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CRASHING_HOST, subject.kind, owner, str(place), *names,
        cwd=Path(__file__).parents[2], stdout=subprocess.PIPE,
    )  # fmt: skip
    assert host.stdout is not None
    async with asyncio.timeout(GUARD_SECONDS):
        assert await host.stdout.readline() == b"made\n"
        host.kill()
        await host.wait()
    following = make_driver(subject.kind, owner, place)
    try:
        statement = await following.prepare()
        assert statement.usable, statement.problem
        assert await following.list() == []
        for name in names:
            assert processes_with(name) == []
        assert (await speaker.run("print(3)")).last == 3
        assert await subject.driver.list() == [theirs.sandbox_id]
    finally:
        await following.close()


FORKING = ("bubblewrap", WITHOUT_CGROUPS)


def _machine(folder: Path) -> dict[str, object]:
    mounts = Path("/proc/self/mounts").read_text()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "children": sum(procfs.alive(pid) for pid in procfs.children(os.getpid())),
        "mounts": [line for line in mounts.splitlines() if str(folder) in line],
        "folders": sorted(path.name for path in folder.rglob("*")),
        "threads": len(os.listdir("/proc/self/task")) < 64,
    }


async def _settle(subject: Subject) -> None:
    """Waits until what is made ahead in the background is there."""
    if subject.kind in FORKING:
        await _wait_for_forks(2)


async def test_fifty_sandboxes_leave_the_machine_as_it_was(subject: Subject, folder: Path) -> None:
    for number in range(3 if subject.has_own_kernel else 10):
        if number == 1:  # what a driver keeps for as many at once it has by now
            await _settle(subject)
            before = _machine(folder)
        async with asyncio.TaskGroup() as group:
            made = [group.create_task(subject.start()) for _ in range(5)]
        async with asyncio.TaskGroup() as group:
            for task in made:
                group.create_task(task.result()[0].destroy())
    await _settle(subject)
    assert _machine(folder) == before
    assert await subject.driver.list() == []


def _forks() -> list[int]:
    """First processes that a zygote forked ahead, which wait to be told what they are."""
    zygotes = [pid for outer in procfs.children(os.getpid()) for pid in procfs.children(outer)]
    return [
        pid
        for pid in processes_with("-" * 65)
        if (found := procfs.process(pid)) is not None and found.parent in zygotes
    ]


def _needs_forks(subject: Subject) -> None:
    if subject.kind not in FORKING:
        pytest.skip("nothing is forked here")


async def _wait_for_forks(count: int) -> list[int]:
    async with asyncio.timeout(GUARD_SECONDS):
        while len(found := _forks()) < count:
            await asyncio.sleep(0)
    return found


async def test_a_fork_that_was_made_ready_and_then_killed_is_made_again(subject: Subject) -> None:
    _needs_forks(subject)
    container, _ = await subject.start()
    await container.destroy()
    for pid in await _wait_for_forks(2):
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(GUARD_SECONDS):
            while procfs.alive(pid):
                await asyncio.sleep(0)
    _, speaker = await subject.start()
    assert (await speaker.run("print(4)")).last == 4


async def test_a_waiting_fork_has_nothing_of_the_hosts_or_the_zygotes(subject: Subject) -> None:
    _needs_forks(subject)
    container, _ = await subject.start()
    await container.destroy()
    for pid in await _wait_for_forks(2):
        async with asyncio.timeout(GUARD_SECONDS):
            while {int(name) for name in os.listdir(f"/proc/{pid}/fd")} - {0, 1, 2}:
                await asyncio.sleep(0)  # it has only begun
        if os.geteuid() == 0:
            assert 0 not in procfs.uids(pid)
        zygote = procfs.process(pid).parent  # type: ignore[union-attr]
        for kind in ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts"):
            assert procfs.namespace(pid, kind) != procfs.namespace(zygote, kind)
            assert procfs.namespace(pid, kind) != procfs.namespace(os.getpid(), kind)


async def test_a_zygote_that_was_killed_ends_its_sandboxes_and_another_is_started(
    subject: Subject,
) -> None:
    _needs_forks(subject)
    container, _ = await subject.start()
    first = (await _wait_for_forks(1))[0]
    os.kill(procfs.process(first).parent, signal.SIGKILL)  # type: ignore[union-attr]
    async with asyncio.timeout(GUARD_SECONDS):
        measured = await container.wait()
    assert measured.signal == signal.SIGKILL
    await container.destroy()
    assert subject.outside(container) == []
    _, speaker = await subject.start()
    assert (await speaker.run("print(4)")).last == 4


async def test_sandboxes_of_one_zygote_draw_different_random_numbers(subject: Subject) -> None:
    program = "import random, uuid; print(random.random(), uuid.uuid4())"
    texts = set()
    for _ in range(3):
        _, speaker = await subject.start()
        texts.add((await speaker.run(program)).output)
    assert len(texts) == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="one kind of zygote is enough")
async def test_a_templates_modules_are_imported_before_its_sandboxes(folder: Path) -> None:
    preload = {"data": ("sqlite3", "wave"), "broken": ("nothing_of_that_name",)}
    (folder / "shared").mkdir()
    driver = BubblewrapDriver("one", folder / "state", shared=folder / "shared", preload=preload)
    try:
        statement = await driver.prepare()
        assert statement.usable, statement.problem
        for template, expected in (("data", True), ("default", False)):
            asked = dataclasses.replace(request(), template=template)
            speaker = Speaker(await driver.create(asked))
            await speaker.ready()
            ran = await speaker.run("import sys; print(int('wave' in sys.modules))")
            assert bool(ran.last) is expected
        with pytest.raises(StartFailed, match="nothing_of_that_name"):
            await driver.create(dataclasses.replace(request(), template="broken"))
    finally:
        await driver.close()


def test_a_module_that_starts_threads_is_not_preloaded(tmp_path: Path) -> None:
    """No fork would have them, and whoever waits for one would wait for ever."""
    (tmp_path / "lively.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n"
    )
    program = "import sys; sys.path.insert(0, sys.argv[1]); from sandbox.runtime import zygote\n"
    command = [sys.executable, "-c", f"{program}zygote._preload(['lively'])", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2]
    )
    assert "lively starts threads" in done.stderr


async def test_close_destroys_what_is_left(subject: Subject) -> None:
    container, _ = await subject.start()
    await subject.driver.close()
    assert subject.outside(container) == []
