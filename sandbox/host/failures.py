"""Failures as data, between frames and messages.

Called by `inbound` and `outbound`.
"""

from __future__ import annotations

from hutch.v1 import ending_pb2
from sandbox.host.fields import Fields
from sandbox.runtime import frames

MAX_TYPE_NAME = 200
MAX_MISMATCH = 2_000
_KIND_PREFIX = "ENDING_KIND_"


def ending_name(kind: ending_pb2.EndingKind.ValueType) -> str:
    """The kind as frames write it: lower case; empty when it is not set."""
    if kind == ending_pb2.ENDING_KIND_UNSPECIFIED:
        return ""
    return ending_pb2.EndingKind.Name(kind).removeprefix(_KIND_PREFIX).lower()


def _ending_kind(fields: Fields) -> ending_pb2.EndingKind.ValueType:
    name = fields.text("ending")
    if not name:
        return ending_pb2.ENDING_KIND_UNSPECIFIED
    full = _KIND_PREFIX + name.upper()
    if not name.islower() or full not in ending_pb2.EndingKind.keys():
        raise fields.breach("ending", "not an ending kind")
    return ending_pb2.EndingKind.Value(full)


def from_frame(fields: Fields) -> ending_pb2.Failure:
    """Reads a sandbox's `failure` object.

    Raises:
        ProtocolBreach: it has not the form it must have.
    """
    failure = ending_pb2.Failure(
        type_name=fields.text("type_name")[:MAX_TYPE_NAME],
        message=fields.text("message", frames.MAX_MESSAGE),
        traceback=fields.text("traceback", frames.MAX_TRACEBACK),
        invocation_id=fields.text("invocation_id"),
        ending_kind=_ending_kind(fields),
        reason=fields.text("reason"),
    )
    path, expected, got = fields.text("path"), fields.text("expected"), fields.text("got")
    fields.end()
    if path or expected or got:
        failure.mismatch.path = path
        failure.mismatch.expected = expected[:MAX_MISMATCH]
        failure.mismatch.got = got[:MAX_MISMATCH]
    return failure


def to_frame(failure: ending_pb2.Failure) -> dict[str, str]:
    """Writes a failure for a sandbox, within the lengths that frames allow."""
    mismatch = failure.mismatch
    return {
        "type_name": failure.type_name[:MAX_TYPE_NAME],
        "message": failure.message[: frames.MAX_MESSAGE],
        "traceback": failure.traceback[: frames.MAX_TRACEBACK],
        "invocation_id": failure.invocation_id[: frames.MAX_TEXT],
        "ending": ending_name(failure.ending_kind),
        "reason": failure.reason[: frames.MAX_TEXT],
        "path": mismatch.path[: frames.MAX_TEXT],
        "expected": mismatch.expected[:MAX_MISMATCH],
        "got": mismatch.got[:MAX_MISMATCH],
    }
