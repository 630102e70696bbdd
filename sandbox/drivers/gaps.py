"""What drivers do not hold, with the reason: in the words of their statements.

Called by the drivers, by the tests that ask a statement what to expect, and by
`sandbox.drivers.document`, which lists them. "…" stands for what depends on the machine.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARED_KERNEL = "Sandboxes share this machine's kernel."
SHARED_UIDS = (
    "Its sandboxes have no user namespaces of their own: their supervisors are uid 0 of this "
    "machine with three capabilities, their code is uid 10001, and these uids share the machine's "
    "quotas of inotify and pipes."
)
ENDS_WHOLE = (
    "What exceeds the memory or the number of processes ends the whole sandbox, with its state, "
    "because its kernel is one process of this machine."
)
COUNTERS_END = (
    "What a container used is read while it lives: of one that ended as a whole, the peak of its "
    "memory may be missing."
)
OPEN_PROC = (
    "Code can read the environment, the memory map and the list of descriptors of its supervisor, "
    "which hold no secret; it can open none of those descriptors, nor its memory."
)
ONE_LAYOUT = (
    "Sandboxes of a template are forks of one interpreter: they share its layout of addresses and "
    "its seed of string hashes."
)
OWN_INTERPRETER = "Each sandbox starts an interpreter of its own, which is slower: …"
UNSEEN_DISK = "A full disk is not measured: its file systems live inside its own kernel."
FILTER_IGNORED = (
    "The engine's system call filter holds only where its runsc was told --oci-seccomp; the code's "
    "own filter holds always."
)
KNOWN_ESCAPES = "… has known escapes (…); it was allowed by name."


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """One thing that a driver does not hold."""

    words: str
    when: str  # on which machines
    reason: str

    def is_stated_by(self, text: str) -> bool:
        """Whether a statement's sentence is this gap."""
        first, *others = self.words.split("…")
        if not text.startswith(first) or not text.endswith(others[-1] if others else text):
            return False
        if not others:
            return text == first
        at = len(first)
        for part in others:
            found = text.find(part, at)
            if found < 0:
                return False
            at = found + len(part)
        return True


_KERNEL = Gap(
    words=SHARED_KERNEL,
    when="always",
    reason="namespaces, filters and control groups are the kernel's own; a fault in it is a way "
    "out. Use `docker-runsc` where that matters",
)
_COUNTERS = Gap(
    words=COUNTERS_END,
    when="always",
    reason="the engine removes a container's control group when its first process ends",
)

BY_DRIVER: dict[str, tuple[Gap, ...]] = {
    "bubblewrap": (
        _KERNEL,
        Gap(
            words="This host is an ordinary user: supervisor and REPL of all its sandboxes share "
            "one uid, so it is for one tenant.",
            when="the host is not root",
            reason="only root may give a user namespace two uids",
        ),
        Gap(
            words="No cgroups: …, so memory is held for each process only.",
            when="the host may not make control groups",
            reason="limits for a whole sandbox need a control group",
        ),
        Gap(
            words="The counters of a systemd scope are gone when its last process is.",
            when="an ordinary user whose systemd makes scopes",
            reason="systemd removes a scope with its last process",
        ),
        Gap(
            words=ONE_LAYOUT,
            when="where one can be had, so nearly always",
            reason="a fork is three times as fast as a start; code can learn where its neighbours' "
            "memory lies, and has no way to it",
        ),
        Gap(
            words=OWN_INTERPRETER,
            when="where namespaces cannot be nested",
            reason="a sandbox of a fork is made of namespaces within bubblewrap's",
        ),
    ),
    "docker": (
        _KERNEL,
        Gap(
            words=SHARED_UIDS,
            when="always",
            reason="an engine maps uids for all its containers or for none; the supervisor keeps "
            "SETUID, SETGID and KILL, its code nothing",
        ),
        _COUNTERS,
        Gap(
            words=KNOWN_ESCAPES,
            when="an old runc that the configuration allows by name",
            reason="a version does not show what a distribution has mended in its own copy",
        ),
    ),
    "docker-runsc": (
        Gap(
            words=ENDS_WHOLE,
            when="always",
            reason="gVisor's kernel is a process itself, and the control group counts and kills it",
        ),
        Gap(
            words=FILTER_IGNORED,
            when="always",
            reason="gVisor leaves out the filter of a container unless it is told otherwise, and "
            "serves every call from its own kernel",
        ),
        _COUNTERS,
        Gap(
            words=UNSEEN_DISK,
            when="always",
            reason="no process of this machine can look into them",
        ),
        Gap(
            words=OPEN_PROC,
            when="always",
            reason="gVisor lets any uid read these files of a process that is not dumpable",
        ),
    ),
    "fake": (
        Gap(
            words="Sandboxes are plain processes of this machine: nothing is isolated.",
            when="always",
            reason="it exists for tests, and is never offered unasked",
        ),
    ),
}
