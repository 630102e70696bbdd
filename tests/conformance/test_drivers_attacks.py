"""Attacks by code inside on its first process and neighbours, each shown to work in the open."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import textwrap

from sandbox.drivers import gaps
from sandbox.drivers.driver import Isolation
from tests.support.subjects import ROOT, Subject

ON_A_PROCESS = textwrap.dedent("""
    import ctypes, json, os, resource, signal
    libc = ctypes.CDLL(None, use_errno=True)
    answer = {}
    def attempt(name, number, *arguments):
        done = libc.syscall(number, *map(ctypes.c_long, arguments))
        answer[name] = ctypes.get_errno() if done == -1 else "done"
        return done
    text = ctypes.create_string_buffer(b"x" * 8)
    class Piece(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
    here = Piece(ctypes.addressof(text), 8)
    piece = ctypes.addressof(here)
    attempt("process_vm_readv", 310, TARGET, piece, 1, piece, 1, 0)
    attempt("process_vm_writev", 311, TARGET, piece, 1, piece, 1, 0)
    pidfd = libc.syscall(434, TARGET, 0)
    attempt("pidfd_getfd", 438, pidfd, 1, 0)
    attempt("pidfd_send_signal", 424, pidfd, signal.SIGCONT, 0, 0)
    attempt("kill", 62, TARGET, signal.SIGCONT)
    limits = (ctypes.c_uint64 * 2)(64, 64)
    attempt("prlimit", 302, TARGET, resource.RLIMIT_NOFILE, ctypes.addressof(limits), 0)
    print(json.dumps(answer))
""")

IN_THE_OPEN = """
import os, signal
child = os.fork()
if child == 0:
    signal.pause()
    os._exit(0)
try:
    exec(CODE.replace("TARGET", str(child)))
finally:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


async def test_case_s16_calls_on_the_first_process_are_refused(subject: Subject) -> None:
    """On a forked child, which has the same addresses, each of them is done."""
    subject.needs_container()
    control = subprocess.run(
        [sys.executable, "-c", f"CODE = {ON_A_PROCESS!r}\n{IN_THE_OPEN}"],
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert set(json.loads(control.stdout).values()) == {"done"}, control.stdout
    _, speaker = await subject.start()
    answer = (await speaker.run(ON_A_PROCESS.replace("TARGET", "1"))).last
    assert all(isinstance(value, int) for value in answer.values()), answer
    assert (await speaker.run("print(1 + 1)")).last == 2


async def test_neighbours_meet_by_no_name_of_the_kernels(subject: Subject) -> None:
    """Abstract sockets, shared memory of System V: found in one's own sandbox, in no other."""
    subject.needs_container()
    name, key = secrets.token_hex(8), secrets.randbelow(1 << 30) + 1
    _, one = await subject.start()
    _, two = await subject.start()
    offer = textwrap.dedent(f"""
        import ctypes, socket
        kept = socket.socket(socket.AF_UNIX)
        kept.bind("\\0{name}")
        kept.listen()
        made = ctypes.CDLL(None).shmget({key}, 4096, 0o1666)
        open("/dev/shm/{name}", "w").close()
    """)
    seek = textwrap.dedent(f"""
        import ctypes, json, os, socket
        seeker = socket.socket(socket.AF_UNIX)
        found = [seeker.connect_ex("\\0{name}") == 0,
                 ctypes.CDLL(None).shmget({key}, 4096, 0o666) != -1,
                 os.path.exists("/dev/shm/{name}")]
        print(json.dumps(found))
    """)
    assert (await one.run(offer + seek)).last == [True, True, True]
    assert (await two.run(seek)).last == [False, False, False]


async def test_case_s20_no_control_group_is_in_reach(subject: Subject) -> None:
    """The same search finds some on the machine, where it runs as root."""
    subject.needs_container()
    look = textwrap.dedent("""
        import json, os
        found = []
        for line in open("/proc/self/mountinfo"):
            place, kind = line.split()[4], line.split(" - ")[1].split()[0]
            if kind.startswith("cgroup"):
                found.append(place)
        writable = []
        for top in {*found, "/sys/fs/cgroup"}:
            for folder, folders, names in os.walk(top):
                for name in {"cgroup.procs", "release_agent", "notify_on_release"} & set(names):
                    try:
                        os.close(os.open(os.path.join(folder, name), os.O_WRONLY))
                        writable.append(os.path.join(folder, name))
                    except OSError:
                        pass
                if folder.count("/") > 5:
                    folders.clear()
        print(json.dumps([found, writable]))
    """)
    control = subprocess.run(
        [sys.executable, "-c", look], capture_output=True, check=True, timeout=60
    )
    outside = json.loads(control.stdout)
    assert outside[0]
    assert outside[1] or not ROOT
    _, speaker = await subject.start()
    assert (await speaker.run(look)).last[1] == []


ON_MOUNTS = textwrap.dedent("""
    import ctypes, json
    libc = ctypes.CDLL(None, use_errno=True)
    answer = {}
    def attempt(name, done):
        answer[name] = ctypes.get_errno() if done == -1 else "done"
    REMOUNT, DETACH = 32, 2
    attempt("mount", libc.mount(b"none", b"/tmp", b"tmpfs", ctypes.c_ulong(0), None))
    attempt("remount", libc.mount(None, b"/tmp", None, ctypes.c_ulong(REMOUNT), None))
    attempt("umount", libc.umount2(b"/proc", DETACH))
    print(json.dumps(answer))
""")


async def test_what_lies_below_a_sandboxes_own_mounts_stays_covered(subject: Subject) -> None:
    """A sandbox that was forked has its /proc and terminals above those of what it was forked from.
    In namespaces of one's own, with their rights, each of these calls is done."""
    subject.needs_container()
    alone = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--mount-proc"]
    control = subprocess.run(
        [*alone, "/usr/bin/python3", "-c", ON_MOUNTS], capture_output=True, check=True, timeout=60
    )
    assert set(json.loads(control.stdout).values()) == {"done"}, control.stdout
    _, speaker = await subject.start()
    answer = (await speaker.run(ON_MOUNTS)).last
    assert all(isinstance(value, int) for value in answer.values()), answer
    seen = "import os; print(max(int(name) for name in os.listdir('/proc') if name.isdecimal()))"
    assert (await speaker.run(seen)).last < 100  # its own processes, and not the zygote's
    if subject.statement.isolation is Isolation.KERNEL or subject.has_gap(gaps.SHARED_UIDS):
        return  # its uids are another kernel's, or the machine's
    mapped = (await speaker.run("print(open('/proc/self/uid_map').read())")).output.split()
    assert {int(size) for size in mapped[2::3]} == {1}
