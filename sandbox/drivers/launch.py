"""The shell line between this process and bwrap: joins the cgroup, sets rlimits, drops to a uid.

Called by the bubblewrap driver; the line is run by `/bin/sh`, which becomes bwrap. A shell of a
millisecond instead of code between fork and exec: nothing of this process, with its threads and
locks, runs in the child, and whatever bwrap starts is inside the limits from its first instruction.
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
    join: Sequence[Path] = (),
    open_files: int,
    address_space_bytes: int | None = None,
    uid: int | None = None,
) -> list[str]:
    """Builds the command that starts `argv` inside its limits.

    Args:
        argv: The program.
        join: Files into which the process writes 0 to join its cgroup.
        open_files: RLIMIT_NOFILE.
        address_space_bytes: RLIMIT_AS; not set when None.
        uid: The uid and gid to become, without supplementary groups and capabilities.
    """
    steps = [f"echo 0 >{shlex.quote(str(path))}" for path in join]
    steps += ["umask 022", "ulimit -c 0", f"ulimit -n {open_files}"]
    if address_space_bytes is not None:
        steps.append(f"ulimit -v {address_space_bytes // 1024}")
    steps.append('exec "$@"')
    drop = [] if uid is None else as_uid(uid)
    return [SHELL, "-c", " && ".join(steps), SHELL, *drop, *argv]


def as_uid(uid: int) -> list[str]:
    """The words before a program that run it as a uid with nothing else (util-linux setpriv)."""
    drop = [f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--inh-caps=-all"]
    return ["setpriv", *drop, "--"]
