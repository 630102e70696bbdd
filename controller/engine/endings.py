"""Which ending follows from what happened to a cell, a value or a sandbox.

Called by `engine.decide`. Evidence is the host's; whatever the sandbox says is only repeated as the
code's own failure.
"""

from __future__ import annotations

import errno

from controller.core.model import (
    CellOutcome,
    Ending,
    EndingKind,
    Failure,
    GoneCause,
    Granted,
)
from controller.engine import events as ev

KILLED = 9  # the signal by which the kernel ends what it ends for memory


def of_cell(event: ev.CellEnded, granted: Granted) -> Ending:
    """The ending of mode program for an outcome that is no value."""
    evidence = event.evidence
    if event.output_cut:
        return Ending(
            kind=EndingKind.OUTPUT_EXCEEDED,
            message=f"the output passed {granted.output_limit_bytes} bytes and was cut",
            evidence=evidence,
        )
    match event.outcome:
        case CellOutcome.INTERRUPTED:
            return Ending(kind=EndingKind.CANCELLED, failure=event.failure, evidence=evidence)
        case CellOutcome.TIMED_OUT:
            return Ending(
                kind=EndingKind.DEADLINE_EXCEEDED,
                message="the cell reached its time limit",
                failure=event.failure,
                evidence=evidence,
            )
        case CellOutcome.REPL_DIED:
            return _of_death(event)
        case _:
            failure = event.failure or Failure(type_name="Exception")
            if (used_up := _used_up(event)) is not None:
                kind, what = used_up
                return Ending(
                    kind=kind,
                    message=f"{what}: {failure.type_name}: {failure.message}"[:2000],
                    failure=failure,
                    evidence=evidence,
                )
            return Ending(
                kind=EndingKind.RAISED,
                message=f"{failure.type_name}: {failure.message}"[:2000],
                failure=failure,
                evidence=evidence,
            )


def _used_up(event: ev.CellEnded) -> tuple[EndingKind, str] | None:
    """The limit that an uncaught error means, where the host's own counter says so too."""
    evidence = event.evidence
    if event.failure_errno == errno.EAGAIN and evidence.pids_limit_hits:
        return EndingKind.PIDS_EXCEEDED, "the sandbox reached its limit of processes"
    if event.failure_errno in (errno.ENOSPC, errno.EDQUOT) and evidence.disk_full_hits:
        return EndingKind.DISK_EXCEEDED, "the sandbox filled its disk"
    return None


def _of_death(event: ev.CellEnded) -> Ending:
    evidence = event.evidence
    if evidence.oom_kill_count and evidence.signal == KILLED:
        return Ending(
            kind=EndingKind.MEMORY_EXCEEDED,
            message=f"the kernel killed the code at its memory limit of {evidence.limit_value}"
            " bytes",
            evidence=evidence,
        )
    if evidence.signal is not None:
        return Ending(
            kind=EndingKind.CRASHED,
            message=f"the code died of signal {evidence.signal}",
            evidence=evidence,
        )
    return Ending(
        kind=EndingKind.EXITED,
        message=f"the code left by os._exit({evidence.exit_code})",
        evidence=evidence,
    )


def of_gone(event: ev.SandboxGone) -> Ending:
    """The ending of an invocation whose sandbox ended before it did."""
    evidence = event.evidence
    kind = {
        GoneCause.START_FAILED: EndingKind.START_FAILED,
        GoneCause.DENIED: EndingKind.DENIED,
        GoneCause.LOST: EndingKind.SANDBOX_LOST,
        GoneCause.HOST_LOST: EndingKind.HOST_LOST,
        GoneCause.DESTROYED: EndingKind.SANDBOX_LOST,
        GoneCause.DIED: EndingKind.CRASHED,
    }[event.cause]
    if kind is EndingKind.CRASHED and evidence.oom_kill_count and evidence.signal == KILLED:
        kind = EndingKind.MEMORY_EXCEEDED
    return Ending(kind=kind, message=event.message[:2000], evidence=evidence)


def of_mismatch(event: ev.ContractChecked, foreign: list[str]) -> Ending:
    """The ending of a value that was refused."""
    mismatch = event.mismatch
    if foreign:
        message = f"GRANT_DENIED: the value names artifacts it may not: {', '.join(foreign)[:500]}"
    elif mismatch is not None:
        message = f"at {mismatch.path}: expected {mismatch.expected}, got {mismatch.got}"
    else:
        message = event.problem or "the value does not fit"
    failure = Failure(type_name="ReturnTypeError", message=message[:2000], mismatch=mismatch)
    return Ending(kind=EndingKind.CONTRACT_VIOLATED, message=message[:2000], failure=failure)
