"""Facts into the engine. Each is something that happened outside; clock and new ids come with it.

Made by the wire, the host client, the contract checker and the timers; read by `engine.decide`.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    ToolServerId,
)
from controller.core.model import (
    Artifact,
    Cause,
    CellOutcome,
    Enforcement,
    Evidence,
    Failure,
    GoneCause,
    InvocationSpec,
    Mismatch,
    NamedValue,
    ShownData,
    Statement,
    Value,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InvocationRequested:
    """A client asks for a root. `invocation_id` is fresh."""

    tenant_id: TenantId
    invocation_id: InvocationId
    spec: InvocationSpec
    request_id: str
    content_digest: str
    session_id: SessionId
    cancel_on_disconnect: bool
    tool_call_id: ToolCallId | None = None  # a client's tool asks: a child of who called it


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnRequested:
    """Code in the sandbox of `parent_id` asks for a child. `invocation_id` is fresh."""

    parent_id: InvocationId
    sandbox_id: SandboxId
    cell_id: CellId
    call_id: CallId
    invocation_id: InvocationId
    spec: InvocationSpec
    detached: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnInvalid:
    """A spawn whose form is bad; the wire of the sandbox found it."""

    parent_id: InvocationId
    sandbox_id: SandboxId
    call_id: CallId
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitRequested:
    """Code asks for the value of a child it spawned."""

    parent_id: InvocationId
    sandbox_id: SandboxId
    call_id: CallId
    child_id: InvocationId


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildCancelRequested:
    """Code cancels a child; the answer comes when it has ended."""

    parent_id: InvocationId
    sandbox_id: SandboxId
    call_id: CallId
    child_id: InvocationId


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactSaved:
    """Code published bytes, which are stored. `call_id` is empty for a captured file."""

    invocation_id: InvocationId
    sandbox_id: SandboxId
    call_id: CallId
    artifact: Artifact


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxStarted:
    """The sandbox takes cells, and its first one was given."""

    invocation_id: InvocationId
    sandbox_id: SandboxId
    enforcement: tuple[Enforcement, ...]
    driver: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CellEnded:
    """A cell ended; its output is in the log up to the offsets."""

    invocation_id: InvocationId
    sandbox_id: SandboxId
    cell_id: CellId
    outcome: CellOutcome
    value: Value | None
    failure: Failure | None
    stdout_bytes: int
    stderr_bytes: int
    evidence: Evidence
    output_cut: bool
    failure_errno: int | None = None
    checked: ContractChecked | None = None  # the verdict, where it cost nothing
    text: str = ""
    killed_processes: int = 0
    background_processes: int = 0
    state_lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSubmitted:
    """A client gives a cell to its box. The same id again changes nothing."""

    invocation_id: InvocationId
    cell_id: CellId
    code: str
    inputs: tuple[NamedValue, ...]
    readable_artifacts: tuple[ArtifactId, ...]
    timeout_seconds: float | None
    refuse_busy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptRequested:
    """A client interrupts a cell, and with `queue` those that wait behind it."""

    invocation_id: InvocationId
    cell_id: CellId
    queue: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CellShown:
    """A cell showed something; large bytes of it are stored."""

    invocation_id: InvocationId
    sandbox_id: SandboxId
    cell_id: CellId
    index: int
    is_result: bool
    data: tuple[ShownData, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRequested:
    """Code calls a tool. `tool_call_id` is fresh."""

    invocation_id: InvocationId
    sandbox_id: SandboxId
    call_id: CallId
    tool_call_id: ToolCallId
    tool_id: ToolId
    method: str
    arguments: Value
    artifact_ids: tuple[ArtifactId, ...] = ()  # those that the arguments name


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolReturned:
    """The owner of a tool says how a call came out: an invocation's code, or a client's server."""

    owner: InvocationId | ToolServerId
    tool_call_id: ToolCallId
    value: Value | None
    failure: Failure | None
    artifact_ids: tuple[ArtifactId, ...] = ()  # those that the value names


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolServerLost:
    """A client's tool server has been away for longer than its grace. `unsent` were never given to
    it."""

    server_id: ToolServerId
    unsent: frozenset[ToolCallId] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolTimeout:
    """A tool call's time is over."""

    tool_call_id: ToolCallId


@dataclass(frozen=True, slots=True, kw_only=True)
class IdlePassed:
    """An interactive box's idle time is over."""

    invocation_id: InvocationId


@dataclass(frozen=True, slots=True, kw_only=True)
class ContractChecked:
    """The value of the invocation was checked."""

    invocation_id: InvocationId
    accepted: bool
    mismatch: Mismatch | None = None
    problem: str = ""
    artifact_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesCaptured:
    """The capture is over, or cannot be had (`problem`)."""

    invocation_id: InvocationId
    sandbox_id: SandboxId
    artifacts: tuple[Artifact, ...] = ()
    refused_count: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxGone:
    """All processes of a sandbox are proved gone, or it never came to be."""

    invocation_id: InvocationId
    sandbox_id: SandboxId
    cause: GoneCause
    message: str
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested:
    """Somebody ends an invocation and all below it."""

    invocation_id: InvocationId
    cause: Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLost:
    """A client is gone for good; what was bound to it is cancelled."""

    session_id: SessionId


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinePassed:
    """A deadline's timer fired."""

    invocation_id: InvocationId


@dataclass(frozen=True, slots=True, kw_only=True)
class HostJoined:
    """A host answers, with this capacity, in this generation."""

    host_id: HostId
    host_generation: int
    capacity: int
    statements: tuple[Statement, ...]
    more_expected: bool = False  # since the start others have neither told nor been given up


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLost:
    """A host has been away for longer than its grace."""

    host_id: HostId
    more_expected: bool = False


Event = (
    InvocationRequested
    | SpawnRequested
    | SpawnInvalid
    | AwaitRequested
    | ChildCancelRequested
    | ArtifactSaved
    | SandboxStarted
    | CellEnded
    | CellSubmitted
    | InterruptRequested
    | CellShown
    | ToolRequested
    | ToolReturned
    | ToolServerLost
    | ToolTimeout
    | IdlePassed
    | ContractChecked
    | FilesCaptured
    | SandboxGone
    | CancelRequested
    | SessionLost
    | DeadlinePassed
    | HostJoined
    | HostLost
)
