"""The values of the domain: invocations, grants, values, failures, endings.

Called by every part of the controller; calls nothing. Everything is frozen. Sizes are bytes, times
microseconds since the epoch (`..._us`), spans seconds unless the name says otherwise.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from controller.core.ids import ArtifactId, InvocationId, ToolId


class Mode(enum.StrEnum):
    """Who writes an invocation's cells."""

    PROGRAM = "program"
    AGENT = "agent"
    INTERACTIVE = "interactive"


class State(enum.StrEnum):
    """Where an invocation is in its life."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting"
    ENDING = "ending"
    ENDED = "ended"


class EndingKind(enum.StrEnum):
    """The closed set of ways in which an invocation ends."""

    RETURNED = "returned"
    RAISED = "raised"
    CONTRACT_VIOLATED = "contract_violated"
    BUDGET_EXHAUSTED = "budget_exhausted"
    ITERATION_LIMIT = "iteration_limit"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    IDLE_TIMEOUT = "idle_timeout"
    MEMORY_EXCEEDED = "memory_exceeded"
    PIDS_EXCEEDED = "pids_exceeded"
    DISK_EXCEEDED = "disk_exceeded"
    OUTPUT_EXCEEDED = "output_exceeded"
    CRASHED = "crashed"
    EXITED = "exited"
    CANCELLED = "cancelled"
    DENIED = "denied"
    MODEL_FAILED = "model_failed"
    SANDBOX_LOST = "sandbox_lost"
    HOST_LOST = "host_lost"
    CAPACITY_LOST = "capacity_lost"
    START_FAILED = "start_failed"
    INTERNAL = "internal"


class Cause(enum.StrEnum):
    """Whose act ended an invocation that did not end by itself."""

    ITSELF = ""
    CLIENT = "client"
    DISCONNECTED = "disconnected"
    PARENT_ENDED = "parent_ended"
    PARENT_CANCELLED = "parent_cancelled"
    DEADLINE = "deadline"


class CellOutcome(enum.StrEnum):
    """How a cell ended."""

    COMPLETED = "completed"
    RETURNED = "returned"
    RAISED = "raised"
    ERRORED = "errored"
    INTERRUPTED = "interrupted"
    TIMED_OUT = "timed_out"
    REPL_DIED = "repl_died"
    RETURN_REFUSED = "return_refused"
    CANCELLED_BEFORE_START = "cancelled_before_start"


class GoneCause(enum.StrEnum):
    """How a sandbox ended, as its host says."""

    DESTROYED = "destroyed"
    START_FAILED = "start_failed"
    DIED = "died"
    DENIED = "denied"
    LOST = "lost"
    HOST_LOST = "host_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactReference:
    """Immutable bytes in one tenant."""

    artifact_id: ArtifactId
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One encoded value: its JSON, or the artifact that holds it when it is over 1 MiB."""

    json: bytes | None = None
    artifact: ArtifactReference | None = None


NONE_VALUE = Value(json=b"null")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedValue:
    """One input."""

    name: str
    value: Value
    description: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownData:
    """One media type of what a cell showed: small bytes, or the artifact that holds them."""

    media_type: str
    data: bytes | None = None
    artifact: ArtifactReference | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolMethod:
    """One method of an object that is a tool."""

    name: str
    signature: str = ""
    description: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolGrant:
    """A tool that an invocation may call."""

    tool_id: ToolId
    name: str = ""
    description: str = ""
    signature: str = ""
    methods: tuple[ToolMethod, ...] = ()
    delegable: bool = False
    timeout_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """The declared shape of the returned value, a JSON Schema over the encoded form."""

    schema_json: bytes
    max_failures: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnGrant:
    """What an invocation may spawn."""

    max_depth: int
    max_children: int
    max_concurrent: int
    max_descendants: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnRequest:
    """What a caller asks for; None takes the default."""

    max_depth: int | None = None
    max_children: int | None = None
    max_concurrent: int | None = None
    max_descendants: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """A sandbox's limits, all resolved."""

    memory_limit_bytes: int
    pids_limit: int
    cpu_limit_millis: int
    tmpfs_limit_bytes: int
    open_files_limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRequest:
    """What a caller asks for; None takes the default."""

    memory_limit_bytes: int | None = None
    pids_limit: int | None = None
    cpu_limit_millis: int | None = None
    tmpfs_limit_bytes: int | None = None
    open_files_limit: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InvocationSpec:
    """What a caller asks for, checked for form but not against any grant."""

    mode: Mode
    program: str = ""
    inputs: tuple[NamedValue, ...] = ()
    contract: Contract | None = None
    spawn: SpawnRequest = SpawnRequest()
    resources: ResourceRequest = ResourceRequest()
    timeout_seconds: float | None = None
    template: str = ""
    driver: str = ""
    artifact_patterns: tuple[str, ...] = ()
    output_view_bytes: int | None = None
    output_limit_bytes: int | None = None
    label: str = ""
    retry_on_loss: bool = False
    readable_artifacts: tuple[ArtifactId, ...] = ()  # those that the inputs name
    idle_timeout_seconds: float | None = None
    attach_stdin: bool = False
    tools: tuple[ToolGrant, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """What an invocation has, every field resolved within its parent's."""

    spawn: SpawnGrant
    resources: Resources
    demanded_limits: tuple[str, ...]
    deadline_us: int
    driver: str
    template: str
    artifact_patterns: tuple[str, ...]
    output_view_bytes: int
    output_limit_bytes: int
    idle_timeout_us: int = 0
    tools: tuple[ToolGrant, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Where and how a value differs from its contract."""

    path: str
    expected: str
    got: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An exception as data; all of it may come from hostile code."""

    type_name: str = ""
    message: str = ""
    traceback: str = ""
    invocation_id: str = ""
    ending: EndingKind | None = None
    reason: str = ""
    mismatch: Mismatch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Enforcement:
    """The level (`sandbox`, `process`, `none`) at which one limit is held, and by what."""

    limit: str
    level: str
    mechanism: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the host measured; None where it could not."""

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
    detail: str = ""
    enforcement: tuple[Enforcement, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an invocation ended, once and for all."""

    kind: EndingKind
    message: str = ""
    cause: Cause = Cause.ITSELF
    failure: Failure | None = None
    evidence: Evidence | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """Immutable bytes with a name, published once per invocation and name."""

    artifact_id: ArtifactId
    name: str
    sha256: str
    size_bytes: int
    media_type: str
    invocation_id: InvocationId | None
    create_time_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """What a driver of a host can hold: level by limit."""

    driver: str
    isolation: str
    levels: tuple[Enforcement, ...] = field(default=())
    usable: bool = True
    problem: str = ""
    templates: tuple[str, ...] = ("default",)  # those that it makes when no driver is named
