"""The code's threads: which cell started each, where what they print goes, and ending them.

Called by `repl`. A thread prints into the cell that started it, or that started the thread which
did, also when that cell has ended and another one runs. The main thread prints to descriptors 1
and 2 and pays nothing for this.
"""

from __future__ import annotations

import _thread
import io
import posix
import sys

from .linux import read_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LOOK_SECONDS = 0.02
QUIET_LOOKS = 3  # of a thread that waits for something, before it is left alone
ERRORS = {1: "strict", 2: "backslashreplace"}
POOLS = "concurrent/futures/thread.py"
STARTERS = ("start_new_thread", "start_joinable_thread")


def text_stream(
    descriptor: int, kind: int, *, owned: bool = False, made: Any = io.TextIOWrapper
) -> Any:
    """Makes a text stream as descriptor 1 or 2 (`kind`) has it; `owned` ones close with it."""
    raw = io.FileIO(descriptor, "w", closefd=owned)
    # A line at a time: what C code and subprocesses print stays in order with it.
    buffer = io.BufferedWriter(raw)
    stream = made(buffer, encoding="utf-8", errors=ERRORS[kind], line_buffering=True)
    stream.mode = "w"  # as the interpreter's own have it
    return stream


class Stream(io.TextIOWrapper):
    """`sys.stdout` or `sys.stderr` while the code has no thread but the main one."""


class SharedStream(Stream):
    """The same object once there are threads: what they print goes to their own cell.

    Attributes:
        find: returns the calling thread's own stream; None in the main thread.
    """

    find: Callable[[], Any]

    def write(self, text: str, /) -> int:
        """Writes to the calling thread's cell."""
        own = self.find()
        return io.TextIOWrapper.write(self, text) if own is None else own.write(text)

    def flush(self) -> None:
        """Flushes what the calling thread printed."""
        own = self.find()
        if own is None:
            io.TextIOWrapper.flush(self)
        else:
            own.flush()

    def fileno(self) -> int:
        """Returns the descriptor of the calling thread's cell."""
        own = self.find()
        return io.TextIOWrapper.fileno(self) if own is None else int(own.fileno())

    @property
    def buffer(self) -> Any:
        """The calling thread's binary stream."""
        own = self.find()
        return super().buffer if own is None else own.buffer


class Member:
    """One thread of the code: its cell, and its number in the kernel."""

    __slots__ = ("cell", "number")

    def __init__(self, cell: int, number: int) -> None:
        """Holds both."""
        self.cell = cell
        self.number = number


class Streams:
    """Where the threads of one cell print: its own pipes, for as long as they run."""

    __slots__ = ("pair", "users")

    def __init__(self) -> None:
        """Takes the pipes of the cell that runs now."""
        self.users = 0
        out, err = (text_stream(posix.dup(kind), kind, owned=True) for kind in (1, 2))
        self.pair = (out, err)

    def leave(self) -> None:
        """Writes what a thread left, and closes both with the last one."""
        for stream in self.pair:
            try:
                if self.users:
                    stream.flush()
                else:
                    stream.close()
            except BaseException:  # noqa: S110 - closed by the code, or its reader is gone
                pass


class Threads:
    """All threads that the code started, by their identities."""

    def __init__(self) -> None:
        """Sees every thread that is started from now on."""
        self._guard = _thread.allocate_lock()  # of the two below: a thread and its cell's streams
        self._members: dict[int, Member] = {}
        self._streams: dict[int, Streams] = {}  # by cell, while it has threads
        self._is_shared = False
        self._cell = 0
        self._streams_of_main: tuple[Any, Any] = (None, None)
        for name in STARTERS:
            if not hasattr(_thread, name):
                continue
            starter = self._wrap(getattr(_thread, name))
            setattr(_thread, name, starter)
            # That module keeps them under names of its own, and may be here already: a sandbox can
            # be the fork of an interpreter that has imported it.
            if "threading" in sys.modules:
                setattr(sys.modules["threading"], f"_{name}", starter)
        posix.register_at_fork(after_in_child=self._renew_guard)

    def begin_cell(self) -> None:
        """Gives the main thread and new threads a new cell, on descriptors 1 and 2."""
        self._cell += 1
        streams = []
        for kind, old in zip((1, 2), self._streams_of_main):
            whole = old is not None and _is_open(old)
            streams.append(old if whole else text_stream(kind, kind, made=Stream))
        self._streams_of_main = (streams[0], streams[1])
        self._share(bool(self._streams))
        for name, stream in zip(("stdout", "stderr"), streams):
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)

    def _share(self, is_shared: bool) -> None:
        """Lets the streams look at who writes, or not any more."""
        self._is_shared = is_shared
        for kind, stream in enumerate(self._streams_of_main):
            if stream is not None:
                stream.find = lambda kind=kind: self._find(kind)
                stream.__class__ = SharedStream if is_shared else Stream

    def _find(self, kind: int) -> Any:
        member = self._members.get(_thread.get_ident())
        return None if member is None else self._streams[member.cell].pair[kind]

    def is_of_this_cell(self) -> bool:
        """Tells whether the calling thread belongs to the cell that runs, or ran last."""
        member = self._members.get(_thread.get_ident())
        return member is None or member.cell == self._cell

    # Starting

    def _wrap(self, starter: Any) -> Any:
        def start(function: Any, *arguments: Any, **options: Any) -> Any:
            """Starts a thread that belongs to the cell of the one that starts it."""
            starting = self._members.get(_thread.get_ident())
            cell = self._cell if starting is None else starting.cell

            def run(*given: Any, **named: Any) -> Any:
                self._members[_thread.get_ident()] = Member(cell, _thread.get_native_id())
                try:
                    return function(*given, **named)
                finally:
                    self._leave(cell)

            self._expect(cell)
            try:
                return starter(run if callable(function) else function, *arguments, **options)
            except BaseException:
                self._leave(cell)
                raise

        return start

    def _expect(self, cell: int) -> None:
        with self._guard:
            streams = self._streams.get(cell)
            if streams is None:
                streams = self._streams[cell] = Streams()
            streams.users += 1
            if not self._is_shared:
                self._share(True)

    def _leave(self, cell: int) -> None:
        with self._guard:
            self._members.pop(_thread.get_ident(), None)
            streams = self._streams[cell]
            streams.users -= 1
            if not streams.users:
                del self._streams[cell]
        streams.leave()

    def _renew_guard(self) -> None:
        self._guard = _thread.allocate_lock()  # a thread that the fork has not may have held it

    # Ending

    def end_cell_threads(self) -> None:
        """Ends the threads of the cell that was stopped; returns when none of them goes on.

        In each an exception is raised that ends it. One that waits in the kernel meets it when it
        wakes up and is left alone; one that catches it meets it again, for as long as that takes:
        who called for this has an end to its patience.
        """
        if not self._running():
            return
        import time

        quiet: dict[int, int] = {}
        spent: dict[int, bytes] = {}
        while True:
            going = []
            for identity, member in self._running():
                used = _time_used(member.number)
                if spent.get(identity) == used:
                    quiet[identity] = quiet.get(identity, 0) + 1
                else:
                    quiet[identity] = 0
                    _raise_in(identity)
                spent[identity] = used
                if quiet[identity] < QUIET_LOOKS:
                    going.append(identity)
            if not going:
                return
            time.sleep(LOOK_SECONDS)

    def _running(self) -> list[tuple[int, Member]]:
        frames = sys._current_frames()
        return [
            (identity, member)
            for identity, member in list(self._members.items())
            if member.cell == self._cell and not _is_idle_worker(frames.get(identity))
        ]


def _is_open(stream: Any) -> bool:
    try:
        return not stream.closed
    except ValueError:  # it was detached
        return False


def _is_idle_worker(frame: Any) -> bool:
    """Whether a thread of a pool waits for work: an exception would fall on what comes next."""
    code = frame.f_code if frame is not None else None
    return code is not None and code.co_name == "_worker" and code.co_filename.endswith(POOLS)


def _time_used(number: int) -> bytes:
    """Returns what the kernel says of a thread's time: it changes when the thread runs."""
    return read_file(f"/proc/self/task/{number}/schedstat") or read_file(
        f"/proc/self/task/{number}/stat"
    )


def _raise_in(identity: int) -> None:
    import ctypes

    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    raise_in(ctypes.c_ulong(identity), ctypes.py_object(SystemExit))
