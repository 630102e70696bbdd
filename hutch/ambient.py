"""Which client a bare `invoke` goes to.

Called by `hutch.calls` and the clients; calls `hutch.client` to make the default one. First the
client of the surrounding `with`, by context variable; then, for threads that were started inside
such a block and do not have its context, the block of this process that was entered last; then a
default client, made by the first call and closed when the process ends.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from contextvars import Context, ContextVar
from typing import TYPE_CHECKING, Any

from hutch.errors import HutchError

if TYPE_CHECKING:
    from hutch.aio import AsyncClient
    from hutch.calls import Call
    from hutch.client import Client
    from hutch.handles import AsyncHandle

_bound: ContextVar[tuple[Client | AsyncClient, ...]] = ContextVar("hutch_clients", default=())


class _Process:
    """The clients of this process that are bound, and the default one.

    The lock guards that there is at most one default client.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.entered: list[Client | AsyncClient] = []
        self.default: Client | None = None


_process = _Process()


def bind(client: Client | AsyncClient) -> None:
    """Makes a client the one that bare calls go to, in this context and in threads without one."""
    _bound.set((*_bound.get(), client))
    with _process.lock:
        _process.entered.append(client)


def unbind(client: Client | AsyncClient) -> None:
    """Ends the binding of a client."""
    _bound.set(tuple(other for other in _bound.get() if other is not client))
    with _process.lock:
        _process.entered = [other for other in _process.entered if other is not client]


def context_of(client: Client | AsyncClient) -> Context:
    """A context in which bare calls go to this client."""
    context = Context()
    context.run(_bound.set, (client,))
    return context


def current() -> Client | AsyncClient:
    """The client that bare calls go to; connects the default one when there is no other."""
    for client in reversed(_bound.get()):
        if not client.closed:
            return client
    from hutch.client import Client

    with _process.lock:
        for client in reversed(_process.entered):
            if not client.closed:
                return client
        if _process.default is None or _process.default.closed:
            default = Client()
            atexit.register(default.close)
            _process.default = default
        return _process.default


def sync_client() -> Client:
    """The client that a blocking call goes to.

    Raises:
        HutchError: The surrounding one is an `AsyncClient`, or the caller runs on an event loop
            that a blocking call would stop for itself.
    """
    from hutch.client import Client

    client = current()
    if isinstance(client, Client):
        return client
    raise HutchError("an AsyncClient surrounds this call: await ainvoke or aspawn instead")


async def _async_client() -> AsyncClient:
    from hutch.aio import AsyncClient

    client = await asyncio.to_thread(current)  # it may have to start a controller
    return client if isinstance(client, AsyncClient) else client.asynchronous


async def ainvoke(call: Call) -> Any:
    """Runs a call on the ambient client, whatever loop that client lives on."""
    client = await _async_client()
    return await client.on_loop(client.run(call))


async def aspawn(call: Call) -> AsyncHandle:
    """Starts a call on the ambient client, whatever loop that client lives on."""
    client = await _async_client()
    return await client.on_loop(client.start(call))
