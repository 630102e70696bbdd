"""What a parent whose ending is decided can still ask for: nothing."""

from __future__ import annotations

from controller.core.model import CellOutcome, EndingKind
from controller.engine import records as rec
from tests.support.engine_world import World


def test_case_d5_a_spawn_of_a_parent_that_is_ending_is_refused_and_makes_no_child() -> None:
    world = World()
    parent = world.started(world.request())
    # Its ending waits for the child, so it is still there when the second spawn arrives.
    child = world.child(parent)
    world.cell(parent, CellOutcome.RETURNED)
    world.accept(parent)
    before = len(world.state.nodes)
    refused = world.spawn(parent)
    assert isinstance(refused, tuple)
    assert refused[0] == "INVOCATION_ENDED"
    assert len(world.state.nodes) == before
    assert child.ending is not None


def test_case_d5_a_child_whose_parent_is_cancelled_before_its_start_ends_without_a_sandbox() -> (
    None
):
    world = World(capacity=4)
    parent = world.started(world.request())
    children = [world.child(parent) for _ in range(6)]
    waiting = [child for child in children if child.slot is None]
    assert waiting
    world.cancel(parent)
    for child in waiting:
        assert child.ending is not None
        assert child.ending.kind is EndingKind.CANCELLED
    granted = {
        record.invocation_id for record in world.journal if isinstance(record, rec.SlotGranted)
    }
    assert granted.isdisjoint(child.invocation_id for child in waiting)
