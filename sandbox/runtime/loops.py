"""Cells with a top-level `await`: one event loop for all of them, and `asyncio.run` inside it.

Called by `cells`, only for such cells. A task that a cell leaves pending goes on in the next cell
that awaits; its loop stands still in between.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .compiling import Cell

MAX_NAMED = 5
_run: Any = asyncio.run


class CellLoop:
    """The event loop of top-level `await`."""

    def __init__(self) -> None:
        """Makes the loop; it runs only while a cell does."""
        self._loop = asyncio.new_event_loop()
        self._reported: set[Any] = set()

    def run(self, cell: Cell, namespace: dict[str, Any], *, ends: bool) -> tuple[Any, Any]:
        """Runs a cell that gives coroutines.

        Args:
            cell: the compiled cell.
            namespace: its globals.
            ends: whether the invocation ends with this cell even if it does not return.

        Returns:
            What its body and its last expression gave.
        """
        main = self._loop.create_task(_run_cell(cell, namespace))
        asyncio.run = run_beside
        try:
            result = self._drive(main)
            ends = ends or cell.returned(result[0])
            return result
        finally:
            try:
                self._leave(main, ends)
            finally:
                asyncio.run = _run

    def _drive(self, main: asyncio.Task[tuple[Any, Any]]) -> tuple[Any, Any]:
        asyncio.set_event_loop(self._loop)
        try:
            return self._loop.run_until_complete(main)
        finally:
            if not main.done():  # an interrupt that fell into the loop itself
                main.cancel()
                self._loop.run_until_complete(asyncio.wait([main]))
            asyncio.set_event_loop(None)

    def _leave(self, main: Any, ends: bool) -> None:
        pending = {task for task in asyncio.all_tasks(self._loop) if task is not main}
        new = pending - self._reported
        if new:
            names = ", ".join(sorted(task.get_name() for task in new)[:MAX_NAMED])
            more = f" and {len(new) - MAX_NAMED} more" if len(new) > MAX_NAMED else ""
            fate = "cancelled" if ends else "waiting for the next cell that awaits"
            sys.stderr.write(f"still pending, {fate}: {names}{more}\n")
        self._reported = pending
        if ends and pending:
            for task in pending:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(pending))
        if ends:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())


async def _run_cell(cell: Cell, namespace: dict[str, Any]) -> tuple[Any, Any]:
    result = eval(cell.body, namespace)
    if hasattr(result, "__await__"):
        result = await result
    shown: Any = eval(cell.shown, namespace) if cell.shown is not None else None
    if cell.shown is not None and cell.shown.co_flags & 0x80:  # CO_COROUTINE
        shown = await shown
    return result, shown


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
