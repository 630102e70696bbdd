"""What this machine is, as far as sandboxes depend on it: read, never changed.

Called by the host's self-check; reads /proc and /sys, and asks bwrap for its version.
"""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from sandbox.drivers import cgroups, selfcheck

_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")


def facts(*, cgroup_root: Path = cgroups.ROOT, sysctls: Path = selfcheck.SYSCTLS) -> dict[str, Any]:
    """Finds them out; what cannot be read is None or empty."""
    return {
        "kernel": platform.release(),
        "uid": os.geteuid(),
        "cpus": os.cpu_count(),
        "namespaces": [name for name in _NAMESPACES if Path(f"/proc/self/ns/{name}").exists()],
        "user_namespaces_max": _number(_text(sysctls / "user/max_user_namespaces")),
        "apparmor_restricts_user_namespaces": _text(
            sysctls / "kernel/apparmor_restrict_unprivileged_userns"
        )
        == "1",
        "seccomp_actions": _text(sysctls / "kernel/seccomp/actions_avail").split(),
        "cgroup_version": _cgroup_version(cgroup_root),
        "cgroup_controllers": _controllers(cgroup_root),
        "memory_free_bytes": _memory_free(),
        "bwrap": [_bwrap(path) for path in selfcheck.bwrap_candidates()],
    }


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _cgroup_version(root: Path) -> int | None:
    if (root / "cgroup.controllers").is_file():
        return 2
    return 1 if (root / "memory").is_dir() else None


def _controllers(root: Path) -> list[str]:
    """The controllers that can be used at the root."""
    if (root / "cgroup.controllers").is_file():
        return sorted(_text(root / "cgroup.controllers").split())
    return sorted(name for name in ("cpu", "cpuacct", "memory", "pids") if (root / name).is_dir())


def _memory_free() -> int | None:
    for line in _text(Path("/proc/meminfo")).splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable" and (size := _number(rest.split()[0])) is not None:
            return size * 1024
    return None


def _bwrap(path: Path) -> dict[str, str]:
    try:
        shown = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=10, check=True, env={}
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        shown = ""
    return {
        "path": str(path),
        "version": shown.removeprefix("bubblewrap ")[:50],
        "problem": selfcheck.bwrap_problem(path),
    }
