"""One life of a controller: the real engine, with the loop's order of things and fake links.

What it decides is folded at once; nothing that follows is done before the journal has it; what the
journal does not have when the controller dies was never decided.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from controller.core.errors import Refused
from controller.core.ids import CallId, InvocationId, SandboxId
from controller.core.model import Evidence, GoneCause
from controller.engine import commands as cmd
from controller.engine import events as ev
from controller.engine import records as rec
from controller.engine.apply import apply
from controller.engine.decide import decide
from controller.engine.implied import commands, recovery
from controller.engine.state import EngineState, Node
from tests.simulation.attachments import Attachment
from tests.simulation.clock import MILLISECOND, SECOND
from tests.simulation.hosts import Host

if TYPE_CHECKING:
    from tests.simulation.world import World

Done = Callable[[], None]


@dataclass(slots=True, kw_only=True)
class Batch:
    """The records of one decision, and what waits for them."""

    time_us: int
    records: list[tuple[InvocationId, rec.Record]]
    commands: list[cmd.Command]
    done: list[Done] = field(default_factory=list)


class Link:
    """The controller's side of one host."""

    def __init__(self, controller: Controller, host: Host) -> None:
        self._controller, self.host = controller, host
        self.connected = False
        self.generation = 0
        self.given_up = False
        self._waiting: list[Done] = []

    def when_connected(self, action: Done) -> None:
        """Does something now or as soon as the host answers."""
        if self.connected:
            action()
        else:
            self._waiting.append(action)

    def broke(self) -> None:
        """The host does not answer any more, or again in another generation."""
        same = self.host.answers and self.host.generation == self.generation
        if self.connected and not same:
            self.connected = False
            self.expect()
            self._controller.soon(self.dial)

    def lost_sight(self) -> None:
        """The watch alone broke; conversations about sandboxes go on."""
        if self.connected:
            self.connected = False
            self.expect()
            self._controller.soon(self.dial)

    def expect(self) -> None:
        """A host that does not answer within the grace is lost."""
        generation = self.generation

        def give_up() -> None:
            if not self.connected and self.generation == generation and not self.given_up:
                self.given_up = True
                self._controller.lost_host(self.host)

        self._controller.later(give_up, self._controller.world.options.grace_us)

    def dial(self) -> None:
        """Asks who the host is and what it holds; strays are ended before it is told."""
        controller, host = self._controller, self.host
        if self.connected or not host.answers:
            return
        generation = host.generation
        host.epoch = max(host.epoch, controller.epoch)
        held = [item.sandbox_id for item in host.sandboxes.values()]

        def join() -> None:
            if self.connected or not host.answers or host.generation != generation:
                controller.soon(self.dial)
                return
            state = controller.state
            current = {node.sandbox_id for node in state.nodes.values() if node.slot is not None}
            for sandbox_id in held:
                if sandbox_id not in current:
                    host.destroy(sandbox_id)
            self.generation = generation
            self.connected, self.given_up = True, False
            self._controller.world.lost_hosts.discard(host.host_id)
            controller.post(
                ev.HostJoined(
                    host_id=host.host_id,
                    host_generation=generation,
                    capacity=host.capacity,
                    statements=(),
                    more_expected=controller.expects_more(),
                ),
            )
            waiting, self._waiting = self._waiting, []
            for action in waiting:
                controller.soon(action)

        controller.soon(join)


class Controller:
    """One life."""

    def __init__(self, world: World, epoch: int) -> None:
        self.world, self.epoch = world, epoch
        self.alive = True
        self.state = EngineState()
        self.links = {host.host_id: Link(self, host) for host in world.hosts}
        self.attachments: dict[SandboxId, Attachment] = {}
        self._pending: deque[Batch] = deque()
        self._last_us = 0
        self._recover()

    def _recover(self) -> None:
        for record in self.world.journal.live():
            apply(self.state, record)
        self.world.checks.begins(self.state)
        for command in recovery(self.state):
            self._issue(command)
        for link in self.links.values():
            link.expect()
            link.dial()

    def expects_more(self) -> bool:
        """Whether some host has neither answered nor been given up since the start."""
        return not all(link.connected or link.given_up for link in self.links.values())

    def lost_host(self, host: Host) -> None:
        """A host has been away for too long."""
        self.world.lost_hosts.add(host.host_id)
        self.post(ev.HostLost(host_id=host.host_id, more_expected=self.expects_more()))

    def later(self, action: Done, delay_us: int) -> None:
        """Does something unless this life is over by then."""
        self.world.clock.after(delay_us, lambda: action() if self.alive else None)

    def soon(self, action: Done) -> None:
        """Does something after a short delay of chance."""
        self.world.clock.soon(lambda: action() if self.alive else None)

    # The loop.

    def post(self, event: ev.Event, done: Done | None = None) -> None:
        """Takes a fact.

        Raises:
            Refused: nothing has changed.
        """
        world, state = self.world, self.state
        records = decide(state, event, world.clock.now_us, world.config, world.rules)
        batch = Batch(
            time_us=world.clock.now_us,
            records=[(state.nodes[item.invocation_id].tree_id, item) for item in records],
            commands=[command for record in records for command in commands(state, record)],
            done=[done] if done is not None else [],
        )
        world.checks.decided(self, records)
        if any(isinstance(record, rec.TreeEnded) for record in records):
            state.forget_ended()
        self._pending.append(batch)
        for command in batch.commands:
            if isinstance(command, cmd.RunCell):
                self._issue(command)  # it alone need not wait
        delay = world.clock.chance.randint(1, 2 * MILLISECOND)
        self._last_us = max(self._last_us, world.clock.now_us + delay)
        world.clock.at(self._last_us, self._commit)

    def _commit(self) -> None:
        if not self.alive:
            return
        batch = self._pending.popleft()
        self.world.journal.append(batch.records, batch.time_us)
        for command in batch.commands:
            if not isinstance(command, cmd.RunCell):
                self._issue(command)
        for done in batch.done:
            done()
        self.world.noticed(batch.records)

    def settled(self, action: Done) -> None:
        """Does something once all that was posted so far is durable."""
        if self._pending:
            self._pending[-1].done.append(action)
        else:
            action()

    @property
    def idle(self) -> bool:
        """Whether all that was decided is durable."""
        return not self._pending

    def crash(self) -> None:
        """Dies; some of what was on its way to the journal arrived."""
        self.alive = False
        for _ in range(self.world.clock.chance.randint(0, len(self._pending))):
            batch = self._pending.popleft()
            self.world.journal.append(batch.records, batch.time_us)
            self.world.noticed(batch.records)
        for attachment in self.attachments.values():
            attachment.die()

    # The executor.

    def _issue(self, command: cmd.Command) -> None:
        world = self.world
        match command:
            case cmd.StartSandbox():
                node = self.state.live(command.invocation_id)
                if node is None or node.sandbox_id != command.sandbox_id:
                    return
                attachment = Attachment(self, command, node)
                self.attachments[command.sandbox_id] = attachment
                attachment.connect()
            case cmd.RunCell():
                if (found := self.attachments.get(command.sandbox_id)) is not None:
                    found.run_cell(command)
            case cmd.Reply():
                if (found := self.attachments.get(command.sandbox_id)) is not None:
                    found.reply(command.call_id, command)
            case cmd.CaptureArtifacts():
                if (found := self.attachments.get(command.sandbox_id)) is not None:
                    found.capture_files()
            case cmd.DestroySandbox():
                self.destroy(command)
            case cmd.CheckContract():
                self.soon(lambda: self._checked(command))
            case cmd.SetDeadline():
                if command.at_us - world.clock.now_us < 60 * SECOND:  # others never fire
                    world.clock.at(command.at_us, lambda: self._passed(command))
            case cmd.CallTool() if command.sandbox_id:
                if (found := self.attachments.get(command.sandbox_id)) is not None:
                    found.call_tool(command)
            case cmd.CallTool():
                world.clients.serve(self, command)
            case _:
                pass

    def _checked(self, command: cmd.CheckContract) -> None:
        accepted = not self.world.clock.likely(self.world.options.refusals)
        self.post(ev.ContractChecked(invocation_id=command.invocation_id, accepted=accepted))

    def _passed(self, command: cmd.SetDeadline) -> None:
        if self.alive:
            self.post(ev.DeadlinePassed(invocation_id=command.invocation_id))

    def destroy(self, command: cmd.DestroySandbox) -> None:
        """Asks until the host answers; requests and answers may be lost."""
        link = self.links[command.host_id]

        def ask() -> None:
            host = link.host
            if not host.answers or not link.connected or host.generation != link.generation:
                link.broke()
                link.when_connected(lambda: self.soon(ask))
                return
            if self.world.faults and self.world.clock.likely(0.1):
                self.soon(ask)
                return
            host.destroy(command.sandbox_id)
            if self.world.faults and self.world.clock.likely(0.1):
                self.soon(ask)
                return
            self.soon(answered)

        def answered() -> None:
            self.lost(command.invocation_id, command.sandbox_id, GoneCause.DESTROYED)

        link.when_connected(lambda: self.soon(ask))

    def lost(
        self,
        invocation_id: InvocationId,
        sandbox_id: SandboxId,
        cause: GoneCause,
        done: Done | None = None,
    ) -> None:
        """Says that a sandbox is no more."""
        self.post(
            ev.SandboxGone(
                invocation_id=invocation_id,
                sandbox_id=sandbox_id,
                cause=cause,
                message=cause.value,
                evidence=Evidence(),
            ),
            done,
        )

    def node_of(self, command: cmd.StartSandbox) -> Node | None:
        """The node of an attempt that still has its slot."""
        node = self.state.live(command.invocation_id)
        if node is None or node.slot is None or node.sandbox_id != command.sandbox_id:
            return None
        return node

    def ask(self, event: ev.Event, call_id: CallId, attachment: Attachment, done: Done) -> None:
        """Posts what code asks for; a refusal that is not journalled is told at once."""
        try:
            self.post(event, done)
        except Refused as refused:
            attachment.reply(call_id, refused)
            done()
