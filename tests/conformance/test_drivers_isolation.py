"""What every driver with isolation keeps out of, and away from, the code inside."""

from __future__ import annotations

import errno
import os
import secrets
import sys
import textwrap
from pathlib import Path

import pytest

from sandbox.drivers import gaps, procfs
from sandbox.drivers.docker_spec import REPL_UID
from sandbox.drivers.driver import (
    Isolation,
)
from tests.support.sandboxes import LIMITS
from tests.support.subjects import ROOT, Subject, processes_with


async def test_two_sandboxes_share_no_writable_folder_and_no_process(subject: Subject) -> None:
    subject.needs_container()
    _, one = await subject.start()
    _, two = await subject.start()
    code = textwrap.dedent("""
        import json, os
        def name(kind): return os.readlink(f"/proc/self/ns/{kind}")
        kinds = set(os.listdir("/proc/self/ns")) & {
            "cgroup", "ipc", "mnt", "net", "pid", "user", "uts"
        }
        print(json.dumps([{kind: name(kind) for kind in kinds}, sorted(os.listdir("/tmp"))]))
        open("/tmp/mine", "w").close()
    """)
    first, second = (await one.run(code)).last, (await two.run(code)).last
    host = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in first[0]}
    shared = {"user"} if subject.has_gap(gaps.SHARED_UIDS) else set()
    assert subject.has_own_kernel or len(first[0]) == 7
    # A kernel of their own gives the same names in each of them.
    for kind in () if subject.has_own_kernel else first[0]:
        expected = 1 if kind in shared else 3
        assert len({first[0][kind], second[0][kind], host[kind]}) == expected, kind
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

    names, outside = ran.last
    assert names == ["lo"]
    assert outside in (errno.ENETUNREACH, errno.EHOSTUNREACH)


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

    answer = ran.last
    assert answer["writable"] == ["/dev/shm", "/tmp", "/workspace"]
    for top, (number, written) in answer["full"].items():
        assert number == errno.ENOSPC, top
        assert LIMITS.tmpfs_limit_bytes - (1 << 20) <= written <= LIMITS.tmpfs_limit_bytes, top


STATUS = textwrap.dedent("""
    import ctypes, json
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    lines.setdefault("NoNewPrivs", str(ctypes.CDLL(None).prctl(39, 0, 0, 0, 0)))
    print(json.dumps({name: value.split() for name, value in lines.items()}))
""")


async def test_code_inside_has_no_capability_and_gets_none(subject: Subject) -> None:
    subject.needs_container()
    _, speaker = await subject.start()
    status = (await speaker.run(STATUS)).last
    # The inheritable set alone gives nothing: no new privileges come with any program.
    for name in ("CapPrm", "CapEff", "CapAmb"):
        assert name in status or (name == "CapAmb" and subject.has_own_kernel)
        assert int(status.get(name, ["0"])[0], 16) == 0, name
    assert status["NoNewPrivs"] == ["1"]
    assert status["Seccomp"] == ["2"]


async def test_each_sandbox_runs_as_uids_of_its_own(subject: Subject) -> None:
    subject.needs_container()
    one, first = await subject.start()
    two, second = await subject.start()
    code = "import os, json; print(json.dumps([os.getuid(), os.geteuid(), os.getgid()]))"
    assert 0 not in (await first.run(code)).last
    assert 0 not in (await second.run(code)).last
    if subject.has_own_kernel:
        return  # the machine sees none of them
    outside = []
    for container in (one, two):
        marked = processes_with(container.sandbox_id)
        outside.append({uid for pid in marked for uid in procfs.uids(pid)})
    if not ROOT:
        assert outside[0] == outside[1] == {os.getuid()}
        assert any("one uid" in gap or "uid" in gap for gap in subject.statement.gaps)
        return
    if subject.has_gap(gaps.SHARED_UIDS):
        assert outside[0] == outside[1] == {0, REPL_UID}
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
    allowed = {name for name, value in answer.items() if not isinstance(value, int)}
    assert allowed <= ({"environ", "maps", "fd"} if subject.has_gap(gaps.OPEN_PROC) else set())


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
    paths = [] if subject.has_own_root else ["/root", "/home", "/var"]
    ran = await speaker.run(
        textwrap.dedent(f"""
        import json, os
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        exists = [os.path.exists(path) for path in ({str(folder)!r}, *{paths!r})]
        print(json.dumps([max(pids) < 100, exists, os.uname().nodename, sorted(os.listdir("/"))]))
        """)
    )
    small, exists, name, top = ran.last
    assert small
    assert not any(exists)
    assert name == "sandbox"
    if subject.has_own_root:
        return  # the rest of it is its image's
    assert set(top) <= {
        "bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "run", "sbin", "sys",
        "tmp", "usr", "workspace", *Path(sys.base_prefix).parts[1:2],
    }  # fmt: skip


async def test_nothing_tells_where_the_host_keeps_a_sandbox(subject: Subject) -> None:
    """Not its own control group either, whose name would be its owner's."""
    subject.needs_container()
    _, speaker = await subject.start()
    ran = await speaker.run(
        textwrap.dedent("""
        import json, os
        groups = {line.rstrip().split(":", 2)[2] for line in open("/proc/self/cgroup")}
        print(json.dumps([sorted(groups), os.getcwd(), os.environ["PWD"]]))
        """)
    )
    groups, folder, variable = ran.last
    assert groups in ([], ["/"])
    assert (folder, variable) == ("/workspace", "/workspace")
