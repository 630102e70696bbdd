"""Who calls: the key of the TCP listener, checked before any servicer sees the request.

Made by `controller.app` for the TCP server only: the unix socket is private to its user by mode.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from controller.core.errors import Reason, Refused
from controller.wire.errors import abort

HEADER = "authorization"


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Refuses every call without the key, whatever its method."""

    def __init__(self, key: str) -> None:
        self._expected = f"Bearer {key}".encode()

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Goes on only with the right key.

        Raises:
            Refused: never; the caller gets CREDENTIAL_INVALID.
        """
        for name, value in handler_call_details.invocation_metadata or ():
            given = value if isinstance(value, bytes) else value.encode()
            if name == HEADER and hmac.compare_digest(given, self._expected):
                return await continuation(handler_call_details)
        return _REFUSING


async def _refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await abort(context, Refused(Reason.CREDENTIAL_INVALID, "the key is missing or wrong"))


_REFUSING: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(_refuse)
