"""From a fork of the zygote to the first process of a sandbox.

Called by `zygote`. The root file system is the zygote's own, read-only; whatever a sandbox can
write, or could tell it of another one, is mounted here anew: /proc, terminals, /tmp, /dev/shm,
/workspace. What follows from no request comes first and is done ahead of it, so that a start is the
rest only.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import struct

from . import linux, start

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

CLONED = 0x7C020000  # CLONE_NEW: ns, uts, ipc, user, pid, net
_NEW_CGROUP = 0x02000000  # its root is where the process is, so it comes after joining
_NUMBERS = {"x86_64": 56, "aarch64": 220}  # of clone(2)
_NOSUID, _NODEV, _NOEXEC, _BIND = 2, 4, 8, 4096
_KEPT = (5, 6, 7)  # CAP_KILL, CAP_SETGID, CAP_SETUID
_LAST_CAPABILITY = 63
_CAPABILITY_VERSION = 0x20080522
_PR_CAPBSET_DROP = 24
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_EINVAL = 22
_UP = 1
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914
_TERMINALS = "newinstance,ptmxmode=0666,mode=620"
_COVERED = ("/proc/cmdline", "/proc/keys")
_CPUS = "/sys/devices/system/cpu/online"
_ENOUGH_DESCRIPTORS = 1024  # a zygote has a dozen
_FAILED = 71

_libc = ctypes.CDLL(None, use_errno=True)
# Calls through it keep the interpreter's lock, as a fork must.
_held = ctypes.PyDLL(None, use_errno=True)


class Place:
    """What every sandbox of a zygote finds: where its name stands, and the driver's files."""

    def __init__(self, name: bytes, files: str) -> None:
        """Looks up what can be looked up once.

        Args:
            name: an argument of this process's command line, which each sandbox overwrites.
            files: the folder with the driver's files.

        Raises:
            OSError: something is missing.
        """
        line = linux.read_file("/proc/self/cmdline")
        stat = linux.read_file("/proc/self/stat").rpartition(b")")[2].split()
        self._address = int(stat[45]) + line.index(name)  # field 48: where the arguments begin
        self._size = len(name)
        self.files = files
        with open(f"{files}/seccomp.bpf", "rb") as file:
            self.filter = file.read()

    def rename(self, name: str) -> None:
        """Has the command line, which every uid may read, say whose process this is."""
        ctypes.memmove(self._address, name.encode("ascii").ljust(self._size, b"\0"), self._size)


def clone(flags: int) -> int:
    """Forks into new namespaces; returns like `os.fork`.

    Raises:
        OSError: the kernel refused, or this machine's clone(2) is not known here.
    """
    number = _NUMBERS.get(os.uname().machine)
    if number is None:
        raise OSError(f"the number of clone(2) on {os.uname().machine} is not known")
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid = int(_held.syscall(number, flags | signal.SIGCHLD, 0, 0, 0, 0))
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    error = ctypes.get_errno()
    python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(error, os.strerror(error))
    return pid


def enter(place: Place, mapped: int, descriptors: list[int], *, is_root: bool) -> NoReturn:
    """Becomes a sandbox's first process.

    Args:
        place: what the zygote knows.
        mapped: says one byte when the user namespace has its maps; nothing when it gets none.
        descriptors: the frame channel, the log, and files that take a 0 to join a control group.
        is_root: whether this is uid 0 of its namespace, beside a second uid for the REPL.
    """
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        channel, log, *groups = descriptors
        for group in groups:
            os.write(group, b"0")
        if _libc.unshare(_NEW_CGROUP) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        os.dup2(channel, 0)
        os.dup2(channel, 1)
        os.dup2(log, 2)
        os.dup2(mapped, 3)
        os.closerange(4, _ENOUGH_DESCRIPTORS)
        if os.read(3, 1) != b"x":
            os._exit(_FAILED)
        os.close(3)
        arguments = _prepare_and_wait(place, is_root=is_root)
        start.main(arguments)
    except BaseException as error:  # nobody else is there to see it
        text = f"{type(error).__name__}: {error}\n"
        os.write(2, text.encode("utf-8", "backslashreplace"))
    finally:
        os._exit(_FAILED)


def _prepare_and_wait(place: Place, *, is_root: bool) -> list[str]:
    os.setsid()
    if is_root:
        os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        linux.prctl(linux.PR_SET_DUMPABLE, 1)  # else its own files of /proc are not its own
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        _raise_loopback(any_socket.fileno())
    _mount("proc", "/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    with open("/proc/sys/user/max_user_namespaces", "w", encoding="ascii") as file:
        file.write("0")
    for path in _COVERED:
        _mount(f"{place.files}/empty", path, None, _BIND)
    _mount("devpts", "/dev/pts", "devpts", _NOSUID | _NOEXEC, _TERMINALS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.umask(0o022)

    order = _receive_order()
    place.rename(order["name"])
    for path in order["writable"]:
        _mount("tmpfs", path, "tmpfs", _NOSUID | _NODEV, f"mode=1777,size={order['tmpfs']}")
    _mount(f"{place.files}/cpus-{order['cpus']}", _CPUS, None, _BIND)
    os.chdir(order["folder"])
    for name, limit in order["limits"].items():
        resource.setrlimit(getattr(resource, name), (limit, limit))
    _give_up_rights(_KEPT if is_root else ())
    _filter(place.filter)
    arguments: list[str] = order["arguments"]
    return arguments


def _receive_order() -> Any:
    """Takes what the host says before the first frame: four bytes of size, then JSON."""
    return json.loads(_receive(int.from_bytes(_receive(4), "big")))


def _receive(size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            os._exit(0)  # it was not needed, or the host is gone
        data += piece
    return data


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    words = [word.encode() if word else None for word in (source, target, kind, options)]
    if _libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"mount {target}: {os.strerror(error)}")


def _raise_loopback(descriptor: int) -> None:
    request = struct.pack("16sh22x", b"lo", 0)
    flags = struct.unpack("16xh22x", fcntl.ioctl(descriptor, _SIOCGIFFLAGS, request))[0]
    fcntl.ioctl(descriptor, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | _UP))


def _give_up_rights(kept: tuple[int, ...]) -> None:
    for capability in range(_LAST_CAPABILITY + 1):
        if capability in kept:
            continue
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            if ctypes.get_errno() == _EINVAL:
                break  # the kernel has no more
            raise OSError(f"capability {capability} could not be given up")
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    low = sum(1 << capability for capability in kept)
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    if _libc.capset(header, struct.pack("=6I", low, low, 0, 0, 0, 0)) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def _filter(program: bytes) -> None:
    kept = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("@HP", len(program) // 8, ctypes.addressof(kept))
    if _libc.prctl(linux.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs")
    if _libc.prctl(linux.PR_SET_SECCOMP, linux.SECCOMP_MODE_FILTER, head, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")
