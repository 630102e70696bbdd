"""The one error map: a refusal becomes one `google.rpc.Status` with one `ErrorInfo`.

Called by every servicer through `mapped`.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio
import structlog
from google.protobuf import any_pb2, duration_pb2
from google.rpc import (  # type: ignore[import-untyped]
    code_pb2,
    error_details_pb2,
    status_pb2,
)
from grpc_status import rpc_status

from controller.core.errors import Reason, Refused
from controller.store.ports import (
    ArtifactNotFound,
    ArtifactTooLarge,
    CursorInvalid,
    NameInvalid,
    StoreFull,
    StoreUnavailable,
)

log = structlog.get_logger(__name__)

DOMAIN = "hutch.v1"
RETRY_SECONDS = 1

_CODES = {
    Reason.FIELD_INVALID: code_pb2.INVALID_ARGUMENT,
    Reason.PAYLOAD_TOO_LARGE: code_pb2.INVALID_ARGUMENT,
    Reason.CREDENTIAL_INVALID: code_pb2.UNAUTHENTICATED,
    Reason.GRANT_DENIED: code_pb2.PERMISSION_DENIED,
    Reason.INVOCATION_NOT_FOUND: code_pb2.NOT_FOUND,
    Reason.ARTIFACT_NOT_FOUND: code_pb2.NOT_FOUND,
    Reason.SANDBOX_NOT_FOUND: code_pb2.NOT_FOUND,
    Reason.REQUEST_ID_REUSED: code_pb2.ALREADY_EXISTS,
    Reason.OWNER_FENCED: code_pb2.FAILED_PRECONDITION,
    Reason.INVOCATION_ENDED: code_pb2.FAILED_PRECONDITION,
    Reason.DEPTH_LIMIT_REACHED: code_pb2.FAILED_PRECONDITION,
    Reason.QUOTA_EXCEEDED: code_pb2.RESOURCE_EXHAUSTED,
    Reason.CONTROLLER_DRAINING: code_pb2.UNAVAILABLE,
    Reason.HOST_UNAVAILABLE: code_pb2.UNAVAILABLE,
    Reason.STORE_UNAVAILABLE: code_pb2.UNAVAILABLE,
    Reason.STORE_FULL: code_pb2.UNAVAILABLE,
    Reason.NOT_ENFORCEABLE: code_pb2.FAILED_PRECONDITION,
    Reason.INTERNAL: code_pb2.INTERNAL,
    Reason.NOT_BUILT: code_pb2.UNIMPLEMENTED,
    Reason.CELL_BUSY: code_pb2.FAILED_PRECONDITION,
    Reason.CELL_NOT_FOUND: code_pb2.NOT_FOUND,
    Reason.TOOL_UNREACHABLE: code_pb2.UNAVAILABLE,
    Reason.TOOL_OUTCOME_UNKNOWN: code_pb2.UNAVAILABLE,
    Reason.TOOL_TIMED_OUT: code_pb2.DEADLINE_EXCEEDED,
    Reason.FILE_NOT_FOUND: code_pb2.NOT_FOUND,
}
_RETRY = frozenset(
    {
        Reason.QUOTA_EXCEEDED,
        Reason.CONTROLLER_DRAINING,
        Reason.HOST_UNAVAILABLE,
        Reason.STORE_UNAVAILABLE,
        Reason.STORE_FULL,
    }
)


def refusal_of(problem: Exception) -> Refused:
    """The refusal that a store's error means; what is none of ours is INTERNAL."""
    match problem:
        case Refused():
            return problem
        case ArtifactNotFound():
            return Refused(Reason.ARTIFACT_NOT_FOUND, "no such artifact")
        case ArtifactTooLarge():
            return Refused(Reason.PAYLOAD_TOO_LARGE, str(problem), limit=str(problem.max_bytes))
        case CursorInvalid():
            return Refused(Reason.FIELD_INVALID, str(problem), field="page_token")
        case NameInvalid():
            return Refused(Reason.INVOCATION_NOT_FOUND, "no such invocation")
        case StoreFull():
            return Refused(Reason.STORE_FULL, "the disk under the store is full")
        case StoreUnavailable():
            return Refused(Reason.STORE_UNAVAILABLE, "the store does not answer")
    incident = secrets.token_hex(6)
    log.error("internal_error", incident=incident, exc_info=problem)
    return Refused(Reason.INTERNAL, f"internal error, incident {incident}", incident=incident)


def status_of(refused: Refused) -> status_pb2.Status:
    """The wire's form of a refusal."""
    info = error_details_pb2.ErrorInfo(
        reason=refused.reason.value, domain=DOMAIN, metadata=dict(refused.details)
    )
    status = status_pb2.Status(code=_CODES[refused.reason], message=refused.message[:4000])
    status.details.append(_packed(info))
    if refused.reason in _RETRY:
        delay = duration_pb2.Duration(seconds=RETRY_SECONDS)
        status.details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status


def _packed(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


async def abort(context: grpc.aio.ServicerContext[Any, Any], problem: Exception) -> NoReturn:
    """Ends an RPC with the status of a problem."""
    status = rpc_status.to_status(status_of(refusal_of(problem)))
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort raises")


def unary(
    method: Callable[..., Awaitable[Any]],
) -> Callable[..., Awaitable[Any]]:
    """Maps what a unary method raises."""

    @functools.wraps(method)
    async def mapped(self: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await method(self, request, context)
        except Exception as problem:
            await abort(context, problem)

    return mapped


def streaming(
    method: Callable[..., AsyncIterator[Any]],
) -> Callable[..., AsyncIterator[Any]]:
    """Maps what a method with a stream of answers raises."""

    @functools.wraps(method)
    async def mapped(
        self: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        try:
            async for answer in method(self, request, context):
                yield answer
        except Exception as problem:
            await abort(context, problem)

    return mapped
