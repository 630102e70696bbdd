"""A process with a frame channel: spawned in its own session and watched by a pidfd, or forked.

Called by the drivers, and by `zygotes` for processes that it forks; calls `subprocess` and the
running event loop. Nothing of it is specific to
one container technology.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence

from sandbox.drivers import procfs
from sandbox.drivers.driver import StartFailed

_DIAGNOSTICS_KEPT_BYTES = 4096
_DIAGNOSTICS_READ_BYTES = 65536
_SANDBOX_ID = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)


def check_name(sandbox_id: str) -> None:
    """Refuses a sandbox id that cannot be the name of a folder and a cgroup.

    Raises:
        StartFailed: It cannot.
    """
    if not _SANDBOX_ID.fullmatch(sandbox_id):
        raise StartFailed(f"{sandbox_id[:100]!r} cannot name a sandbox")


class SandboxProcess:
    """A process outside that a sandbox is, or is in, with one stream socket as its standard input
    and output.

    Its standard error is read for as long as it lives, and the last 4 KiB are kept as evidence.
    """

    def __init__(self, pid: int, channel: socket.socket, diagnostics: int) -> None:
        self._pid = pid
        self._channel = channel
        self._diagnostics = diagnostics
        self._tail = b""
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._loop.add_reader(diagnostics, self._drain)

    @property
    def pid(self) -> int:
        """The process id; it stays reserved until the process was reaped."""
        return self._pid

    @property
    def channel(self) -> socket.socket:
        """This side of the frame channel, non-blocking."""
        return self._channel

    @property
    def diagnostics(self) -> str:
        """The end of what it wrote to standard error, as text."""
        return self._tail.decode("utf-8", "replace").strip()

    @property
    def return_code(self) -> int | None:
        """The exit code, the negated signal, or None while it runs."""
        return self._ended.result() if self._ended.done() else None

    def first_process(self) -> int | None:
        """The pid of the first process inside, as this machine sees it; None when there is none."""
        raise NotImplementedError

    def end_inside(self) -> None:
        """Kills the first process inside, and so, by the kernel, every other one."""
        raise NotImplementedError

    async def wait(self) -> int:
        """Waits for its end; any number of callers may wait, and each may be cancelled."""
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        """Sends SIGKILL, also when it has ended."""
        raise NotImplementedError

    def close(self) -> None:
        """Closes this side's descriptors; call it once the process has ended."""
        if self._diagnostics >= 0:
            self._drain()
        if self._diagnostics >= 0:
            self._close_diagnostics()
        if self._channel.fileno() >= 0:
            self._channel.close()

    def _settle(self, code: int) -> None:
        if not self._ended.done():
            self._ended.set_result(code)

    def _drain(self) -> None:
        try:
            piece = os.read(self._diagnostics, _DIAGNOSTICS_READ_BYTES)
        except BlockingIOError:
            return
        if piece:
            self._tail = (self._tail + piece)[-_DIAGNOSTICS_KEPT_BYTES:]
        else:
            self._close_diagnostics()

    def _close_diagnostics(self) -> None:
        self._loop.remove_reader(self._diagnostics)
        os.close(self._diagnostics)
        self._diagnostics = -1


class SpawnedProcess(SandboxProcess):
    """A child of this process, watched by a pidfd.

    It must be spawned on the thread that lives as long as the host, because a parent-death signal
    fires when the spawning thread ends.
    """

    def __init__(
        self, child: subprocess.Popen[bytes], channel: socket.socket, diagnostics: int
    ) -> None:
        super().__init__(child.pid, channel, diagnostics)
        self._child = child
        self._pidfd = os.pidfd_open(child.pid)
        self._loop.add_reader(self._pidfd, self._reap)

    def first_process(self) -> int | None:
        """The one child of bwrap."""
        return next(iter(procfs.direct_children(self._pid)), None)

    def end_inside(self) -> None:
        """Kills the first process inside; bwrap then ends by itself."""
        if not self._ended.done() and (first := self.first_process()) is not None:
            procfs.kill(first)

    def kill(self) -> None:
        """Sends SIGKILL, also when it has ended."""
        if not self._ended.done():
            self._child.kill()

    def close(self) -> None:
        """Closes this side's descriptors; call it once the process has ended."""
        self._stop_watching()
        super().close()

    def _reap(self) -> None:
        self._stop_watching()
        self._settle(self._child.wait())

    def _stop_watching(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1


def spawn(
    argv: Sequence[str], *, env: Mapping[str, str], cwd: str = "/", pass_fds: Sequence[int] = ()
) -> SpawnedProcess:
    """Starts a process with only the standard descriptors and `pass_fds` open, and watches it.

    Args:
        argv: The program and its arguments.
        env: Its whole environment.
        cwd: Its working directory.
        pass_fds: Descriptors it keeps, under the same numbers.

    Raises:
        StartFailed: It could not be started; nothing is left open.
    """
    ours, theirs = socket.socketpair()
    diagnostics, diagnostics_end = os.pipe()
    try:
        ours.setblocking(False)
        os.set_blocking(diagnostics, False)
        child = subprocess.Popen(
            argv,
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=diagnostics_end,
            env=dict(env),
            cwd=cwd,
            close_fds=True,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        ours.close()
        os.close(diagnostics)
        raise StartFailed(f"cannot start {argv[0]}: {error}") from error
    finally:
        theirs.close()
        os.close(diagnostics_end)
    return SpawnedProcess(child, ours, diagnostics)
