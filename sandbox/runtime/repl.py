"""The process that evaluates cells: a fork of the supervisor that gives up all its powers first.

Called by `replink` in the child. It takes a cell, moves descriptors 1 and 2 to the cell's own
pipes, runs it, shows what is to be shown, and says how it ended. It is trusted with nothing.
"""

from __future__ import annotations

import gc
import posix
import sys

from . import cells, confine, imports
from .channel import Channel, Order, Place
from .linux import signals
from .threads import Threads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    from .settings import Settings

IDLE_SECONDS = 0.05  # without a cell; then there is time to import what most cells need
EMFILE = 24
NO_DESCRIPTORS = (
    "earlier cells hold every descriptor that a process may have, so that none is left for a new"
    " cell's output; the REPL is replaced"
)
PRELOADED = (
    "_json",
    "os",
    "traceback",
    "threading",
    "contextlib",
    "typing",
    "dataclasses",
    "datetime",
)


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
        self._modules = settings.preload
        self._site = imports.SiteFinder()
        self._threads = Threads()
        sys.meta_path.insert(0, imports.Completer(self._completions()))
        sys.meta_path.append(self._site)
        sys.argv = [""]
        self._main = type(sys)("__main__")
        sys.modules["__main__"] = self._main
        self._namespace = self._main.__dict__
        self._namespace.update(__builtins__=sys.modules["builtins"], __annotations__={})
        self._own_folder = run_child.__code__.co_filename.rpartition("/")[0] + "/"
        self._runner = cells.Runner(self._namespace, self._own_folder, self._sources)
        self._stdin = Stdin()
        self._shows: Any = None  # made with the first cell
        self._history: Any = None
        if b"MPLBACKEND" not in posix.environ:
            posix.environ[b"MPLBACKEND"] = b"Agg"
            posix.putenv(b"MPLBACKEND", b"Agg")
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
                self._obey(order)
            try:
                order = self._channel.next_order()
            except Exception:
                order = None  # a handler of the code raised here: its signal was for a cell

    def _preload(self) -> Order | None:
        """Prepares for a first cell, step by step, until one comes; returns it if one came."""
        self._prepare()
        self._site.load()
        for name in (*PRELOADED, *self._modules):
            try:
                __import__(name)
            except Exception:  # noqa: S110 - a template's; the code meets it when it imports it
                pass
            order = self._channel.next_order(0)
            if order is not None:
                return order
        return None

    def _obey(self, order: Order) -> None:
        if order.header["type"] == "cell":
            self._run(order)
            return
        self._threads.end_cell_threads()
        self._channel.send({"type": "threads_ended", "cell": order.header["cell"]}, [])

    def _run(self, order: Order) -> None:
        header = order.header
        cell = header["cell"]
        if len(order.descriptors) < 2 + header["records"] + bool(header.get("stdin")):
            self._give_up(cell)
        recording = self._take_descriptors(order)
        self._threads.begin_cell()
        try:
            self._bind(order)
        except Exception as error:
            from . import failures

            failure = failures.describe(error, cells.class_name(error), None, self._own_folder)
            self._report(cell, cells.Outcome("errored", failure=failure))
            return
        self._shows.begin(cell, header["output_limit"])
        entry = self._history.begin(recording)
        outcome = self._runner.run(
            order.code,
            header["mode"],
            start=lambda: self._channel.send({"type": "started", "cell": cell}, []),
            show=self._shows.result,
            finish=self._shows.figures,
        )
        if not self._channel.is_own:
            _leave_fork(outcome)
        self._shows.end()
        cells.flush_outputs()
        entry.end(self._runner.source, outcome.failure)
        self._report(cell, outcome)
        if header["final"]:
            posix._exit(0)  # sooner than anybody could end it: nothing runs here any more

    def _give_up(self, cell: str) -> NoReturn:
        """Ends a REPL whose code left no descriptor free: no cell could ever print again."""
        from . import errors

        failure = errors.Failure(type_name="OSError", message=NO_DESCRIPTORS)
        outcome = cells.Outcome("errored", failure=failure.to_dict(), errno=EMFILE)
        self._report(cell, outcome, is_last=True)
        posix._exit(71)

    def _take_descriptors(self, order: Order) -> int:
        """Moves a cell's pipes to their places; returns the recording of its output, or -1."""
        descriptors = list(order.descriptors)
        for target in (1, 2):
            descriptor = descriptors.pop(0)
            posix.dup2(descriptor, target)
            posix.close(descriptor)
        recording = descriptors.pop(0) if order.header["records"] else -1
        self._stdin.set(descriptors.pop(0) if order.header.get("stdin") else -1)
        return recording

    def _prepare(self) -> None:
        """Makes what cells need and a start does not."""
        if self._shows is None:
            from . import history, shows

            self._shows = shows.install(self._channel, self._threads)
            self._history = self._namespace["__history__"] = history.History()

    def _bind(self, order: Order) -> None:
        header = order.header
        self._prepare()
        self._guest.describe(
            header["invocation"], header["depth"], header["max_depth"], header["tools"]
        )
        if header["mode"] == "program":
            for name in ("invoke", "ainvoke", "spawn", "aspawn"):
                self._namespace[name] = getattr(self._guest, name)
        for name, data in order.inputs:
            self._namespace[name] = self._guest.decode(data, name)

    def _report(self, cell: str, outcome: cells.Outcome, *, is_last: bool = False) -> None:
        contents: list[bytes] = []

        def place(content: bytes | None) -> Place | None:
            if content is None:
                return None
            contents.append(content)
            return Place(len(contents) - 1)

        header = {
            "type": "done",
            "cell": cell,
            "outcome": outcome.kind,
            "value": place(outcome.value),
            "text": place(outcome.text),
            "failure": outcome.failure,
            "errno": outcome.errno,
            "last": is_last,
        }
        self._channel.send(header, contents)

    def _completions(self) -> dict[str, Callable[[Any], None]]:
        """What is done to modules of others once the code has imported them."""

        def show_figures(pyplot: Any) -> None:
            self._shows.complete(pyplot)

        def find_names_of_cells(spawning: Any) -> None:
            from . import spawned

            spawned.complete(spawning, self._sources)

        return {
            "linecache": lambda module: cells.fill_linecache(module, self._sources),
            "matplotlib.pyplot": show_figures,
            "multiprocessing.spawn": find_names_of_cells,
        }


class Stdin:
    """`sys.stdin` and `input()`, which either read what the caller sends or fail at once."""

    def __init__(self) -> None:
        """Begins without standard input; descriptor 0 is the null device."""
        self._builtins: Any = sys.modules["builtins"]
        self._input = self._builtins.input
        self._null = self._text(posix.dup(0))
        self._attached: Any = None
        self._is_on = True
        self.set(-1)

    def set(self, descriptor: int) -> None:
        """Makes a cell's standard input descriptor 0; -1 where it has none."""
        is_on = descriptor >= 0
        if is_on or self._is_on:
            posix.dup2(descriptor if is_on else self._null.fileno(), 0)
        if is_on:
            posix.close(descriptor)
            if self._attached is None:
                self._attached = self._text(posix.dup(0))
        self._is_on = is_on
        self._builtins.input = self._input if is_on else refuse_input
        stream = self._attached if is_on else self._null
        sys.stdin = sys.__stdin__ = stream  # type: ignore[misc]

    @staticmethod
    def _text(descriptor: int) -> Any:
        posix.set_inheritable(descriptor, False)
        return open(descriptor, encoding="utf-8", errors="surrogateescape")


def refuse_input(prompt: object = "", /) -> str:
    """Raises EOFError: there is no standard input here."""
    raise EOFError("input() cannot be answered: this code has no stdin")


def _leave_fork(outcome: cells.Outcome) -> NoReturn:
    """Ends a process that the code forked and that ran on to the end of the cell."""
    if outcome.failure is not None:
        sys.stderr.write(outcome.failure["traceback"])
    cells.flush_outputs()
    signals.signal(signals.SIGINT, signals.SIG_DFL)
    posix._exit(0 if outcome.failure is None else 1)
