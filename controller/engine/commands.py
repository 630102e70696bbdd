"""Orders out of the engine. Each one may be issued again after a crash: where it acts, it is
deduplicated by its ids. One that fails comes back as an event.
"""

from __future__ import annotations

from dataclasses import dataclass

from controller.core.ids import (
    CallId,
    CellId,
    HostId,
    InvocationId,
    SandboxId,
    TenantId,
    ToolCallId,
    ToolId,
    ToolServerId,
)
from controller.core.model import Failure, Granted, Mode, NamedValue, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSandbox:
    """Start (or attach to) the sandbox of an attempt and give it its program."""

    tenant_id: TenantId
    invocation_id: InvocationId
    host_id: HostId
    sandbox_id: SandboxId
    cell_id: CellId
    program: str
    inputs: tuple[NamedValue, ...]
    granted: Granted
    depth: int
    has_contract: bool
    run: bool = True  # False: attach only, the cell is known to have ended
    mode: Mode = Mode.PROGRAM
    attach_stdin: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCell:
    """Give a box the cell that is to run. It alone need not wait until its record is durable: see
    docs/adr/0006."""

    invocation_id: InvocationId
    sandbox_id: SandboxId
    cell_id: CellId
    code: str
    inputs: tuple[NamedValue, ...]
    timeout_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptCell:
    """Interrupt the cell that runs."""

    sandbox_id: SandboxId
    cell_id: CellId


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTool:
    """Have a tool called by its owner; the id makes a repeated one the same call."""

    tenant_id: TenantId
    owner: InvocationId | ToolServerId
    sandbox_id: SandboxId  # the owner's, empty for a client's tool server
    tool_call_id: ToolCallId
    tool_id: ToolId
    method: str
    arguments: Value
    invocation_id: InvocationId  # who calls
    deadline_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndToolCall:
    """Tell the owner that a call is over: its outcome is durable, or (`cancel`) nobody waits."""

    owner: InvocationId | ToolServerId
    sandbox_id: SandboxId
    tool_call_id: ToolCallId
    cancel: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SetIdleTimer:
    """Fire `IdlePassed` at this time; 0: it no longer matters."""

    invocation_id: InvocationId
    at_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Answer one call of a sandbox's code: exactly one of `value` and `failure` is set."""

    tenant_id: TenantId
    sandbox_id: SandboxId
    call_id: CallId
    value: Value | None = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckContract:
    """Check the returned value, with the contract if there is one."""

    tenant_id: TenantId
    tree_id: InvocationId
    invocation_id: InvocationId
    value: Value
    schema_json: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureArtifacts:
    """End the sandbox's user processes and publish the matching files."""

    tenant_id: TenantId
    invocation_id: InvocationId
    sandbox_id: SandboxId
    patterns: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DestroySandbox:
    """End everything of a sandbox and prove it gone."""

    invocation_id: InvocationId
    host_id: HostId
    sandbox_id: SandboxId


@dataclass(frozen=True, slots=True, kw_only=True)
class SetDeadline:
    """Fire `DeadlinePassed` at this time."""

    invocation_id: InvocationId
    at_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DropDeadline:
    """The deadline no longer matters."""

    invocation_id: InvocationId


Command = (
    StartSandbox
    | RunCell
    | InterruptCell
    | CallTool
    | EndToolCall
    | SetIdleTimer
    | Reply
    | CheckContract
    | CaptureArtifacts
    | DestroySandbox
    | SetDeadline
    | DropDeadline
)
