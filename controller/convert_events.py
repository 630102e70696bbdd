"""Journal records as the events that clients watch, and bounded views of them.

Called by the invocation servicer and, for a parent's code, by the host client. A record that says
nothing to a client gives no event.
"""

from __future__ import annotations

import json
from collections import deque

from google.protobuf.json_format import MessageToDict

from controller import convert, convert_cells
from controller.core.errors import Reason, Refused
from controller.core.ids import sandbox_id_of
from controller.core.model import Ending, State
from controller.engine import records as rec
from controller.store.ports import Journal, StoredRecord, tree_records
from hutch.v1 import event_pb2, invocation_pb2
from hutch.v1 import invocation_service_pb2 as isv

EVENTS = 25
EVENTS_MAXIMUM = 1000
EVENT_BYTES = 1024
EVENT_BYTES_MAXIMUM = 64 * 1024


async def view(
    journal: Journal, codec: rec.Codec, tenant_id: str, tree_id: str, request: isv.ListEventsRequest
) -> isv.ListEventsResponse:
    """The last events of an invocation, each cut to a few bytes.

    Raises:
        Refused: FIELD_INVALID, more is asked for than may be.
    """
    if request.max_events > EVENTS_MAXIMUM:
        raise Refused(Reason.FIELD_INVALID, f"at most {EVENTS_MAXIMUM}", field="max_events")
    if request.max_bytes > EVENT_BYTES_MAXIMUM:
        raise Refused(Reason.FIELD_INVALID, f"at most {EVENT_BYTES_MAXIMUM}", field="max_bytes")
    limit = request.max_events or EVENTS
    last: deque[event_pb2.EventView] = deque(maxlen=limit + 1)  # one more shows that there are more
    maker = EventMaker(codec)
    members = {request.invocation_id}
    async for item in tree_records(journal, tenant_id, tree_id):
        if request.before_sequence and item.sequence >= request.before_sequence:
            break
        event = maker.event_of(item)
        if event is None:
            continue
        grow(members, event, tree=request.tree)
        if event.invocation_id in members:
            last.append(_shortened(event, request.max_bytes or EVENT_BYTES))
    truncated = len(last) > limit
    events = list(last)[-limit:]
    return isv.ListEventsResponse(
        events=events,
        truncated=truncated,
        before_sequence=events[0].sequence if truncated else 0,
    )


def grow(members: set[str], event: event_pb2.InvocationEvent, *, tree: bool) -> None:
    """Takes a new descendant into the set of those whose events are wanted."""
    if tree and event.HasField("accepted") and event.accepted.invocation.parent_id in members:
        members.add(event.invocation_id)


def _shortened(event: event_pb2.InvocationEvent, limit: int) -> event_pb2.EventView:
    kind = event.WhichOneof("event") or ""
    body = MessageToDict(getattr(event, kind), preserving_proto_field_name=True)
    whole = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
    text = whole[:limit].decode("utf-8", "ignore")  # a character that was cut through is left out
    return event_pb2.EventView(
        sequence=event.sequence,
        event_time=event.event_time,
        invocation_id=event.invocation_id,
        kind=kind,
        text=text,
        truncated=len(whole) > limit,
        total_bytes=len(whole),
    )


class EventMaker:
    """Turns the records of one tree into events, in their order.

    It remembers each invocation's ending between its `ending_decided` and `ended` records.
    """

    def __init__(self, codec: rec.Codec) -> None:
        self._codec = codec
        self._endings: dict[str, Ending] = {}
        self._tools: dict[str, str] = {}

    def event_of(self, stored: StoredRecord) -> event_pb2.InvocationEvent | None:
        """The event of one record, or None."""
        event = event_pb2.InvocationEvent(
            sequence=stored.sequence,
            event_time=convert.timestamp(stored.time_us),
            invocation_id=stored.invocation_id,
        )
        record = self._codec.load(stored.payload)
        return event if self._fill(event, record) else None

    def _fill(self, event: event_pb2.InvocationEvent, record: rec.Record) -> bool:
        match record:
            case rec.Admitted():
                self._tools.update({item.tool_id: item.name for item in record.granted.tools})
                event.accepted.invocation.CopyFrom(_accepted(record))
            case rec.SlotGranted():
                sandbox_id = sandbox_id_of(record.invocation_id, record.attempt)
                _state(event, State.STARTING, record.attempt, sandbox_id)
            case rec.CodeStarted():
                _state(event, State.RUNNING, 0, record.sandbox_id)
            case rec.AttemptAbandoned():
                _state(event, State.QUEUED, record.attempt, "")
            case rec.CallRefused():
                event.call_refused.reason = record.reason
                event.call_refused.message = record.message
            case rec.CellRecorded():
                event.cell_completed.cell_id = record.cell_id
                event.cell_completed.outcome = record.outcome.value
                event.cell_completed.stdout_bytes = record.stdout_bytes
                event.cell_completed.stderr_bytes = record.stderr_bytes
            case rec.CellAccepted():
                event.cell_accepted.CopyFrom(convert_cells.accepted_out(record))
            case rec.CellDisplayed():
                event.display.CopyFrom(convert_cells.display_out(record))
            case rec.ToolCalled():
                event.tool_called.call_id = record.tool_call_id
                event.tool_called.tool_id = record.tool_id
                event.tool_called.name = self._tools.get(record.tool_id, "")
                event.tool_called.method = record.method
            case rec.ToolAnswered():
                event.tool_answered.call_id = record.tool_call_id
                if record.failure is not None:
                    event.tool_answered.failure.CopyFrom(convert.failure_out(record.failure))
            case rec.ValueChecked():
                event.contract_checked.accepted = record.accepted
                if record.mismatch is not None:
                    mismatch = convert.mismatch_out(record.mismatch)
                    event.contract_checked.mismatch.CopyFrom(mismatch)
            case rec.ArtifactPublished():
                artifact = convert.artifact_out(record.artifact)
                event.artifact_published.artifact.CopyFrom(artifact)
            case rec.EndingDecided():
                self._endings[record.invocation_id] = record.ending
                _state(event, State.ENDING, 0, "")
            case rec.Ended():
                ending = self._endings.pop(record.invocation_id, None)
                if ending is not None:
                    event.ended.ending.CopyFrom(convert.ending_out(ending))
                else:
                    event.ended.SetInParent()
            case _:
                return False
        return True


def _state(event: event_pb2.InvocationEvent, state: State, attempt: int, sandbox_id: str) -> None:
    event.state_changed.state = convert.state_out(state)
    event.state_changed.attempt = attempt
    event.state_changed.sandbox_id = sandbox_id


def _accepted(record: rec.Admitted) -> invocation_pb2.Invocation:
    return invocation_pb2.Invocation(
        invocation_id=record.invocation_id,
        parent_id=record.parent_id or "",
        lineage=record.lineage,
        depth=record.depth,
        mode=invocation_pb2.InvocationMode.Value(f"INVOCATION_MODE_{record.spec.mode.upper()}"),
        state=convert.state_out(State.QUEUED),
        label=record.spec.label,
        create_time=convert.timestamp(record.time_us),
        deadline_time=convert.timestamp(record.granted.deadline_us),
        driver=record.granted.driver,
        spawned_by=f"{record.cell_id}/{record.call_id}" if record.parent_id else "",
    )
