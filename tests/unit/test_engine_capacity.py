"""The engine: capacity is never exceeded, and bounded capacity never locks up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.errors import Reason, Refused
from controller.core.model import EndingKind, SpawnRequest, State
from controller.engine.state import EngineState, Node
from tests.support.engine_world import World, program


def used(state: EngineState) -> int:
    return sum(node.slot is not None for node in state.nodes.values())


def depth(levels: int, **fields: int) -> object:
    return program(spawn=SpawnRequest(max_depth=levels, **fields))


def test_a_root_waits_until_its_levels_fit_beside_all_reservations() -> None:
    world = World(capacity=8)
    roots = [world.request(depth(3)) for _ in range(3)]  # type: ignore[arg-type]
    assert [node.state for node in roots] == [State.STARTING, State.STARTING, State.QUEUED]
    world.started(roots[0])
    world.finish(roots[0])
    assert roots[2].state is State.STARTING


def test_a_depth_that_can_never_fit_is_refused_at_once() -> None:
    world = World(capacity=3)
    with pytest.raises(Refused) as refused:
        world.request(depth(4))  # type: ignore[arg-type]
    assert refused.value.reason is Reason.QUOTA_EXCEEDED


def test_children_borrow_free_slots_and_the_reserved_one_is_used_first() -> None:
    world = World(capacity=4)
    root = world.started(world.request(depth(2)))  # type: ignore[arg-type]
    children = [world.child(root) for _ in range(4)]
    slots = [node.slot for node in children]
    assert [slot.borrowed if slot else None for slot in slots] == [False, True, True, None]
    assert used(world.state) == 4


def test_a_waiting_root_is_not_starved_by_younger_children_that_borrow() -> None:
    world = World(capacity=4)
    first = world.started(world.request(depth(2)))  # type: ignore[arg-type]
    running = [world.started(world.child(first)) for _ in range(3)]
    waiting = world.request(depth(2))  # type: ignore[arg-type]
    late = [world.child(first) for _ in range(4)]
    for node in running:
        world.finish(node)
    assert waiting.state is State.STARTING
    assert sum(node.state is State.STARTING for node in late) == 1  # its own reserved slot


def test_when_capacity_falls_the_youngest_trees_end() -> None:
    world = World(capacity=8)
    old = world.started(world.request(depth(4)))  # type: ignore[arg-type]
    young = world.started(world.request(depth(4)))  # type: ignore[arg-type]
    world.join(4)
    assert old.ending is None
    assert young.ending is not None
    assert young.ending.kind is EndingKind.CAPACITY_LOST


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_case_d19_any_forest_ends_with_bounded_capacity_and_no_deadline(
    data: st.DataObject,
) -> None:
    """Parents wait for all their children; every step picks any event that could happen next."""
    capacity = data.draw(st.integers(3, 9), label="capacity")
    world = World(capacity=capacity)
    plan: dict[str, int] = {}
    roots = data.draw(st.integers(1, 6), label="roots")
    for _ in range(roots):
        levels = data.draw(st.integers(1, min(4, capacity)), label="levels")
        node = world.request(depth(levels, max_concurrent=data.draw(st.integers(1, 4))))  # type: ignore[arg-type]
        plan[node.invocation_id] = data.draw(st.integers(0, 3), label="children")
    for _ in range(2000):
        assert used(world.state) <= capacity
        live = [node for node in world.state.nodes.values() if not node.gone]
        if not live:
            break
        able = [node for node in live if _can_step(node, plan)]
        assert able, "locked up: every sandbox is held by a waiting parent"
        _step(world, data.draw(st.sampled_from(able)), plan, data)
    assert all(tree.over for tree in world.state.trees.values())
    assert used(world.state) == 0


def _can_step(node: Node, plan: dict[str, int]) -> bool:
    if node.state in (State.STARTING, State.ENDED) or node.capturing:
        return node.slot is not None
    if node.state is not State.RUNNING:
        return False
    may_spawn = plan[node.invocation_id] > 0 and node.depth < node.granted.spawn.max_depth
    return may_spawn or not node.waits


def _step(world: World, node: Node, plan: dict[str, int], data: st.DataObject) -> None:
    if node.state is State.STARTING:
        world.started(node)
    elif node.capturing:
        world.captured(node)
    elif node.state is State.ENDED:
        world.gone(node)
    elif plan[node.invocation_id] > 0 and node.depth < node.granted.spawn.max_depth:
        plan[node.invocation_id] -= 1
        child = world.child(node)
        plan[child.invocation_id] = data.draw(st.integers(0, 2), label="grandchildren")
    elif node.checking is not None:
        world.accept(node)
    else:
        world.cell(node)
