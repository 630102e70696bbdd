"""A home for tasks of sandboxes that are independent of one another.

Made by the daemon; used by everything that starts a task. A child that fails is logged and never
takes a sibling with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self

import structlog


class Nursery:
    """Owns tasks from their start to their end."""

    def __init__(self) -> None:
        """Starts empty."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = structlog.get_logger()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Runs `work` as a task that ends at the latest with the nursery."""
        task = asyncio.get_running_loop().create_task(self._guarded(work, name), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guarded(self, work: Coroutine[Any, Any, None], name: str) -> None:
        try:
            await work
        except Exception:
            self._log.exception("task_failed", task=name)

    async def __aenter__(self) -> Self:
        """Opens it."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Cancels what still runs and waits for it."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(set(self._tasks))
