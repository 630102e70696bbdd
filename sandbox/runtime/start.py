"""The first steps of PID 1: it hides, and forks the REPL before it loads the rest of itself.

Started by a driver (see `sandbox.packing`) with the frame channel as descriptors 0 and 1 and a log
of the host's as 2. Supervisor and REPL then import their own halves side by side, which is what a
start mostly consists of.
"""

from __future__ import annotations

import posix

from . import linux, settings
from .linux import signals
from .replink import ReplLink

ZYGOTE = "--zygote"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from .settings import Settings


def main(arguments: list[str]) -> NoReturn:
    """Becomes the supervisor, with a REPL; told so, it becomes what supervisors are forked from."""
    if arguments[:1] == [ZYGOTE]:
        from .zygote import serve as serve_forks

        serve_forks(arguments[1:])
    hidden = linux.hide_memory()
    linux.adopt_orphans()
    chosen = settings.parse(arguments)
    for number in (signals.SIGINT, signals.SIGTERM, signals.SIGHUP, signals.SIGPIPE):
        signals.signal(number, signals.SIG_IGN)
    _choose_uid(chosen)
    repl = ReplLink(chosen, 1)
    from .supervisor import serve

    serve(chosen, hidden, repl)


def _choose_uid(chosen: Settings) -> None:
    """Uses the second uid only where it can be taken; `ready` says whether it was."""
    uid = chosen.repl_uid
    if uid < 0 or uid == posix.getuid() or not linux.has_capability(linux.CAP_SETUID):
        chosen.repl_uid = -1
