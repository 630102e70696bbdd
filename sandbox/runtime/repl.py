"""The process that evaluates cells: a fork of the supervisor that gives up all its powers first.

Called by `replink` in the child. It takes a cell, moves descriptors 1 and 2 to the cell's own
pipes, runs it, and says how it ended. It is trusted with nothing.
"""

from __future__ import annotations

import gc
import io
import posix
import sys

from . import cells, confine, imports
from .channel import Channel, Order, Place
from .linux import signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from .settings import Settings

IDLE_SECONDS = 0.05  # without a cell; then there is time to import what most cells need
PRELOADED = ("os", "traceback", "threading", "contextlib", "typing", "dataclasses", "datetime")


def run_child(socket: Any, settings: Settings, supervisor: int) -> NoReturn:
    """Serves cells until the supervisor is gone."""
    try:
        gc.disable()  # until everything of ours is imported
        confine.confine(settings, supervisor, (socket.fileno(),))
        repl = Repl(Channel(socket), settings)
        gc.freeze()
        gc.enable()
        repl.serve()
    except BaseException as error:  # nobody else is there to see it
        text = f"repl: {type(error).__name__}: {error}\n"
        posix.write(2, text.encode("utf-8", "backslashreplace"))
    finally:
        posix._exit(71)


class Repl:
    """One namespace and the loop that serves it."""

    def __init__(self, channel: Channel, settings: Settings) -> None:
        """Prepares the namespace; nothing of the code's runs yet."""
        self._channel = channel
        self._sources: dict[str, str] = {}
        self._site = imports.SiteFinder()
        sys.meta_path.insert(0, imports.SourcesFinder(self._sources))
        sys.meta_path.append(self._site)
        sys.argv = [""]
        self._main = type(sys)("__main__")
        sys.modules["__main__"] = self._main
        self._namespace = self._main.__dict__
        self._namespace.update(__builtins__=sys.modules["builtins"], __annotations__={})
        self._own_folder = run_child.__code__.co_filename.rpartition("/")[0] + "/"
        self._runner = cells.Runner(self._namespace, self._own_folder, self._sources, shows=False)
        _refuse_input()
        try:
            posix.chdir(settings.workspace)
        except OSError:
            posix.chdir("/")
        from . import guest

        self._guest = guest.install(channel)

    def serve(self) -> NoReturn:
        """Runs cells for ever."""
        order = self._channel.next_order(IDLE_SECONDS) or self._preload()
        while True:
            if order is not None:
                self._run(order)
            try:
                order = self._channel.next_order()
            except Exception:
                order = None  # a handler of the code raised here: its signal was for a cell

    def _preload(self) -> Order | None:
        """Imports one module after the other until a cell comes; returns it if one came."""
        self._site.load()
        for name in PRELOADED:
            __import__(name)
            order = self._channel.next_order(0)
            if order is not None:
                return order
        return None

    def _run(self, order: Order) -> None:
        header = order.header
        cell = header["cell"]
        _move_outputs(order.descriptors)
        try:
            self._bind(order)
        except Exception as error:
            from . import failures

            failure = failures.describe(error, cells.class_name(error), None, self._own_folder)
            self._report(cell, cells.Outcome("errored", failure=failure))
            return
        self._channel.send({"type": "started", "cell": cell}, [])
        outcome = self._runner.run(order.code)
        if not self._channel.is_own:
            _leave_fork(outcome)
        cells.flush_outputs()
        self._report(cell, outcome)

    def _bind(self, order: Order) -> None:
        header = order.header
        self._guest.describe(header["invocation"], header["depth"], header["max_depth"])
        if header["mode"] == "program":
            for name in ("invoke", "ainvoke", "spawn", "aspawn"):
                self._namespace[name] = getattr(self._guest, name)
        for name, data in order.inputs:
            self._namespace[name] = self._guest.decode(data, name)

    def _report(self, cell: str, outcome: cells.Outcome) -> None:
        contents = [] if outcome.value is None else [outcome.value]
        header = {
            "type": "done",
            "cell": cell,
            "outcome": outcome.kind,
            "value": None if outcome.value is None else Place(0),
            "failure": outcome.failure,
            "errno": outcome.errno,
        }
        self._channel.send(header, contents)


def _move_outputs(descriptors: tuple[int, ...]) -> None:
    """Makes a cell's pipes descriptors 1 and 2, and text streams of them."""
    for target, descriptor in zip((1, 2), descriptors):
        posix.dup2(descriptor, target)
        posix.close(descriptor)
    # A line at a time: what C code and subprocesses print stays in order with it.
    _set_stream("stdout", _text_stream(1, "strict"))
    _set_stream("stderr", _text_stream(2, "backslashreplace"))


def _text_stream(descriptor: int, errors: str) -> io.TextIOWrapper:
    raw = io.FileIO(descriptor, "w", closefd=False)
    stream = io.TextIOWrapper(
        io.BufferedWriter(raw), encoding="utf-8", errors=errors, line_buffering=True
    )
    stream.mode = "w"  # type: ignore[misc] # as the interpreter's own have it
    return stream


def _refuse_input() -> None:
    """Makes `input()` say at once that nobody can answer."""

    def input(prompt: object = "", /) -> str:
        """Raises EOFError: there is no standard input here."""
        raise EOFError("input() cannot be answered: this code has no stdin")

    sys.modules["builtins"].input = input  # type: ignore[attr-defined]
    null = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, "r", closefd=False)), encoding="utf-8")
    _set_stream("stdin", null)


def _set_stream(name: str, stream: io.TextIOWrapper) -> None:
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


def _leave_fork(outcome: cells.Outcome) -> NoReturn:
    """Ends a process that the code forked and that ran on to the end of the cell."""
    if outcome.failure is not None:
        sys.stderr.write(outcome.failure["traceback"])
    cells.flush_outputs()
    signals.signal(signals.SIGINT, signals.SIG_DFL)
    posix._exit(0 if outcome.failure is None else 1)
