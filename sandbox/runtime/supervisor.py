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
from .filelink import FileLink
from .hostlink import HostLink
from .linux import signals
from .outputs import LateOutputs, Outputs, make_pipe, make_recording
from .processes import Sweep, is_ending
from .replink import ReplLink
from .stdinlink import StdinLink

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from .frames import Frame
    from .settings import Settings

SWEEP_WAIT = 0.002  # between two looks at /proc while processes are being killed
END_SECONDS = 5.0
OUTCOMES = ("completed", "returned", "raised", "errored")  # those that a REPL may tell
FAILURE_KEYS = ("type_name message traceback invocation_id ending reason path expected got").split()
LAST_FRAMES = 1024  # more than its socket can hold
FRAMES_A_TURN = 64  # of a REPL before others are served
REAPED_A_TURN = 512  # of ended processes
PIECES_A_TURN = 4  # of one stream
SMALL_PIECE = 32_768  # code that prints less at a time is let print more before the next look
PAUSE_SECONDS = 0.002


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
        self._late = LateOutputs()
        self._stdin = StdinLink(self._link)
        self._files = FileLink(chosen)
        self._capture: CaptureLink | None = None
        self._capture_sweep: Sweep | None = None
        self._capture_request: dict[str, Any] = {}
        self._pause_until = 0.0  # when it is time to look at output again
        self._reaps_on = False  # whether more children may have ended than were looked at
        # Pipes for the next cell, made while there is nothing else to do.
        self._spare: tuple[tuple[int, int], tuple[int, int]] | None = None
        self._takes_more = True  # whether another cell may come
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
            self._stdin.flush()
            self._tick(time.monotonic())
            self._link.flush()
            self._prepare()
            ready = self._poll()
            if self._link.reader in ready and not self._serve_host():
                return
            self._serve_repl()
            self._serve_outputs(ready)
            self._serve_files()
            self._serve_capture()

    def _prepare(self) -> None:
        if self._cell is None and self._spare is None and self._takes_more:
            try:
                self._spare = make_pipe(), make_pipe()
            except OSError:
                self._takes_more = False  # no descriptor is free: whoever needs one will say so

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
        # Asked once: a pause that is over a moment later must still bound the wait, or the output
        # that is not watched here would never be read.
        is_pausing = self._is_pausing()
        if self._cell is not None and has_room and not is_pausing:
            for stream in self._cell.outputs.readable():
                poll.register(stream.descriptor, select.POLLIN)
        if self._capture is not None and has_room:
            poll.register(self._capture.descriptor, select.POLLIN)
        if has_room:
            for _, stream in self._late.readable():
                poll.register(stream.descriptor, select.POLLIN)
            if self._files.descriptor >= 0:
                poll.register(self._files.descriptor, select.POLLIN)
        if self._stdin.wants_write:
            poll.register(self._stdin.descriptor, select.POLLOUT)
        events = poll.poll(self._timeout(is_pausing=is_pausing))
        ready = {descriptor for descriptor, _ in events}
        if self._wake in ready:
            posix.read(self._wake, 4096)
        return ready

    def _timeout(self, *, is_pausing: bool) -> float | None:
        """Returns how long nothing needs to be done, in milliseconds; None: no limit."""
        if self._reaps_on:
            return 0
        cell = self._cell
        if self._capture_sweep is not None or (cell is not None and cell.is_sweeping):
            return SWEEP_WAIT * 1000
        if cell is not None and cell.draining and cell.outputs.is_drained:
            return 0
        moments = [self._files.next_time(), cell.next_time() if cell is not None else None]
        moments.append(self._link.held_until or None)
        if cell is not None and is_pausing:
            moments.append(self._pause_until)
        due = [moment for moment in moments if moment is not None]
        if not due:
            return None
        return max(0.0, (min(due) - time.monotonic()) * 1000 + 1)

    def _is_pausing(self) -> bool:
        return self._pause_until > 0 and time.monotonic() < self._pause_until

    # The host

    def _serve_host(self) -> bool:
        for frame in self._link.read():
            kind = frame.type
            if kind == "shutdown":
                return False
            if kind == "cell":
                self._begin_cell(frame)
            elif kind == "blob":
                repl = self._ensure_repl()
                if repl is not None:
                    repl.send_blob(frame)
            elif kind == "reply":
                self._pass_reply(frame)
            elif kind == "interrupt":
                if self._cell is not None and self._cell.id == frame.header["cell"]:
                    self._cell.stop("interrupted", time.monotonic())
            elif kind == "credit":
                self._take_credit(frame.header)
            elif kind == "stdin":
                self._stdin.feed(frame)
            elif kind == "file_op":
                self._files.ask(frame)
            elif kind in ("tool_call", "tool_cancel"):
                self._pass_tool(frame)
            elif kind == "capture":
                self._begin_capture(frame.header)
            else:
                raise frames.FrameError(f"the host sends no {kind[:40]}")
        return True

    def _take_credit(self, header: dict[str, Any]) -> None:
        cell, name, offset = header["cell"], header["stream"], header["offset"]
        if self._cell is not None and self._cell.id == cell:
            self._cell.outputs.credit(name, offset)
        else:
            self._late.credit(cell, name, offset)

    def _pass_reply(self, frame: Frame) -> None:
        repl = self._repl
        call = repl.own_call(frame.header["call"]) if repl is not None else None
        if repl is not None and call is not None:
            frame.header["call"] = call
            repl.has_contents(frame.header)
            repl.send(frames.encode(frame.header, frame.payload))

    def _pass_tool(self, frame: Frame) -> None:
        repl = self._repl
        if frame.type == "tool_cancel":
            if repl is not None:
                repl.send(frames.encode(frame.header))
        elif repl is not None and repl.has_contents(frame.header):
            repl.call_tool(frame)
        else:
            message = "the code that had this tool is gone"
            self._fail_tool(frame.header["call"], "TOOL_UNREACHABLE", message)

    def _fail_tool(self, call: str, reason: str, message: str) -> None:
        failure = _failure(message, reason)
        self._link.send({"type": "tool_result", "call": call, "failure": failure})

    def _begin_cell(self, frame: Frame) -> None:
        header = frame.header
        if self._cell is not None or self._capture_request:
            raise frames.FrameError("a cell beside another one or after the capture")
        repl = self._ensure_repl()
        pipes = self._spare or (make_pipe(), make_pipe())
        self._spare = None
        descriptors: list[int] = []
        record = -1
        if header["mode"] != "program":
            record, copy = make_recording()
            descriptors = [copy] if record >= 0 else []
        if header.get("stdin"):
            descriptors.append(self._stdin.reader())
        now = time.monotonic()
        limit = header["output_limit"]
        timeout = header.pop("timeout_ms")
        self._cell = CellRun(
            header["cell"],
            Outputs(self._link, header["cell"], pipes, limit, record),
            repl.pid if repl is not None else -1,
            repl.key if repl is not None else None,
            now + timeout / 1000 if timeout else 0.0,
            self._settings.grace_seconds,
            self._files.owns,
        )
        self._cell.state_lost = self._lost
        self._cell.final = header.setdefault("final", False)
        self._lost = False
        if repl is None or not repl.has_contents(header):
            # What it had been sent of the cell is gone with the REPL before it.
            for descriptor in descriptors:
                posix.close(descriptor)
            what = "the REPL died before the cell began"
            failure = _failure("no REPL can be started now" if repl is None else what)
            report = {"outcome": "repl_died", "failure": failure}
            self._cell.state_lost = True
            self._cell.finish(report, b"")
            return
        header["records"] = record >= 0
        kept = (pipes[0][1], pipes[1][1])
        repl.send(frames.encode(header, frame.payload), tuple(descriptors), kept)

    # The REPL

    def _ensure_repl(self) -> ReplLink | None:
        """Returns the REPL, a new one if there is none; None where none can be started now."""
        if self._repl is None:
            try:
                self._repl = ReplLink(self._settings, self._generation + 1)
            except OSError:
                return None  # processes of the code's may have used up what a sandbox may have
            self._generation += 1
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
                self._pass_on(repl, frame)
        except EOFError:
            if not is_ending(repl.pid):  # else its own end is what is told
                repl.kill("the REPL closed its channel and was ended")
        except frames.FrameError as error:
            # A REPL that cannot be understood is of no use; its death is reported.
            repl.kill(f"the REPL sent what it may not send and was ended: {error}")

    def _pass_on(self, repl: ReplLink, frame: Frame) -> None:
        kind, header = frame.type, frame.header
        cell = self._cell
        if kind == "done":
            if cell is None or cell.report is not None or header.get("cell") != cell.id:
                raise frames.FrameError("a report about no running cell")
            failure = header.get("failure")
            if header.get("outcome") not in OUTCOMES or not isinstance(failure, (dict, type(None))):
                raise frames.FrameError("a report that is none")
            cell.finish(header, frame.payload)
            if cell.ends_repl:
                cell.wait_for_threads(time.monotonic())
            elif cell.reason:
                repl.send(frames.encode({"type": "end_threads", "cell": cell.id}))
                cell.wait_for_threads(time.monotonic())
            return
        if kind == "threads_ended":
            if cell is not None and header.get("cell") == cell.id:
                cell.threads_ended()
            return
        if kind == "call":
            header["cell"] = cell.id if cell is not None and cell.report is None else ""
        if kind in ("started", "display"):
            if cell is None or cell.report is not None or header.get("cell") != cell.id:
                raise frames.FrameError("a word about no running cell")
            if cell.has_started is (kind == "started"):
                raise frames.FrameError("a cell starts once, and before it shows anything")
            cell.begin(time.monotonic())
        if kind == "started" and not frame.payload:
            self._link.send_soon(header, time.monotonic())
        else:
            self._link.send(header, frame.payload)

    def _reap(self) -> None:
        self._reaps_on = False
        for _ in range(REAPED_A_TURN):
            try:
                pid, status = posix.waitpid(-1, posix.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._repl is not None and pid == self._repl.pid:
                self._repl_gone(self._repl, status)
            self._files.gone(pid)
        self._reaps_on = True

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
                self._pass_on(repl, frame)
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
        cell.state_lost = cell.state_lost or not (cell.final and cell.report is not None)
        cell.threads_ended()
        if cell.report is None:
            cell.finish(_death_report(status, repl.fault), b"")

    # Cells

    def _tick(self, now: float) -> None:
        if self._link.held_until and now >= self._link.held_until:
            self._link.release()
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
        if cell.is_sweeping and not cell.step_sweep():
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
                "text": header.get("text") if outcome == "completed" else None,
            },
            payload if outcome in ("returned", "completed") else b"",
        )
        self._late.add(cell.outputs)
        self._cell = None
        self._takes_more = not cell.final

    def _serve_outputs(self, ready: set[int]) -> None:
        cell = self._cell
        if cell is not None:
            taken = 0
            for stream in cell.outputs.readable():
                if stream.descriptor in ready or cell.draining:
                    taken += cell.outputs.pump(stream, PIECES_A_TURN)
            if 0 < taken < SMALL_PIECE and not cell.draining:
                self._pause_until = time.monotonic() + PAUSE_SECONDS
        self._late.pump(ready)

    def _serve_files(self) -> None:
        while self._link.has_room:
            outcome = self._files.receive()
            if outcome is None:
                return
            self._link.send(outcome.header, outcome.payload)

    # The capture

    def _begin_capture(self, header: dict[str, Any]) -> None:
        self._capture_request = header
        if self._cell is not None:
            self._cell.stop("interrupted", time.monotonic())
        self._capture_sweep = Sweep(())
        self._files.close()

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


def _failure(message: str, reason: str = "") -> dict[str, str]:
    given = {"message": message, "reason": reason}
    return {name: given.get(name, "") for name in FAILURE_KEYS}


def _death_report(status: int, fault: str) -> dict[str, Any]:
    """Writes the report about a REPL that died, or was ended for a fault."""
    report: dict[str, Any] = {"outcome": "repl_died"}
    if fault:
        report["failure"] = _failure(fault[: frames.MAX_MESSAGE])
    if posix.WIFSIGNALED(status):
        report["signal"] = posix.WTERMSIG(status)
    else:
        report["exit_code"] = posix.WEXITSTATUS(status)
    return report
