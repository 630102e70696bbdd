"""What the SDK and the CLI show of the controller's resources, as frozen values.

Read by users of `Client` and `AsyncClient` and by the CLI; made only by `hutch.convert`. Texts in
here (messages, labels, names, tracebacks) may come from hostile code: they are data, never format
strings. Enumerations are lower-case texts (`returned`, `queued`, `sandbox`), so that a value of a
newer controller is shown and not an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from hutch.errors import Failure

Stream = Literal["stdout", "stderr"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """Immutable bytes named by digest.

    Attributes:
        artifact_id: The random id, `art_...`.
        name: The name below the workspace. It may come from hostile code.
        sha256: Lower-case hexadecimal SHA-256 of the bytes.
        size_bytes: The number of bytes.
        media_type: The media type.
        invocation_id: Who published it; empty for bytes that a client put.
        create_time: When it was published.
    """

    artifact_id: str
    name: str
    sha256: str
    size_bytes: int
    media_type: str = ""
    invocation_id: str = ""
    create_time: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactRefusal:
    """Why one file was not captured."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactPage:
    """One page of an invocation's artifacts; refusals come with the first page only."""

    artifacts: tuple[Artifact, ...]
    refusals: tuple[ArtifactRefusal, ...] = ()
    next_page_token: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A value in its encoded form: the JSON bytes themselves, or the artifact that holds them."""

    json: bytes | None = None
    artifact_id: str = ""
    sha256: str = ""
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitEnforcement:
    """At which level (`sandbox`, `process`, `none`) one limit is held, and by what."""

    limit: str
    level: str
    mechanism: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the host measured of a sandbox; None where it could not measure."""

    exit_code: int | None = None
    signal: int | None = None
    oom_kill_count: int | None = None
    memory_peak_bytes: int | None = None
    pids_limit_hits: int | None = None
    disk_full_hits: int | None = None
    cpu_seconds: float | None = None
    wall_seconds: float | None = None
    limit: str = ""
    limit_value: int | None = None
    enforcement: tuple[LimitEnforcement, ...] = ()
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How one invocation ended, once and for all.

    Attributes:
        kind: `returned`, `raised`, `cancelled`, ...: the closed set of `EndingKind`.
        message: One sentence.
        cause: Whose act it was (`client`, `disconnected`, `parent_ended`, ...); empty for its own.
        failure: What the code raised, or how the contract was missed.
        evidence: What the host measured.
    """

    kind: str
    message: str = ""
    cause: str = ""
    failure: Failure | None = None
    evidence: Evidence | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnGrant:
    """What an invocation may spawn; None means the parent's or the server's default."""

    max_depth: int | None = None
    max_children: int | None = None
    max_concurrent: int | None = None
    max_descendants: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceLimits:
    """A sandbox's resources; None means the template's or the server's default."""

    memory_limit_bytes: int | None = None
    pids_limit: int | None = None
    cpu_limit_millis: int | None = None
    tmpfs_limit_bytes: int | None = None
    open_files_limit: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """What sandboxes of one name are made from.

    Attributes:
        name: What an invocation asks for as `template`.
        driver: What makes its sandboxes when an invocation names no driver.
        isolation: What stands between a sandbox and the machine: `process`, `container`, `kernel`.
        image: The image, by its digest; empty where the machine's own files are used.
        runtime: `runc` or `runsc`; empty where no container engine is used.
        usable: Whether its driver passed its self-check.
        problem: What the self-check found, with the mend, when it is not usable.
        limits: What a sandbox gets whose invocation names no limits.
        enforcement: At which level each limit is held.
        gaps: What the driver does not hold, each in one sentence.
    """

    name: str
    driver: str
    isolation: str
    image: str = ""
    runtime: str = ""
    usable: bool = True
    problem: str = ""
    limits: ResourceLimits = ResourceLimits()
    enforcement: tuple[LimitEnforcement, ...] = ()
    gaps: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLimits:
    """How much output is shown inline, and after how much the invocation is ended."""

    output_view_bytes: int | None = None
    output_limit_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """One accepted unit of agent work as it stood when asked.

    Attributes:
        invocation_id: The id, `inv_...`.
        parent_id: The parent's id, empty for a root.
        lineage: The ancestors' ids, root first, without this one.
        depth: Levels counted from the root = 1.
        mode: `program`, `agent` or `interactive`.
        state: `queued`, `starting`, `running`, `waiting`, `ending` or `ended`.
        ending: How it ended, once it has.
        value: The accepted value, where the request shows it.
        attempt: The current or last attempt, from 1; 0 before the first.
        spawned_by: The call of its parent that made it, as `cell/call`; empty for a root.
        cell_count: How many cells of a box have ended.
    """

    invocation_id: str
    parent_id: str = ""
    lineage: tuple[str, ...] = ()
    depth: int = 1
    mode: str = "program"
    state: str = "queued"
    ending: Ending | None = None
    value: Value | None = None
    label: str = ""
    create_time: datetime | None = None
    start_time: datetime | None = None
    end_time: datetime | None = None
    deadline_time: datetime | None = None
    attempt: int = 0
    sandbox_id: str = ""
    driver: str = ""
    spawn: SpawnGrant = field(default_factory=SpawnGrant)
    resources: ResourceLimits = field(default_factory=ResourceLimits)
    output: OutputLimits = field(default_factory=OutputLimits)
    enforcement: tuple[LimitEnforcement, ...] = ()
    child_count: int = 0
    descendant_count: int = 0
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    artifact_count: int = 0
    spawned_by: str = ""
    cell_count: int = 0

    @property
    def ended(self) -> bool:
        """Whether it and everything below it has ended."""
        return self.state == "ended"

    @property
    def root_id(self) -> str:
        """The id of its tree's root."""
        return self.lineage[0] if self.lineage else self.invocation_id


@dataclass(frozen=True, slots=True, kw_only=True)
class InvocationPage:
    """One page of invocations."""

    invocations: tuple[Invocation, ...]
    next_page_token: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventView:
    """One event as a text: JSON, cut at a character where it is too long."""

    sequence: int
    event_time: datetime | None
    invocation_id: str
    kind: str
    text: str
    truncated: bool
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EventPage:
    """The last events of an invocation, oldest first; `before_sequence` leads to earlier ones."""

    events: tuple[EventView, ...]
    truncated: bool = False
    before_sequence: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """An invocation exists."""

    invocation: Invocation


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChanged:
    """An invocation is in a new state."""

    state: str
    attempt: int = 0
    sandbox_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRefused:
    """The code asked for something in vain."""

    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellCompleted:
    """A cell ended."""

    cell_id: str
    outcome: str
    stdout_bytes: int = 0
    stderr_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ContractChecked:
    """The returned value was checked; the texts are empty when it was accepted."""

    accepted: bool
    path: str = ""
    expected: str = ""
    got: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactPublished:
    """A file is kept."""

    artifact: Artifact


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """An invocation ended."""

    ending: Ending


@dataclass(frozen=True, slots=True, kw_only=True)
class DisplayData:
    """A display in one media type: the bytes, or the artifact that holds them."""

    media_type: str
    data: bytes | None = None
    artifact_id: str = ""
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Display:
    """One thing that a cell showed, in one or more media types. All of it may be hostile.

    Attributes:
        cell_id: The cell.
        index: Its number in the cell, from 0.
        is_result: Whether it is the value of the cell's trailing expression.
        data: The same thing in each media type.
    """

    cell_id: str
    index: int
    is_result: bool = False
    data: tuple[DisplayData, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell that has ended.

    Attributes:
        cell_id: Its id.
        outcome: `completed`, `returned`, `raised`, `errored`, `interrupted`, `timed_out`,
            `repl_died`, `return_refused` or `cancelled_before_start`.
        value: The returned value, encoded.
        failure: What it raised, or how its value missed the contract.
        text: The `repr` of the value of a trailing expression; empty where there was none.
        stdout_bytes: What it had printed by its end.
        stderr_bytes: The same of standard error.
        killed_processes: How many of its processes were killed.
        background_processes: How many it left running.
        state_lost: Whether the namespace was lost, in this cell or since the one before.
        output_cut: Whether its output passed the limit.
        evidence: What the host measured.
    """

    cell_id: str
    outcome: str
    value: Value | None = None
    failure: Failure | None = None
    text: str = ""
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    killed_processes: int = 0
    background_processes: int = 0
    state_lost: bool = False
    output_cut: bool = False
    evidence: Evidence | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxStatus:
    """A box as it stood when its stream was attached."""

    invocation: Invocation
    running_cell_id: str = ""
    waiting_cell_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOutput:
    """Some bytes that a cell printed, exactly as its code wrote them, and where they begin."""

    cell_id: str
    stream: Stream
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CellAccepted:
    """A cell was given to a box; the code's first 2,000 characters."""

    cell_id: str
    code: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCalled:
    """The code called a tool."""

    call_id: str
    tool_id: str
    name: str = ""
    method: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAnswered:
    """A tool call has its outcome; the failure where it has no value."""

    call_id: str
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownEvent:
    """An event of a newer controller."""


EventDetail = (
    Accepted
    | StateChanged
    | CallRefused
    | CellCompleted
    | ContractChecked
    | ArtifactPublished
    | Ended
    | CellAccepted
    | Display
    | ToolCalled
    | ToolAnswered
    | UnknownEvent
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One durable fact about an invocation.

    Attributes:
        sequence: Its place in the journal of its tree, rising, with gaps.
        event_time: When it was decided.
        invocation_id: The invocation it is about.
        kind: The event's name on the wire, for example `state_changed`.
        detail: What happened.
    """

    sequence: int
    event_time: datetime | None
    invocation_id: str
    kind: str
    detail: EventDetail


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputChunk:
    """Some printed bytes, exactly as the code wrote them, and where they begin."""

    offset: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceFile:
    """One file or folder of a live sandbox. Its name may come from hostile code.

    Attributes:
        path: The path as it was asked for, with the name for a listing.
        kind: `file`, `folder`, `link` or `other`.
        size_bytes: The number of bytes of a file.
        modify_time: When it was changed.
        mode: The permission bits.
    """

    path: str
    kind: str
    size_bytes: int = 0
    modify_time: datetime | None = None
    mode: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspacePage:
    """One page of a folder of a live sandbox."""

    files: tuple[WorkspaceFile, ...]
    next_page_token: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedInput:
    """One named input in its encoded form (JSON bytes)."""

    name: str
    json: bytes
    description: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenTool:
    """A function or object of this process, and the id by which the inputs of a spec name it."""

    tool_id: str
    target: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """The declared shape of the returned value: a JSON Schema (2020-12) as bytes."""

    schema_json: bytes
    max_failures: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Interactive:
    """A box that its client feeds cell by cell; None takes the server's idle time."""

    idle_timeout_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a caller asks for; exactly one of `program`, `task` and `interactive` is set.

    Unset fields take the server's defaults. `timeout_seconds` counts from the acceptance.
    """

    program: str | None = None
    task: str | None = None
    interactive: Interactive | None = None
    inputs: tuple[NamedInput, ...] = ()
    tools: tuple[GivenTool, ...] = ()
    contract: Contract | None = None
    spawn: SpawnGrant = field(default_factory=SpawnGrant)
    resources: ResourceLimits = field(default_factory=ResourceLimits)
    output: OutputLimits = field(default_factory=OutputLimits)
    timeout_seconds: float | None = None
    template: str = ""
    driver: str = ""
    artifact_patterns: tuple[str, ...] = ()
    label: str = ""
    retry_on_loss: bool = False
    attach_stdin: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What the controller said of itself when the session was opened."""

    version: str
    drivers: tuple[str, ...] = ()
    capacity: int = 0
    disconnect_grace_seconds: float = 0.0
