"""The controller's side of one sandbox: what is said again after a cut, what is acknowledged."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from controller.core.ids import CallId, InvocationId, ToolCallId
from controller.core.model import (
    NONE_VALUE,
    CellOutcome,
    Evidence,
    Failure,
    GoneCause,
    ToolGrant,
    Value,
)
from controller.engine import commands as cmd
from controller.engine import events as ev
from controller.engine.implied import answer
from controller.engine.state import Node
from tests.simulation.hosts import Stream, Told
from tests.simulation.plans import Plan, spec_of

if TYPE_CHECKING:
    from tests.simulation.control import Controller, Done


class Attachment:
    """Kept until the sandbox is gone or not the invocation's any more."""

    def __init__(self, controller: Controller, command: cmd.StartSandbox, node: Node) -> None:
        self._controller, self._command, self._node = controller, command, node
        self._world = controller.world
        self._link = controller.links[command.host_id]
        self._stream: Stream | None = None
        self._sequence = 0
        self._acks: deque[list[Any]] = deque()  # [sequence, whether it is durable]
        self._greeted: Told | None = None
        self._capture = False
        self._cell: cmd.RunCell | None = None
        self._tools: dict[ToolCallId, cmd.CallTool] = {}
        self._over = False

    # Down.

    def connect(self) -> None:
        """Begins a conversation, as soon as the host answers."""
        self._link.when_connected(lambda: self._controller.soon(self._converse))

    def _converse(self) -> None:
        if self._over or self._controller.node_of(self._command) is None:
            self._over = True
            return
        host = self._link.host
        if not host.answers or host.generation != self._link.generation:
            self._link.broke()
            self._controller.soon(self._link.dial)
            self.connect()
            return
        stream = Stream(self._world.clock, self._hear, lambda: self._broke(stream))
        self._stream = stream
        fence = (self._controller.epoch, self._link.generation)
        after = self._sequence
        command = self._command

        def arrive() -> None:
            if not host.answers:
                stream.cut()
                return
            found = host.attach(stream, command.sandbox_id, command.invocation_id, fence, after)
            if found == "not_found":
                stream.up.send(lambda: self._gone_unheard(stream))
            elif found == "fenced":
                stream.cut()

        stream.down.send(arrive)
        if command.run:
            self._send_cell(stream, command.cell_id, int(command.program), capture=True)
        elif self._cell is not None:
            self._send_cell(stream, self._cell.cell_id, int(self._cell.code), capture=False)
        if self._capture:
            self._send_capture(stream)
        for call in self._tools.values():
            self._send_tool(stream, call)
        if self._world.faults and self._world.clock.likely(0.15):
            self._world.clock.soon(stream.cut, 40_000)

    def _broke(self, stream: Stream) -> None:
        """Begins again."""
        if self._controller.alive and self._stream is stream:
            self._stream = None
            if not self._over:
                self.connect()

    def _sandbox_then(self, stream: Stream, action: Any) -> None:
        def arrive() -> None:
            sandbox = self._link.host.sandboxes.get(self._command.sandbox_id)
            if sandbox is not None and sandbox.stream is stream:
                action(sandbox)

        stream.down.send(arrive)

    def _send_cell(self, stream: Stream, cell_id: Any, number: int, *, capture: bool) -> None:
        self._sandbox_then(stream, lambda box: box.run_cell(cell_id, number, capture))

    def _send_capture(self, stream: Stream) -> None:
        self._sandbox_then(stream, lambda box: box.capture())

    def _send_tool(self, stream: Stream, call: cmd.CallTool) -> None:
        index = int(call.tool_id.rpartition("_")[2]) - 1
        self._sandbox_then(stream, lambda box: box.serve(call.tool_call_id, index))

    def run_cell(self, command: cmd.RunCell) -> None:
        """Gives a box its cell, again on a new stream."""
        self._cell = command
        if self._stream is not None:
            self._send_cell(self._stream, command.cell_id, int(command.code), capture=False)

    def call_tool(self, command: cmd.CallTool) -> None:
        """Has the code serve a call, again on a new stream until it is answered."""
        self._tools[command.tool_call_id] = command
        if self._stream is not None:
            self._send_tool(self._stream, command)

    def capture_files(self) -> None:
        """Asks for the files."""
        self._capture = True
        if self._stream is not None:
            self._send_capture(self._stream)

    def reply(self, call_id: CallId, outcome: Any) -> None:
        """Gives an answer to the code."""
        if self._stream is None:
            return
        value = None
        if isinstance(outcome, cmd.Reply):
            self._world.checks.replied(outcome)
            if outcome.value is not None and outcome.value.json not in (None, b"null"):
                text = outcome.value.json.decode()
                value = text.strip('"') if text.startswith('"inv_') else None
        self._sandbox_then(self._stream, lambda box: box.reply(call_id, value))

    def die(self) -> None:
        """The controller is no more; what it had said may still arrive."""
        if self._stream is not None:
            self._stream.up.open = False

    # Up.

    def _hear(self, told: Told) -> None:
        if not self._controller.alive or self._over:
            return
        if told.kind == "attached":
            self._greeted = told
            self._reply_again(self._sequence)
            return
        entry: list[Any] = [told.sequence, False]

        def durable() -> None:
            entry[1] = True
            self._acknowledge()

        self._acks.append(entry)
        self._handle(told, durable)
        self._sequence = told.sequence
        self._reply_again(told.sequence)
        if told.kind == "gone":
            self._over = True

    def _reply_again(self, sequence: int) -> None:
        """Answers the calls that were open when the stream was attached: with what is known of them
        now, once that is durable."""
        greeted = self._greeted
        node = self._controller.state.live(self._command.invocation_id)
        if greeted is None or sequence < greeted.data["last"] or node is None:
            return
        self._greeted = None
        found: list[cmd.Reply] = []
        for call_id in greeted.data["open"]:
            if call_id in node.calls:
                found.extend(answer(self._controller.state, node, call_id))
            else:
                self.reply(call_id, Failure(reason="STORE_UNAVAILABLE"))

        def durable() -> None:
            for reply in found:
                self.reply(reply.call_id, reply)

        self._controller.settled(durable)

    def _acknowledge(self) -> None:
        sequence = 0
        while self._acks and self._acks[0][1]:
            sequence = self._acks.popleft()[0]
        if sequence and self._stream is not None:
            self._sandbox_then(self._stream, lambda box: box.acknowledge(sequence))

    def _gone_unheard(self, stream: Stream) -> None:
        if self._controller.alive and stream is self._stream and not self._over:
            self._over = True
            self._lost(GoneCause.LOST, None)

    def _lost(self, cause: GoneCause, done: Done | None) -> None:
        command = self._command
        self._controller.lost(command.invocation_id, command.sandbox_id, cause, done)

    def _handle(self, told: Told, done: Done) -> None:
        controller, data = self._controller, told.data
        invocation_id, sandbox_id = self._command.invocation_id, self._command.sandbox_id
        match told.kind:
            case "ready":
                started = ev.SandboxStarted(
                    invocation_id=invocation_id, sandbox_id=sandbox_id, enforcement=(), driver=""
                )
                controller.post(started, done)
            case "cell_completed":
                controller.post(self._ended(data["cell_id"], data["outcome"]), done)
            case "captured":
                captured = ev.FilesCaptured(invocation_id=invocation_id, sandbox_id=sandbox_id)
                controller.post(captured, done)
            case "gone":
                self._lost(data["cause"], done)
            case "tool_result":
                self._tools.pop(data["tool_call_id"], None)
                returned = ev.ToolReturned(
                    owner=invocation_id,
                    tool_call_id=data["tool_call_id"],
                    value=NONE_VALUE,
                    failure=None,
                )
                controller.post(returned, done)
            case "call":
                self._call(data, done)

    def _ended(self, cell_id: Any, outcome: CellOutcome) -> ev.CellEnded:
        returned = outcome in (CellOutcome.RETURNED, CellOutcome.COMPLETED)
        return ev.CellEnded(
            invocation_id=self._command.invocation_id,
            sandbox_id=self._command.sandbox_id,
            cell_id=cell_id,
            outcome=outcome,
            value=Value(json=b"1") if returned else None,
            failure=None if returned else Failure(type_name="ValueError"),
            stdout_bytes=0,
            stderr_bytes=0,
            evidence=Evidence(),
            output_cut=False,
        )

    def _call(self, data: dict[str, Any], done: Done) -> None:
        controller, call_id = self._controller, data["call_id"]
        node = controller.state.live(self._command.invocation_id)
        if node is None or node.ending is not None:
            self.reply(call_id, Failure(reason="INVOCATION_ENDED"))
            done()
            return
        common = {"sandbox_id": self._command.sandbox_id, "call_id": call_id}
        event: ev.Event
        match data["operation"]:
            case "spawn":
                event = self._spawn(node, data["plan"], data["cell_id"], data["detached"], common)
            case "tool":
                if not node.granted.tools:
                    self.reply(call_id, Failure(reason="GRANT_DENIED"))
                    done()
                    return
                tool = node.granted.tools[data["index"] % len(node.granted.tools)]
                event = ev.ToolRequested(
                    **common,
                    invocation_id=node.invocation_id,
                    tool_call_id=self._world.new_tool_call(),
                    tool_id=tool.tool_id,
                    method="",
                    arguments=NONE_VALUE,
                )
            case operation:
                kind = ev.AwaitRequested if operation == "await" else ev.ChildCancelRequested
                event = kind(
                    **common,
                    parent_id=node.invocation_id,
                    child_id=InvocationId(data["child_id"]),
                )
        controller.ask(event, call_id, self, done)

    def _spawn(
        self, node: Node, plan: Plan, cell_id: Any, detached: bool, common: dict[str, Any]
    ) -> ev.SpawnRequested:
        own = self._world.planner.made[int(node.spec.label)].tools
        tools = [
            ToolGrant(tool_id=self._world.tool_id(node.invocation_id, index), delegable=True)
            for index in range(len(own))
        ]
        granted = [item for item in node.granted.tools if item.delegable]
        spec = spec_of(plan, (*tools, *granted))
        child_id = self._world.new_invocation(spec)
        return ev.SpawnRequested(
            **common,
            parent_id=node.invocation_id,
            cell_id=cell_id,
            invocation_id=child_id,
            spec=spec,
            detached=detached,
        )
