"""Calls to one controller: capped, retried where that is safe, resumed where they stream.

Called by `hutch.aio` and `hutch.session`; calls grpc.aio. It belongs to one event loop.

A call that was lost may have run. It is sent again only because every call here is either a read or
carries a `request_id` under which the controller gives the same answer.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc

from hutch import channel, wire_errors
from hutch.errors import ConnectionLostError, HutchError
from hutch.v1 import (
    artifact_service_pb2_grpc,
    invocation_service_pb2_grpc,
    template_service_pb2_grpc,
    workspace_service_pb2_grpc,
)

Response = TypeVar("Response")

SHORT_CALLS = 60
LONG_CALLS = 200
CALL_SECONDS = 30.0
_BACKOFF_FIRST_SECONDS = 0.05
_BACKOFF_MOST_SECONDS = 2.0


def backoff_seconds(attempt: int, hint: float | None = None) -> float:
    """How long to wait before try `attempt` + 1: doubled each time, half of it by chance."""
    most: float = min(_BACKOFF_MOST_SECONDS, _BACKOFF_FIRST_SECONDS * 2 ** min(attempt, 10))
    jittered = most / 2 + most / 2 * secrets.randbelow(1000) / 1000
    return max(jittered, hint or 0.0)


class Patience:
    """How long one operation goes on trying; progress makes it fresh again."""

    def __init__(self, seconds: float) -> None:
        """Patience of `seconds` from the first failure on."""
        self._seconds = seconds
        self._attempt = 0
        self._end: float | None = None

    def progress(self) -> None:
        """Forgets earlier failures."""
        self._attempt = 0
        self._end = None

    async def after(self, error: grpc.aio.AioRpcError, *, timeouts: bool = False) -> None:
        """Waits before the next try.

        Args:
            error: What the last try ended with.
            timeouts: Whether a call that got no answer in time may be sent again.

        Raises:
            HutchError: The failure is final, or patience is at its end.
        """
        refusal = wire_errors.read(error)
        silent = timeouts and refusal.code is grpc.StatusCode.DEADLINE_EXCEEDED
        if not refusal.may_retry and not (silent and not refusal.reason):
            raise wire_errors.exception(refusal) from error
        await self.pause(wire_errors.exception(refusal), refusal.retry_seconds)

    async def pause(self, problem: HutchError, hint: float | None = None) -> None:
        """Waits before the next try after a problem that may pass.

        Raises:
            HutchError: The problem, when patience is at its end.
        """
        now = asyncio.get_running_loop().time()
        if self._end is None:
            self._end = now + self._seconds
        delay = backoff_seconds(self._attempt, hint)
        if now + delay > self._end:
            raise problem
        self._attempt += 1
        await asyncio.sleep(delay)


class Link:
    """A connection of its own for one long stream: what others do neither slows nor ends it.

    Attributes:
        invocations: The stub of `InvocationService`.
        metadata: What each call must carry.
    """

    def __init__(self, target: str, metadata: tuple[tuple[str, str], ...]) -> None:
        """A connection that is made when it is first used."""
        self._channel = channel.open_channel(target, slow_reader=True)
        self.metadata = metadata
        self.invocations = invocation_service_pb2_grpc.InvocationServiceStub(self._channel)

    async def close(self) -> None:
        """Closes it."""
        await self._channel.close()


class Transport:
    """One channel to one controller.

    Attributes:
        invocations: The stub of `InvocationService`.
        artifacts: The stub of `ArtifactService`.
        templates: The stub of `TemplateService`.
        workspaces: The stub of `WorkspaceService`.
    """

    def __init__(
        self,
        target: str,
        api_key: str,
        *,
        retry_seconds: float,
        revive: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Opens a channel; nothing is sent yet.

        Args:
            target: A checked target.
            api_key: The key for TCP.
            retry_seconds: How long a safe call is tried again from its first failure on.
            revive: Called between tries; it sees to it that there is a controller again.

        Raises:
            FieldInvalidError: The key would cross a network in clear text.
        """
        self._target = target
        self._metadata = channel.credentials(target, api_key)
        self._channel = channel.open_channel(target)
        self._retry_seconds = retry_seconds
        self._revive = revive
        self._closed = False
        # A wait lasts; it must not keep a short call (a cancellation above all) from being sent.
        self._short = asyncio.Semaphore(SHORT_CALLS)
        self._long = asyncio.Semaphore(LONG_CALLS)
        self.invocations = invocation_service_pb2_grpc.InvocationServiceStub(self._channel)
        self.artifacts = artifact_service_pb2_grpc.ArtifactServiceStub(self._channel)
        self.templates = template_service_pb2_grpc.TemplateServiceStub(self._channel)
        self.workspaces = workspace_service_pb2_grpc.WorkspaceServiceStub(self._channel)

    @property
    def crowded(self) -> bool:
        """Whether long calls have to queue."""
        return self._long.locked()

    async def close(self) -> None:
        """Closes the channel; what is in flight raises `ConnectionLostError`."""
        self._closed = True
        await self._channel.close()

    def link(self) -> Link:
        """A fresh connection to the same controller; the caller closes it."""
        self._check_open()
        return Link(self._target, self._metadata)

    def patience(self) -> Patience:
        """A fresh patience for one operation."""
        return Patience(self._retry_seconds)

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectionLostError("the client is closed")

    def _closed_under(self, error: asyncio.CancelledError) -> bool:
        """Whether a call was cancelled by the channel's closing and not by its caller."""
        task = asyncio.current_task()
        return self._closed and (task is None or task.cancelling() == 0) and error is not None

    async def call(
        self,
        method: Callable[..., Awaitable[Response]],
        make_request: Callable[[], Any],
        *,
        seconds: float | None = CALL_SECONDS,
        long: bool = False,
    ) -> Response:
        """Sends a safe call until it is answered.

        Args:
            method: The stub's method.
            make_request: Makes the request, or its stream, of one try; the `request_id` is the same
                in all of them.
            seconds: How long one try may take; None for a transfer, which ends by itself.
            long: Whether it counts among the long calls.

        Raises:
            HutchError: It was refused, or the controller cannot be reached.
        """
        patience = self.patience()
        while True:
            self._check_open()
            try:
                async with self._long if long else self._short:
                    self._check_open()
                    return await method(make_request(), timeout=seconds, metadata=self._metadata)
            except asyncio.CancelledError as error:
                if self._closed_under(error):
                    raise ConnectionLostError("the client is closed") from None
                raise
            except grpc.aio.AioRpcError as error:
                await patience.after(error, timeouts=True)
            await self.revive()

    async def revive(self) -> None:
        """Sees to it that a controller is there, where that is ours to see to."""
        if self._revive is not None and not self._closed:
            await self._revive()

    def open(self, method: Callable[..., Any], request: Any) -> Any:
        """Opens one stream, without retry; the caller reads and cancels it."""
        self._check_open()
        return method(request, metadata=self._metadata)

    async def stream(
        self, method: Callable[..., Any], make_request: Callable[[], Any]
    ) -> AsyncIterator[Any]:
        """Reads a stream to its end and resumes it when it is cut.

        Args:
            method: The stub's method.
            make_request: Makes the request from wherever the reader has come to.

        Raises:
            HutchError: It was refused, or the controller cannot be reached.
        """
        patience = self.patience()
        while True:
            self._check_open()
            try:
                async with self._long:
                    call = self.open(method, make_request())
                    try:
                        async for response in call:
                            patience.progress()
                            yield response
                        return
                    finally:
                        call.cancel()
            except asyncio.CancelledError as error:
                if self._closed_under(error):
                    raise ConnectionLostError("the client is closed") from None
                raise
            except grpc.aio.AioRpcError as error:
                await patience.after(error)
            await self.revive()
