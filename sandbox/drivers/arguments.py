"""The arguments of bwrap: a pure function from what was found on the machine and one request.

Called by the bubblewrap driver for every sandbox and for its self-check, so both are the same.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sandbox import packing
from sandbox.drivers.users import REPL_UID, SUPERVISOR_UID

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sandbox.drivers.driver import Limits
    from sandbox.drivers.interpreter import Interpreter
    from sandbox.drivers.layout import Layout

WRITABLE = ("/dev/shm", "/tmp", "/workspace")  # noqa: S108 - inside the sandbox
COVERED = ("/proc/cmdline", "/proc/keys")
CPUS = "/sys/devices/system/cpu/online"
ZYGOTE = "--zygote"  # what `sandbox.runtime.start` knows
# Of a zygote with one uid outside: were it 0, that uid would own what the kernel keeps to the root
# of the namespace in which a program began, such as the list of a hidden process's descriptors.
ZYGOTE_UID = 1
_LONGEST_NAME = 65  # and a slash
_MEMORY_KEPT_BYTES = 64 * 1024 * 1024
_SMALLEST_TMPFS_BYTES = 1024 * 1024
FOLDER = "/workspace"  # where code runs
ENVIRONMENT = {
    "HOME": "/workspace",
    "LANG": "C.UTF-8",
    "LOGNAME": "sandbox",
    "MPLBACKEND": "Agg",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
    "TMPDIR": "/tmp",  # noqa: S108 - inside the sandbox
    "USER": "sandbox",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the self-check found once and every sandbox uses."""

    bwrap: Path
    interpreter: Interpreter
    layout: Layout
    mark: str  # begins the folder that names the owner inside: see `archive_path`
    system: tuple[tuple[str, str, str], ...]  # (option, source, destination) for /usr and its like


def system_folders(root: Path = Path("/")) -> tuple[tuple[str, str, str], ...]:
    """How /usr, /bin, /lib and their like are shown: links as links, folders read-only.

    Args:
        root: The file system that they are of.
    """
    found = [("--ro-bind", str(root / "usr"), "/usr")]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = root / name
        if path.is_symlink():
            found.append(("--symlink", os.readlink(path), f"/{name}"))
        elif path.is_dir():
            found.append(("--ro-bind", str(path), f"/{name}"))
    if (root / "etc/alternatives").is_dir():
        found.append(("--ro-bind", str(root / "etc/alternatives"), "/etc/alternatives"))
    return tuple(found)


def archive_path(mark: str, sandbox_id: str) -> str:
    """Where the runtime archive is inside: with the sandbox's name, so that the command line of its
    first process, which every uid may read, says whose it is."""
    return f"{mark}{sandbox_id}/runtime.bundle"


def tmpfs_bytes(limits: Limits, *, charged: bool) -> int:
    """The size of each writable file system.

    They are charged to the sandbox's memory: were their sum above it, a full disk would kill the
    supervisor. So they shrink, to leave 64 MiB for processes.

    Args:
        limits: The sandbox's.
        charged: Whether a memory cgroup holds it.

    Raises:
        ValueError: The memory limit leaves no room for them; the text says how much is needed.
    """
    if not charged:
        return limits.tmpfs_limit_bytes
    room = (limits.memory_limit_bytes - _MEMORY_KEPT_BYTES) // len(WRITABLE)
    if room < min(_SMALLEST_TMPFS_BYTES, limits.tmpfs_limit_bytes):
        needed = _MEMORY_KEPT_BYTES + len(WRITABLE) * _SMALLEST_TMPFS_BYTES
        raise ValueError(
            f"memory_limit_bytes is {limits.memory_limit_bytes}; a sandbox needs at least {needed}"
        )
    return min(limits.tmpfs_limit_bytes, room)


def visible_cpus(limits: Limits) -> int:
    """How many CPUs code is told of: the limit, rounded up, but no more than there are."""
    return max(1, min(-(-limits.cpu_limit_millis // 1000), os.cpu_count() or 1))


def build(
    machine: Machine,
    *,
    sandbox_id: str,
    cpus: int,
    tmpfs: int,
    user_namespace: int | None,
    seccomp: int,
    more: Sequence[str] = (),
) -> list[str]:
    """The command line up to and including `--`; the program comes after it.

    Args:
        machine: What the self-check found.
        sandbox_id: The sandbox's name.
        cpus: How many CPUs code is told of.
        tmpfs: The size of each writable file system, in bytes.
        user_namespace: A descriptor of a namespace with two uids; None for a new one with one uid.
        seccomp: A descriptor of the compiled filter, at its beginning.
        more: Further options.
    """
    layout = machine.layout
    if user_namespace is None:
        uid, own = REPL_UID, ["--unshare-user", "--disable-userns"]
    else:
        # Only to become the REPL's uid in a child, and to kill what has that uid.
        uid, own = SUPERVISOR_UID, _with_rights("SETUID", "SETGID", "KILL")
        own += ["--userns", str(user_namespace)]
    argv = [str(machine.bwrap), *_separation(uid), *own, *more, *_root(machine)]
    for path in COVERED:
        argv += ["--ro-bind", str(layout.empty), path]
    for path in WRITABLE:
        argv += ["--size", str(tmpfs), "--perms", "1777", "--tmpfs", path]
    argv += _shown(layout.cpus(cpus), CPUS)
    argv += _shown(layout.archive, archive_path(machine.mark, sandbox_id))
    return [*argv, *_sealed(), "--chdir", FOLDER, "--seccomp", str(seccomp), "--"]


def zygote(machine: Machine, *, user_namespace: int | None, modules: Sequence[str]) -> list[str]:
    """The whole command line of a zygote: what every sandbox has in common, without what is one's
    own (`sandbox.runtime.namespaces` adds that), and with the rights to make sandboxes from it.

    Args:
        machine: What the self-check found.
        user_namespace: A descriptor of a namespace with the uids of all sandboxes; None for a new
            one with one uid.
        modules: What it imports beside its own.
    """
    layout = machine.layout
    own = _with_rights("SETUID", "SETGID")
    if user_namespace is None:
        uid, own = ZYGOTE_UID, [*own, "--unshare-user"]
    else:
        uid, own = SUPERVISOR_UID, [*own, "--userns", str(user_namespace)]
    argv = [str(machine.bwrap), *_separation(uid), *own, *_root(machine)]
    for path in WRITABLE:
        argv += ["--perms", "0755", "--dir", path]
    argv += _shown(layout.cpus(1), CPUS)
    files = f"{machine.mark.rstrip('/')}-files"
    argv += _shown(layout.root, files)
    argv += [*_sealed(), "--chdir", FOLDER, "--", str(machine.interpreter.executable)]
    argv += packing.start_arguments(f"{files}/{layout.archive.name}")
    return [*argv, ZYGOTE, zygote_name(machine.mark), files, *modules]


def zygote_name(mark: str) -> str:
    """What stands on its command line where a sandbox writes its own name, and is no shorter."""
    return f"{mark}{'-' * _LONGEST_NAME}"


def _root(machine: Machine) -> list[str]:
    argv: list[str] = []
    for entry in machine.system:
        if not entry[2].startswith("/etc/"):
            argv += entry
    if machine.interpreter.prefix is not None:
        argv += _shown(machine.interpreter.prefix, str(machine.interpreter.prefix))
    argv += ["--ro-bind", str(machine.layout.etc), "/etc"]
    for entry in machine.system:
        if entry[2].startswith("/etc/"):
            argv += entry
    return [*argv, "--proc", "/proc", "--dev", "/dev"]


def _sealed() -> list[str]:
    argv = ["--remount-ro", "/dev", "--remount-ro", "/", "--clearenv"]
    return [*argv, *_environment(ENVIRONMENT)]


def _with_rights(*names: str) -> list[str]:
    return [word for name in names for word in ("--cap-add", f"CAP_{name}")]


def _shown(source: Path, destination: str) -> list[str]:
    """Shows something read-only, below folders that every uid may enter: bwrap's own are closed."""
    above = [str(folder) for folder in reversed(Path(destination).parents)][1:]
    made = [word for folder in above for word in ("--perms", "0755", "--dir", folder)]
    return [*made, "--ro-bind", str(source), destination]


def _environment(variables: Mapping[str, str]) -> list[str]:
    return [word for item in variables.items() for word in ("--setenv", *item)]


def _separation(uid: int) -> list[str]:
    argv = ["--as-pid-1", "--new-session", "--die-with-parent"]
    argv += [f"--unshare-{kind}" for kind in ("ipc", "pid", "net", "uts", "cgroup")]
    argv += ["--hostname", "sandbox", "--cap-drop", "ALL"]
    return [*argv, "--uid", str(uid), "--gid", str(uid)]


def runtime_options(*, open_files: int, two_uids: bool) -> list[str]:
    """The supervisor's options."""
    options = ["--open-files", str(open_files)]
    return [*options, "--repl-uid", str(REPL_UID)] if two_uids else options


def runtime_command(
    machine: Machine, *, sandbox_id: str, open_files: int, two_uids: bool
) -> list[str]:
    """The supervisor's command line."""
    archive = archive_path(machine.mark, sandbox_id)
    argv = [str(machine.interpreter.executable), *packing.start_arguments(archive)]
    return [*argv, *runtime_options(open_files=open_files, two_uids=two_uids)]
