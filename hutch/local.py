"""The local controller's life, as its clients see it: where it is, how it is started.

Called by `hutch.aio` (a client without a target), `hutch.supervise` and the CLI; calls the
operating system only. Every function here may block and must not run on an event loop.

Files of a state directory and of its runtime directory are named in `LocalPaths` and nowhere else.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import select
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hutch.errors import HutchError

START_TIMEOUT_SECONDS = 60.0
_POLL_SECONDS = 0.05
_SOCKET_PATH_LIMIT = 107
_READY_LINE_LIMIT = 64 * 1024


class LocalControllerError(HutchError):
    """A local controller could not be found, used or started; the message names the mend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPaths:
    """Every path that local processes agree upon.

    Attributes:
        state: The state directory, 0700.
        runtime: The directory of the sockets, 0700.
    """

    state: Path
    runtime: Path

    @property
    def controller_file(self) -> Path:
        """What the live controller says of itself."""
        return self.state / "controller.json"

    @property
    def host_state(self) -> Path:
        """The host's own state directory."""
        return self.state / "host"

    @property
    def host_file(self) -> Path:
        """What the live host says of itself."""
        return self.host_state / "host.json"

    @property
    def up_lock(self) -> Path:
        """Held by the supervising `hutch up`; its text is that process's id."""
        return self.state / "up.lock"

    @property
    def start_lock(self) -> Path:
        """Held while somebody starts a controller."""
        return self.state / "start.lock"

    @property
    def key_file(self) -> Path:
        """The key of the TCP listener."""
        return self.state / "client.key"

    @property
    def logs(self) -> Path:
        """Where the processes' standard error goes."""
        return self.state / "logs"

    @property
    def controller_socket(self) -> Path:
        """The controller's private listener."""
        return self.runtime / "controller.sock"

    @property
    def host_socket(self) -> Path:
        """The host's private listener."""
        return self.runtime / "host.sock"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveProcess:
    """A controller or host that runs: its process and where it listens.

    `start_time` is field 22 of `/proc/PID/stat`: with the id it names one process for good.
    """

    pid: int
    start_time: str
    socket: str
    listen: str = ""
    version: str = ""

    def alive(self) -> bool:
        """Whether that very process still runs."""
        return process_start_time(self.pid) == self.start_time

    def answers(self) -> bool:
        """Whether it runs and its socket takes connections."""
        return self.alive() and socket_answers(self.socket)


def default_state() -> Path:
    """`$HUTCH_STATE`, else the XDG state directory's `hutch`."""
    named = os.environ.get("HUTCH_STATE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_STATE_HOME")
    if base and os.path.isabs(base):
        return Path(base) / "hutch"
    return Path.home() / ".local" / "state" / "hutch"


def prepare(state: Path | str | None = None) -> LocalPaths:
    """The paths of a state directory, whose directories are made where they are missing.

    Raises:
        LocalControllerError: A directory cannot be made, is somebody else's or open to others.
    """
    directory = Path(state) if state else default_state()
    _private_directory(directory, "state directory", parents=True)
    directory = directory.resolve()
    runtime = _runtime_path(directory)
    _private_directory(runtime, "runtime directory")
    paths = LocalPaths(state=directory, runtime=runtime)
    if len(os.fsencode(paths.controller_socket)) > _SOCKET_PATH_LIMIT:
        raise LocalControllerError(
            f"the socket path {str(paths.controller_socket)!r} is over {_SOCKET_PATH_LIMIT} bytes: "
            "set XDG_RUNTIME_DIR (or TMPDIR) to a shorter directory"
        )
    return paths


def _runtime_path(state: Path) -> Path:
    digest = hashlib.sha256(os.fsencode(state)).hexdigest()[:12]
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.path.isabs(base) and os.path.isdir(base):
        return Path(base) / f"hutch-{digest}"
    return Path(tempfile.gettempdir()) / f"hutch-{os.getuid()}-{digest}"


def _private_directory(path: Path, what: str, *, parents: bool = False) -> None:
    """Makes a 0700 directory, or checks that the one that is there is ours alone."""
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        # A link in a directory that others may write could lead anywhere; in ours it is our wish.
        found = path.stat() if parents else path.lstat()
    except OSError as error:
        raise LocalControllerError(f"the {what} {str(path)!r} cannot be used: {error}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise LocalControllerError(f"the {what} {str(path)!r} is not a directory")
    if found.st_uid != os.getuid():
        raise LocalControllerError(
            f"the {what} {str(path)!r} belongs to user {found.st_uid}, not to you: name another one"
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise LocalControllerError(
            f"the {what} {str(path)!r} is open to others: run chmod 700 {str(path)!r}"
        )


def process_start_time(pid: int) -> str | None:
    """When a live process started, as the kernel's own text; None for none and for a zombie."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = line[line.rfind(")") + 1 :].split()
    if len(fields) < 20 or fields[0] in ("Z", "X"):
        return None
    return fields[19]


def socket_answers(path: str) -> bool:
    """Whether somebody takes connections at a unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def read_process(path: Path) -> LiveProcess | None:
    """What a `controller.json` or `host.json` names, alive or not; None when it says nothing."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return LiveProcess(
            pid=int(data["pid"]),
            start_time=str(data["start_time"]),
            socket=str(data["socket"]),
            listen=str(data.get("listen", "")),
            version=str(data.get("version", "")),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def find_live(path: Path) -> LiveProcess | None:
    """The live process that a `controller.json` or `host.json` names, if it answers."""
    found = read_process(path)
    return found if found is not None and found.answers() else None


def read_key(paths: LocalPaths) -> str:
    """The TCP listener's key; empty when there is none yet."""
    try:
        return paths.key_file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def lock_file(path: Path) -> IO[bytes] | None:
    """Takes an exclusive lock for as long as the file is open; None when somebody holds it."""
    handle = open(path, "a+b", opener=lambda name, flags: os.open(name, flags, 0o600))
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        return None
    return handle


def _served(paths: LocalPaths) -> LiveProcess | None:
    """The live controller, if its host lives too: a host that died with its `up` stays away."""
    live = find_live(paths.controller_file)
    return live if live is not None and find_live(paths.host_file) is not None else None


@contextmanager
def _start_lock(paths: LocalPaths, deadline: float) -> Iterator[bool]:
    """Holds the start lock; False when controller and host appeared while waiting for it."""
    while True:
        handle = lock_file(paths.start_lock)
        if handle is not None:
            with handle:
                yield True
            return
        if _served(paths) is not None:
            yield False
            return
        if time.monotonic() > deadline:
            raise LocalControllerError(
                f"another process has been starting a controller for {str(paths.state)!r} for too "
                f"long: see {str(paths.logs)!r}"
            )
        time.sleep(_POLL_SECONDS)


def ensure(paths: LocalPaths, *, timeout_seconds: float = START_TIMEOUT_SECONDS) -> LiveProcess:
    """The live controller of a state directory, started when there is none.

    It is race-free: of many callers at once one starts it and all get the same one.

    Raises:
        LocalControllerError: It could not be started; the message has the reason.
    """
    deadline = time.monotonic() + timeout_seconds
    started = False
    while True:
        live = find_live(paths.controller_file) if started else _served(paths)
        if live is not None:
            return live
        with _start_lock(paths, deadline) as mine:
            if mine and _served(paths) is None:
                _start_up(paths, deadline)  # where an `up` lives already this only waits for it
                started = True
        if time.monotonic() > deadline:
            raise LocalControllerError(
                f"no controller for {str(paths.state)!r} answered within {timeout_seconds:.0f} s: "
                f"see {str(paths.logs)!r}"
            )


def _start_up(paths: LocalPaths, deadline: float) -> None:
    """Starts an `up` of its own session, which ends by itself, and waits until it is ready."""
    paths.logs.mkdir(mode=0o700, exist_ok=True)
    command = [
        sys.executable,
        "-I",
        "-m",
        "hutch.cli",
        "up",
        "--ephemeral",
        "--state",
        str(paths.state),
    ]
    with open_log(paths.logs / "up.log") as log:
        process, reader = spawn_ready(command, log)
    try:
        process.wait()  # it leaves a child of its own behind, which nobody has to reap here
        ready = wait_ready(reader, deadline)
    finally:
        os.close(reader)
    if ready.get("ready") is True:
        return
    problem = ready.get("problem") or f"the local controller did not start: see {str(paths.logs)!r}"
    raise LocalControllerError(str(problem))


def open_log(path: Path) -> IO[bytes]:
    """A log file to append to, 0600."""
    return open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600))


def spawn_ready(command: list[str], log: IO[bytes]) -> tuple[subprocess.Popen[bytes], int]:
    """Starts a process in its own session that will say on a descriptor when it is ready.

    Args:
        command: The command, to which `--ready-fd N` is added.
        log: Where its standard output and error go.

    Returns:
        The process, and the descriptor to read from, which the caller closes.
    """
    reader, writer = os.pipe()
    try:
        process = subprocess.Popen(
            [*command, "--ready-fd", str(writer)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            pass_fds=(writer,),
            start_new_session=True,
        )
    except OSError:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    return process, reader


def wait_ready(reader: int, deadline: float) -> dict[str, object]:
    """The JSON line that a started process wrote; empty when it closed or was too late."""
    data = b""
    while b"\n" not in data and len(data) < _READY_LINE_LIMIT:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reader], [], [], left)[0]:
            return {}
        chunk = os.read(reader, 4096)
        if not chunk:
            break
        data += chunk
    return parse_ready(data)


def parse_ready(data: bytes) -> dict[str, object]:
    """What a ready line says; empty when it is none."""
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def write_ready(
    descriptor: int | None, facts: Mapping[str, object] | None = None, *, problem: str = ""
) -> None:
    """Tells the starter on its descriptor that this process is ready, or why it never will be."""
    if descriptor is None:
        return
    line: dict[str, object] = {"ready": not problem, **(facts or {})}
    if problem:
        line["problem"] = problem
    with suppress(OSError), open(descriptor, "wb") as pipe:
        pipe.write(json.dumps(line).encode() + b"\n")


def key_for(target: str, paths: LocalPaths) -> str:
    """The local key when a TCP target is the listener of the state directory's live controller."""
    live = find_live(paths.controller_file)
    if live is None or not live.listen or live.listen != target:
        return ""
    return read_key(paths)
