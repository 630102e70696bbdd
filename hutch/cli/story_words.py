"""Events in plain words.

Called by `hutch story`; calls nothing but `hutch.cli.display`. Texts in events may come from
hostile code.
"""

from __future__ import annotations

from typing import Any

from hutch import types
from hutch.cli import display

_STATES = {
    "queued": "waits for a slot",
    "starting": "gets",
    "running": "runs",
    "waiting": "waits for its children",
    "ending": "is ending: what is below it ends, files are kept",
    "ended": "has ended",
}


def sentence(event: types.Event, *, with_id: bool) -> str:
    """One line: when, who, what."""
    when = event.event_time.astimezone().strftime("%H:%M:%S.%f")[:-3] if event.event_time else "-"
    who = f"{event.invocation_id}  " if with_id else ""
    return f"{when}  {who}{_words(event.detail)}"


def _words(detail: types.EventDetail) -> str:
    match detail:
        case types.Accepted(invocation=invocation):
            label = f" “{display.line(invocation.label, 60)}”" if invocation.label else ""
            of = f", child of {invocation.parent_id}" if invocation.parent_id else ""
            return f"was accepted{label} at depth {invocation.depth}{of}"
        case types.StateChanged(state=state, attempt=attempt, sandbox_id=sandbox_id):
            words = _STATES.get(state, f"is {display.line(state)}")
            where = ""
            if state == "starting":
                where = f" {sandbox_id or 'a sandbox'}"
            elif state == "running" and sandbox_id:
                where = f" in {sandbox_id}"
            again = f" (attempt {attempt})" if attempt > 1 else ""
            return f"{words}{where}{again}"
        case types.CellAccepted(cell_id=cell_id, code=code):
            return f"was given the cell {display.line(cell_id)}: {display.line(code, 100)}"
        case types.Display(cell_id=cell_id, data=data):
            kinds = ", ".join(display.line(item.media_type, 50) for item in data)
            return f"its cell {display.line(cell_id)} showed {kinds}"
        case types.ToolCalled(call_id=call_id, name=name, method=method):
            what = f"{name}.{method}" if method else name
            return f"called the tool {display.line(what)} as {display.line(call_id)}"
        case types.ToolAnswered(call_id=call_id, failure=failure):
            how = (
                "a value" if failure is None else display.line(failure.type_name or failure.reason)
            )
            return f"its call {display.line(call_id)} came to {how}"
        case types.CallRefused(reason=reason, message=message):
            return f"asked in vain: {display.line(reason)}: {display.line(message, 300)}"
        case types.CellCompleted(
            cell_id=cell_id, outcome=outcome, stdout_bytes=stdout, stderr_bytes=stderr
        ):
            printed = f"{display.size(stdout + stderr)} printed"
            return f"its cell {display.line(cell_id)} is over: {display.line(outcome)}, {printed}"
        case types.ContractChecked(accepted=True):
            return "its value was accepted"
        case types.ContractChecked(path=path, expected=expected, got=got):
            found = f"expected {display.line(expected, 200)}, got {display.line(got, 200)}"
            return f"its value was refused at {display.line(path)}: {found}"
        case types.ArtifactPublished(artifact=artifact):
            name = display.line(artifact.name)
            return f"left {name} ({display.size(artifact.size_bytes)}) as {artifact.artifact_id}"
        case types.Ended(ending=ending):
            cause = f" by {ending.cause.replace('_', ' ')}" if ending.cause else ""
            why = f": {display.line(ending.message, 300)}" if ending.message else ""
            return f"ended {display.safe(ending.kind)}{cause}{why}"
        case _:
            return "something happened that this release does not know"


def event_json(event: types.Event) -> dict[str, Any]:
    """An event as JSON."""
    document: dict[str, Any] = {
        "sequence": event.sequence,
        "event_time": display.plain(event.event_time),
        "invocation_id": event.invocation_id,
        "kind": event.kind,
    }
    if isinstance(event.detail, types.Accepted):
        document["invocation"] = display.invocation_json(event.detail.invocation)
    elif isinstance(event.detail, types.Display):
        document |= {"cell_id": event.detail.cell_id, "index": event.detail.index}
        document["media_types"] = [item.media_type for item in event.detail.data]
    else:
        document |= display.plain(event.detail)
    return document
