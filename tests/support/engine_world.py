"""A world without I/O around the real engine: facts in, records and commands out.

Used by the engine's unit tests. What it journals can be folded again, as recovery would do it.
"""

from __future__ import annotations

import itertools

from controller.config import ControllerConfig
from controller.core.ids import (
    LOCAL_TENANT,
    CallId,
    HostId,
    InvocationId,
    SessionId,
    TenantId,
)
from controller.core.model import (
    Cause,
    CellOutcome,
    Evidence,
    Failure,
    GoneCause,
    InvocationSpec,
    Mode,
    Statement,
    Value,
)
from controller.engine import commands as cmd
from controller.engine import events as ev
from controller.engine import records as rec
from controller.engine.apply import apply
from controller.engine.decide import decide
from controller.engine.implied import commands
from controller.engine.state import EngineState, Node

HOST = HostId("hst_1")
START_US = 1_000_000_000


class World:
    """One controller's engine, its clock and what it was told to do."""

    def __init__(self, capacity: int = 16, config: ControllerConfig | None = None) -> None:
        self.state = EngineState()
        self.config = config or ControllerConfig()
        self.now_us = START_US
        self.journal: list[rec.Record] = []
        self.issued: list[cmd.Command] = []
        self._codec = rec.Codec()
        self._ids = itertools.count(1)
        self._calls = itertools.count(1)
        if capacity:
            self.join(capacity)

    def join(
        self,
        capacity: int,
        *,
        generation: int = 1,
        statements: tuple[Statement, ...] = (),
    ) -> list[rec.Record]:
        return self.post(
            ev.HostJoined(
                host_id=HOST,
                host_generation=generation,
                capacity=capacity,
                statements=statements,
            )
        )

    def post(self, event: ev.Event) -> list[rec.Record]:
        records = decide(self.state, event, self.now_us, self.config)
        self.journal.extend(records)
        for record in records:
            self.issued.extend(commands(self.state, record))
        return records

    def request(
        self,
        spec: InvocationSpec | None = None,
        *,
        request_id: str = "",
        session_id: str = "",
        cancel_on_disconnect: bool = False,
        tenant_id: TenantId = LOCAL_TENANT,
    ) -> Node:
        number = next(self._ids)
        invocation_id = InvocationId(f"inv_{number}")
        request_id = request_id or f"request-{number}"
        self.post(
            ev.InvocationRequested(
                tenant_id=tenant_id,
                invocation_id=invocation_id,
                spec=spec or program(),
                request_id=request_id,
                content_digest=repr(spec),
                session_id=SessionId(session_id),
                cancel_on_disconnect=cancel_on_disconnect,
            )
        )
        return self.state.nodes[self.state.requests[(tenant_id, request_id)][1]]

    def spawn(
        self, parent: Node, spec: InvocationSpec | None = None, *, detached: bool = False
    ) -> Node | tuple[str, str]:
        """The child, or the reason and message of the refusal."""
        call_id = CallId(f"call{next(self._calls)}")
        self.post(self.spawn_event(parent, call_id, spec, detached=detached))
        call = parent.calls[call_id]
        if call.refusal is not None:
            return call.refusal
        assert call.child_id is not None
        return self.state.nodes[call.child_id]

    def spawn_event(
        self,
        parent: Node,
        call_id: CallId,
        spec: InvocationSpec | None = None,
        *,
        detached: bool = False,
    ) -> ev.SpawnRequested:
        return ev.SpawnRequested(
            parent_id=parent.invocation_id,
            sandbox_id=parent.sandbox_id,
            cell_id=parent.cell_id,
            call_id=call_id,
            invocation_id=InvocationId(f"inv_{next(self._ids)}"),
            spec=spec or program(),
            detached=detached,
        )

    def child(self, parent: Node, spec: InvocationSpec | None = None) -> Node:
        found = self.spawn(parent, spec)
        assert isinstance(found, Node), found
        return found

    def started(self, node: Node) -> Node:
        self.post(
            ev.SandboxStarted(
                invocation_id=node.invocation_id,
                sandbox_id=node.sandbox_id,
                enforcement=(),
                driver="fake",
            )
        )
        return node

    def cell(
        self,
        node: Node,
        outcome: CellOutcome = CellOutcome.RETURNED,
        *,
        value: bytes = b"1",
        failure: Failure | None = None,
        evidence: Evidence | None = None,
        output_cut: bool = False,
    ) -> list[rec.Record]:
        returned = outcome in (CellOutcome.RETURNED, CellOutcome.COMPLETED)
        return self.post(
            ev.CellEnded(
                invocation_id=node.invocation_id,
                sandbox_id=node.sandbox_id,
                cell_id=node.cell_id,
                outcome=outcome,
                value=Value(json=value) if returned else None,
                failure=failure,
                stdout_bytes=0,
                stderr_bytes=0,
                evidence=evidence or Evidence(),
                output_cut=output_cut,
            )
        )

    def accept(self, node: Node) -> list[rec.Record]:
        return self.post(ev.ContractChecked(invocation_id=node.invocation_id, accepted=True))

    def captured(self, node: Node) -> list[rec.Record]:
        return self.post(
            ev.FilesCaptured(invocation_id=node.invocation_id, sandbox_id=node.sandbox_id)
        )

    def gone(
        self, node: Node, cause: GoneCause = GoneCause.DESTROYED, evidence: Evidence | None = None
    ) -> list[rec.Record]:
        return self.post(
            ev.SandboxGone(
                invocation_id=node.invocation_id,
                sandbox_id=node.sandbox_id,
                cause=cause,
                message=cause.value,
                evidence=evidence or Evidence(),
            )
        )

    def cancel(self, node: Node, cause: Cause = Cause.CLIENT) -> list[rec.Record]:
        return self.post(ev.CancelRequested(invocation_id=node.invocation_id, cause=cause))

    def finish(self, node: Node) -> None:
        """Lets a running invocation return and all of it go."""
        self.cell(node)
        self.accept(node)
        self.captured(node)
        self.gone(node)

    def take(self, kind: type[cmd.Command]) -> list[cmd.Command]:
        """The commands of a kind issued so far; they are dropped."""
        found = [command for command in self.issued if isinstance(command, kind)]
        self.issued = [command for command in self.issued if not isinstance(command, kind)]
        return found

    def refolded(self) -> EngineState:
        """The state that recovery would reach from the live trees' journal entries alone."""
        state = EngineState()
        over = {item.invocation_id for item in self.journal if isinstance(item, rec.TreeEnded)}
        tree_of: dict[str, str] = {}
        for record in self.journal:
            if isinstance(record, rec.Admitted):
                tree_of[record.invocation_id] = record.tree_id
            if tree_of[record.invocation_id] not in over:
                apply(state, self._codec.load(self._codec.dump(record)))
        return state


def program(**fields: object) -> InvocationSpec:
    """A spec of mode program."""
    return InvocationSpec(mode=Mode.PROGRAM, program="return 1", **fields)  # type: ignore[arg-type]
