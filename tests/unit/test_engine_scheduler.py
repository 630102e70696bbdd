"""The scheduler: how tenants share what is free, and what bounds the wait of each."""

from __future__ import annotations

from collections import Counter

from controller.config import ControllerConfig
from controller.core.ids import CallId, TenantId, ToolCallId, ToolId
from controller.core.model import (
    NONE_VALUE,
    InvocationSpec,
    SpawnRequest,
    State,
    ToolGrant,
)
from controller.engine import events as ev
from controller.engine.state import Node
from tests.support.engine_world import World, program

A, B, C = TenantId("a"), TenantId("b"), TenantId("c")


def depth(levels: int, max_concurrent: int = 100) -> InvocationSpec:
    return program(spawn=SpawnRequest(max_depth=levels, max_concurrent=max_concurrent))


def state_of(node: Node) -> State:
    return node.state  # a call, so that a type checker does not think it fixed


def held(world: World) -> Counter[TenantId]:
    return Counter(node.tenant_id for node in world.state.nodes.values() if node.slot is not None)


def crowd(config: ControllerConfig | None = None) -> World:
    """Eight slots, for each of which fifty roots of two tenants wait."""
    world = World(8, config)
    before = world.started(world.request(depth(8), tenant_id=C))
    for _ in range(50):
        world.request(depth(1), tenant_id=A)
    for _ in range(50):
        world.request(depth(1), tenant_id=B)
    assert held(world) == {C: 1}
    world.finish(before)
    return world


def test_what_is_free_is_shared_by_weight_whoever_asked_first() -> None:
    assert held(crowd()) == {A: 4, B: 4}
    assert held(crowd(ControllerConfig(tenant_weights={"b": 3}))) == {A: 2, B: 6}


def test_a_tenant_that_keeps_its_slots_for_long_does_not_displace_one_that_returns_them() -> None:
    """A queue that counted what was given would give A every other slot, and A keeps them: after
    eight turns B would have none."""
    world = crowd()
    for _ in range(30):
        node = next(
            node for node in world.state.nodes.values() if node.tenant_id == B and node.slot
        )
        world.started(node)
        world.finish(node)
        assert held(world) == {A: 4, B: 4}


def test_one_tenant_cannot_borrow_everything() -> None:
    world = World(16)
    hostile = world.started(world.request(depth(2), tenant_id=A))
    for _ in range(100):
        world.child(hostile, depth(2))
    assert held(world) == {A: 14}  # its own two, and three quarters of sixteen
    other = world.request(depth(2), tenant_id=B)
    assert state_of(other) is State.STARTING


def test_slots_are_gathered_for_a_root_that_is_next_and_nobody_overtakes_it() -> None:
    world = World(4)
    small = [world.started(world.request(depth(1), tenant_id=A)) for _ in range(4)]
    large = world.request(depth(4), tenant_id=B)
    late = [world.request(depth(1), tenant_id=C) for _ in range(4)]
    for node in small:
        assert state_of(large) is State.QUEUED
        world.finish(node)
        assert all(state_of(node) is State.QUEUED for node in late)
    assert state_of(large) is State.STARTING


def test_a_root_that_all_hosts_together_cannot_hold_holds_nobody_back() -> None:
    world = World(4)
    running = world.started(world.request(depth(4)))
    large = world.request(depth(4))
    small = world.request(depth(1))
    world.join(2)
    world.gone(running)
    assert (state_of(large), state_of(small)) == (State.QUEUED, State.STARTING)
    world.join(8)
    assert state_of(large) is State.STARTING


def test_the_deepest_that_waits_borrows_first() -> None:
    world = World(6)
    root = world.started(world.request(depth(3)))
    middle = [world.started(world.child(root, depth(3))) for _ in range(4)]
    assert held(world).total() == 5  # the third level's own slot is free
    older = world.child(root, depth(3))
    deep = [world.child(middle[0], depth(3)) for _ in range(2)]
    assert [state_of(node) for node in (older, *deep)] == [
        State.QUEUED,
        State.STARTING,
        State.QUEUED,
    ]
    world.finish(middle[3])
    assert [state_of(node) for node in (older, deep[1])] == [State.QUEUED, State.STARTING]


def test_a_tree_that_is_ending_anyway_makes_room_for_the_others_when_capacity_falls() -> None:
    world = World(8)
    old = world.started(world.request(depth(4)))
    young = world.started(world.request(depth(4)))
    world.cancel(young)
    world.join(4)
    assert old.ending is None


def test_what_a_tool_invokes_is_not_held_back_by_the_caller_that_waits_for_it() -> None:
    world = World(8)
    parent = world.started(world.request(depth(3, max_concurrent=1)))
    tool = ToolGrant(tool_id=ToolId(f"tool_{parent.invocation_id}_1"))
    child = world.started(world.child(parent, program(tools=(tool,))))
    world.post(
        ev.ToolRequested(
            invocation_id=child.invocation_id,
            sandbox_id=child.sandbox_id,
            call_id=CallId("t1"),
            tool_call_id=ToolCallId("tc_1"),
            tool_id=tool.tool_id,
            method="",
            arguments=NONE_VALUE,
        )
    )
    served = world.child(parent)
    assert (served.level, state_of(served)) == (3, State.STARTING)
    assert isinstance(world.spawn(world.started(served)), tuple)  # a fourth level is refused
