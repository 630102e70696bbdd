"""What every driver must do, run on each by factory.

What only some can do is asked of their own statement: a limit's level, the isolation, whether this
host is root. What this machine cannot show is skipped with its reason.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from sandbox.drivers import NAMES, procfs
from sandbox.drivers.bubblewrap import BubblewrapDriver
from sandbox.drivers.driver import (
    Container,
    Driver,
    Enforcement,
    Isolation,
    Level,
    StartFailed,
    Statement,
)
from sandbox.drivers.fake import FakeDriver
from tests.support.sandboxes import GUARD_SECONDS, LIMITS, Speaker, request

ROOT = os.geteuid() == 0
WITHOUT_CGROUPS = "bubblewrap-without-cgroups"
# For an ordinary user that is what bubblewrap is anyway, or a scope of systemd.
KINDS = (*NAMES, WITHOUT_CGROUPS) if ROOT else NAMES


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One driver under test, prepared."""

    kind: str
    driver: Driver
    statement: Statement

    async def start(self, **limits: int) -> tuple[Container, Speaker]:
        """Makes a sandbox and waits until it is ready."""
        container = await self.driver.create(request(limits=dataclasses.replace(LIMITS, **limits)))
        speaker = Speaker(container)
        await speaker.ready()
        return container, speaker

    def needs_container(self) -> None:
        """Skips what a driver without isolation cannot show."""
        if self.statement.isolation is Isolation.PROCESS:
            pytest.skip(f"{self.driver.name} isolates nothing")

    def level(self, limit: str) -> Level:
        """At which level a limit is held here."""
        return next(entry.level for entry in self.statement.enforcement if entry.limit == limit)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short folder that sandboxes' uids may enter."""
    with tempfile.TemporaryDirectory(prefix="drv-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


def _make(kind: str, owner: str, folder: Path) -> Driver:
    if kind == "fake":
        return FakeDriver(owner, folder / "state")
    place = {"shared": folder / "shared"}
    if kind == WITHOUT_CGROUPS:
        place["cgroup_root"] = folder / "absent"
    return BubblewrapDriver(owner, folder / "state", **place)


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runtime archives that one test built and the next need not."""
    return tmp_path_factory.mktemp("archives")


@pytest.fixture(params=KINDS)
async def subject(
    request: pytest.FixtureRequest, folder: Path, archives: Path
) -> AsyncIterator[Subject]:
    """Each driver in turn, with an owner of its own."""
    driver = _make(request.param, secrets.token_hex(8), folder)
    shutil.copytree(archives, folder / "state" / "archives")
    statement = await driver.prepare()
    if not statement.usable:
        await driver.close()
        pytest.skip(f"{driver.name} is not usable here: {statement.problem}")
    shutil.copytree(folder / "state" / "archives", archives, dirs_exist_ok=True)
    yield Subject(kind=request.param, driver=driver, statement=statement)
    await driver.close()


def _processes_with(text: str) -> list[int]:
    """Running processes outside whose command line holds a text."""
    sought = text.encode()
    return [
        pid
        for pid in procfs.pids()
        if pid != os.getpid() and sought in procfs.read(pid, "cmdline") and procfs.alive(pid)
    ]


async def test_a_sandbox_becomes_ready_and_runs_cells(subject: Subject) -> None:
    _, speaker = await subject.start()
    ran = await speaker.run("print(6 * 7)")
    assert ran.outcome == "completed"
    assert ran.last == 42


async def test_the_statement_names_every_limit_once(subject: Subject) -> None:
    limits = sorted(entry.limit for entry in subject.statement.enforcement)
    assert limits == ["cpu", "memory", "open_files", "pids", "tmpfs"]
    container, _ = await subject.start()
    stated = {entry.limit: entry.level for entry in container.enforcement}
    assert stated == {entry.limit: entry.level for entry in subject.statement.enforcement}


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
    assert _processes_with(mark)
    await container.destroy()
    assert _processes_with(mark) == []
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
        assert _processes_with(container.sandbox_id) == []


async def test_destroy_after_the_outer_process_was_killed(subject: Subject) -> None:
    container, speaker = await subject.start()
    await speaker.run("import subprocess; subprocess.Popen(['sleep', '1000'])")
    for pid in procfs.children(os.getpid()):
        if container.sandbox_id.encode() in procfs.read(pid, "cmdline"):
            os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(GUARD_SECONDS):
        await container.wait()
    await container.destroy()
    assert _processes_with(container.sandbox_id) == []
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


async def test_two_sandboxes_share_no_writable_folder_and_no_process(subject: Subject) -> None:
    subject.needs_container()
    _, one = await subject.start()
    _, two = await subject.start()
    code = textwrap.dedent("""
        import json, os
        def name(kind): return os.readlink(f"/proc/self/ns/{kind}")
        kinds = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
        print(json.dumps([{kind: name(kind) for kind in kinds}, sorted(os.listdir("/tmp"))]))
        open("/tmp/mine", "w").close()
    """)
    first, second = (await one.run(code)).last, (await two.run(code)).last
    host = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in first[0]}
    for kind in first[0]:
        assert len({first[0][kind], second[0][kind], host[kind]}) == 3, kind
    assert second[1] == []


async def test_no_descriptor_and_no_variable_of_the_host_is_inside(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    canary = f"canary{secrets.token_hex(8)}"
    monkeypatch.setenv("HUTCH_TEST_CANARY", canary)
    path = folder / canary
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    os.set_inheritable(descriptor, True)
    try:
        _, speaker = await subject.start()
        ran = await speaker.run(
            textwrap.dedent("""
            import json, os
            found = []
            for pid in filter(str.isdigit, os.listdir("/proc")):
                try:
                    found.append(open(f"/proc/{pid}/environ").read())
                    for fd in os.listdir(f"/proc/{pid}/fd"):
                        found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
                except OSError:
                    pass
            mine = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                    if os.path.exists(f"/proc/self/fd/{fd}")]
            env = dict(os.environ)
            print(json.dumps({"all": "\\n".join(found), "mine": mine, "env": env}))
            """)
        )
    finally:
        os.close(descriptor)
    seen = ran.last
    assert "HUTCH_TEST_CANARY" not in seen["env"]
    assert not any(canary in target for target in seen["mine"])
    if subject.statement.isolation is not Isolation.PROCESS:
        assert canary not in seen["all"]


async def test_the_environment_is_utf8_whatever_the_hosts_is(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.startswith("LC_") or name in ("LANG", "PYTHONUTF8"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("LC_ALL", "C")
    _, speaker = await subject.start()
    ran = await speaker.run(
        "import locale, json, sys\n"
        "print(json.dumps([sys.getfilesystemencoding(), locale.getpreferredencoding(False)]))"
    )
    assert [name.lower() for name in ran.last] == ["utf-8", "utf-8"]


async def test_only_loopback_exists(subject: Subject) -> None:
    subject.needs_container()
    _, speaker = await subject.start()
    ran = await speaker.run(
        textwrap.dedent("""
        import json, socket
        names = [name for _, name in socket.if_nameindex()]
        server = socket.create_server(("127.0.0.1", 0))
        client = socket.create_connection(server.getsockname())
        try:
            socket.create_connection(("192.0.2.1", 80), 5)
            outside = "connected"
        except OSError as error:
            outside = error.errno
        print(json.dumps([names, outside]))
        """)
    )
    import errno

    assert ran.last == [["lo"], errno.ENETUNREACH]


async def test_only_sized_temporary_folders_are_writable(subject: Subject) -> None:
    subject.needs_container()
    _, speaker = await subject.start()
    ran = await speaker.run(
        textwrap.dedent("""
        import errno, json, os
        writable = set()
        for top, folders, _ in os.walk("/"):
            if top.startswith("/proc") or top.count("/") > 5:
                folders.clear()
                continue
            try:
                path = os.path.join(top, "probe")
                os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
                os.unlink(path)
                writable.add(top)
            except OSError:
                pass
        answer = {"writable": sorted(writable), "full": {}}
        for top in ("/tmp", "/dev/shm", "/workspace"):
            written = 0
            path = os.path.join(top, "big")
            with open(path, "wb", buffering=0) as file:
                try:
                    while written < 1 << 30:
                        written += file.write(bytes(1 << 20))
                except OSError as error:
                    answer["full"][top] = [error.errno, written]
            os.unlink(path)
        print(json.dumps(answer))
        """)
    )
    import errno

    answer = ran.last
    assert answer["writable"] == ["/dev/shm", "/tmp", "/workspace"]
    for top, (number, written) in answer["full"].items():
        assert number == errno.ENOSPC, top
        assert LIMITS.tmpfs_limit_bytes - (1 << 20) <= written <= LIMITS.tmpfs_limit_bytes, top


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
    assert ran.outcome == "completed"
    assert (await speaker.run("print(2)")).last == 2
    assert (await container.measure()).oom_kill_count == 0
    entry = next(entry for entry in container.enforcement if entry.limit == "tmpfs")
    assert "bytes each" in entry.mechanism


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
    assert measured.memory_peak_bytes is not None
    assert measured.memory_peak_bytes <= 128 << 20


async def test_a_fork_bomb_is_bounded_and_ends(subject: Subject) -> None:
    if subject.level("pids") is not Level.SANDBOX:
        pytest.skip(f"{subject.driver.name} does not hold the number of processes here")
    container, speaker = await subject.start(pids_limit=32)
    ran = await speaker.run(
        textwrap.dedent("""
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
    )
    assert ran.last <= 32
    measured = await container.measure()
    if _mechanism(container.enforcement, "pids").startswith("cgroup"):
        assert measured.pids_limit_hits is not None
        assert measured.pids_limit_hits >= 1
    await container.destroy()
    assert _processes_with(container.sandbox_id) == []


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
    assert _processes_with(container.sandbox_id) == []


def _mechanism(enforcement: object, limit: str) -> str:
    assert isinstance(enforcement, tuple)
    return next(
        entry.mechanism
        for entry in enforcement
        if isinstance(entry, Enforcement) and entry.limit == limit
    )


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


async def test_the_cpu_count_inside_is_the_limit(subject: Subject) -> None:
    subject.needs_container()
    _, speaker = await subject.start(cpu_limit_millis=1000)
    assert (await speaker.run("import os; print(os.cpu_count())")).last == 1


async def test_cpu_time_is_held_and_measured(subject: Subject) -> None:
    """Half a CPU: code that spins for 0.4 s of wall time gets well under that."""
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
    assert ran.outcome == "completed"


STATUS = textwrap.dedent("""
    import json
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    print(json.dumps({name: value.split() for name, value in lines.items()}))
""")


async def test_code_inside_has_no_capability_and_gets_none(subject: Subject) -> None:
    subject.needs_container()
    _, speaker = await subject.start()
    status = (await speaker.run(STATUS)).last
    # The inheritable set alone gives nothing: no new privileges come with any program.
    for name in ("CapPrm", "CapEff", "CapAmb"):
        assert int(status[name][0], 16) == 0, name
    assert status["NoNewPrivs"] == ["1"]
    assert status["Seccomp"] == ["2"]


async def test_each_sandbox_runs_as_uids_of_its_own(subject: Subject) -> None:
    subject.needs_container()
    one, first = await subject.start()
    two, second = await subject.start()
    code = "import os, json; print(json.dumps([os.getuid(), os.geteuid(), os.getgid()]))"
    assert 0 not in (await first.run(code)).last
    assert 0 not in (await second.run(code)).last
    outside = []
    for container in (one, two):
        marked = _processes_with(container.sandbox_id)
        outside.append({uid for pid in marked for uid in procfs.uids(pid)})
    if not ROOT:
        assert outside[0] == outside[1] == {os.getuid()}
        assert any("one uid" in gap or "uid" in gap for gap in subject.statement.gaps)
        return
    assert not outside[0] & outside[1]
    assert min(outside[0] | outside[1]) >= 200_000


async def test_the_first_process_is_closed_to_code_inside(subject: Subject) -> None:
    subject.needs_container()
    _, speaker = await subject.start()
    ran = await speaker.run(
        textwrap.dedent("""
        import ctypes, json, os, signal
        answer = {}
        def attempt(name, action):
            try:
                answer[name] = repr(action())
            except OSError as error:
                answer[name] = error.errno
        for name in ("mem", "environ", "maps"):
            attempt(name, lambda: open(f"/proc/1/{name}", "rb").read(1))
        attempt("fd", lambda: os.listdir("/proc/1/fd"))
        attempt("fd/1", lambda: os.open("/proc/1/fd/1", os.O_WRONLY))
        attempt("root", lambda: os.listdir("/proc/1/root/"))
        libc = ctypes.CDLL(None, use_errno=True)
        libc.ptrace.restype = ctypes.c_long
        done = libc.ptrace(16, 1, 0, 0)
        answer["ptrace"] = ctypes.get_errno() if done else "attached"
        attempt("kill", lambda: os.kill(1, signal.SIGKILL))
        print(json.dumps(answer))
        """)
    )
    answer = ran.last
    allowed = {name: value for name, value in answer.items() if not isinstance(value, int)}
    assert allowed == {}, answer


async def test_no_namespace_mount_or_old_root_is_to_be_had(subject: Subject) -> None:
    subject.needs_container()
    _, speaker = await subject.start()
    ran = await speaker.run(
        textwrap.dedent("""
        import ctypes, json
        libc = ctypes.CDLL(None, use_errno=True)
        answer = {}
        def attempt(name, *arguments):
            function = getattr(libc, name)
            answer[name + str(arguments[:1])] = (
                ctypes.get_errno() if function(*arguments) == -1 else "done"
            )
        for flag in (0x10000000, 0x00020000, 0x40000000, 0x20000000):
            attempt("unshare", flag)
        attempt("mount", b"none", b"/tmp", b"tmpfs", 0, None)
        attempt("umount2", b"/tmp", 2)
        attempt("chroot", b"/tmp")
        attempt("setns", 0, 0)
        attempt("syscall", 435, 0, 0)        # clone3
        attempt("syscall", 56, 0x10000000 | 17, 0, 0, 0, 0)   # clone, x86-64
        attempt("keyctl", 0) if hasattr(libc, "keyctl") else None
        print(json.dumps(answer))
        """)
    )
    answer = ran.last
    assert all(isinstance(value, int) and value > 0 for value in answer.values()), answer


async def test_the_hosts_files_and_processes_are_out_of_sight(
    subject: Subject, folder: Path
) -> None:
    subject.needs_container()
    _, speaker = await subject.start()
    ran = await speaker.run(
        textwrap.dedent(f"""
        import json, os
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        exists = [os.path.exists(path) for path in ({str(folder)!r}, "/root", "/home", "/var")]
        print(json.dumps([max(pids) < 100, exists, os.uname().nodename, sorted(os.listdir("/"))]))
        """)
    )
    small, exists, name, top = ran.last
    assert small
    assert not any(exists)
    assert name == "sandbox"
    assert set(top) <= {
        "bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "run", "sbin", "sys",
        "tmp", "usr", "workspace", *Path(sys.base_prefix).parts[1:2],
    }  # fmt: skip


CRASHING_HOST = """
import asyncio, os, sys
from pathlib import Path
from tests.conformance import test_drivers as tests
from tests.support.sandboxes import Speaker, request

async def main():
    driver = tests._make(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
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
    following = _make(subject.kind, owner, place)
    try:
        statement = await following.prepare()
        assert statement.usable, statement.problem
        assert await following.list() == []
        for name in names:
            assert _processes_with(name) == []
        assert (await speaker.run("print(3)")).last == 3
        assert await subject.driver.list() == [theirs.sandbox_id]
    finally:
        await following.close()


def _machine(folder: Path) -> dict[str, object]:
    mounts = Path("/proc/self/mounts").read_text().count("\n")
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "children": [pid for pid in procfs.children(os.getpid()) if procfs.alive(pid)],
        "mounts": mounts,
        "folders": sorted(path.name for path in folder.rglob("*")),
        "threads": len(os.listdir("/proc/self/task")) < 64,
    }


async def test_fifty_sandboxes_leave_the_machine_as_it_was(subject: Subject, folder: Path) -> None:
    container, _ = await subject.start()
    await container.destroy()
    before = _machine(folder)
    for _ in range(10):
        async with asyncio.TaskGroup() as group:
            made = [group.create_task(subject.start()) for _ in range(5)]
        async with asyncio.TaskGroup() as group:
            for task in made:
                group.create_task(task.result()[0].destroy())
    after = _machine(folder)
    assert after == before
    assert await subject.driver.list() == []


async def test_close_destroys_what_is_left(subject: Subject) -> None:
    container, _ = await subject.start()
    await subject.driver.close()
    assert _processes_with(container.sandbox_id) == []
