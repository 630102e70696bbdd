"""Sandboxes that are forked from one interpreter instead of being started anew.

Called by the bubblewrap driver; calls bwrap once, and `sandbox.runtime.zygote` inside it. The
zygote speaks a message socket: a request carries the descriptors of a new process, and the answer a
pidfd of it. When the zygote ends, the kernel ends every sandbox that came from it. See
docs/adr/0011.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sandbox.drivers.driver import StartFailed
from sandbox.drivers.process import SandboxProcess

_MESSAGE_BYTES = 65_536
_BEGIN_SECONDS = 30.0
_TAIL_CHARACTERS = 2000
_SIZE_BYTES = 4


class ForkedProcess(SandboxProcess):
    """The first process of a sandbox; the zygote's child."""

    def __init__(self, pid: int, pidfd: int, channel: socket.socket, diagnostics: int) -> None:
        super().__init__(pid, channel, diagnostics)
        self._pidfd = pidfd

    def first_process(self) -> int | None:
        """This one."""
        return None if self._ended.done() else self._pid

    def is_alive(self) -> bool:
        """Whether it has not ended, known or not."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(0)

    def end_inside(self) -> None:
        """Kills this one."""
        self.kill()

    def kill(self) -> None:
        """Sends SIGKILL, also when it has ended."""
        if not self._ended.done():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def order(self, order: Mapping[str, object]) -> None:
        """Says what the sandbox is to be; frames may follow at once.

        Raises:
            OSError: It is gone.
        """
        text = json.dumps(order).encode("ascii")
        whole = len(text).to_bytes(_SIZE_BYTES, "big") + text
        if self.channel.send(whole) != len(whole):
            raise OSError("what a sandbox is to be does not fit into its channel")

    def ended(self, code: int) -> None:
        """Takes what the zygote says of its end."""
        self._settle(code)

    def close(self) -> None:
        """Closes this side's descriptors; call it once the process has ended."""
        super().close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


class Zygote:
    """The interpreter that sandboxes are forked from, and the socket to it.

    Args:
        child: bwrap, as a child of the thread that lives as long as the host.
        control: This side of the message socket.
        diagnostics: Where it writes what went wrong; this object reads and closes it.
    """

    def __init__(
        self, child: subprocess.Popen[bytes], control: socket.socket, diagnostics: int
    ) -> None:
        self._child = child
        self._control = control
        self._diagnostics = diagnostics
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._asking: dict[int, _Asking] = {}
        self._children: dict[int, ForkedProcess] = {}  # by the pid the zygote knows
        self._asked = 0
        self._is_open = True
        self._loop.add_reader(control, self._receive)

    @classmethod
    def start(cls, argv: Sequence[str], *, pass_fds: Sequence[int]) -> Zygote:
        """Starts one; it can be asked at once.

        Raises:
            StartFailed: It could not be started.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        diagnostics, diagnostics_end = os.pipe()
        try:
            ours.setblocking(False)
            os.set_blocking(diagnostics, False)
            child = subprocess.Popen(
                argv,
                stdin=theirs.fileno(),
                stdout=diagnostics_end,
                stderr=diagnostics_end,
                env={},
                cwd="/",
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
        return cls(child, ours, diagnostics)

    @property
    def is_open(self) -> bool:
        """Whether it can be asked."""
        return self._is_open

    async def wait_ready(self) -> None:
        """Waits until it has imported everything.

        Raises:
            StartFailed: It ended, or took too long.
        """
        try:
            async with asyncio.timeout(_BEGIN_SECONDS):
                await asyncio.shield(self._ready)
        except TimeoutError as error:
            raise StartFailed(f"it was not ready within {_BEGIN_SECONDS:.0f} seconds") from error

    async def fork(self, *, maps: str, is_root: bool, join: Sequence[int]) -> ForkedProcess:
        """Makes a process in namespaces of its own, which waits for its `order`.

        Args:
            maps: The uid map of its user namespace, and the gid map, which are the same.
            is_root: Whether it becomes uid 0 there, beside the REPL's.
            join: Descriptors of files that take a 0 to join a control group.

        Do not cancel this: the process would be nobody's.

        Raises:
            StartFailed: It could not be made; nothing of it is left.
        """
        if not self._is_open:
            raise StartFailed(f"the zygote ended: {self._said()}")
        self._asked += 1
        request = {"key": self._asked, "map": maps, "is_root": is_root}
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as theirs:
            channel, channel_end = socket.socketpair()
            undo.callback(channel.close)
            theirs.callback(channel_end.close)
            diagnostics, diagnostics_end = os.pipe()
            undo.callback(os.close, diagnostics)
            theirs.callback(os.close, diagnostics_end)
            channel.setblocking(False)
            os.set_blocking(diagnostics, False)
            given = [channel_end.fileno(), diagnostics_end, *join]
            try:
                socket.send_fds(self._control, [json.dumps(request).encode("ascii")], given)
            except OSError as error:
                raise StartFailed(f"the zygote cannot be asked: {error}") from error
            undo.pop_all()
        answer: asyncio.Future[ForkedProcess] = self._loop.create_future()
        self._asking[self._asked] = _Asking(answer, channel, diagnostics)
        return await answer

    async def close(self) -> None:
        """Ends it, and with it every process that it forked."""
        self._stop()
        await asyncio.to_thread(self._child.wait)
        os.close(self._diagnostics)

    def _receive(self) -> None:
        while self._is_open:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._control, _MESSAGE_BYTES, 1)
            except BlockingIOError:
                return
            except OSError:
                data, descriptors = b"", []
            if not data:
                self._stop()
                return
            self._take(json.loads(data), descriptors)

    def _take(self, message: dict[str, Any], descriptors: list[int]) -> None:
        kind = message["is"]
        if kind == "ready":
            self._ready.set_result(None)
        elif kind == "ended":
            child = self._children.pop(message["pid"], None)
            if child is not None:
                child.ended(message["code"])
        elif kind == "refused":
            asking = self._asking.pop(message["key"])
            asking.fail(f"the zygote could not fork: {message['text']}")
        elif kind == "made":
            asking = self._asking.pop(message["key"])
            pidfd = descriptors[0]
            pid = _pid_of(pidfd)
            if not pid:
                os.close(pidfd)
                asking.fail("a process that the zygote forked ended at once")
                return
            child = ForkedProcess(pid, pidfd, asking.channel, asking.diagnostics)
            self._children[message["pid"]] = child
            asking.answer.set_result(child)

    def _stop(self) -> None:
        """Ends what is left of it; whoever waits for something of it is told."""
        if not self._is_open:
            return
        self._is_open = False
        self._loop.remove_reader(self._control)
        self._control.close()
        self._child.kill()
        problem = f"the zygote ended: {self._said()}"
        for asking in self._asking.values():
            asking.fail(problem)
        self._asking.clear()
        if not self._ready.done():
            self._ready.set_exception(StartFailed(problem))
            self._ready.exception()  # perhaps nobody waits
        for child in self._children.values():
            child.ended(-signal.SIGKILL)
        self._children.clear()

    def _said(self) -> str:
        try:
            said = os.read(self._diagnostics, _MESSAGE_BYTES).decode("utf-8", "replace").strip()
        except OSError:
            said = ""
        return said[-_TAIL_CHARACTERS:] or "it said nothing"


@dataclass(frozen=True, slots=True)
class _Asking:
    answer: asyncio.Future[ForkedProcess]
    channel: socket.socket
    diagnostics: int

    def fail(self, problem: str) -> None:
        with contextlib.suppress(OSError):
            said = os.read(self.diagnostics, _MESSAGE_BYTES).decode("utf-8", "replace").strip()
            problem = f"{problem}: {said[-_TAIL_CHARACTERS:]}" if said else problem
        self.channel.close()
        os.close(self.diagnostics)
        self.answer.set_exception(StartFailed(problem))


def _pid_of(pidfd: int) -> int:
    """The id, as this process sees it, of the process that a pidfd names; 0 when it is gone."""
    with open(f"/proc/self/fdinfo/{pidfd}", encoding="ascii") as file:
        for line in file:
            if line.startswith("Pid:"):
                return max(0, int(line.split()[1]))
    return 0
