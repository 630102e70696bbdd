"""Which Python runs in a sandbox: this host's own if the sandbox's uid can read it, else /usr's.

Called by the bubblewrap driver's self-check; looks at files only. What it proposes is tried in a
real sandbox before it is used.
"""

from __future__ import annotations

import os
import stat
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

SYSTEM = Path("/usr/bin/python3")
OLDEST = (3, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """One interpreter, seen at the same path inside and outside."""

    executable: Path
    prefix: Path | None  # a folder to show inside, if it lies outside of /usr
    problem: str = ""  # why the sandbox's uid cannot use it; empty when it can


def obstacle(path: Path, uid: int) -> str:
    """Says what keeps a uid without groups from reading a file or entering a folder.

    Looks at the mode of every component of the real path; empty when nothing does.
    """
    real = path.resolve()
    for component in (*reversed(real.parents), real):
        try:
            status = component.stat()
        except OSError as error:
            return f"{component}: {error.strerror}"
        folder = stat.S_ISDIR(status.st_mode)
        needed = 0o1 if folder and component != real else 0o5 if folder else 0o4
        shift = 6 if status.st_uid == uid else 3 if status.st_gid == uid else 0
        if (status.st_mode >> shift) & needed != needed:
            return f"{component} has mode {stat.S_IMODE(status.st_mode):04o}"
    return ""


def candidates(uid: int | None) -> list[Interpreter]:
    """The interpreters to try, the best first.

    Args:
        uid: The sandbox's uid on this machine; None when it is this process's own.
    """
    base = Path(getattr(sys, "_base_executable", "") or sys.executable).resolve()
    found = [_own(base, uid)]
    if SYSTEM.exists() and SYSTEM.resolve() != base:
        found.append(Interpreter(executable=SYSTEM.resolve(), prefix=None))
    elif not SYSTEM.exists():
        problem = "it does not exist; install it (Debian: apt install python3)"
        found.append(Interpreter(executable=SYSTEM, prefix=None, problem=problem))
    return found


def of_root(root: Path) -> list[Interpreter]:
    """The interpreter of another root file system.

    Args:
        root: Where that lies.
    """
    for inside in (SYSTEM, Path("/usr/local/bin/python3")):
        if os.path.lexists(root / inside.relative_to("/")):
            return [Interpreter(executable=inside, prefix=None)]
    problem = "its root file system has no such file; install Python 3.9 or newer into it"
    return [Interpreter(executable=SYSTEM, prefix=None, problem=problem)]


def _own(executable: Path, uid: int | None) -> Interpreter:
    prefix = Path(sys.base_prefix).resolve()
    needed = [executable, Path(os.__file__)]
    library = Path(sysconfig.get_config_var("LIBDIR") or "") / str(
        sysconfig.get_config_var("LDLIBRARY") or ""
    )
    if sysconfig.get_config_var("Py_ENABLE_SHARED"):
        needed.append(library)
    problem = ""
    if uid is not None:
        problem = next((text for path in needed if (text := obstacle(path, uid))), "")
        if problem:
            problem = f"uid {uid} cannot read it: {problem}"
    outside = not prefix.is_relative_to("/usr")
    if outside and len(prefix.parts) < 3:
        problem = problem or f"its prefix {prefix} is too wide to be shown to a sandbox"
    return Interpreter(executable=executable, prefix=prefix if outside else None, problem=problem)
