"""What the SDK makes of calls that failed without an answer of the controller."""

from __future__ import annotations

import grpc
import pytest
from grpc.aio import Metadata

from hutch import wire_errors
from hutch.errors import ConnectionLostError, HutchError, InternalError


def failed(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, Metadata(), Metadata(), details=details)


@pytest.mark.parametrize(
    ("code", "details", "may_retry", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "connection refused", True, ConnectionLostError),
        (grpc.StatusCode.INTERNAL, "Internal error from Core", True, ConnectionLostError),
        (grpc.StatusCode.INTERNAL, "a defect", False, InternalError),
    ],
)
def test_a_connection_that_breaks_while_something_is_sent_is_a_lost_one(
    code: grpc.StatusCode, details: str, may_retry: bool, kind: type[HutchError]
) -> None:
    refusal = wire_errors.read(failed(code, details))
    assert refusal.may_retry is may_retry
    assert type(wire_errors.exception(refusal)) is kind
