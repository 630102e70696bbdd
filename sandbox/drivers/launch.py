"""The shell lines between this process and bwrap: join the cgroup, drop to a uid, set rlimits.

Called by the modules that start bwrap; the lines are run by `/bin/sh`, which becomes bwrap. A shell
of a millisecond instead of code between fork and exec: nothing of this process, with its threads
and locks, runs in the child, and whatever bwrap starts is inside the limits from its first
instruction.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SHELL = "/bin/sh"


def wrap(argv: Sequence[str], *, open_files: int, uid: int | None = None) -> list[str]:
    """Builds the command that starts `argv` at once, with no limits but those of a process.

    Args:
        argv: The program.
        open_files: RLIMIT_NOFILE.
        uid: The uid and gid to become, without supplementary groups and capabilities.
    """
    line = " && ".join([*_limits(open_files, None), 'exec "$@"'])
    return [SHELL, "-c", line, SHELL, *_dropping(uid), *argv]


def waiting(*, join: Sequence[Path] = (), uid: int | None = None) -> list[str]:
    """Builds the command that does what needs no knowledge of the program, and waits for a `line`
    on its standard input.

    Args:
        join: Files into which the process writes 0 to join its cgroup.
        uid: As for `wrap`.
    """
    steps = [f"echo 0 >{shlex.quote(str(path))}" for path in join]
    return [SHELL, "-c", " && ".join([*steps, 'exec "$@"']), SHELL, *_dropping(uid), SHELL, "-s"]


def line(argv: Sequence[str], *, open_files: int, address_space_bytes: int | None = None) -> bytes:
    """Builds what a waiting shell is told: it becomes the program, whose standard input is then
    what the shell's output is.

    Args:
        argv: The program.
        open_files: RLIMIT_NOFILE.
        address_space_bytes: RLIMIT_AS; not set when None.
    """
    steps = [*_limits(open_files, address_space_bytes), f"exec {shlex.join(argv)} <&1"]
    return f"{' && '.join(steps)}\n".encode()


def as_uid(uid: int) -> list[str]:
    """The words before a program that run it as a uid with nothing else (util-linux setpriv)."""
    drop = [f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--inh-caps=-all"]
    return ["setpriv", *drop, "--"]


def _dropping(uid: int | None) -> list[str]:
    return [] if uid is None else as_uid(uid)


def _limits(open_files: int, address_space_bytes: int | None) -> list[str]:
    steps = ["umask 022", "ulimit -c 0", f"ulimit -n {open_files}"]
    if address_space_bytes is not None:
        steps.append(f"ulimit -v {address_space_bytes // 1024}")
    return steps
