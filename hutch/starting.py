"""Starting invocations so that an interruption leaves nothing behind.

Called by `hutch.aio`; calls the client that it is given.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from hutch import types
from hutch.errors import HutchError

if TYPE_CHECKING:
    from hutch.aio import AsyncClient

_ABANDON_SECONDS = 15.0


async def create(client: AsyncClient, spec: types.Spec, *, bound: bool) -> types.Invocation:
    """Asks for a root; interrupted meanwhile, it learns what became of it and cancels that."""
    work = asyncio.create_task(
        client.create_invocation(spec, cancel_on_disconnect=bound), name="hutch-create"
    )
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        if work.cancelled():
            raise
        settled = await _settle(work)
        if settled is not None:
            await abandon(client, settled.invocation_id)
        raise


async def _settle(work: asyncio.Task[types.Invocation]) -> types.Invocation | None:
    try:
        async with asyncio.timeout(_ABANDON_SECONDS):
            return await work
    except (TimeoutError, HutchError):
        return None  # its session ends with this client


async def abandon(client: AsyncClient, invocation_id: str) -> None:
    """Nobody will ever read this invocation's result: ends it, within bounds."""
    try:
        async with asyncio.timeout(_ABANDON_SECONDS):
            await client.cancel_invocation(invocation_id)
    except (TimeoutError, HutchError):
        return  # the controller is gone or slow; the interruption matters more
