"""What was decided: the journal's content. `decide` makes them, `apply` folds them.

A record belongs to one invocation of one tree. Its JSON form is the journal's; fields may be added
with defaults, never renamed, so that journals of every release fold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, TypeAdapter

from controller.core.ids import (
    ArtifactId,
    CallId,
    CellId,
    HostId,
    InvocationId,
    SandboxId,
    SessionId,
    TenantId,
    ToolCallId,
    ToolId,
)
from controller.core.model import (
    Artifact,
    CellOutcome,
    Ending,
    Enforcement,
    Evidence,
    Failure,
    Granted,
    InvocationSpec,
    Mismatch,
    NamedValue,
    ShownData,
    Value,
)

ENGINE_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """An invocation exists. Its grants are final."""

    kind: Literal["admitted"] = "admitted"
    tenant_id: TenantId
    tree_id: InvocationId
    invocation_id: InvocationId
    parent_id: InvocationId | None
    lineage: tuple[InvocationId, ...]
    depth: int
    level: int
    spec: InvocationSpec
    granted: Granted
    time_us: int
    request_id: str = ""
    content_digest: str = ""
    session_id: SessionId = SessionId("")
    cancel_on_disconnect: bool = False
    cell_id: CellId = CellId("")
    call_id: CallId = CallId("")
    parent_attempt: int = 0
    detached: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotGranted:
    """An attempt begins on a host, on the tree's own slot of its level or on a borrowed one."""

    kind: Literal["slot_granted"] = "slot_granted"
    invocation_id: InvocationId
    attempt: int
    host_id: HostId
    borrowed: bool
    host_generation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRefused:
    """A request of the code was refused; the answer is in the record."""

    kind: Literal["call_refused"] = "call_refused"
    invocation_id: InvocationId
    call_id: CallId
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOpened:
    """Code waits for a child: for its value, or (`cancel`) for its end."""

    kind: Literal["call_opened"] = "call_opened"
    invocation_id: InvocationId
    call_id: CallId
    child_id: InvocationId
    cancel: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactPublished:
    """A file is kept; `call_id` is empty for a captured one."""

    kind: Literal["artifact_published"] = "artifact_published"
    invocation_id: InvocationId
    call_id: CallId
    artifact: Artifact


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeStarted:
    """The sandbox is there and runs the invocation's code."""

    kind: Literal["code_started"] = "code_started"
    invocation_id: InvocationId
    sandbox_id: SandboxId
    enforcement: tuple[Enforcement, ...]
    driver: str
    time_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRecorded:
    """A cell ended. `value` waits for its check."""

    kind: Literal["cell_recorded"] = "cell_recorded"
    invocation_id: InvocationId
    cell_id: CellId
    outcome: CellOutcome
    value: Value | None
    failure: Failure | None
    stdout_bytes: int
    stderr_bytes: int
    evidence: Evidence
    check: bool
    capture: bool = False  # the cell was the last one, whatever the check says
    text: str = ""
    killed_processes: int = 0
    background_processes: int = 0
    state_lost: bool = False
    output_cut: bool = False
    time_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CellAccepted:
    """A client gave a cell to its box; the first that has not ended runs."""

    kind: Literal["cell_accepted"] = "cell_accepted"
    invocation_id: InvocationId
    cell_id: CellId
    code: str
    inputs: tuple[NamedValue, ...] = ()
    readable_artifacts: tuple[ArtifactId, ...] = ()
    timeout_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CellInterrupted:
    """A client interrupts the cell that runs."""

    kind: Literal["cell_interrupted"] = "cell_interrupted"
    invocation_id: InvocationId
    cell_id: CellId


@dataclass(frozen=True, slots=True, kw_only=True)
class CellDisplayed:
    """A cell showed something."""

    kind: Literal["cell_displayed"] = "cell_displayed"
    invocation_id: InvocationId
    cell_id: CellId
    index: int
    is_result: bool
    data: tuple[ShownData, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCalled:
    """Code calls a tool that it was granted; it waits for the owner's answer."""

    kind: Literal["tool_called"] = "tool_called"
    invocation_id: InvocationId
    call_id: CallId
    tool_call_id: ToolCallId
    tool_id: ToolId
    method: str
    arguments: Value
    deadline_us: int
    artifact_ids: tuple[ArtifactId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAnswered:
    """A tool call has its outcome, for good."""

    kind: Literal["tool_answered"] = "tool_answered"
    invocation_id: InvocationId
    call_id: CallId
    tool_call_id: ToolCallId
    value: Value | None = None
    failure: Failure | None = None
    artifact_ids: tuple[ArtifactId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueChecked:
    """The verdict on a returned value; recovery never checks again."""

    kind: Literal["value_checked"] = "value_checked"
    invocation_id: InvocationId
    accepted: bool
    mismatch: Mismatch | None = None
    artifact_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EndingDecided:
    """How it ends is final; what remains is to end all below it and to capture files."""

    kind: Literal["ending_decided"] = "ending_decided"
    invocation_id: InvocationId
    ending: Ending
    value: Value | None
    capture: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureEnded:
    """The capture is over."""

    kind: Literal["capture_ended"] = "capture_ended"
    invocation_id: InvocationId
    refused_count: int
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """It has ended, and so have its descendants."""

    kind: Literal["ended"] = "ended"
    invocation_id: InvocationId
    time_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRemoved:
    """The sandbox of an attempt is proved gone; its slot is free."""

    kind: Literal["sandbox_removed"] = "sandbox_removed"
    invocation_id: InvocationId
    attempt: int
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptAbandoned:
    """An attempt was lost, its descendants have ended, and another one may begin."""

    kind: Literal["attempt_abandoned"] = "attempt_abandoned"
    invocation_id: InvocationId
    attempt: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeEnded:
    """Nothing of the tree is live; recovery no longer needs its records."""

    kind: Literal["tree_ended"] = "tree_ended"
    invocation_id: InvocationId


Record = (
    Admitted
    | SlotGranted
    | CallRefused
    | CallOpened
    | ArtifactPublished
    | CodeStarted
    | CellAccepted
    | CellInterrupted
    | CellDisplayed
    | CellRecorded
    | ToolCalled
    | ToolAnswered
    | ValueChecked
    | EndingDecided
    | CaptureEnded
    | Ended
    | SandboxRemoved
    | AttemptAbandoned
    | TreeEnded
)

_CONFIG = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")


class Codec:
    """Turns records into JSON bytes and back; made once by the loop."""

    def __init__(self) -> None:
        self._adapter: TypeAdapter[Any] = TypeAdapter(
            Annotated[Record, Discriminator("kind")], config=_CONFIG
        )

    def dump(self, record: Record) -> bytes:
        """The journal's form of a record."""
        return self._adapter.dump_json(record)

    def load(self, payload: bytes) -> Record:
        """The record behind a journal entry.

        Raises:
            pydantic.ValidationError: the entry is not one of this release or an earlier one.
        """
        record: Record = self._adapter.validate_json(payload)
        return record
