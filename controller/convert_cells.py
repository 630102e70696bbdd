"""Cells, displays and tool calls between the wire and the controller's records.

Called by the servicers and by the host client, beside `controller.convert`.
"""

from __future__ import annotations

import hashlib
import re

from controller import convert
from controller.core.errors import Reason, Refused
from controller.core.ids import CellId
from controller.core.model import CellOutcome, Failure
from controller.engine import records as rec
from hutch.v1 import cell_pb2, event_pb2
from hutch.v1 import host_service_pb2 as hs
from hutch.v1 import invocation_service_pb2 as isv

CELL_SECONDS = 86_400.0
CODE_SHOWN = 2000
_CELL_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")


def cell_id_in(cell_id: str) -> CellId:
    """A cell's id as a client chose it.

    Raises:
        Refused: FIELD_INVALID.
    """
    if not _CELL_ID.fullmatch(cell_id):
        message = "cell_id: 1 to 64 ASCII letters, digits, - and _"
        raise Refused(Reason.FIELD_INVALID, message, field="cell_id")
    return CellId(cell_id)


def timeout_in(submit: isv.SubmitCell) -> float | None:
    """A cell's own time limit in seconds.

    Raises:
        Refused: FIELD_INVALID.
    """
    if not submit.HasField("timeout"):
        return None
    seconds = convert.seconds_of(submit.timeout)
    if not 0 < seconds <= CELL_SECONDS:
        message = f"timeout: over 0 s and at most {CELL_SECONDS:g} s"
        raise Refused(Reason.FIELD_INVALID, message, field="timeout")
    return seconds


def outcome_in(outcome: cell_pb2.CellOutcome.ValueType) -> CellOutcome:
    """How a cell ended, as a host says."""
    return CellOutcome(cell_pb2.CellOutcome.Name(outcome).removeprefix("CELL_OUTCOME_").lower())


def cell_out(record: rec.CellRecorded, checked: rec.ValueChecked | None = None) -> cell_pb2.Cell:
    """A cell that has ended; one that returned, with the verdict on its value."""
    outcome, failure = record.outcome, record.failure
    if checked is not None and not checked.accepted:
        outcome = CellOutcome.RETURN_REFUSED
        failure = Failure(
            type_name="ReturnTypeError",
            message="the contract refuses the returned value",
            mismatch=checked.mismatch,
        )
    found = cell_pb2.Cell(
        cell_id=record.cell_id,
        outcome=cell_pb2.CellOutcome.Value(f"CELL_OUTCOME_{outcome.upper()}"),
        text=record.text,
        stdout_bytes=record.stdout_bytes,
        stderr_bytes=record.stderr_bytes,
        killed_processes=record.killed_processes,
        background_processes=record.background_processes,
        state_lost=record.state_lost,
        evidence=convert.evidence_out(record.evidence),
        output_cut=record.output_cut,
    )
    if record.value is not None and outcome is CellOutcome.RETURNED:
        found.value.CopyFrom(convert.value_out(record.value))
    if failure is not None:
        found.failure.CopyFrom(convert.failure_out(failure))
    return found


def streams_of(cell: hs.CellCompleted | rec.CellRecorded) -> list[str]:
    """The streams on which a cell has printed."""
    sizes = (("stdout", cell.stdout_bytes), ("stderr", cell.stderr_bytes))
    return [name for name, size in sizes if size]


def display_out(record: rec.CellDisplayed) -> cell_pb2.Display:
    """What a cell showed."""
    found = cell_pb2.Display(cell_id=record.cell_id, index=record.index, is_result=record.is_result)
    for item in record.data:
        shown = found.data.add(media_type=item.media_type)
        if item.artifact is not None:
            shown.artifact.artifact_id = item.artifact.artifact_id
            shown.artifact.sha256 = item.artifact.sha256
            shown.artifact.size_bytes = item.artifact.size_bytes
        else:
            shown.data = item.data or b""
    return found


def accepted_out(record: rec.CellAccepted) -> event_pb2.InvocationCellAccepted:
    """That a cell waits or runs."""
    return event_pb2.InvocationCellAccepted(cell_id=record.cell_id, code=record.code[:CODE_SHOWN])


def cell_output_id(invocation_id: str, cell_id: str) -> str:
    """The name under which the output of a box's cell is kept. The client chose the cell's id, so
    it is not part of a name as it stands."""
    digest = hashlib.sha256(cell_id.encode()).hexdigest()
    return f"{invocation_id}c{digest[:24]}"
