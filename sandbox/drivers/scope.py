"""Limits by `systemd-run --user --scope`, where an ordinary user's systemd may set them.

Called by the bubblewrap driver of a host that may not write cgroups itself; calls systemd-run. The
user's own systemd owns a delegated part of cgroup version 2, makes one scope for each sandbox, and
removes it when it is empty.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from sandbox.drivers import procfs
from sandbox.drivers.cgroups import Cgroup, Counters, owner_name
from sandbox.drivers.driver import Enforcement, Level, Limits

_TRIAL_SECONDS = 10
_CONTROLLERS = ("memory", "pids", "cpu")
# What systemd-run needs to find the user's systemd.
_VARIABLES = ("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scopes:
    """How to start a program in a scope of its own."""

    program: str
    environment: dict[str, str]
    controllers: frozenset[str]

    @property
    def enforcement(self) -> tuple[Enforcement, ...]:
        """The limits it holds, all for the whole sandbox."""
        return tuple(
            Enforcement(limit=name, level=Level.SANDBOX, mechanism="systemd user scope, cgroup v2")
            for name in _CONTROLLERS
            if name in self.controllers
        )

    def prefix(self, owner: str, sandbox_id: str, limits: Limits) -> list[str]:
        """The words before a program that start it in a scope with these limits."""
        properties = [
            f"MemoryMax={limits.memory_limit_bytes}",
            "MemorySwapMax=0",
            f"TasksMax={limits.pids_limit + 1}",  # and bwrap itself
            f"CPUQuota={max(1, limits.cpu_limit_millis // 10)}%",
        ]
        unit = f"{owner_name(owner)}-{sandbox_id}.scope"
        argv = [self.program, "--user", "--scope", "--quiet", "--collect", f"--unit={unit}"]
        return [*argv, *(f"--property={text}" for text in properties), "--"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeGroup:
    """The scope that a process was put into, known once systemd has put it there."""

    pid: int
    unit: str
    root: Path

    def _group(self) -> Cgroup | None:
        for line in procfs.read(self.pid, "cgroup").decode("utf-8", "replace").splitlines():
            if line.startswith("0::") and line.endswith(self.unit):
                folder = self.root / line.removeprefix("0::").lstrip("/")
                return Cgroup(version=2, folders={"memory": folder})
        return None

    @property
    def is_certain(self) -> bool:
        """No: systemd puts a process there when it comes to it, and forgets an empty scope."""
        return False

    def pids(self) -> set[int]:
        """The processes in it."""
        group = self._group()
        return group.pids() if group else set()

    def counters(self) -> Counters:
        """The kernel's counters, while the scope exists."""
        group = self._group()
        return group.counters() if group else Counters()

    def remove(self) -> None:
        """Nothing to do: systemd removes an empty scope."""


def find(root: Path) -> Scopes | None:
    """Tries whether this user's systemd makes scopes with limits, and answers None if not."""
    program = shutil.which("systemd-run")
    variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    if program is None or not variables or not (root / "cgroup.controllers").is_file():
        return None
    trial = [program, "--user", "--scope", "--quiet", "--collect", "--property=TasksMax=64"]
    try:
        shown = subprocess.run(
            [*trial, "--", "cat", "/proc/self/cgroup"],
            capture_output=True,
            text=True,
            timeout=_TRIAL_SECONDS,
            check=True,
            env={**variables, "PATH": os.defpath},
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    folder = root / shown.strip().rpartition("0::")[2].lstrip("/")
    try:
        enabled = (folder.parent / "cgroup.subtree_control").read_text(encoding="ascii").split()
    except OSError:
        return None
    controllers = frozenset(enabled) & frozenset(_CONTROLLERS)
    if not {"memory", "pids"} <= controllers:
        return None
    return Scopes(program=program, environment=variables, controllers=controllers)
