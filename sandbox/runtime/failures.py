"""Exceptions of cells as data: what is told of them, and where they came from.

Called by `cells`, in the REPL, only when a cell failed: it imports what formats tracebacks.
"""

from __future__ import annotations

from . import errors, frames

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

    from .compiling import Cell

MAX_PATH = 2_000


def describe(
    error: BaseException, type_name: str, cell: Cell | None, own_folder: str
) -> dict[str, str]:
    """Writes an exception as a `failure`.

    Args:
        error: the exception that left the cell.
        type_name: the name of its class.
        cell: the compiled cell; None when it could not be compiled.
        own_folder: where this package's files are: its frames are none of the code's.
    """
    failure = errors.Failure(type_name=type_name)
    failure.message = clean(_text(error), frames.MAX_MESSAGE)
    trace = _traceback(error, type_name, cell, own_folder)
    failure.traceback = clean(trace, frames.MAX_TRACEBACK)
    if isinstance(error, errors.InvocationFailed):
        failure.invocation_id = clean(error.child_id, 128)
        failure.ending = clean(error.ending, 64)
        failure.path = clean(error.failure.path, MAX_PATH)
        failure.expected = clean(error.failure.expected, MAX_PATH)
        failure.got = clean(error.failure.got, MAX_PATH)
    elif isinstance(error, errors.RequestRefused):
        failure.reason = clean(error.reason, 64)
    elif isinstance(error, (errors.ValueEncodeError, errors.ValueDecodeError)):
        failure.path = clean(error.path, MAX_PATH)
    return failure.to_dict()


def left_by_raise(error: BaseException, cell: Cell, namespace: dict[str, Any]) -> bool:
    """Tells whether the exception is one that a top-level `raise X(...)` made and nobody caught.

    Its traceback then ends in the cell's own frame, at an instruction that raises, in the lines of
    such a statement.
    """
    place = _cell_entry(error.__traceback__, cell)
    if place is None or place.tb_next is not None:
        return False
    here = [raising for raising in cell.raises if raising.first <= place.tb_lineno <= raising.last]
    if not here or all(raising.is_caught(error, namespace) for raising in here):
        return False
    import opcode

    code = place.tb_frame.f_code.co_code
    index = place.tb_lasti
    return 0 <= index < len(code) and code[index] == opcode.opmap["RAISE_VARARGS"]


def clean(text: object, limit: int) -> str:
    """Makes sound text of at most so many characters; the middle of a longer one is left out."""
    # A class of the code's own may be a text: only an exact one has the methods that it should.
    sound = str.__str__(str(text)).encode("utf-8", "backslashreplace").decode("utf-8")
    if len(sound) <= limit:
        return sound
    mark = "\n[...]\n" if limit > 500 else "..."
    half = (limit - len(mark)) // 2
    return sound[:half] + mark + sound[len(sound) - half :]


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # the class is the code's own: anything may happen in it
        return "<the text of the exception could not be made>"


def _traceback(error: BaseException, type_name: str, cell: Cell | None, own_folder: str) -> str:
    import traceback

    # Outside the cell's own frame fails what shows its value, and what compiles it.
    start = _cell_entry(error.__traceback__, cell) or error.__traceback__
    try:
        report = traceback.TracebackException(type(error), error, start)
        _drop_own_frames(report, own_folder, set())
        return "".join(report.format())
    except BaseException:  # as above
        return f"{type_name}: the traceback could not be made"


def _drop_own_frames(report: Any, own_folder: str, seen: set[int]) -> None:
    """Leaves the code's frames in a report and in those of its causes and parts."""
    if report is None or id(report) in seen:
        return
    seen.add(id(report))
    report.stack[:] = [f for f in report.stack if not f.filename.startswith(own_folder)]
    _drop_own_frames(report.__cause__, own_folder, seen)
    _drop_own_frames(report.__context__, own_folder, seen)
    for part in getattr(report, "exceptions", None) or ():
        _drop_own_frames(part, own_folder, seen)


def _cell_entry(entry: TracebackType | None, cell: Cell | None) -> TracebackType | None:
    """Finds the entry of the cell's own frame, behind those of what ran it."""
    codes = (cell.body, cell.shown) if cell is not None else ()
    while entry is not None and entry.tb_frame.f_code not in codes:
        entry = entry.tb_next
    return entry
