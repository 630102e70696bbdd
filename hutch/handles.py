"""A handle to a spawned invocation.

Made by `hutch.aio`; calls the client that made it. `hutch.client` has a blocking front to it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from hutch import calls, types
from hutch.cells import OutputView
from hutch.errors import ResultTimeoutError

if TYPE_CHECKING:
    from hutch.aio import AsyncClient


class AsyncHandle:
    """A spawned invocation. It may be used from any event loop while its client is open."""

    def __init__(self, client: AsyncClient, invocation_id: str, hint: Any = calls.NoHint) -> None:
        """A handle to an invocation that exists."""
        self._client = client
        self._hint = hint
        self.id = invocation_id

    def __repr__(self) -> str:
        """Names the invocation."""
        return f"<{type(self).__name__} {self.id}>"

    async def result(self, timeout_seconds: float | None = None) -> Any:
        """Waits for the value.

        Raises:
            InvocationFailed: It ended without a value; the subclass says how.
            ResultTimeoutError: It has not ended in time; it goes on.
        """
        return await self._client.on_loop(self._result(timeout_seconds))

    async def _result(self, timeout_seconds: float | None) -> Any:
        found = await self._client.wait_invocation(self.id, timeout_seconds)
        if not found.ended:
            raise ResultTimeoutError(
                f"{self.id} has not ended within {timeout_seconds} s; it is {found.state}"
            )
        return await self._client.value_of(found, self._hint)

    async def invocation(self) -> types.Invocation:
        """The invocation as it stands."""
        return await self._client.on_loop(self._client.get_invocation(self.id))

    async def status(self) -> str:
        """Its state: `queued`, `starting`, `running`, `waiting`, `ending` or `ended`."""
        return (await self.invocation()).state

    async def cancel(self) -> types.Invocation:
        """Ends it and all below it, and answers when every sandbox is gone."""
        return await self._client.on_loop(self._client.cancel_invocation(self.id))

    async def output(
        self, stream: types.Stream = "stdout", offset: int = 0, max_bytes: int = 64 * 1024
    ) -> bytes:
        """What it has printed so far, from `offset`, at most `max_bytes`."""
        return await self._client.on_loop(self._output(stream, offset, max_bytes))

    async def output_view(self, stream: types.Stream = "stdout") -> OutputView:
        """The beginning and the end of what it has printed so far, `output_view_bytes` together."""
        found = await self.invocation()
        size = found.stdout_bytes if stream == "stdout" else found.stderr_bytes
        half = max(1, (found.output.output_view_bytes or 64 * 1024) // 2)
        head = await self.output(stream, 0, half)
        tail = await self.output(stream, max(half, size - half), half) if size > half else b""
        return OutputView(head=head, tail=tail, total_bytes=size)

    async def _output(self, stream: types.Stream, offset: int, max_bytes: int) -> bytes:
        data = bytearray()
        async for chunk in self._client.read_output(
            self.id, stream, offset=offset, max_bytes=max_bytes
        ):
            data += chunk.data
        return bytes(data)

    async def artifacts(self) -> tuple[types.Artifact, ...]:
        """What it has published."""
        page = await self._client.on_loop(self._client.all_artifacts(self.id))
        return page.artifacts

    async def events(self, *, tree: bool = False) -> AsyncIterator[types.Event]:
        """Yields its events, or its tree's, until it has ended."""
        source = self._client.watch_invocation(self.id, tree=tree)
        while True:
            found = await self._client.on_loop(_next(source))
            if found is None:
                return
            yield found


async def _next(source: AsyncIterator[types.Event]) -> types.Event | None:
    return await anext(source, None)
