"""The one map from what the host refuses to what a gRPC caller sees.

Raised all over `sandbox.host`; turned into a status by the servicer alone.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

DOMAIN = "hutch.v1"
STATUS_DETAILS_KEY = "grpc-status-details-bin"
MAX_MESSAGE_CHARACTERS = 2_000

_CODES = {
    "FIELD_INVALID": grpc.StatusCode.INVALID_ARGUMENT,
    "PAYLOAD_TOO_LARGE": grpc.StatusCode.INVALID_ARGUMENT,
    "SANDBOX_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "OWNER_FENCED": grpc.StatusCode.FAILED_PRECONDITION,
    "NOT_ENFORCEABLE": grpc.StatusCode.FAILED_PRECONDITION,
    "HOST_UNAVAILABLE": grpc.StatusCode.UNAVAILABLE,
    "INTERNAL": grpc.StatusCode.INTERNAL,
}


class HostError(Exception):
    """A request that the host refuses; each reason has its function below.

    Attributes:
        reason: A name of `ErrorReason` without its prefix.
        metadata: What a program needs to know of the refusal.
        retry_after_seconds: When to try again, or None.
    """

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        retry_after_seconds: int | None = None,
    ) -> None:
        super().__init__(message[:MAX_MESSAGE_CHARACTERS])
        self.reason = reason
        self.metadata = dict(metadata or {})
        self.retry_after_seconds = retry_after_seconds

    @property
    def code(self) -> grpc.StatusCode:
        """The status code that belongs to the reason."""
        return _CODES[self.reason]

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        """The `google.rpc.Status` with its details, as it travels."""
        info = error_details_pb2.ErrorInfo(
            reason=self.reason, domain=DOMAIN, metadata=self.metadata
        )
        status = status_pb2.Status(code=self.code.value[0], message=str(self))
        _pack(status, info)
        if self.retry_after_seconds is not None:
            delay = Duration(seconds=self.retry_after_seconds)
            _pack(status, error_details_pb2.RetryInfo(retry_delay=delay))
        return ((STATUS_DETAILS_KEY, status.SerializeToString()),)


def _pack(status: status_pb2.Status, detail: object) -> None:
    wrapped = Any()
    wrapped.Pack(detail)  # type: ignore[arg-type]
    status.details.append(wrapped)


def field_invalid(field: str, message: str) -> HostError:
    """A field is missing, malformed or out of range."""
    return HostError("FIELD_INVALID", f"{field}: {message}", metadata={"field": field})


def payload_too_large(what: str, limit: int) -> HostError:
    """A content is larger than its limit, in bytes."""
    return HostError(
        "PAYLOAD_TOO_LARGE", f"{what}: more than {limit} bytes", metadata={"limit": str(limit)}
    )


def owner_fenced(message: str) -> HostError:
    """The caller's epoch, or the generation it means, is not the current one."""
    return HostError("OWNER_FENCED", message)


def sandbox_not_found(sandbox_id: str) -> HostError:
    """The host neither has the sandbox nor would start it."""
    return HostError("SANDBOX_NOT_FOUND", f"no sandbox {sandbox_id!r} on this host")


def not_enforceable(limits: list[str], driver: str) -> HostError:
    """A limit that the caller named is not held for the whole sandbox."""
    names = ", ".join(limits)
    return HostError(
        "NOT_ENFORCEABLE",
        f"driver {driver} does not hold for the whole sandbox here: {names}",
        metadata={"limit": names},
    )


def host_unavailable(message: str, retry_after_seconds: int = 1) -> HostError:
    """The host is full or shutting down; the same request may succeed later."""
    return HostError("HOST_UNAVAILABLE", message, retry_after_seconds=retry_after_seconds)


def internal() -> HostError:
    """An invariant broke; the trace is in the host's log under the incident id only."""
    incident = secrets.token_hex(8)
    return HostError(
        "INTERNAL", f"internal error, incident {incident}", metadata={"incident": incident}
    )
