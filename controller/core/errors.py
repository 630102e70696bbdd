"""Refusals: requests that are answered with an error and change nothing.

Raised by the wire, the engine and the store's callers; turned into `google.rpc.Status` in one
place, `controller.wire.errors`.

    Refused                 one class; the reason says which row of the error table it is
    InvariantBroken         a defect of this program
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class Reason(enum.StrEnum):
    """The machine-readable reasons, as in `hutch.v1.ErrorReason` without the prefix."""

    FIELD_INVALID = "FIELD_INVALID"
    PAYLOAD_TOO_LARGE = "PAYLOAD_TOO_LARGE"
    CREDENTIAL_INVALID = "CREDENTIAL_INVALID"
    GRANT_DENIED = "GRANT_DENIED"
    INVOCATION_NOT_FOUND = "INVOCATION_NOT_FOUND"
    ARTIFACT_NOT_FOUND = "ARTIFACT_NOT_FOUND"
    SANDBOX_NOT_FOUND = "SANDBOX_NOT_FOUND"
    REQUEST_ID_REUSED = "REQUEST_ID_REUSED"
    OWNER_FENCED = "OWNER_FENCED"
    INVOCATION_ENDED = "INVOCATION_ENDED"
    DEPTH_LIMIT_REACHED = "DEPTH_LIMIT_REACHED"
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
    CONTROLLER_DRAINING = "CONTROLLER_DRAINING"
    HOST_UNAVAILABLE = "HOST_UNAVAILABLE"
    STORE_UNAVAILABLE = "STORE_UNAVAILABLE"
    STORE_FULL = "STORE_FULL"
    NOT_ENFORCEABLE = "NOT_ENFORCEABLE"
    INTERNAL = "INTERNAL"
    NOT_BUILT = "NOT_BUILT"
    CELL_BUSY = "CELL_BUSY"
    CELL_NOT_FOUND = "CELL_NOT_FOUND"
    TOOL_UNREACHABLE = "TOOL_UNREACHABLE"
    TOOL_OUTCOME_UNKNOWN = "TOOL_OUTCOME_UNKNOWN"
    TOOL_TIMED_OUT = "TOOL_TIMED_OUT"
    FILE_NOT_FOUND = "FILE_NOT_FOUND"


class Refused(Exception):
    """A request that is refused.

    Attributes:
        reason: which row of the error table.
        details: what the error info carries beside the reason: `field`, `excess`, `limit`.
    """

    def __init__(self, reason: Reason, message: str, **details: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.details: Mapping[str, str] = details


class InvariantBroken(Exception):
    """Something that cannot be happened: a defect. It holds under `-O` as well."""


def invariant(condition: object, message: str) -> None:
    """Raises `InvariantBroken` unless the condition holds."""
    if not condition:
        raise InvariantBroken(message)
