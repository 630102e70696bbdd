"""Gives this command's standard input to a program in a sandbox.

Called by `hutch.cli.run`; calls the SDK. Reading a terminal or a pipe blocks, so it is done in a
thread that ends with the process; what has been read is given on piece by piece, each once the
sandbox has room for it.
"""

from __future__ import annotations

import asyncio
import os
import threading

from hutch.aio import AsyncClient
from hutch.errors import HutchError

_PIECE_BYTES = 64 * 1024


class Feed:
    """Standard input on its way to one invocation."""

    def __init__(self, client: AsyncClient, invocation_id: str) -> None:
        """A feed that has not begun."""
        self._client = client
        self._id = invocation_id
        self._task: asyncio.Task[None] | None = None
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue(1)

    def start(self) -> None:
        """Begins to read."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), name="stdin", daemon=True).start()
        self._task = asyncio.create_task(self._give(), name="hutch-stdin")

    async def stop(self) -> None:
        """Gives nothing more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            try:
                piece = os.read(0, _PIECE_BYTES)
            except OSError:
                piece = b""
            try:
                asyncio.run_coroutine_threadsafe(self._pieces.put(piece), loop).result()
            except (RuntimeError, asyncio.CancelledError):
                return  # the command is over
            if not piece:
                return

    async def _give(self) -> None:
        offset = 0
        try:
            while True:
                piece = await self._pieces.get()
                close, end = not piece, offset + len(piece)
                while offset < end or close:
                    rest = piece[len(piece) - (end - offset) :]
                    offset = await self._client.write_stdin(
                        self._id, rest, offset=offset, close=close
                    )
                    if close:
                        return
        except HutchError:
            return  # it has ended, and how is told elsewhere
