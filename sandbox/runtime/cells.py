"""Runs one cell in the namespace and says how it ended.

Called by `repl`; calls `compiling`, `failures` and `values`.
"""

from __future__ import annotations

import sys

from . import errors, values
from .compiling import Cell, compile_cell
from .linux import signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_TYPE_NAME = 200


class Outcome:
    """How a cell ended: the fields of `done` that the REPL knows."""

    __slots__ = ("errno", "failure", "kind", "text", "value")

    def __init__(
        self,
        kind: str,
        value: bytes | None = None,
        failure: dict[str, str] | None = None,
        errno: int | None = None,
        text: bytes | None = None,
    ) -> None:
        """Holds the outcome's kind, the encoded value, the failure, an OSError's number, and the
        text of a trailing expression's value."""
        self.kind = kind
        self.value = value
        self.failure = failure
        self.errno = errno
        self.text = text


class Runner:
    """Runs cells one after the other in one namespace.

    Args:
        namespace: the globals of all cells.
        own_folder: where this package's files are: its frames are left out of tracebacks.
        sources: filled with the source of each cell, by file name, before it runs.

    Attributes:
        source: the source of the last cell.
    """

    def __init__(self, namespace: dict[str, Any], own_folder: str, sources: dict[str, str]) -> None:
        """Takes the namespace as it is."""
        self._namespace = namespace
        self._own_folder = own_folder
        self._sources = sources
        self._count = 0
        self._loop: Any = None  # of cells that await, over all of them
        self.source = ""

    def run(
        self,
        code: bytes,
        mode: str,
        *,
        start: Callable[[], None],
        show: Callable[[Any], bytes | None],
        finish: Callable[[], None],
    ) -> Outcome:
        """Runs a cell. Whatever its code does to exceptions, this returns.

        Args:
            code: its source, UTF-8.
            mode: `program`, `agent` or `interactive`: only in the last one a value is shown, and
                in the first nothing is shown that the code does not show itself.
            start: is called when an interrupt reaches the code from then on.
            show: shows a trailing expression's value and returns its text.
            finish: shows what the code left to be shown.
        """
        try:
            return self._run(code, mode, start, show, finish)
        except BaseException as error:  # an interrupt that came in its last moment
            signals.signal(signals.SIGINT, signals.SIG_IGN)
            failure = errors.Failure(type_name=class_name(error))
            return Outcome("errored", failure=failure.to_dict())

    def _run(
        self,
        code: bytes,
        mode: str,
        start: Callable[[], None],
        show: Callable[[Any], bytes | None],
        finish: Callable[[], None],
    ) -> Outcome:
        cell: Cell | None = None
        self._count += 1
        filename = f"<cell {self._count}>"
        try:
            # From here an interrupt is an exception of the code, up to the last line.
            signals.signal(signals.SIGINT, signals.default_int_handler)
            start()
            self.source = ""
            source = self.source = code.decode("utf-8")
            self._sources[filename] = source
            if "linecache" in sys.modules:
                fill_linecache(sys.modules["linecache"], {filename: source})
            cell = _compile(source, filename)
            try:
                returned, value = self._evaluate(cell, mode)
            except Exception:
                if mode != "program":
                    finish()
                raise
            result = values.encode(value) if returned else None
            text = show(value) if mode == "interactive" and not returned else None
            if mode != "program":
                finish()
            signals.signal(signals.SIGINT, signals.SIG_IGN)
            return Outcome("returned" if returned else "completed", result, text=text)
        except BaseException as error:  # the code's own exceptions, whatever they are
            signals.signal(signals.SIGINT, signals.SIG_IGN)
            return self._failed(error, cell)

    def _evaluate(self, cell: Cell, mode: str) -> tuple[bool, Any]:
        """Returns whether the cell returned, and what; if not, its trailing expression's value."""
        if cell.is_async:
            from . import loops

            self._loop = self._loop or loops.CellLoop()
            result, shown = self._loop.run(cell, self._namespace, ends=mode == "program")
        else:
            result = eval(cell.body, self._namespace)
            shown = eval(cell.shown, self._namespace) if cell.shown is not None else None
        if cell.returned(result):
            return True, result
        if cell.is_function:
            shown = result[1]
        if shown is not None:
            self._namespace["_"] = shown
        return False, shown

    def _failed(self, error: BaseException, cell: Cell | None) -> Outcome:
        from . import failures

        number = None
        try:
            if issubclass(type(error), OSError):
                number = getattr(error, "errno", None)
            import linecache

            fill_linecache(linecache, self._sources)
            failure = failures.describe(error, class_name(error), cell, self._own_folder)
            raised = cell is not None and failures.left_by_raise(error, cell, self._namespace)
        except BaseException as problem:  # the class is the code's own, and memory may be short
            failure = errors.Failure(
                type_name=class_name(error),
                message=f"its description failed: {class_name(problem)}",
            ).to_dict()
            raised = False
        if type(number) is not int or not 0 <= number < 4096:
            number = None
        return Outcome("raised" if raised else "errored", failure=failure, errno=number)


def class_name(error: BaseException) -> str:
    """Returns the name of its class, short and sound, without running code of that class."""
    name = str.__str__(type.__dict__["__name__"].__get__(type(error)))[:MAX_TYPE_NAME]
    return name.encode("utf-8", "backslashreplace").decode("utf-8")[:MAX_TYPE_NAME]


def fill_linecache(linecache: Any, sources: dict[str, str]) -> None:
    """Lets tracebacks show the lines of cells."""
    for filename, source in sources.items():
        lines = source.splitlines(keepends=True)
        linecache.cache[filename] = (len(source), None, lines, filename)


def _compile(source: str, filename: str) -> Cell:
    if "\0" in source:
        # Before Python 3.12 the compiler calls this a ValueError, with another text.
        raise SyntaxError("source code cannot contain null bytes", (filename, 1, 1, None))
    return compile_cell(source, filename)


def flush_outputs() -> None:
    """Writes what the code printed and did not flush; the code may have replaced the streams."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:  # noqa: S110 - closed or replaced by the code
            pass
