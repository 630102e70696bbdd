"""Interactive boxes: cells that a client gives one after the other.

Called by `engine.decide`. The first cell that has not ended is the one that runs; what a cell came
to is a record like that of a program's cell, and only a returned value can end the box.
"""

from __future__ import annotations

from dataclasses import replace

from controller.core.errors import Reason, Refused
from controller.core.ids import CellId, InvocationId
from controller.core.model import CellOutcome, Ending, EndingKind, Evidence
from controller.engine import events as ev
from controller.engine import records as rec
from controller.engine.draft import Draft
from controller.engine.endings import of_cell
from controller.engine.settle import decide_ending
from controller.engine.state import Node


def submitted(draft: Draft, event: ev.CellSubmitted) -> None:
    """Takes a cell, or nothing when its id came before.

    Raises:
        Refused: INVOCATION_ENDED; CELL_BUSY; QUOTA_EXCEEDED.
    """
    node = _live_box(draft, event.invocation_id)
    if event.cell_id in node.open_cells or event.cell_id in node.ended_cells:
        return
    if event.refuse_busy and node.open_cells:
        raise Refused(Reason.CELL_BUSY, f"the cell {next(iter(node.open_cells))} runs")
    if len(node.open_cells) > draft.config.waiting_cells:
        raise Refused(
            Reason.QUOTA_EXCEEDED, f"more than {draft.config.waiting_cells} cells would wait"
        )
    if len(node.ended_cells) + len(node.open_cells) >= draft.config.cells:
        raise Refused(Reason.QUOTA_EXCEEDED, f"the box has had {draft.config.cells} cells")
    draft.add(
        rec.CellAccepted(
            invocation_id=node.invocation_id,
            cell_id=event.cell_id,
            code=event.code,
            inputs=event.inputs,
            readable_artifacts=event.readable_artifacts,
            timeout_seconds=event.timeout_seconds,
        )
    )


def interrupt(draft: Draft, event: ev.InterruptRequested) -> None:
    """Interrupts the cell that runs; one that waits is taken out of the queue.

    Raises:
        Refused: INVOCATION_ENDED; CELL_NOT_FOUND.
    """
    node = _live_box(draft, event.invocation_id)
    cells = list(node.open_cells)
    if event.cell_id in node.ended_cells:
        cells = cells if event.queue else []
    elif event.cell_id not in node.open_cells:
        raise Refused(Reason.CELL_NOT_FOUND, f"no cell {event.cell_id!r}")
    elif event.queue:
        cells = cells[cells.index(event.cell_id) :]
    else:
        cells = [event.cell_id]
    running = node.next_cell.cell_id if node.next_cell is not None else None
    for cell_id in cells:
        if cell_id == node.returned_cell:
            continue  # it has ended, its value is being checked
        if cell_id != running:
            _never_ran(draft, node, cell_id)
        elif not node.open_cells[cell_id].interrupted and cell_id == event.cell_id:
            draft.add(rec.CellInterrupted(invocation_id=node.invocation_id, cell_id=cell_id))


def cell_ended(draft: Draft, node: Node, event: ev.CellEnded) -> None:
    """Notes what a cell of a box came to. A cell that is not known was given to the sandbox by a
    controller that died before it had written that down."""
    if event.cell_id in node.ended_cells or event.cell_id == node.returned_cell:
        return
    check = node.ending is None and not event.output_cut and event.outcome is CellOutcome.RETURNED
    draft.add(
        rec.CellRecorded(
            invocation_id=node.invocation_id,
            cell_id=event.cell_id,
            outcome=event.outcome,
            value=event.value if check else None,
            failure=event.failure,
            stdout_bytes=event.stdout_bytes,
            stderr_bytes=event.stderr_bytes,
            evidence=_own(event.evidence),
            check=check,
            text=event.text,
            killed_processes=event.killed_processes,
            background_processes=event.background_processes,
            state_lost=event.state_lost,
            output_cut=event.output_cut,
            time_us=draft.now_us,
        )
    )
    if event.output_cut and node.ending is None:
        decide_ending(draft, node, of_cell(event, node.granted))


def refused_return(draft: Draft, node: Node, missed: Ending) -> None:
    """A value that the contract refuses leaves the box alive, so many times."""
    contract = node.spec.contract
    if contract is None or node.return_refusals > contract.max_failures:
        decide_ending(draft, node, missed)


def shown(draft: Draft, node: Node, event: ev.CellShown) -> None:
    """Keeps what a cell showed."""
    draft.add(
        rec.CellDisplayed(
            invocation_id=node.invocation_id,
            cell_id=event.cell_id,
            index=event.index,
            is_result=event.is_result,
            data=event.data,
        )
    )


def idle_passed(draft: Draft, event: ev.IdlePassed) -> None:
    """Ends a box that nobody has used; one that is in use sets its timer anew by itself."""
    node = draft.state.live(event.invocation_id)
    if node is None or not draft.state.is_idle(node):
        return
    limit = node.granted.idle_timeout_us
    if draft.now_us < node.idle_since_us + limit:
        return
    seconds = limit / 1_000_000
    ending = Ending(
        kind=EndingKind.IDLE_TIMEOUT,
        message=f"no cell ran for {seconds:g} s",
        evidence=Evidence(limit="idle_timeout", limit_value=max(1, round(seconds))),
    )
    decide_ending(draft, node, ending)


def _never_ran(draft: Draft, node: Node, cell_id: CellId) -> None:
    draft.add(
        rec.CellRecorded(
            invocation_id=node.invocation_id,
            cell_id=cell_id,
            outcome=CellOutcome.CANCELLED_BEFORE_START,
            value=None,
            failure=None,
            stdout_bytes=0,
            stderr_bytes=0,
            evidence=Evidence(),
            check=False,
            time_us=draft.now_us,
        )
    )


def _own(evidence: Evidence) -> Evidence:
    """What was measured, without the levels of its limits: they are the same for every cell."""
    return replace(evidence, enforcement=()) if evidence.enforcement else evidence


def _live_box(draft: Draft, invocation_id: InvocationId) -> Node:
    node = draft.state.live(invocation_id)
    if node is None or node.ending is not None:
        raise Refused(Reason.INVOCATION_ENDED, "the box has ended")
    if not node.interactive:
        raise Refused(Reason.FIELD_INVALID, "it takes no cells: it is not interactive")
    return node
