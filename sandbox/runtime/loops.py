"""Cells with a top-level `await`: one event loop for the cell, and `asyncio.run` inside it.

Called by `cells`, only for such cells.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .compiling import Cell

_run: Any = asyncio.run


def run_async(cell: Cell, namespace: dict[str, Any]) -> tuple[Any, Any]:
    """Runs a cell that gives coroutines; returns what its body and its last expression gave."""

    async def run_cell() -> tuple[Any, Any]:
        result = eval(cell.body, namespace)
        if hasattr(result, "__await__"):
            result = await result
        shown: Any = eval(cell.shown, namespace) if cell.shown is not None else None
        if cell.shown is not None and cell.shown.co_flags & 0x80:  # CO_COROUTINE
            shown = await shown
        return result, shown

    asyncio.run = run_beside
    try:
        return _run(run_cell())  # type: ignore[no-any-return]
    finally:
        asyncio.run = _run


def run_beside(main: Any, *arguments: Any, **options: Any) -> Any:
    """Does what `asyncio.run` does, also where a loop runs: then on another, in a thread beside it.

    The caller's loop stands still meanwhile, as it would in any other call that takes its time.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(main, *arguments, **options)
    outcome: list[Any] = []
    context = contextvars.copy_context()

    def run_there() -> None:
        try:
            outcome.extend((True, context.run(_run, main, *arguments, **options)))
        except BaseException as error:  # it is raised again in the caller's thread
            outcome.extend((False, error))

    thread = threading.Thread(target=run_there, daemon=True)
    thread.start()
    thread.join()
    succeeded, result = outcome
    if not succeeded:
        raise result
    return result
