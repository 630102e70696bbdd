"""The loop around the engine: decide, journal, then issue the commands.

Every fact enters through `post`. Deciding and folding happen at once, in the order of the facts;
the records are appended to the journal in that order, and nothing that follows from them (commands,
answers, notices to watchers) happens before they are durable. Batches that wait share one commit;
records for which nobody waits are held for a moment to share the next one.
A journal that fails ends the process: `failed` is set and the application exits.

Called by the servicers, the host client, the contract checker's task and the timers; calls the
engine and the journal.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from controller.config import ControllerConfig
from controller.core.errors import Reason, Refused
from controller.core.ids import CellId, InvocationId
from controller.engine import commands as cmd
from controller.engine import records as rec
from controller.engine.apply import apply
from controller.engine.decide import decide
from controller.engine.events import (
    CellEnded,
    CellShown,
    CellSubmitted,
    Event,
    InvocationRequested,
    SandboxGone,
    SandboxStarted,
    SpawnRequested,
)
from controller.engine.implied import commands, recovery
from controller.engine.state import EngineState, Node
from controller.store.ports import (
    Batch,
    InvocationRow,
    Journal,
    RequestRow,
    StoredRecord,
    StoreFull,
)

log = structlog.get_logger(__name__)


HOLD_SECONDS = 0.01  # the longest that records for which nobody waits are held for company
RECENT_VALUE_BYTES = 64 * 1024
FEED_FACTS = 2000
# What begins more work: refused while the disk is short of room; the rest goes on while it can.
NEW_WORK = (InvocationRequested, SpawnRequested, CellSubmitted)
RECENT = 100  # ended invocations whose rows are at hand: whoever waited for one asks at once


# Records that change nothing of what the read model shows.
_UNSHOWN = (rec.CellAccepted, rec.CellInterrupted, rec.CellDisplayed)


Fact = tuple[InvocationId, int, rec.Record]


class Executor(Protocol):
    """What carries out commands."""

    def issue(self, command: cmd.Command) -> None:
        """Begins to carry out a command and returns at once."""


class Projector(Protocol):
    """Makes the read model's row of a node."""

    def __call__(self, node: Node) -> InvocationRow:
        """The row as the node stands."""


@dataclass(slots=True, kw_only=True)
class _Pending:
    """What one fact led to, from its decision until it is durable and acted on."""

    done: asyncio.Future[None]
    time_us: int = 0
    records: list[rec.Record] = field(default_factory=list)
    append: asyncio.Future[None] | None = None
    commands: list[cmd.Command] = field(default_factory=list)
    trees: dict[InvocationId, None] = field(default_factory=dict)
    rows: list[InvocationRow] = field(default_factory=list)  # of invocations that have ended
    ended: list[Node] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)  # of trees that are followed


def _shown_above(node: Node, record: rec.Record) -> tuple[InvocationId, ...]:
    """The ancestors that the read model shows otherwise because of a record: it counts descendants,
    and says whether code waits."""
    match record:
        case rec.Admitted():
            return node.lineage
        case rec.Ended():
            return node.lineage[-1:]
        case _:
            return ()


def _may_wait(event: Event, pending: _Pending) -> bool:
    """Whether nobody waits for these records: what a sandbox tells on its way is most often
    followed at once by more, and one commit then serves both."""
    if not pending.records:
        return False
    if isinstance(event, CellEnded):  # of a program: its capture is under way
        return any(isinstance(item, cmd.CaptureArtifacts) for item in pending.commands) and all(
            isinstance(item, (cmd.CaptureArtifacts, cmd.DropDeadline)) for item in pending.commands
        )
    if isinstance(event, SandboxGone):  # its slot is free; the next start brings its own commit
        return not pending.commands
    return isinstance(event, (SandboxStarted, CellSubmitted, CellShown)) and all(
        isinstance(item, cmd.SetIdleTimer) for item in pending.commands
    )


def _is_over(append: asyncio.Future[None] | None) -> bool:
    return append is None or (append.done() and not append.cancelled())


@dataclass(slots=True, eq=False)
class Feed:
    """What becomes durable in one tree, in order, for one reader; and which cells print.

    Attributes:
        changed: set whenever there is something new.
        facts: sequences and records.
        missed: whether some were dropped because the reader was slow: the journal has them.
        printed: the cells that have printed since the reader last looked, each with the stream.
    """

    changed: asyncio.Event
    facts: deque[tuple[int, rec.Record]] = field(default_factory=deque)
    missed: bool = False
    printed: set[tuple[CellId, str]] = field(default_factory=set)

    def add(self, sequence: int, record: rec.Record) -> None:
        """Takes a durable fact."""
        self.facts.append((sequence, record))
        if len(self.facts) > FEED_FACTS:
            self.facts.clear()
            self.missed = True
        self.changed.set()


def by_age(records: Iterable[StoredRecord]) -> list[StoredRecord]:
    """The records of several trees in the order of their times, each tree's in its own order: who
    waits longest is known by the order in which records are folded."""
    latest: dict[str, int] = {}
    aged: list[tuple[int, StoredRecord]] = []
    for stored in records:  # each tree's are in order; its clock may have been set back
        time_us = max(stored.time_us, latest.get(stored.tree_id, 0))
        latest[stored.tree_id] = time_us
        aged.append((time_us, stored))
    aged.sort(key=lambda item: item[0])
    return [stored for _, stored in aged]


class Watchers:
    """Tells whoever waits that something durable happened in a tree."""

    def __init__(self) -> None:
        self._waits: dict[InvocationId, set[asyncio.Event]] = {}
        self._feeds: dict[InvocationId, set[Feed]] = {}

    def follow(self, tree_id: InvocationId) -> Feed:
        """A feed of all that becomes durable in the tree from now on; give it back afterwards. What
        was decided before and is not durable yet may be missing: see `Loop.settled`."""
        feed = Feed(asyncio.Event())
        self._feeds.setdefault(tree_id, set()).add(feed)
        return feed

    def unfollow(self, tree_id: InvocationId, feed: Feed) -> None:
        """Ends a feed."""
        feeds = self._feeds.get(tree_id, set())
        feeds.discard(feed)
        if not feeds:
            self._feeds.pop(tree_id, None)

    def followed(self, tree_id: InvocationId) -> bool:
        """Whether somebody follows the tree."""
        return tree_id in self._feeds

    def tell(self, facts: Iterable[Fact]) -> None:
        """Hands durable facts to the feeds of their trees."""
        for tree_id, sequence, record in facts:
            for feed in self._feeds.get(tree_id, ()):
                feed.add(sequence, record)

    def printed(self, tree_id: InvocationId, cell_id: CellId, stream: str) -> None:
        """Says that a cell has printed on a stream."""
        for feed in self._feeds.get(tree_id, ()):
            feed.printed.add((cell_id, stream))
            feed.changed.set()

    def subscribe(self, tree_id: InvocationId) -> asyncio.Event:
        """An event that is set at every durable change of the tree; give it back afterwards."""
        event = asyncio.Event()
        self._waits.setdefault(tree_id, set()).add(event)
        return event

    def unsubscribe(self, tree_id: InvocationId, event: asyncio.Event) -> None:
        """Ends a subscription."""
        waits = self._waits.get(tree_id)
        if waits is not None:
            waits.discard(event)
            if not waits:
                del self._waits[tree_id]

    def notify(self, trees: Iterable[InvocationId]) -> None:
        """Sets the events of these trees."""
        for tree_id in trees:
            for event in self._waits.get(tree_id, ()):
                event.set()

    def notify_all(self) -> None:
        """Sets every event, because the controller ends."""
        self.notify(list(self._waits))
        for feeds in self._feeds.values():
            for feed in feeds:
                feed.changed.set()


class Loop:
    """The only owner of the engine's state."""

    def __init__(
        self,
        *,
        config: ControllerConfig,
        journal: Journal,
        project: Projector,
        now_us: Callable[[], int],
        ended: Callable[[Node], None],
        changed: Callable[[], None],
        short_of_room: Callable[[], bool] = lambda: False,
    ) -> None:
        self.state = EngineState()
        self.watchers = Watchers()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.draining = False
        self._config = config
        self._journal = journal
        self._project = project
        self._now_us = now_us
        self._ended = ended
        self._changed = changed
        self._short_of_room = short_of_room
        self.codec = rec.Codec()  # the only one: it costs a tenth of a second to make
        self._executor: Executor | None = None
        self._held: list[_Pending] = []  # decided, not yet handed to the journal
        self._timer: asyncio.TimerHandle | None = None
        self._pending: deque[_Pending] = deque()
        self._stopped = False  # the journal failed
        self.recent: OrderedDict[str, InvocationRow] = OrderedDict()  # the latest to end, durably

    def start(self, executor: Executor) -> None:
        """Takes the executor, which is given the commands of recovery."""
        self._executor = executor
        for command in recovery(self.state):
            executor.issue(command)

    async def recover(self) -> None:
        """Folds the live trees' records; nothing is decided again."""
        for stored in by_age(await self._journal.live_records()):
            record = self.codec.load(stored.payload)
            apply(self.state, record)
            tree_id = InvocationId(stored.tree_id)
            if tree_id in self.state.trees:
                self.state.trees[tree_id].records = stored.sequence

    def post(self, event: Event) -> asyncio.Future[None]:
        """Takes a fact. The future is done once all that followed from it is durable.

        Raises:
            Refused: the request cannot be granted; nothing has changed.
        """
        if self.failed.done():
            raise Refused(Reason.STORE_UNAVAILABLE, "the journal has failed")
        if isinstance(event, NEW_WORK) and self._short_of_room():
            raise Refused(Reason.STORE_FULL, "the disk under the store is nearly full")
        try:
            now_us = self._now_us()
            records = decide(self.state, event, now_us, self._config)
        except Refused:
            raise
        except Exception as problem:  # the state may be ahead of what will ever be journalled
            log.critical("decision_failed", event_kind=type(event).__name__, exc_info=problem)
            self.failed.set_exception(problem)
            raise
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        pending = _Pending(done=done, time_us=now_us, records=records)
        for record in records:
            for command in commands(self.state, record):
                if isinstance(command, cmd.RunCell) and self._executor is not None:
                    self._executor.issue(command)
                else:
                    pending.commands.append(command)
        self._held.append(pending)
        if _may_wait(event, pending):
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(HOLD_SECONDS, self.flush)
        else:
            self.flush()
        return done

    def flush(self) -> None:
        """Hands what is held to the journal, as one batch."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held, self._held = self._held, []
        self._pending.extend(held)
        if not any(pending.records for pending in held):
            asyncio.get_running_loop().call_soon(self._go_on)
            return
        try:
            batch = self._batch(held)
        except Exception as problem:  # the state is ahead of what will ever be journalled
            self._fail(held[0], problem)
            return
        append = self._journal.begin(batch)
        if batch.ended_trees:
            self.state.forget_ended()
        for pending in held:
            pending.append = append
        append.add_done_callback(self._go_on)

    async def settled(self) -> None:
        """Returns once all that was posted so far is durable.

        Raises:
            Refused: the journal has failed.
        """
        if self._stopped:
            raise Refused(Reason.STORE_UNAVAILABLE, "the journal has failed")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._held.append(_Pending(done=done))
        self.flush()
        await done

    def _go_on(self, _: object = None) -> None:
        """Acts on what is durable by now, in order. No task of its own: each would be one more
        round of the event loop between a commit and what waits for it."""
        while self._pending and not self._stopped and _is_over(self._pending[0].append):
            pending = self._pending.popleft()
            try:
                if pending.append is not None:
                    pending.append.result()
                self._act(pending)
            except Exception as problem:
                self._fail(pending, problem)

    def _act(self, pending: _Pending) -> None:
        if not pending.done.done():
            pending.done.set_result(None)
        assert self._executor is not None
        for command in pending.commands:
            self._executor.issue(command)
        self._remember(pending.rows)
        self.watchers.tell(pending.facts)
        self.watchers.notify(pending.trees)
        for node in pending.ended:
            self._ended(node)
        self._changed()

    def _remember(self, rows: Iterable[InvocationRow]) -> None:
        for row in rows:
            if len(row.value) > RECENT_VALUE_BYTES:
                self.recent.pop(row.invocation_id, None)  # too large to keep; the store has it
                continue
            self.recent[row.invocation_id] = row
            self.recent.move_to_end(row.invocation_id)
        while len(self.recent) > RECENT:
            self.recent.popitem(last=False)

    def _fail(self, pending: _Pending, problem: Exception) -> None:
        """Nothing follows any more, from this or from what comes behind it."""
        self._stopped = True
        reason = Reason.STORE_FULL if isinstance(problem, StoreFull) else None
        log.critical("journal_failed", exc_info=problem)
        refusal = Refused(reason or Reason.STORE_UNAVAILABLE, "the journal cannot be written")
        for waiting in (pending, *self._pending, *self._held):
            if not waiting.done.done():
                waiting.done.set_exception(refusal)
                waiting.done.exception()  # a caller that does not wait is not a fault
        if not self.failed.done():
            self.failed.set_exception(problem)

    def _batch(self, held: list[_Pending]) -> Batch:
        """What was decided as the journal stores it, with the rows that it changes. Not made before
        it is handed over: what the loop issues at once need not wait for it, and of an invocation
        that changed more than once there is one row."""
        stored: list[StoredRecord] = []
        requests: list[RequestRow] = []
        ended: list[tuple[str, str]] = []
        rows: dict[InvocationId, InvocationRow] = {}
        for pending in held:
            touched: dict[InvocationId, None] = {}
            for record in pending.records:
                node = self.state.nodes[record.invocation_id]
                tree = self.state.trees[node.tree_id]
                tree.records += 1
                pending.trees[node.tree_id] = None
                if not isinstance(record, _UNSHOWN):
                    touched[node.invocation_id] = None
                touched.update(dict.fromkeys(_shown_above(node, record)))
                if self.watchers.followed(node.tree_id):
                    pending.facts.append((node.tree_id, tree.records, record))
                stored.append(self._stored(node, tree.records, pending.time_us, record))
                match record:
                    case rec.Ended():
                        pending.ended.append(node)
                    case rec.TreeEnded():
                        ended.append((node.tenant_id, node.tree_id))
                    case rec.Admitted() if record.request_id:
                        requests.append(_request(record))
            for invocation_id in touched:
                row = rows.get(invocation_id)
                if row is None:
                    row = rows[invocation_id] = self._project(self.state.nodes[invocation_id])
                if row.end_time_us:
                    pending.rows.append(row)
        return Batch(
            records=tuple(stored),
            rows=tuple(rows.values()),
            requests=tuple(requests),
            ended_trees=tuple(ended),
        )

    def _stored(self, node: Node, sequence: int, time_us: int, record: rec.Record) -> StoredRecord:
        return StoredRecord(
            tenant_id=node.tenant_id,
            tree_id=node.tree_id,
            sequence=sequence,
            kind=record.kind,
            invocation_id=node.invocation_id,
            time_us=time_us,
            engine_version=rec.ENGINE_VERSION,
            payload=self.codec.dump(record),
        )


def _request(record: rec.Admitted) -> RequestRow:
    return RequestRow(
        tenant_id=record.tenant_id,
        request_id=record.request_id,
        content_digest=record.content_digest,
        answer_id=record.invocation_id,
    )
