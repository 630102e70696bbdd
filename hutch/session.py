"""The session that tells the controller that a client is there.

Called by `hutch.aio`; calls `hutch.transport`. While it is open a controller that ends when idle
stays, and invocations bound to it are not cancelled.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from typing import Any

import grpc

from hutch import convert, types, wire_errors
from hutch.errors import ConnectionLostError
from hutch.transport import Transport, backoff_seconds
from hutch.v1 import invocation_service_pb2 as pb


class Session:
    """One session, kept for the client's life under one id and taken up again when it breaks."""

    def __init__(self, transport: Transport, client_name: str) -> None:
        """A session that is not open yet."""
        self._transport = transport
        self._request = pb.OpenSessionRequest(
            session_id=secrets.token_hex(16), client_name=client_name[:200]
        )
        self._call: Any = None
        self._keeper: asyncio.Task[None] | None = None

    @property
    def session_id(self) -> str:
        """The unguessable id that invocations are bound to."""
        return self._request.session_id

    async def open(self, timeout_seconds: float) -> types.ServerInfo:
        """Opens the session with one try and keeps it from then on.

        Raises:
            HutchError: The controller refused it, is not there or did not answer in time.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                greeting = await self._greet()
        except TimeoutError:
            self._drop()
            raise ConnectionLostError(
                f"the controller did not answer within {timeout_seconds:.0f} s"
            ) from None
        except grpc.aio.AioRpcError as error:
            self._drop()
            raise wire_errors.exception(wire_errors.read(error)) from error
        except BaseException:
            self._drop()
            raise
        self._keeper = asyncio.create_task(self._keep(), name="hutch-session")
        return convert.server_info(greeting)

    async def close(self) -> None:
        """Ends the session; the controller learns it at once."""
        if self._keeper is not None:
            self._keeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._keeper
            self._keeper = None
        self._drop()

    def _drop(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None

    async def _greet(self) -> pb.OpenSessionResponse:
        self._drop()
        self._call = self._transport.open(self._transport.invocations.OpenSession, self._request)
        greeting = await self._call.read()
        if not isinstance(greeting, pb.OpenSessionResponse):
            raise ConnectionLostError("the controller ended the session")
        return greeting

    async def _keep(self) -> None:
        """Reads the controller's signs of life and opens the session again when they end."""
        attempt = 0
        while True:
            try:
                if self._call is None:
                    await self._greet()
                    attempt = 0
                while await self._call.read() is not grpc.aio.EOF:
                    attempt = 0
            except grpc.aio.AioRpcError as error:
                refusal = wire_errors.read(error)
                if not refusal.may_retry:
                    return  # refused for good: the next call says so to whoever makes it
            except ConnectionLostError:
                pass
            self._drop()
            await asyncio.sleep(backoff_seconds(attempt))
            attempt = min(attempt + 1, 5)
