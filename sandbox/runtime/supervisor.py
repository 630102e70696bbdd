"""PID 1 of a sandbox: stands between the host and the code, and outlasts whatever the code does.

Called by `start`, with the frame channel as descriptors 0 and 1 and a log of the host's as 2. One
loop always reads: the host, the REPL, what cells print. It imports C modules and this package's
own only, and all of it before any user code runs.
"""

from __future__ import annotations

import posix
import select
import sys
import time

from . import frames, linux
from .capturelink import CaptureLink
from .cellrun import CellRun
from .hostlink import HostLink
from .linux import signals
from .outputs import Outputs, make_pipe
from .processes import Sweep
from .replink import ReplLink

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from .frames import Frame
    from .outputs import Stream
    from .settings import Settings

SWEEP_WAIT = 0.002  # between two looks at /proc while processes are being killed
END_SECONDS = 5.0
OUTCOMES = ("completed", "returned", "raised", "errored")  # those that a REPL may tell
FAILURE_KEYS = ("type_name message traceback invocation_id ending reason path expected got").split()
LAST_FRAMES = 1024  # more than its socket can hold
FRAMES_A_TURN = 64  # of a REPL before others are served


def serve(chosen: Settings, hidden: bool, repl: ReplLink) -> NoReturn:
    """Runs a supervisor until its host ends it or is gone.

    Args:
        chosen: what it was started with.
        hidden: whether this process is hidden from the others.
        repl: the first REPL, forked already.
    """
    supervisor = Supervisor(chosen, hidden, repl)
    try:
        supervisor.run()
    except EOFError:
        pass
    except Exception as error:
        # The host's log is the only place left: a broken supervisor must not look like an end.
        posix.write(2, f"supervisor: {type(error).__name__}: {error}\n".encode("utf-8", "replace"))
        supervisor.end()
        posix._exit(70)
    supervisor.end()
    posix._exit(0)


class Supervisor:
    """The loop and what it holds."""

    def __init__(self, chosen: Settings, hidden: bool, repl: ReplLink) -> None:
        """Greets the host; nothing runs yet."""
        self._settings = chosen
        self._link = HostLink(0, 1)
        self._repl: ReplLink | None = repl
        self._generation = 1
        self._lost = False  # a namespace was lost and no report said so yet
        self._cell: CellRun | None = None
        self._leftovers: list[int] = []  # pipes of finished cells that processes still hold
        self._capture: CaptureLink | None = None
        self._capture_sweep: Sweep | None = None
        self._capture_request: dict[str, Any] = {}
        self._wake = self._watch_children()
        self._link.send(
            {
                "type": "ready",
                "version": frames.FRAME_VERSION,
                "python": ".".join(map(str, sys.version_info[:3])),
                "protections": {
                    "dumpable": hidden,
                    "separate_uid": chosen.repl_uid >= 0,
                    "filter": chosen.use_filter and linux.can_filter(),
                },
            }
        )
        self._link.flush()

    def _watch_children(self) -> int:
        reader, writer = posix.pipe2(posix.O_CLOEXEC | posix.O_NONBLOCK)
        signals.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signals.signal(signals.SIGCHLD, lambda number, frame: None)
        return reader

    def run(self) -> None:
        """Serves until the host is gone (EOFError) or says `shutdown` (returns)."""
        while True:
            self._reap()
            self._tick(time.monotonic())
            self._link.flush()
            ready = self._poll()
            if self._link.reader in ready and not self._serve_host():
                return
            self._serve_repl()
            self._serve_outputs(ready)
            self._serve_capture()

    def end(self) -> None:
        """Ends every process; afterwards this one may exit."""
        sweep = Sweep(())
        limit = time.monotonic() + END_SECONDS
        while not sweep.step() and time.monotonic() < limit:
            time.sleep(SWEEP_WAIT)
            self._reap_quietly()
        self._reap_quietly()

    # What is waited for

    def _poll(self) -> set[int]:
        poll = select.poll()
        has_room = self._link.has_room
        poll.register(self._link.reader, select.POLLIN)
        if self._link.queued_bytes:
            mask = select.POLLOUT
            if self._link.writer == self._link.reader:
                mask |= select.POLLIN
            poll.register(self._link.writer, mask)
        poll.register(self._wake, select.POLLIN)
        if self._repl is not None:
            mask = select.POLLIN if has_room else 0
            mask |= select.POLLOUT if self._repl.wants_write else 0
            if mask:
                poll.register(self._repl.descriptor, mask)
        if self._cell is not None and has_room:
            for stream in self._cell.outputs.readable():
                poll.register(stream.descriptor, select.POLLIN)
        if self._capture is not None and has_room:
            poll.register(self._capture.descriptor, select.POLLIN)
        for descriptor in self._leftovers:
            poll.register(descriptor, select.POLLIN)
        events = poll.poll(self._timeout())
        ready = {descriptor for descriptor, _ in events}
        if self._wake in ready:
            posix.read(self._wake, 4096)
        return ready

    def _timeout(self) -> float | None:
        """Returns how long nothing needs to be done, in milliseconds; None: no limit."""
        cell = self._cell
        if self._capture_sweep is not None or (cell is not None and cell.sweep is not None):
            return SWEEP_WAIT * 1000
        if cell is not None and cell.draining and cell.outputs.is_drained:
            return 0
        moment = cell.next_time() if cell is not None else None
        if moment is None:
            return None
        return max(0.0, (moment - time.monotonic()) * 1000 + 1)

    # The host

    def _serve_host(self) -> bool:
        for frame in self._link.read():
            kind = frame.type
            if kind == "shutdown":
                return False
            if kind == "cell":
                self._begin_cell(frame)
            elif kind == "blob":
                self._ensure_repl().send(frames.encode(frame.header, frame.payload))
            elif kind == "reply":
                self._pass_reply(frame)
            elif kind == "interrupt":
                if self._cell is not None and self._cell.id == frame.header["cell"]:
                    self._cell.stop("interrupted", time.monotonic())
            elif kind == "credit":
                if self._cell is not None and self._cell.id == frame.header["cell"]:
                    header = frame.header
                    self._cell.outputs.credit(header["stream"], header["offset"])
            elif kind in ("tool_call", "tool_cancel"):
                self._pass_tool(frame)
            elif kind == "capture":
                self._begin_capture(frame.header)
            else:
                raise frames.FrameError(f"the host sends no {kind[:40]}")
        return True

    def _pass_reply(self, frame: Frame) -> None:
        repl = self._repl
        call = repl.own_call(frame.header["call"]) if repl is not None else None
        if repl is not None and call is not None:
            frame.header["call"] = call
            repl.send(frames.encode(frame.header, frame.payload))

    def _pass_tool(self, frame: Frame) -> None:
        repl = self._repl
        if frame.type == "tool_cancel":
            if repl is not None:
                repl.send(frames.encode(frame.header))
        elif repl is not None:
            repl.call_tool(frame)
        else:
            message = "the code that had this tool is gone"
            self._fail_tool(frame.header["call"], "TOOL_UNREACHABLE", message)

    def _fail_tool(self, call: str, reason: str, message: str) -> None:
        failure = {"reason": reason, "message": message}
        whole = {name: failure.get(name, "") for name in FAILURE_KEYS}
        self._link.send({"type": "tool_result", "call": call, "failure": whole})

    def _begin_cell(self, frame: Frame) -> None:
        header = frame.header
        if self._cell is not None or self._capture_request:
            raise frames.FrameError("a cell beside another one or after the capture")
        repl = self._ensure_repl()
        stdout, stderr = make_pipe(), make_pipe()
        now = time.monotonic()
        limit = header.pop("output_limit")
        timeout = header.pop("timeout_ms")
        self._cell = CellRun(
            header["cell"],
            Outputs(self._link, header["cell"], (stdout[0], stderr[0]), limit),
            repl.pid,
            now + timeout / 1000 if timeout else 0.0,
            self._settings.grace_seconds,
        )
        self._cell.state_lost = self._lost
        self._lost = False
        repl.send(frames.encode(header, frame.payload), (stdout[1], stderr[1]))

    # The REPL

    def _ensure_repl(self) -> ReplLink:
        if self._repl is None:
            self._generation += 1
            self._repl = ReplLink(self._settings, self._generation)
        return self._repl

    def _serve_repl(self) -> None:
        repl = self._repl
        if repl is None:
            return
        repl.flush()
        try:
            for _ in range(FRAMES_A_TURN):
                frame = repl.receive() if self._link.has_room else None
                if frame is None:
                    return
                self._pass_on(frame)
        except (EOFError, frames.FrameError):
            repl.kill()  # a REPL that cannot be understood is of no use; its death is reported

    def _pass_on(self, frame: Frame) -> None:
        kind, header = frame.type, frame.header
        cell = self._cell
        if kind == "done":
            if cell is None or cell.report is not None or header.get("cell") != cell.id:
                raise frames.FrameError("a report about no running cell")
            failure = header.get("failure")
            if header.get("outcome") not in OUTCOMES or not isinstance(failure, (dict, type(None))):
                raise frames.FrameError("a report that is none")
            cell.finish(header, frame.payload)
            return
        if kind == "call":
            header["cell"] = cell.id if cell is not None and cell.report is None else ""
        if kind == "started" and (cell is None or header.get("cell") != cell.id):
            raise frames.FrameError("a start of no running cell")
        self._link.send(header, frame.payload)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = posix.waitpid(-1, posix.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._repl is not None and pid == self._repl.pid:
                self._repl_gone(self._repl, status)

    def _reap_quietly(self) -> None:
        try:
            while posix.waitpid(-1, posix.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass

    def _repl_gone(self, repl: ReplLink, status: int) -> None:
        """Takes what the REPL said last, then reports its death."""
        try:
            for _ in range(LAST_FRAMES):  # a fork of it may go on sending for ever
                frame = repl.receive()
                if frame is None:
                    break
                self._pass_on(frame)
        except (EOFError, frames.FrameError):
            pass
        for name, size in repl.unfinished_blobs():
            # Nobody will name it; its end lets the host forget it.
            self._link.send({"type": "blob", "blob": name, "offset": size, "last": True})
        for call in repl.unanswered_tools():
            message = "the code that had this tool ended while it was called"
            self._fail_tool(call, "TOOL_OUTCOME_UNKNOWN", message)
        repl.close()
        self._repl = None
        cell = self._cell
        if cell is None:
            self._lost = True
            return
        cell.state_lost = True
        if cell.report is None:
            cell.finish(_death_report(cell.id, status), b"")

    # Cells

    def _tick(self, now: float) -> None:
        if self._capture_sweep is not None and self._capture_sweep.step():
            self._start_capture()
        cell = self._cell
        if cell is None:
            return
        if cell.outputs.cut:
            cell.stop("interrupted", now)
        cell.tick(now)
        if cell.report is None:
            return
        if cell.sweep is not None and not cell.draining:
            if not cell.sweep.step():
                return
        if not cell.draining:
            cell.draining = True
            cell.outputs.begin_drain()
        if cell.outputs.is_drained:
            self._end_cell(cell)

    def _end_cell(self, cell: CellRun) -> None:
        header, payload = cell.report or ({}, b"")
        stdout, stderr = cell.outputs.streams
        outcome = header["outcome"]
        failure = header.get("failure")
        if cell.reason and (
            outcome == "repl_died"
            or cell.reason == "timed_out"
            or (failure and failure.get("type_name") == "KeyboardInterrupt")
            or cell.outputs.cut
        ):
            outcome = cell.reason
        killed = len(cell.sweep.killed) if cell.sweep is not None else 0
        self._link.send_in_order(
            {
                "type": "done",
                "cell": cell.id,
                "outcome": outcome,
                "value": header.get("value") if outcome == "returned" else None,
                "failure": failure,
                "stdout_bytes": stdout.offset,
                "stderr_bytes": stderr.offset,
                "killed": killed,
                "background": 0 if cell.sweep is not None else len(cell.own_processes()),
                "state_lost": cell.state_lost,
                "output_cut": cell.outputs.cut,
                "errno": header.get("errno"),
                "exit_code": header.get("exit_code"),
                "signal": header.get("signal"),
            },
            payload if outcome == "returned" else b"",
        )
        self._leftovers += [fd for fd in map(_detach, cell.outputs.streams) if fd >= 0]
        self._cell = None

    def _serve_outputs(self, ready: set[int]) -> None:
        if self._cell is not None:
            for stream in self._cell.outputs.readable():
                if stream.descriptor in ready or self._cell.draining:
                    self._cell.outputs.pump(stream)
        for descriptor in [fd for fd in self._leftovers if fd in ready]:
            self._discard(descriptor)

    def _discard(self, descriptor: int) -> None:
        """Reads what a finished cell's processes still print, so that they are not held up."""
        try:
            data = posix.read(descriptor, frames.OUTPUT_CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            posix.close(descriptor)
            self._leftovers.remove(descriptor)

    # The capture

    def _begin_capture(self, header: dict[str, Any]) -> None:
        self._capture_request = header
        if self._cell is not None:
            self._cell.stop("interrupted", time.monotonic())
        self._capture_sweep = Sweep(())

    def _start_capture(self) -> None:
        """Begins once no process is left, the REPL included, and its death is noted."""
        if self._repl is not None or self._cell is not None:
            return
        self._capture_sweep = None
        if _is_empty(self._settings.workspace):  # most often: then there is nothing to look for
            self._link.send({"type": "captured", "files": 0, "refused": []})
            return
        self._capture = CaptureLink(self._settings, self._capture_request)

    def _serve_capture(self) -> None:
        capture = self._capture
        while capture is not None and self._link.has_room:
            frame = capture.receive()
            if frame is None:
                return
            self._link.send(frame.header, frame.payload)
            if frame.type == "captured":
                capture.close()
                self._capture = capture = None


def _is_empty(folder: str) -> bool:
    try:
        with posix.scandir(folder) as entries:
            return next(entries, None) is None
    except OSError:
        return False  # whoever may look finds out


def _detach(stream: Stream) -> int:
    return stream.detach()


def _death_report(cell: str, status: int) -> dict[str, Any]:
    report: dict[str, Any] = {"type": "done", "cell": cell, "outcome": "repl_died"}
    if posix.WIFSIGNALED(status):
        report["signal"] = posix.WTERMSIG(status)
    else:
        report["exit_code"] = posix.WEXITSTATUS(status)
    return report
