"""Fake clients: they ask for roots and boxes, cancel, and serve tools, and ask again until told."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from controller.core.errors import Reason, Refused
from controller.core.ids import CellId, InvocationId, SessionId, TenantId, ToolCallId, ToolServerId
from controller.core.model import NONE_VALUE, Cause, ToolGrant
from controller.engine import commands as cmd
from controller.engine import events as ev
from tests.simulation.clock import MILLISECOND, SECOND
from tests.simulation.plans import Plan, Step, Steps, spec_of

if TYPE_CHECKING:
    from tests.simulation.control import Controller
    from tests.simulation.world import World

SERVER = ToolServerId("server0000000001")
AGAIN_US = 300 * MILLISECOND
PATIENCE = 40  # asks before a client gives up a request that is refused


class Clients:
    """All clients of a run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.tools: tuple[Steps, ...] = ()
        self._served: dict[ToolCallId, bool] = {}  # whether it is done
        self._server_lives = True
        self._requests = 0
        self._waits: dict[InvocationId, list[Callable[[], None]]] = {}
        self._cells: dict[CellId, tuple[Callable[[], None], Callable[[], None]]] = {}

    def grants(self) -> tuple[ToolGrant, ...]:
        """The client's own tools, for a root."""
        return tuple(
            ToolGrant(tool_id=self._world.tool_id(SERVER, index), delegable=True)
            for index in range(len(self.tools))
        )

    def create(
        self,
        tenant_id: TenantId,
        plan: Plan,
        tool_call_id: ToolCallId | None = None,
        tools: bool = False,
        then: Callable[[InvocationId | None], None] = lambda _: None,
    ) -> None:
        """Asks for an invocation until it is accepted or refused for good."""
        self._requests += 1
        request_id = f"request{self._requests}"
        spec = spec_of(plan, self.grants() if tools else ())
        world = self._world
        answered: list[bool] = []

        def accepted() -> None:
            if not answered:
                answered.append(True)
                invocation_id = world.journal.requests[(tenant_id, request_id)]
                then(invocation_id)

        def ask(asks: int = 0) -> None:
            if answered:
                return
            if (tenant_id, request_id) in world.journal.requests:
                accepted()
                return
            for controller in world.living():
                event = ev.InvocationRequested(
                    tenant_id=tenant_id,
                    invocation_id=world.new_invocation(spec),
                    spec=spec,
                    request_id=request_id,
                    content_digest=request_id,
                    session_id=SessionId(""),
                    cancel_on_disconnect=False,
                    tool_call_id=tool_call_id,
                )
                try:
                    controller.post(event, accepted)
                except Refused as refused:
                    later = (Reason.HOST_UNAVAILABLE, Reason.QUOTA_EXCEEDED)
                    if tool_call_id is not None or refused.reason not in later:
                        answered.append(True)
                        then(None)
                        return
                    if asks >= PATIENCE:
                        return
            world.clock.after(AGAIN_US, lambda: ask(asks + 1))

        ask()

    def cancel(self, invocation_id: InvocationId) -> None:
        """Cancels, until somebody hears it."""
        world = self._world
        for controller in world.living():
            controller.post(
                ev.CancelRequested(invocation_id=invocation_id, cause=Cause.CLIENT),
            )
        if invocation_id not in world.journal.decided:
            world.clock.after(AGAIN_US, lambda: self.cancel(invocation_id))

    def when_ended(self, invocation_id: InvocationId, action: Callable[[], None]) -> None:
        """Does something when the end of an invocation is durable."""
        if invocation_id in self._world.journal.ended:
            action()
        else:
            self._waits.setdefault(invocation_id, []).append(action)

    def noticed(self, ended: list[InvocationId], cells: list[CellId]) -> None:
        """Hears what became durable."""
        for invocation_id in ended:
            for action in self._waits.pop(invocation_id, ()):
                self._world.clock.soon(action)
        for cell_id in cells:
            if (found := self._cells.pop(cell_id, None)) is not None:
                self._world.clock.soon(found[1])

    # Boxes.

    def drive(self, box_id: InvocationId, plan: Plan, index: int = 0) -> None:
        """Gives a box its cells, one after the other, then cancels it if it lives on."""
        world = self._world
        if index >= len(plan.cells):
            self.cancel(box_id)
            return
        cell_id = CellId(f"cell_{box_id.partition('_')[2]}n{index}")

        def give() -> None:
            if cell_id not in self._cells or box_id in world.journal.decided:
                return
            for controller in world.living():
                event = ev.CellSubmitted(
                    invocation_id=box_id,
                    cell_id=cell_id,
                    code=str(plan.cells[index].number),
                    inputs=(),
                    readable_artifacts=(),
                    timeout_seconds=None,
                    refuse_busy=False,
                )
                try:
                    controller.post(event)
                except Refused:
                    return

        self._cells[cell_id] = (give, lambda: self.drive(box_id, plan, index + 1))
        world.clock.soon(give, SECOND // 5)
        if plan.cells[index].outcome == "forever":
            world.clock.after(world.clock.chance.randint(1, SECOND), lambda: self.cancel(box_id))

    def heard_of(self, controller: Controller) -> None:
        """Gives a new controller the cells that have not ended: they are the same cells."""
        for give, _ in self._cells.values():
            controller.soon(give)

    # Tools.

    def serve(self, controller: Controller, command: cmd.CallTool) -> None:
        """Runs a tool of the client's, once, and tells the outcome as often as it is asked."""
        call_id = command.tool_call_id
        if not self._server_lives:
            unsent = frozenset({call_id} - self._served.keys())
            self._world.clock.soon(lambda: self._server_lost(unsent))
        elif self._served.get(call_id, False):
            self._world.clock.soon(lambda: self._told(call_id))
        elif call_id not in self._served:
            self._served[call_id] = False
            index = int(command.tool_id.rpartition("_")[2]) - 1
            steps = list(self.tools[index])
            tenant_id = command.tenant_id
            self._world.clock.soon(lambda: self._act(tenant_id, call_id, steps))

    def server_dies(self) -> None:
        """The process that serves the client's tools is gone for good."""
        self._server_lives = False
        self._server_lost(frozenset())

    def _server_lost(self, unsent: frozenset[ToolCallId]) -> None:
        for controller in self._world.living():
            controller.post(ev.ToolServerLost(server_id=SERVER, unsent=unsent))

    def _act(self, tenant_id: TenantId, call_id: ToolCallId, steps: list[Step]) -> None:
        if not self._server_lives:
            return
        if not steps:
            self._served[call_id] = True
            self._told(call_id)
            return
        step, rest = steps[0], steps[1:]

        def go_on() -> None:
            self._world.clock.soon(lambda: self._act(tenant_id, call_id, rest))

        if step.plan is None:
            go_on()
            return

        def created(child_id: InvocationId | None) -> None:
            if child_id is None or step.act == "detach":
                go_on()
            else:
                self.when_ended(child_id, go_on)

        naive = self._world.naive_tools
        self.create(tenant_id, step.plan, None if naive else call_id, then=created)

    def _told(self, call_id: ToolCallId) -> None:
        if not self._server_lives:
            return
        for controller in self._world.living():
            controller.post(
                ev.ToolReturned(owner=SERVER, tool_call_id=call_id, value=NONE_VALUE, failure=None)
            )
