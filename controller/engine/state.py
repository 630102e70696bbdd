"""The engine's state: live trees and the hosts. Changed only by `engine.apply`.

Read by `decide`, by the scheduler and by servicers that show what is live. Trees that have ended
are not in it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from controller.core.ids import (
    CallId,
    CellId,
    HostId,
    InvocationId,
    SandboxId,
    SessionId,
    TenantId,
    ToolCallId,
    ToolId,
    cell_id_of,
    sandbox_id_of,
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
    Mode,
    NamedValue,
    State,
    Statement,
    Value,
)
from controller.engine.ledger import Ledger

KNOWN_REQUESTS = 10_000


@dataclass(slots=True, kw_only=True)
class Slot:
    """The capacity that one attempt holds."""

    host_id: HostId
    host_generation: int
    level: int
    borrowed: bool


@dataclass(slots=True, kw_only=True)
class Call:
    """A call of the code that concerns a child or is answered for good."""

    child_id: InvocationId | None = None
    cancel: bool = False
    refusal: tuple[str, str] | None = None  # reason, message
    artifact: Artifact | None = None
    wants_id: bool = False  # a detached spawn: answered by the child's id
    tool: ToolUse | None = None


@dataclass(slots=True, kw_only=True)
class ToolUse:
    """One call of a tool, until the caller has ended."""

    tool_call_id: ToolCallId
    tool_id: ToolId
    method: str
    arguments: Value | None  # until it is answered
    deadline_us: int
    value: Value | None = None
    failure: Failure | None = None

    @property
    def open(self) -> bool:
        """Whether the owner has not answered."""
        return self.value is None and self.failure is None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCell:
    """A cell of a box that has not ended."""

    cell_id: CellId
    code: str
    inputs: tuple[NamedValue, ...]
    timeout_seconds: float | None
    interrupted: bool = False


@dataclass(slots=True, kw_only=True)
class Node:
    """One live invocation."""

    tenant_id: TenantId
    tree_id: InvocationId
    invocation_id: InvocationId
    parent_id: InvocationId | None
    lineage: tuple[InvocationId, ...]
    depth: int
    level: int
    ordinal: int
    spec: InvocationSpec
    granted: Granted
    create_time_us: int
    session_id: SessionId
    cancel_on_disconnect: bool
    spawned_by: tuple[int, CellId, CallId] | None
    detached: bool
    state: State = State.QUEUED
    attempt: int = 0
    slot: Slot | None = None
    start_time_us: int = 0
    end_time_us: int = 0
    enforcement: tuple[Enforcement, ...] = ()
    driver: str = ""
    cell_outcome: CellOutcome | None = None
    cell_evidence: Evidence | None = None
    checking: Value | None = None
    ending: Ending | None = None
    value: Value | None = None
    capturing: bool = False
    captured: bool = False
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    child_count: int = 0
    descendant_count: int = 0
    children: dict[InvocationId, None] = field(default_factory=dict)
    calls: dict[CallId, Call] = field(default_factory=dict)
    readable: dict[str, None] = field(default_factory=dict)
    artifact_count: int = 0
    artifact_bytes: int = 0
    call_refusals: int = 0
    waiting_calls: int = 0  # calls of its code that wait for a child
    waited: dict[CallId, None] = field(default_factory=dict)  # calls of its parent, for its end
    # Of an interactive box:
    open_cells: dict[CellId, OpenCell] = field(default_factory=dict)  # the first one runs
    ended_cells: set[CellId] = field(default_factory=set)
    returned_cell: CellId | None = None  # its value is being checked
    bound: bool = False  # its inputs are in the namespace
    return_refusals: int = 0
    idle_since_us: int = 0
    # Tool calls that its code or client has yet to answer, with who called.
    serving: dict[ToolCallId, InvocationId] = field(default_factory=dict)

    @property
    def sandbox_id(self) -> SandboxId:
        """The sandbox of the current attempt; empty before the first."""
        return sandbox_id_of(self.invocation_id, self.attempt) if self.attempt else SandboxId("")

    @property
    def cell_id(self) -> CellId:
        """The cell of the current attempt."""
        return cell_id_of(self.invocation_id, self.attempt) if self.attempt else CellId("")

    @property
    def interactive(self) -> bool:
        """Whether a client gives it its cells."""
        return self.spec.mode is Mode.INTERACTIVE

    @property
    def next_cell(self) -> OpenCell | None:
        """The cell of a box that runs, or is to run now."""
        if self.state is not State.RUNNING or self.returned_cell is not None:
            return None
        return next(iter(self.open_cells.values()), None)

    @property
    def waits(self) -> bool:
        """Whether some call of its code waits for a child."""
        return self.waiting_calls > 0

    @property
    def ended(self) -> bool:
        """Whether its ending stands and all below it has ended."""
        return self.state is State.ENDED

    @property
    def gone(self) -> bool:
        """Whether nothing of it is left on any host."""
        return self.ended and self.slot is None


@dataclass(slots=True, kw_only=True)
class Tree:
    """One root and all below it."""

    tenant_id: TenantId
    tree_id: InvocationId
    ordinal: int
    depth: int  # the granted depth: how many levels are reserved
    nodes: list[InvocationId] = field(default_factory=list)
    reserved: bool = False  # the root has had a slot, so its levels are reserved
    records: int = 0  # journalled so far
    over: bool = False  # nothing of it is live


@dataclass(slots=True, kw_only=True)
class HostState:
    """One host that answers, or that may come back."""

    host_id: HostId
    host_generation: int
    capacity: int
    statements: tuple[Statement, ...]


@dataclass(slots=True, kw_only=True)
class EngineState:
    """Everything that `decide` may look at."""

    nodes: dict[InvocationId, Node] = field(default_factory=dict)
    trees: dict[InvocationId, Tree] = field(default_factory=dict)
    hosts: dict[HostId, HostState] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    tool_calls: dict[ToolCallId, tuple[InvocationId, CallId]] = field(default_factory=dict)  # open
    requests: OrderedDict[tuple[TenantId, str], tuple[str, InvocationId]] = field(
        default_factory=OrderedDict
    )
    next_ordinal: int = 1

    def forget_ended(self) -> None:
        """Drops the trees of which nothing is live; the read model keeps them."""
        for tree_id in [tree.tree_id for tree in self.trees.values() if tree.over]:
            for invocation_id in self.trees.pop(tree_id).nodes:
                del self.nodes[invocation_id]

    def live(self, invocation_id: InvocationId) -> Node | None:
        """The node, unless its tree has ended or it never was."""
        return self.nodes.get(invocation_id)

    def children_of(self, node: Node) -> Iterator[Node]:
        """The children of a node, oldest first, ended ones too."""
        for child_id in node.children:
            yield self.nodes[child_id]

    def is_idle(self, node: Node) -> bool:
        """Whether nothing of a box goes on: no cell, no child."""
        return (
            node.interactive
            and node.state is State.RUNNING
            and not node.open_cells
            and node.returned_cell is None
            and all(child.ended for child in self.children_of(node))
        )

    def parent_of(self, node: Node) -> Node | None:
        """The parent of a node."""
        return self.nodes[node.parent_id] if node.parent_id else None

    @property
    def capacity(self) -> int:
        """How many sandboxes all hosts together hold."""
        return sum(host.capacity for host in self.hosts.values())
