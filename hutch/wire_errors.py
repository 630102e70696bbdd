"""From what gRPC and endings say to the exceptions of `hutch.errors`: the one place that maps them.

Called by `hutch.aio`; calls `hutch.errors`. Agent code that fails is data (an ending), never a
status; everything else is one `google.rpc.Status` with one `ErrorInfo` of the domain `hutch.v1`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from hutch import types as t
from hutch.errors import (
    ConnectionLostError,
    CredentialInvalidError,
    Failure,
    HutchError,
    InternalError,
    InvocationFailed,
    PayloadTooLargeError,
    RequestRefused,
    failed,
    refused,
)

DOMAIN = "hutch.v1"
# What grpc.aio says of a stream whose connection broke while something was sent on it.
_BROKEN_SEND = "Internal error from Core"
_STATUS_KEY = "grpc-status-details-bin"
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
_RETRIED_REASONS = frozenset({"CONTROLLER_DRAINING", "HOST_UNAVAILABLE", "STORE_UNAVAILABLE"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What a failed call said.

    Attributes:
        code: The gRPC code.
        message: One sentence.
        reason: The reason of its `ErrorInfo`; empty when it had none (a broken channel).
        details: The metadata of its `ErrorInfo`.
        retry_seconds: The hint of its `RetryInfo`, if any.
    """

    code: grpc.StatusCode
    message: str = ""
    reason: str = ""
    details: dict[str, str] = field(default_factory=dict)
    retry_seconds: float | None = None

    @property
    def may_retry(self) -> bool:
        """Whether the same call, with the same request id, may be sent again.

        A lost call is never taken for one that did not run: only the request id makes it safe.
        """
        if self.reason:
            return self.reason in _RETRIED_REASONS or self.retry_seconds is not None
        return self.code in _LOST


def read(error: grpc.aio.AioRpcError) -> Refusal:
    """What a failed call said, with its `ErrorInfo` and `RetryInfo` where it carries them."""
    message = error.details() or error.code().name
    code = error.code()
    if code is grpc.StatusCode.INTERNAL and message == _BROKEN_SEND:
        code = grpc.StatusCode.UNAVAILABLE
    refusal = Refusal(code=code, message=message)
    for key, raw in error.trailing_metadata() or ():
        if key != _STATUS_KEY or not isinstance(raw, bytes):
            continue
        status = status_pb2.Status()
        try:
            status.ParseFromString(raw)
        except DecodeError:
            return refusal
        refusal = _with_details(refusal, status)
    return refusal


def _with_details(refusal: Refusal, status: status_pb2.Status) -> Refusal:
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    reason, details, seconds = "", {}, None
    for part in status.details:
        if part.Unpack(info) and info.domain == DOMAIN:
            reason, details = info.reason, dict(info.metadata)
        elif part.Unpack(retry):
            seconds = retry.retry_delay.ToTimedelta().total_seconds()
    return Refusal(
        code=refusal.code,
        message=status.message or refusal.message,
        reason=reason,
        details=details,
        retry_seconds=seconds,
    )


def exception(refusal: Refusal) -> HutchError:
    """The exception that stands for a failed call."""
    if refusal.reason:
        return refused(refusal.reason, refusal.message, refusal.details)
    match refusal.code:
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            return ConnectionLostError(f"the controller cannot be reached: {refusal.message}")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return ConnectionLostError(f"the controller did not answer in time: {refusal.message}")
        case grpc.StatusCode.UNAUTHENTICATED:
            return CredentialInvalidError(refusal.message, "CREDENTIAL_INVALID")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return PayloadTooLargeError(refusal.message, "PAYLOAD_TOO_LARGE")
        case grpc.StatusCode.INTERNAL | grpc.StatusCode.UNKNOWN:
            return InternalError(refusal.message, "INTERNAL")
        case _:
            return RequestRefused(refusal.message, refusal.code.name)


def ending_exception(invocation: t.Invocation) -> InvocationFailed:
    """The exception that stands for an ending without a value."""
    ending = invocation.ending or t.Ending(kind="internal", message="it ended without an ending")
    return failed(
        ending.kind, invocation.invocation_id, ending.failure or Failure(), ending.message
    )
