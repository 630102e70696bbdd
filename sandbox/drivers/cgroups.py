"""Cgroups, version 1 and 2: one directory per owner, one below it per sandbox.

Called by the bubblewrap driver; calls the file system below a root that tests replace. The limits
here hold for the whole sandbox, and the counters are the only evidence of a breach.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from sandbox.drivers.driver import Enforcement, Level, Limits

ROOT = Path("/sys/fs/cgroup")
_PERIOD_MICROSECONDS = 100_000
_READ_BYTES = 65_536
_CONTROLLERS = ("memory", "pids", "cpu")
_LIMIT_NAMES = ("memory", "pids", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What the kernel counted for one sandbox; None where it does not say."""

    oom_kill_count: int | None = None
    memory_peak_bytes: int | None = None
    pids_limit_hits: int | None = None
    cpu_seconds: float | None = None


def owner_name(owner: str) -> str:
    """The name of an owner's directories: `hutch-` and 12 hexadecimal digits."""
    return "hutch-" + hashlib.sha256(owner.encode()).hexdigest()[:12]


def _write(path: Path, value: object) -> None:
    # These files are read and written a few dozen times for each sandbox: without file objects.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        os.write(descriptor, str(value).encode("ascii"))
    finally:
        os.close(descriptor)


def _text(path: Path) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        pieces = []
        while piece := os.read(descriptor, _READ_BYTES):
            pieces.append(piece)
        return b"".join(pieces).decode("ascii")
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _keyed(path: Path, key: str) -> int | None:
    for line in _text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.strip().isdecimal():
            return int(value)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cgroup:
    """The cgroup of one sandbox: one directory in version 2, one for each controller in 1."""

    version: int
    folders: dict[str, Path]  # by controller; several may name one directory

    @property
    def directories(self) -> list[Path]:
        """Its directories, each once."""
        return list(dict.fromkeys(self.folders.values()))

    @property
    def is_certain(self) -> bool:
        """Yes: the first process joins before it starts another, and none of them can leave."""
        return True

    def join_files(self) -> list[Path]:
        """Files into which a process writes 0 to come in, with all it starts afterwards.

        In version 1 that is `tasks`: a lone thread that moves itself needs no grace period of the
        kernel, which `cgroup.procs` waits for (some 20 ms).
        """
        name = "tasks" if self.version == 1 else "cgroup.procs"
        return [folder / name for folder in self.directories]

    def pids(self) -> set[int]:
        """The processes in it. Each is in all of its directories: they join together, and that the
        others can be removed proves that none is left there either."""
        return {int(word) for word in _text(self.directories[0] / "cgroup.procs").split()}

    def limit(self, limits: Limits, *, beside: int = 0) -> None:
        """Sets a sandbox's limits.

        Args:
            limits: The sandbox's.
            beside: Processes of the driver's in it, which do not count.

        Raises:
            OSError: The kernel refused.
        """
        _limit(self, limits, limits.pids_limit + beside)

    def counters(self) -> Counters:
        """Reads the kernel's counters."""
        return _counters_v1(self.folders) if self.version == 1 else _counters_v2(self.folders)

    def remove(self) -> None:
        """Removes the directories; that they can be removed proves that no process is in them.

        Raises:
            OSError: A process is left (EBUSY).
        """
        for folder in self.directories:
            with contextlib.suppress(FileNotFoundError):
                folder.rmdir()


def _counters_v1(folders: dict[str, Path]) -> Counters:
    memory, pids, usage = folders.get("memory"), folders.get("pids"), folders.get("cpuacct")
    nanoseconds = _number(usage / "cpuacct.usage") if usage else None
    return Counters(
        oom_kill_count=_keyed(memory / "memory.oom_control", "oom_kill") if memory else None,
        memory_peak_bytes=_number(memory / "memory.max_usage_in_bytes") if memory else None,
        pids_limit_hits=_keyed(pids / "pids.events", "max") if pids else None,
        cpu_seconds=nanoseconds / 1e9 if nanoseconds is not None else None,
    )


def _counters_v2(folders: dict[str, Path]) -> Counters:
    folder = next(iter(folders.values()))
    microseconds = _keyed(folder / "cpu.stat", "usage_usec")
    return Counters(
        oom_kill_count=_keyed(folder / "memory.events", "oom_kill"),
        memory_peak_bytes=_number(folder / "memory.peak"),
        pids_limit_hits=_keyed(folder / "pids.events", "max"),
        cpu_seconds=microseconds / 1e6 if microseconds is not None else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """One owner's part of the machine's cgroups."""

    version: int
    parents: dict[str, Path]  # the owner's directory, by controller

    @property
    def enforcement(self) -> tuple[Enforcement, ...]:
        """The limits it holds, all for the whole sandbox."""
        return tuple(
            Enforcement(limit=name, level=Level.SANDBOX, mechanism=f"cgroup v{self.version}")
            for name in _LIMIT_NAMES
            if name in self.parents
        )

    def create(self, name: str) -> Cgroup:
        """Makes one sandbox's cgroup, without limits.

        Raises:
            OSError: The kernel refused; nothing is left.
        """
        group = self.of(name)
        try:
            for folder in group.directories:
                folder.mkdir()
        except OSError:
            with contextlib.suppress(OSError):
                group.remove()
            raise
        return group

    def of(self, name: str) -> Cgroup:
        """The cgroup of that name, whether it exists or not."""
        return Cgroup(
            version=self.version,
            folders={controller: parent / name for controller, parent in self.parents.items()},
        )

    def names(self) -> set[str]:
        """The cgroups of this owner."""
        found: set[str] = set()
        for parent in set(self.parents.values()):
            with contextlib.suppress(OSError):
                found |= {entry.name for entry in os.scandir(parent) if entry.is_dir()}
        return found

    def remove(self) -> None:
        """Removes the owner's directories, if no sandbox is left in them."""
        for parent in set(self.parents.values()):
            with contextlib.suppress(OSError):
                parent.rmdir()


def _limit(group: Cgroup, limits: Limits, processes: int) -> None:
    quota = max(1000, limits.cpu_limit_millis * _PERIOD_MICROSECONDS // 1000)
    memory, pids, cpu = (group.folders.get(name) for name in _CONTROLLERS)
    if pids:
        _write(pids / "pids.max", processes)
    if group.version == 1:
        if memory:
            _write(memory / "memory.limit_in_bytes", limits.memory_limit_bytes)
            _without_swap_v1(memory, limits.memory_limit_bytes)
        if cpu:
            _write(cpu / "cpu.cfs_period_us", _PERIOD_MICROSECONDS)
            _write(cpu / "cpu.cfs_quota_us", quota)
        return
    if memory:
        _write(memory / "memory.max", limits.memory_limit_bytes)
        # A kernel without swap has no such file, and no swap to forbid.
        with contextlib.suppress(FileNotFoundError, PermissionError):
            _write(memory / "memory.swap.max", 0)
    if cpu:
        _write(cpu / "cpu.max", f"{quota} {_PERIOD_MICROSECONDS}")


def _without_swap_v1(memory: Path, size: int) -> None:
    combined = memory / "memory.memsw.limit_in_bytes"
    if combined.exists():
        _write(combined, size)
    else:  # swap accounting is off, so the best that can be said is: do not swap
        _write(memory / "memory.swappiness", 0)


def find(owner: str, root: Path = ROOT) -> tuple[Hierarchy | None, str]:
    """Finds where this process may make cgroups, and makes the owner's directory there.

    Returns:
        The hierarchy, or None and why there is none.
    """
    if (root / "cgroup.controllers").is_file():
        return _find_v2(owner, root)
    if (root / "memory").is_dir():
        return _find_v1(owner, root)
    return None, f"no cgroup controllers are mounted at {root}"


def _find_v1(owner: str, root: Path) -> tuple[Hierarchy | None, str]:
    parents: dict[str, Path] = {}
    refused: list[str] = []
    for controller in (*_CONTROLLERS, "cpuacct"):
        # Several controllers may share one directory, reached by symbolic links.
        folder = (root / controller).resolve() / owner_name(owner)
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            refused.append(f"{folder}: {error.strerror}")
        else:
            parents[controller] = folder
    hierarchy = Hierarchy(version=1, parents=parents)
    if "memory" not in parents or "pids" not in parents:
        hierarchy.remove()
        return None, f"this host may not make cgroups ({'; '.join(refused)})"
    return hierarchy, ""


def _find_v2(owner: str, root: Path) -> tuple[Hierarchy | None, str]:
    folder = root / owner_name(owner)
    offered = set(_text(root / "cgroup.controllers").split()) & set(_CONTROLLERS)
    if not {"memory", "pids"} <= offered:
        return None, f"{root} does not offer the memory and pids controllers"
    try:
        missing = offered - set(_text(root / "cgroup.subtree_control").split())
        if missing:
            _write(root / "cgroup.subtree_control", _enable(missing))
        folder.mkdir(exist_ok=True)
        _write(folder / "cgroup.subtree_control", _enable(offered))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        return None, f"this host may not make cgroups below {root} ({error.strerror})"
    return Hierarchy(version=2, parents=dict.fromkeys(sorted(offered), folder)), ""


def _enable(controllers: set[str]) -> str:
    return " ".join(f"+{name}" for name in _CONTROLLERS if name in controllers)
