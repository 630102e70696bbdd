"""Why a sandbox ended when nobody asked for it, judged from what could be measured.

Called by `sandbox.host.hosted`. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from hutch.v1 import host_service_pb2 as pb
from sandbox.drivers.driver import Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The first cause; later ones do not count."""

    cause: pb.GoneCause.ValueType
    message: str


def judge(*, exited: Measurement, ready: bool, truncated: bool) -> Verdict:
    """Names the cause of an end.

    Args:
        exited: How the supervisor exited; without code and signal when that is not known.
        ready: Whether it had said that it takes cells.
        truncated: Whether its channel ended within a frame.
    """
    how = _how(exited)
    detail = f": {exited.detail}" if exited.detail else ""
    if not ready:
        return Verdict(
            cause=pb.GONE_CAUSE_START_FAILED,
            message=f"its supervisor {how} before it was ready{detail}",
        )
    if truncated and exited.signal is None:
        # A signal may cut a frame; a supervisor that ends by itself sends whole ones.
        return Verdict(
            cause=pb.GONE_CAUSE_DENIED,
            message="it broke the frame protocol: its channel ended inside a frame",
        )
    if exited.exit_code is None and exited.signal is None:
        return Verdict(
            cause=pb.GONE_CAUSE_LOST,
            message="its channel ended while its supervisor seemed to live",
        )
    return Verdict(cause=pb.GONE_CAUSE_DIED, message=f"its supervisor {how}{detail}")


def _how(exited: Measurement) -> str:
    if exited.signal is not None:
        return f"died of signal {exited.signal}"
    if exited.exit_code is not None:
        return f"exited with code {exited.exit_code}"
    return "closed its channel"
