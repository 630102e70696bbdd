"""The process that sandboxes are forked from: an interpreter with everything of ours imported.

Started by a driver, inside a bubblewrap sandbox of its own, with a message socket to the host as
descriptor 0. For each request it makes one process in fresh namespaces of every kind. That process
joins its control groups, prepares what no request could change, waits on its frame channel for the
rest (see `namespaces`), gives up every right it had, and goes on as a supervisor.

No user code ever runs here, nothing of a sandbox reaches it but an exit status, and it holds no
secret. Where a machine cannot have it, a driver starts each sandbox's interpreter anew.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys

from . import namespaces

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

REQUEST_BYTES = 65_536
MAX_DESCRIPTORS = 16
# What a sandbox imports when it has time, and what it would import with its first cell.
MODULES = (
    "ast",
    "contextlib",
    "dataclasses",
    "datetime",
    "decimal",
    "linecache",
    "pathlib",
    "resource",
    "threading",
    "traceback",
    "typing",
    "uuid",
)
# Libraries of linear algebra start as many threads as there are cores, unless they are told not to.
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
OURS = (
    "supervisor",
    "syscalls",
    "repl",
    "guest",
    "failures",
    "history",
    "shows",
    "tools",
    "serving",
    "returns",
    "hints",
)


def serve(arguments: list[str]) -> NoReturn:
    """Forks sandboxes until the host is gone.

    Args:
        arguments: a name as long as any sandbox's, to be replaced by theirs; where files of the
            driver's are; then modules to import.
    """
    name, files, *modules = arguments
    for module in MODULES:
        __import__(module)
    for module in OURS:
        __import__(f"{__package__}.{module}")
    if modules:
        _preload(modules)
    place = namespaces.Place(name.encode("ascii"), files)
    host = socket.socket(fileno=0)
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    gc.collect()
    gc.freeze()
    poll = select.poll()
    poll.register(host, select.POLLIN)
    poll.register(reader, select.POLLIN)
    _send(host, {"is": "ready"})
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if reader in ready:
            os.read(reader, 4096)
            _reap(host)
        if host.fileno() in ready:
            data, descriptors, _, _ = socket.recv_fds(host, REQUEST_BYTES, MAX_DESCRIPTORS)
            if not data:
                os._exit(0)  # and with it every sandbox that is left
            _fork(host, place, json.loads(data), descriptors)


def _preload(modules: list[str]) -> None:
    """Imports a template's modules, installed ones too, as every sandbox of it will find them.

    Raises:
        ImportError: one cannot be imported.
        RuntimeError: one left threads running, which no fork would have.
    """
    import site

    site.main()
    alone = dict.fromkeys(ONE_THREAD, "1")
    os.environ.update(alone)
    for module in modules:
        __import__(module)
    for variable in alone:
        del os.environ[variable]
    if len(os.listdir("/proc/self/task")) > 1:
        names = ", ".join(modules)
        raise RuntimeError(f"a module among {names} starts threads when it is imported")
    numbers = sys.modules.get("numpy.random")
    if numbers is not None:  # the module `random` does so itself
        os.register_at_fork(after_in_child=numbers.seed)


def _fork(host: socket.socket, place: namespaces.Place, order: Any, descriptors: list[int]) -> None:
    mapped, map_it = os.pipe2(os.O_CLOEXEC)
    try:
        try:
            pid = namespaces.clone(namespaces.CLONED)
            if pid == 0:
                namespaces.enter(place, mapped, descriptors, is_root=order["is_root"])
            for name in ("uid_map", "gid_map"):
                with open(f"/proc/{pid}/{name}", "w", encoding="ascii") as file:
                    file.write(order["map"])
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            _send(host, {"is": "refused", "key": order["key"], "text": str(error)})
            return
        os.write(map_it, b"x")
        try:
            socket.send_fds(
                host, [_encode({"is": "made", "key": order["key"], "pid": pid})], [pidfd]
            )
        finally:
            os.close(pidfd)
    finally:
        for descriptor in (mapped, map_it, *descriptors):
            os.close(descriptor)


def _reap(host: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
        _send(host, {"is": "ended", "pid": pid, "code": code})


def _send(host: socket.socket, message: dict[str, Any]) -> None:
    try:
        host.send(_encode(message))
    except OSError:
        os._exit(0)  # the host is gone


def _encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode("ascii")
