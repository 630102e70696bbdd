"""Uids for sandboxes: two for each, out of a block that one host of the machine holds alone.

Called by the bubblewrap driver of a root host; calls util-linux `unshare` to make the user
namespaces that bwrap is told to use. One uid runs the supervisor, the other the REPL, so that the
kernel itself keeps the second from the first. A uid is taken again only after every process of it
was proved gone: uids share inotify, pipe and key quotas.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from sandbox.drivers import procfs
from sandbox.drivers.driver import StartFailed
from sandbox.drivers.launch import SHELL, as_uid

FIRST_UID = 200_000
PAIRS = 512  # of uids that one host has; the last one is the zygote's
SLOTS = PAIRS - 1  # sandboxes one host can hold at once
BLOCKS = 64  # hosts on one machine
LOCKS = Path("/run/hutch")
# Inside, the supervisor is uid 0 of its user namespace, with three capabilities: only a change from
# uid 0 to another makes the kernel take all of them away.
SUPERVISOR_UID = 0
REPL_UID = 1000

# Says that the namespace is there, waits for its maps, forbids namespaces inside it, says so.
_FORBID = "echo 0 >/proc/sys/user/max_user_namespaces"
_HOLD = "echo && read go && {forbid} && echo && read go"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The two uids of one sandbox."""

    index: int
    uid: int  # of the supervisor; the REPL's is the next one
    inner: int  # `uid` as the zygote's user namespace names it

    @property
    def maps(self) -> str:
        """What a user namespace made by the zygote maps: these two and no other."""
        return f"{SUPERVISOR_UID} {self.inner} 1\n{REPL_UID} {self.inner + 1} 1\n"

    @property
    def uids(self) -> frozenset[int]:
        """Both uids, as the machine sees them."""
        return frozenset((self.uid, self.uid + 1))


class Users:
    """One block of uids, held by a lock for as long as this object lives."""

    def __init__(self, locks: Path = LOCKS) -> None:
        self._locks = locks
        self._lock = -1
        self._path = locks
        self._block = 0
        self._free: list[int] = []
        self._namespaces: dict[int, int] = {}

    @property
    def first_uid(self) -> int:
        """The first uid of the block."""
        return FIRST_UID + self._block * PAIRS * 2

    def open(self) -> None:
        """Takes a block no other host holds.

        Raises:
            StartFailed: No block is free.
        """
        last = FIRST_UID + BLOCKS * PAIRS * 2
        if not _are_mapped(FIRST_UID, last):
            raise StartFailed(
                f"this host is root in a user namespace that lacks the uids {FIRST_UID} to {last}: "
                "run it as an ordinary user, or give its container these subordinate uids"
            )
        self._locks.mkdir(mode=0o755, parents=True, exist_ok=True)
        for block in range(BLOCKS):
            if self._try_lock(block):
                break
        else:
            raise StartFailed(f"all {BLOCKS} blocks of sandbox uids are in use: see {self._locks}")
        living = _living_uids()
        self._free = [
            index
            for index in reversed(range(SLOTS))
            if not {self._uid(index), self._uid(index) + 1} & living
        ]

    def take(self) -> Slot:
        """Takes a slot for a new sandbox.

        Raises:
            StartFailed: None is free, or its namespace cannot be made.
        """
        if not self._free:
            raise StartFailed(f"all {SLOTS} pairs of sandbox uids are in use")
        return self._slot(self._free.pop())

    def namespace(self, slot: Slot) -> int:
        """A descriptor of a user namespace that maps the two uids of a slot; this object keeps it.

        Raises:
            StartFailed: It cannot be made.
        """
        if slot.index not in self._namespaces:
            maps = f"{SUPERVISOR_UID} {slot.uid} 1\n{REPL_UID} {slot.uid + 1} 1\n"
            self._namespaces[slot.index] = make_user_namespace(slot.uid, maps)
        return self._namespaces[slot.index]

    @property
    def zygote_uid(self) -> int:
        """The uid that the zygote has."""
        return self._uid(SLOTS)

    def zygote_namespace(self) -> int:
        """Makes the user namespace of a zygote, which maps its own uid and those of every slot.

        Returns:
            A descriptor of it, which the caller closes.

        Raises:
            StartFailed: It cannot be made.
        """
        maps = f"0 {self.zygote_uid} 1\n1 {self.first_uid} {2 * SLOTS}\n"
        return make_user_namespace(self.zygote_uid, maps, nests=True)

    def give_back(self, slot: Slot) -> None:
        """Frees a slot whose processes were proved gone."""
        self._free.append(slot.index)

    def close(self) -> None:
        """Frees the block and the namespaces."""
        for descriptor in self._namespaces.values():
            os.close(descriptor)
        self._namespaces.clear()
        self._free.clear()
        if self._lock >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1

    def _slot(self, index: int) -> Slot:
        return Slot(index=index, uid=self._uid(index), inner=2 * index + 1)

    def _uid(self, index: int) -> int:
        return self.first_uid + 2 * index

    def _try_lock(self, block: int) -> bool:
        path = self._locks / f"uids-{block}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its last holder may have removed the file between our open and our lock.
            held = os.fstat(descriptor).st_ino == path.stat().st_ino
        except OSError:
            held = False
        if not held:
            os.close(descriptor)
            return False
        self._lock, self._path, self._block = descriptor, path, block
        return True


def _are_mapped(first: int, last: int) -> bool:
    for line in procfs.read(os.getpid(), "uid_map").splitlines():
        inside, _, length = (int(word) for word in line.split())
        if inside <= first and last <= inside + length:
            return True
    return False


def _living_uids() -> set[int]:
    return {uid for pid in procfs.pids() for uid in procfs.uids(pid)}


def make_user_namespace(uid: int, maps: str, *, nests: bool = False) -> int:
    """Makes a user namespace owned by a uid.

    Args:
        uid: The owner.
        maps: Its uid map, and its gid map, which are the same.
        nests: Whether further user namespaces can be made inside it.

    Returns:
        A descriptor of the namespace; it lives while that is open or a process is in it.

    Raises:
        StartFailed: The kernel refused.
    """
    hold = _HOLD.format(forbid="true" if nests else _FORBID)
    # Not Popen's `user`: with it Python forks instead of vforking, and a library's fork handlers
    # (gRPC starts threads in them) run in the child, which then dies now and then.
    try:
        holder = subprocess.Popen(
            [*as_uid(uid), "/usr/bin/unshare", "--user", "--keep-caps", "--", SHELL, "-c", hold],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            cwd="/",
        )
    except OSError as error:
        problem = f"cannot run setpriv and unshare (install util-linux): {error}"
        raise StartFailed(problem) from error
    with holder:
        assert holder.stdin
        assert holder.stdout
        assert holder.stderr
        try:
            if holder.stdout.readline() == b"\n":
                for name in ("uid_map", "gid_map"):
                    Path(f"/proc/{holder.pid}/{name}").write_text(maps, encoding="ascii")
                found = os.open(f"/proc/{holder.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
                holder.stdin.write(b"\n")
                holder.stdin.flush()
                if holder.stdout.readline() == b"\n":
                    return found
                os.close(found)
            problem = holder.stderr.read(2000).decode("utf-8", "replace").strip()
            problem = problem or f"unshare ended with {holder.wait()} and said nothing"
        except OSError as error:
            problem = str(error)
        finally:
            holder.kill()
    raise StartFailed(f"cannot make a user namespace for uid {uid}: {problem}")
