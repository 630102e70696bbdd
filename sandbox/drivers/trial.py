"""Trial sandboxes: a program run as a supervisor will be run, before there is any user code.

Called by the bubblewrap driver's self-check, and by the benchmark through the driver; calls bwrap.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sandbox.drivers import arguments, interpreter, launch, layout, selfcheck
from sandbox.drivers.driver import Driver, Limits, SandboxRequest, StartFailed
from sandbox.drivers.users import Slot, Users

NAME = "trial"  # where a sandbox's id stands otherwise
_SECONDS = 30
_OPEN_FILES = 256
_MEMORY_BYTES = 256 * 1024 * 1024
_TMPFS_BYTES = 16 * 1024 * 1024
_PROGRAM = "import sys; print('python', *sys.version_info[:2])"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command line with the descriptors it needs; `release` it after one use."""

    argv: list[str]
    pass_fds: tuple[int, ...]
    slot: Slot | None
    filter_descriptor: int


def command(machine: arguments.Machine, users: Users | None, program: Sequence[str]) -> Command:
    """Builds the command line that runs a program in a sandbox.

    Raises:
        StartFailed: No uid is free.
    """
    slot = users.take() if users is not None else None
    namespace = None
    if users is not None and slot is not None:
        namespace = users.namespace(slot)
    descriptor = os.open(machine.layout.seccomp, os.O_RDONLY | os.O_CLOEXEC)
    argv = arguments.build(
        machine,
        sandbox_id=NAME,
        cpus=1,
        tmpfs=_TMPFS_BYTES,
        user_namespace=namespace,
        seccomp=descriptor,
    )
    wrapped = launch.wrap([*argv, *program], open_files=_OPEN_FILES, uid=slot.uid if slot else None)
    fds = (descriptor,) if namespace is None else (descriptor, namespace)
    return Command(argv=wrapped, pass_fds=fds, slot=slot, filter_descriptor=descriptor)


def release(used: Command, users: Users | None) -> None:
    """Frees what a command took; its processes must have ended."""
    os.close(used.filter_descriptor)
    if used.slot is not None and users is not None:
        users.give_back(used.slot)


def run(
    machine: arguments.Machine, users: Users | None, program: Sequence[str], given: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Runs a program in a sandbox, with bytes on its standard input, and waits for its end.

    Raises:
        subprocess.TimeoutExpired: It took longer than 30 seconds.
        StartFailed: No uid is free.
    """
    used = command(machine, users, program)
    try:
        return subprocess.run(
            used.argv,
            input=given,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
            env={},
            cwd="/",
            pass_fds=used.pass_fds,
            start_new_session=True,
        )
    finally:
        release(used, users)


async def start_one(driver: Driver) -> None:
    """Has a prepared driver make a sandbox, waits until it says something, and destroys it.

    Raises:
        StartFailed: It could not be made, or ended first.
    """
    limits = Limits(
        memory_limit_bytes=_MEMORY_BYTES,
        pids_limit=64,
        cpu_limit_millis=1000,
        tmpfs_limit_bytes=_TMPFS_BYTES,
        open_files_limit=_OPEN_FILES,
    )
    container = await driver.create(
        SandboxRequest(sandbox_id=NAME, template="default", limits=limits)
    )
    said = b""
    try:
        async with asyncio.timeout(_SECONDS):
            said = await asyncio.get_running_loop().sock_recv(container.channel, 1)
    except (OSError, TimeoutError):
        pass
    finally:
        measured = await container.destroy()
    if not said:
        raise StartFailed(f"a sandbox said nothing: {measured.detail or 'it is not known why'}")


def choose(
    bwrap: Path,
    files: layout.Layout,
    users: Users | None,
    mark: str,
    root: Path | None = None,
) -> tuple[arguments.Machine | None, str]:
    """Tries each interpreter in a real sandbox and takes the first that runs there.

    Args:
        bwrap: The program.
        files: What sandboxes see beside the system.
        users: Where uids come from.
        mark: The owner's.
        root: The root file system; None for this machine's own.

    Returns:
        What every sandbox is made from, or None and what is wrong, with the mend.
    """
    problems: list[str] = []
    uid = users.first_uid if users is not None else None
    candidates = interpreter.of_root(root) if root else interpreter.candidates(uid)
    for found in candidates:
        if found.problem:
            problems.append(f"{found.executable}: {found.problem}")
            continue
        machine = arguments.Machine(
            bwrap=bwrap,
            interpreter=found,
            layout=files,
            mark=mark,
            system=arguments.system_folders(root or Path("/")),
        )
        done = run(machine, users, [str(found.executable), "-I", "-S", "-c", _PROGRAM])
        if done.returncode != 0:
            said = done.stderr.decode("utf-8", "replace")
            problems.append(f"{found.executable}: {selfcheck.explain(said, bwrap)}")
            continue
        shown = done.stdout.decode("utf-8", "replace").strip()
        version = tuple(int(word) for word in re.findall(r"[0-9]+", shown)[:2])
        if version >= interpreter.OLDEST:
            return machine, ""
        oldest = ".".join(map(str, interpreter.OLDEST))
        problems.append(f"{found.executable} is {shown}; {oldest} is needed")
    return None, (
        f"No Python runs in a sandbox. {' '.join(f'({text})' for text in problems)} If it is the "
        "interpreter: install Python 3.9 or newer as /usr/bin/python3 (Debian: apt install "
        "python3), or run the host with one that the sandbox's uid can read."
    )
