"""The engine: cells of interactive boxes."""

from __future__ import annotations

import pytest

from controller.core.errors import Reason, Refused
from controller.core.ids import CellId
from controller.core.model import (
    CellOutcome,
    Contract,
    EndingKind,
    Evidence,
    InvocationSpec,
    Mode,
    NamedValue,
    SpawnRequest,
    State,
    Value,
)
from controller.engine import commands as cmd
from controller.engine import events as ev
from controller.engine import records as rec
from controller.engine.implied import recovery
from controller.engine.state import Node
from tests.support.engine_world import World

SECOND = 1_000_000


def box(world: World, **fields: object) -> Node:
    """A box whose sandbox takes cells."""
    spec = InvocationSpec(mode=Mode.INTERACTIVE, **fields)  # type: ignore[arg-type]
    return world.started(world.request(spec))


def submit(
    world: World, node: Node, cell_id: str, *, refuse_busy: bool = False
) -> list[rec.Record]:
    return world.post(
        ev.CellSubmitted(
            invocation_id=node.invocation_id,
            cell_id=CellId(cell_id),
            code=f"print({cell_id!r})",
            inputs=(),
            readable_artifacts=(),
            timeout_seconds=None,
            refuse_busy=refuse_busy,
        )
    )


def ends(
    world: World,
    node: Node,
    cell_id: str,
    outcome: CellOutcome = CellOutcome.COMPLETED,
    *,
    state_lost: bool = False,
    output_cut: bool = False,
) -> list[rec.Record]:
    returned = outcome is CellOutcome.RETURNED
    return world.post(
        ev.CellEnded(
            invocation_id=node.invocation_id,
            sandbox_id=node.sandbox_id,
            cell_id=CellId(cell_id),
            outcome=outcome,
            value=Value(json=b"7") if returned else None,
            failure=None,
            stdout_bytes=1,
            stderr_bytes=0,
            evidence=Evidence(),
            output_cut=output_cut,
            state_lost=state_lost,
        )
    )


def given(world: World) -> list[str]:
    """The cells that were given to sandboxes since the last look."""
    return [item.cell_id for item in world.take(cmd.RunCell) if isinstance(item, cmd.RunCell)]


def ending_of(node: Node) -> EndingKind | None:
    return node.ending.kind if node.ending is not None else None


def test_cells_run_one_after_the_other_in_their_order() -> None:
    world = World()
    node = box(world)
    for cell_id in ("a", "b", "c"):
        submit(world, node, cell_id)
    assert given(world) == ["a"]
    ends(world, node, "a")
    assert given(world) == ["b"]
    ends(world, node, "b", CellOutcome.ERRORED)
    assert given(world) == ["c"]
    ends(world, node, "c", CellOutcome.RAISED)
    assert ending_of(node) is None
    assert node.ended_cells == {"a", "b", "c"}


def test_a_cell_given_before_the_sandbox_is_there_runs_when_it_is() -> None:
    world = World()
    node = world.request(InvocationSpec(mode=Mode.INTERACTIVE))
    submit(world, node, "a")
    assert given(world) == []
    world.started(node)
    assert given(world) == ["a"]


def test_the_same_id_again_changes_nothing() -> None:
    world = World()
    node = box(world)
    submit(world, node, "a")
    assert submit(world, node, "a") == []
    ends(world, node, "a")
    assert submit(world, node, "a") == []
    assert given(world) == ["a"]
    assert ends(world, node, "a") == []


def test_who_would_not_wait_is_refused_at_once() -> None:
    world = World()
    node = box(world)
    submit(world, node, "a")
    with pytest.raises(Refused) as refused:
        submit(world, node, "b", refuse_busy=True)
    assert refused.value.reason is Reason.CELL_BUSY
    ends(world, node, "a")
    submit(world, node, "b", refuse_busy=True)
    assert given(world) == ["a", "b"]


def test_case_7_an_interrupt_of_the_queue_ends_one_and_cancels_the_rest_before_they_start() -> None:
    world = World()
    node = box(world)
    for cell_id in ("a", "b", "c"):
        submit(world, node, cell_id)
    given(world)
    records = world.post(
        ev.InterruptRequested(invocation_id=node.invocation_id, cell_id=CellId("a"), queue=True)
    )
    never_ran = [item.cell_id for item in records if isinstance(item, rec.CellRecorded)]
    assert never_ran == ["b", "c"]
    assert {item.outcome for item in records if isinstance(item, rec.CellRecorded)} == {
        CellOutcome.CANCELLED_BEFORE_START
    }
    assert [item.cell_id for item in world.take(cmd.InterruptCell)] == ["a"]  # type: ignore[union-attr]
    ends(world, node, "a", CellOutcome.INTERRUPTED)
    assert given(world) == []
    assert ending_of(node) is None


def test_an_interrupt_names_its_cell() -> None:
    world = World()
    node = box(world)
    submit(world, node, "a")
    ends(world, node, "a")
    submit(world, node, "b")

    def interrupt(cell_id: str) -> None:
        world.post(
            ev.InterruptRequested(
                invocation_id=node.invocation_id, cell_id=CellId(cell_id), queue=False
            )
        )

    interrupt("a")  # it has ended: nothing happens to the next one
    assert world.take(cmd.InterruptCell) == []
    with pytest.raises(Refused) as refused:
        interrupt("never")
    assert refused.value.reason is Reason.CELL_NOT_FOUND


def test_a_returned_value_ends_the_box_and_nothing_runs_until_it_is_checked() -> None:
    world = World()
    node = box(world)
    submit(world, node, "a")
    submit(world, node, "b")
    given(world)
    ends(world, node, "a", CellOutcome.RETURNED)
    assert given(world) == []
    world.accept(node)
    assert ending_of(node) is EndingKind.RETURNED
    assert node.value == Value(json=b"7")


def test_a_refused_value_leaves_the_box_alive_so_many_times() -> None:
    world = World()
    node = box(world, contract=Contract(schema_json=b"{}", max_failures=1))
    for cell_id in ("a", "b"):
        assert ending_of(node) is None
        submit(world, node, cell_id)
        assert given(world) == [cell_id]
        ends(world, node, cell_id, CellOutcome.RETURNED)
        world.post(ev.ContractChecked(invocation_id=node.invocation_id, accepted=False))
    assert ending_of(node) is EndingKind.CONTRACT_VIOLATED


def test_a_dead_repl_gets_the_inputs_again() -> None:
    world = World()
    held = NamedValue(name="data", value=Value(json=b"[1]"))
    node = box(world, inputs=(held,))
    seen: list[tuple[NamedValue, ...]] = []
    for cell_id, lost in (("a", False), ("b", True), ("c", False), ("d", False)):
        submit(world, node, cell_id)
        seen += [item.inputs for item in world.take(cmd.RunCell)]  # type: ignore[union-attr]
        outcome = CellOutcome.REPL_DIED if lost else CellOutcome.COMPLETED
        ends(world, node, cell_id, outcome, state_lost=lost)
    assert seen == [(held,), (), (held,), ()]
    assert ending_of(node) is None


def test_output_over_the_limit_ends_the_box() -> None:
    world = World()
    node = box(world)
    submit(world, node, "a")
    ends(world, node, "a", output_cut=True)
    assert ending_of(node) is EndingKind.OUTPUT_EXCEEDED


def test_a_running_cell_and_a_child_never_count_as_idle() -> None:
    world = World()
    node = box(world, idle_timeout_seconds=10, spawn=SpawnRequest(max_depth=2))
    submit(world, node, "a")
    world.now_us += 60 * SECOND
    world.post(ev.IdlePassed(invocation_id=node.invocation_id))
    assert ending_of(node) is None
    child = world.child(node)
    ends(world, node, "a")
    world.now_us += 60 * SECOND
    world.post(ev.IdlePassed(invocation_id=node.invocation_id))
    assert ending_of(node) is None
    world.started(child)
    world.finish(child)
    timer = world.take(cmd.SetIdleTimer)[-1]
    assert isinstance(timer, cmd.SetIdleTimer)
    assert timer.at_us == world.now_us + 10 * SECOND
    world.now_us = timer.at_us
    world.post(ev.IdlePassed(invocation_id=node.invocation_id))
    assert ending_of(node) is EndingKind.IDLE_TIMEOUT


def test_a_box_is_one_level_deep_and_lives_a_day_unless_its_caller_says_otherwise() -> None:
    world = World()
    node = box(world)
    assert node.granted.spawn.max_depth == 1
    assert node.granted.deadline_us == node.create_time_us + 86_400 * SECOND
    refusal = world.spawn(node)
    assert isinstance(refusal, tuple)
    assert refusal[0] == Reason.DEPTH_LIMIT_REACHED


def test_the_next_controller_gives_the_running_cell_again_and_interrupts_it_again() -> None:
    world = World()
    node = box(world)
    submit(world, node, "a")
    submit(world, node, "b")
    world.post(
        ev.InterruptRequested(invocation_id=node.invocation_id, cell_id=CellId("a"), queue=False)
    )
    state = world.refolded()
    found = recovery(state)
    assert [item.cell_id for item in found if isinstance(item, cmd.RunCell)] == ["a"]
    assert [item.cell_id for item in found if isinstance(item, cmd.InterruptCell)] == ["a"]
    starts = [item for item in found if isinstance(item, cmd.StartSandbox)]
    assert [item.run for item in starts] == [False]


def test_a_result_of_a_cell_that_was_never_written_down_is_taken() -> None:
    world = World()
    node = box(world)
    ends(world, node, "unknown")
    assert node.ended_cells == {"unknown"}
    assert submit(world, node, "unknown") == []
    assert given(world) == []


def test_a_box_that_has_ended_takes_no_cells() -> None:
    world = World()
    node = box(world)
    submit(world, node, "a")
    world.cancel(node)
    assert node.state is State.ENDING
    with pytest.raises(Refused) as refused:
        submit(world, node, "b")
    assert refused.value.reason is Reason.INVOCATION_ENDED


def test_no_more_cells_wait_than_may() -> None:
    world = World()
    node = box(world)
    for number in range(world.config.waiting_cells + 1):
        submit(world, node, f"c{number}")
    with pytest.raises(Refused) as refused:
        submit(world, node, "over")
    assert refused.value.reason is Reason.QUOTA_EXCEEDED
