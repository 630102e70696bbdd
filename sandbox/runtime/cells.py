"""Runs one cell in the namespace and says how it ended.

Called by `repl`; calls `compiling`, `failures` and `values`.
"""

from __future__ import annotations

import sys

from . import errors, values
from .compiling import END, Cell, compile_cell
from .linux import signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_TYPE_NAME = 200


class Outcome:
    """How a cell ended: the fields of `done` that the REPL knows."""

    __slots__ = ("errno", "failure", "kind", "value")

    def __init__(
        self,
        kind: str,
        value: bytes | None = None,
        failure: dict[str, str] | None = None,
        errno: int | None = None,
    ) -> None:
        """Holds the outcome's kind, the encoded value, the failure, and an OSError's number."""
        self.kind = kind
        self.value = value
        self.failure = failure
        self.errno = errno


class Runner:
    """Runs cells one after the other in one namespace.

    Args:
        namespace: the globals of all cells.
        own_folder: where this package's files are: its frames are left out of tracebacks.
        sources: filled with the source of each cell, by file name, before it runs.
        shows: whether a trailing expression is printed, besides being bound to `_`.
    """

    def __init__(
        self, namespace: dict[str, Any], own_folder: str, sources: dict[str, str], shows: bool
    ) -> None:
        """Takes the namespace as it is."""
        self._namespace = namespace
        self._own_folder = own_folder
        self._sources = sources
        self._shows = shows
        self._count = 0

    def run(self, code: bytes) -> Outcome:
        """Runs a cell. Whatever its code does to exceptions, this returns."""
        try:
            return self._run(code)
        except BaseException as error:  # an interrupt that came in its last moment
            signals.signal(signals.SIGINT, signals.SIG_IGN)
            failure = errors.Failure(type_name=class_name(error))
            return Outcome("errored", failure=failure.to_dict())

    def _run(self, code: bytes) -> Outcome:
        cell: Cell | None = None
        self._count += 1
        filename = f"<cell {self._count}>"
        try:
            # From here an interrupt is an exception of the code, up to the last line.
            signals.signal(signals.SIGINT, signals.default_int_handler)
            source = code.decode("utf-8")
            self._sources[filename] = source
            if "linecache" in sys.modules:
                register_sources({filename: source})
            cell = _compile(source, filename)
            returned, value = self._evaluate(cell)
            result = values.encode(value) if returned else None
            signals.signal(signals.SIGINT, signals.SIG_IGN)
            return Outcome("returned" if returned else "completed", result)
        except BaseException as error:  # the code's own exceptions, whatever they are
            signals.signal(signals.SIGINT, signals.SIG_IGN)
            return self._failed(error, cell)

    def _evaluate(self, cell: Cell) -> tuple[bool, Any]:
        """Returns whether the cell returned, and what."""
        if cell.is_async:
            from .loops import run_async

            result, shown = run_async(cell, self._namespace)
        else:
            result = eval(cell.body, self._namespace)
            shown = eval(cell.shown, self._namespace) if cell.shown is not None else None
        if cell.is_function:
            if not (type(result) is tuple and len(result) == 2 and _is_end(result[0])):
                return True, result
            shown = result[1]
        if shown is not None:
            self._namespace["_"] = shown
            if self._shows:
                print(repr(shown))  # noqa: T201 - this is the display of a cell's value
        return False, None

    def _failed(self, error: BaseException, cell: Cell | None) -> Outcome:
        from . import failures

        number = None
        try:
            if issubclass(type(error), OSError):
                number = getattr(error, "errno", None)
            register_sources(self._sources)
            failure = failures.describe(error, class_name(error), cell, self._own_folder)
            raised = cell is not None and failures.left_by_raise(error, cell)
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


def register_sources(sources: dict[str, str]) -> None:
    """Lets tracebacks show the lines of cells."""
    import linecache

    for filename, source in sources.items():
        lines = source.splitlines(keepends=True)
        linecache.cache[filename] = (len(source), None, lines, filename)


def _compile(source: str, filename: str) -> Cell:
    if "\0" in source:
        # Before Python 3.12 the compiler calls this a ValueError, with another text.
        raise SyntaxError("source code cannot contain null bytes", (filename, 1, 1, None))
    return compile_cell(source, filename)


def _is_end(value: object) -> bool:
    return type(value) is str and value == END


def flush_outputs() -> None:
    """Writes what the code printed and did not flush; the code may have replaced the streams."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:  # noqa: S110 - closed or replaced by the code
            pass
