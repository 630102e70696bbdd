"""The shell line between this process and bwrap: join the cgroup, set rlimits, drop to a uid.

Called by the modules that start bwrap; the line is run by `/bin/sh`, which becomes bwrap. A shell
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


def wrap(
    argv: Sequence[str],
    *,
    open_files: int,
    uid: int | None = None,
    join: Sequence[Path] = (),
    address_space_bytes: int | None = None,
) -> list[str]:
    """Builds the command that starts `argv` with limits.

    Args:
        argv: The program.
        open_files: RLIMIT_NOFILE.
        uid: The uid and gid to become, without supplementary groups and capabilities.
        join: Files into which the process writes 0 to join its cgroup.
        address_space_bytes: RLIMIT_AS; not set when None.
    """
    steps = [f"echo 0 >{shlex.quote(str(path))}" for path in join]
    steps += ["umask 022", "ulimit -c 0", f"ulimit -n {open_files}"]
    if address_space_bytes is not None:
        steps.append(f"ulimit -v {address_space_bytes // 1024}")
    dropping = [] if uid is None else as_uid(uid)
    return [SHELL, "-c", " && ".join([*steps, 'exec "$@"']), SHELL, *dropping, *argv]


def as_uid(uid: int) -> list[str]:
    """The words before a program that run it as a uid with nothing else (util-linux setpriv)."""
    drop = [f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--inh-caps=-all"]
    return ["setpriv", *drop, "--"]
