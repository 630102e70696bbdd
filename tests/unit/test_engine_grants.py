"""The engine: a child gets exactly what is named, never more than its parent has."""

from __future__ import annotations

import pytest

from controller.config import Limits
from controller.core.errors import Reason, Refused
from controller.core.model import (
    Enforcement,
    Granted,
    InvocationSpec,
    ResourceRequest,
    SpawnRequest,
    Statement,
)
from controller.engine.grants import for_child, for_root
from controller.engine.state import Node
from tests.support.engine_world import World, program

MIB = 1024 * 1024


def refusal(found: Node | tuple[str, str]) -> tuple[str, str]:
    assert isinstance(found, tuple), found
    return found


def test_a_root_gets_the_defaults_of_the_configuration() -> None:
    granted = World().request().granted
    assert granted.spawn.max_depth == 4
    assert granted.resources.memory_limit_bytes == 512 * MIB
    assert granted.artifact_patterns == ("artifacts/**",)


@pytest.mark.parametrize(
    "spec",
    [
        program(spawn=SpawnRequest(max_depth=17)),
        program(spawn=SpawnRequest(max_children=0)),
        program(resources=ResourceRequest(memory_limit_bytes=9 * 1024 * MIB)),
        program(resources=ResourceRequest(pids_limit=5000)),
        program(timeout_seconds=0.0),
        program(timeout_seconds=86_401.0),
        program(template="unknown"),
    ],
)
def test_a_root_over_a_maximum_is_refused_with_the_field(spec: object) -> None:
    world = World()
    with pytest.raises(Refused) as refused:
        world.request(spec)  # type: ignore[arg-type]
    assert refused.value.reason is Reason.FIELD_INVALID
    assert refused.value.details["field"]
    assert not world.state.nodes


def test_case_d2_more_than_the_parent_has_is_refused_and_each_excess_is_named() -> None:
    world = World()
    root = world.started(world.request())
    reason, message = refusal(
        world.spawn(
            root,
            program(
                spawn=SpawnRequest(max_depth=5),
                resources=ResourceRequest(memory_limit_bytes=1024 * MIB, pids_limit=500),
                driver="other",
            ),
        )
    )
    assert reason == Reason.GRANT_DENIED
    for name in ("max_depth=5", "memory_limit_bytes", "pids_limit=500", "driver='other'"):
        assert name in message
    assert root.child_count == 0


def test_limits_only_tighten_on_the_way_down() -> None:
    world = World()
    root = world.started(world.request())
    child = world.started(
        world.child(
            root,
            program(
                spawn=SpawnRequest(max_depth=3, max_children=2),
                resources=ResourceRequest(memory_limit_bytes=256 * MIB),
            ),
        )
    )
    grandchild = world.child(child)
    assert grandchild.granted.spawn.max_depth == 3
    assert grandchild.granted.spawn.max_children == 2
    assert grandchild.granted.resources.memory_limit_bytes == 256 * MIB


def test_case_d18_the_child_over_max_children_is_refused_and_over_max_concurrent_waits() -> None:
    world = World()
    spec = program(spawn=SpawnRequest(max_children=3, max_concurrent=2))
    root = world.started(world.request(spec))
    first, second, third = (world.child(root) for _ in range(3))
    assert [node.state.value for node in (first, second, third)] == [
        "starting",
        "starting",
        "queued",
    ]
    assert refusal(world.spawn(root))[0] == Reason.QUOTA_EXCEEDED
    world.started(first)
    world.finish(first)
    assert third.state.value == "starting"


def test_max_descendants_counts_the_whole_subtree() -> None:
    world = World()
    root = world.started(world.request(program(spawn=SpawnRequest(max_descendants=2))))
    child = world.started(world.child(root))
    world.child(child)
    reason, message = refusal(world.spawn(child))
    assert reason == Reason.QUOTA_EXCEEDED
    assert "max_descendants" in message


def test_a_named_limit_that_no_host_holds_for_the_sandbox_is_refused() -> None:
    levels = (
        Enforcement(limit="memory", level="process", mechanism="rlimit"),
        Enforcement(limit="open_files", level="process", mechanism="rlimit"),
    )
    statement = Statement(driver="bubblewrap", isolation="container", levels=levels)
    world = World(capacity=0)
    world.join(16, statements=(statement,))
    with pytest.raises(Refused) as refused:
        world.request(program(resources=ResourceRequest(memory_limit_bytes=256 * MIB)))
    assert refused.value.reason is Reason.NOT_ENFORCEABLE
    named = world.request(program(resources=ResourceRequest(open_files_limit=100)))
    assert named.granted.demanded_limits == ("open_files",)
    assert world.request().granted.demanded_limits == ()


def test_a_small_memory_shrinks_a_default_tmpfs_but_not_a_named_one() -> None:
    world = World()
    memory = ResourceRequest(memory_limit_bytes=128 * MIB)
    assert world.request(program(resources=memory)).granted.resources.tmpfs_limit_bytes < 22 * MIB
    both = ResourceRequest(memory_limit_bytes=128 * MIB, tmpfs_limit_bytes=64 * MIB)
    with pytest.raises(Refused):
        world.request(program(resources=both))


@pytest.mark.parametrize(
    "resources", [ResourceRequest(pids_limit=1), ResourceRequest(open_files_limit=2)]
)
def test_a_limit_under_which_no_sandbox_can_start_is_refused(resources: ResourceRequest) -> None:
    world = World()
    with pytest.raises(Refused) as refused:
        world.request(program(resources=resources))
    assert refused.value.reason is Reason.FIELD_INVALID
    root = world.started(world.request())
    assert refusal(world.spawn(root, program(resources=resources)))[0] == Reason.FIELD_INVALID


def test_an_input_may_name_only_artifacts_that_the_parent_may_read() -> None:
    world = World()
    root = world.started(world.request(program(readable_artifacts=("art_1",))))
    child = world.child(root, program(readable_artifacts=("art_1",)))
    assert list(child.readable) == ["art_1"]
    reason, _ = refusal(world.spawn(root, program(readable_artifacts=("art_2",))))
    assert reason == Reason.GRANT_DENIED


def test_without_any_host_a_root_is_refused() -> None:
    world = World(capacity=0)
    with pytest.raises(Refused) as refused:
        world.request()
    assert refused.value.reason is Reason.HOST_UNAVAILABLE


def _offered(driver: str, isolation: str, *templates: str) -> Statement:
    return Statement(driver=driver, isolation=isolation, templates=templates)


def _granted(spec: InvocationSpec, statements: tuple[Statement, ...]) -> Granted:
    return for_root(spec, Limits(), statements, 0)


def test_a_template_that_a_host_has_is_granted_and_an_unknown_one_names_those() -> None:
    offered = (
        _offered("bubblewrap", "container", "default"),
        _offered("docker", "container", "data"),
    )
    assert _granted(program(template="data"), offered).template == "data"
    assert _granted(program(), offered).template == "default"
    with pytest.raises(Refused, match="there are default, data") as refused:
        _granted(program(template="other"), offered)
    assert refused.value.reason is Reason.FIELD_INVALID
    assert refused.value.details["field"] == "template"


def test_a_named_limit_is_held_by_the_driver_that_makes_the_template() -> None:
    weak = _offered("bubblewrap", "container", "default")
    strong = Statement(
        driver="docker",
        isolation="container",
        templates=("data",),
        levels=(Enforcement(limit="pids", level="sandbox", mechanism="pids cgroup"),),
    )
    named = ResourceRequest(pids_limit=64)
    assert _granted(program(template="data", resources=named), (weak, strong)).demanded_limits
    with pytest.raises(Refused) as refused:
        _granted(program(resources=named), (weak, strong))
    assert refused.value.reason is Reason.NOT_ENFORCEABLE


def test_a_childs_template_may_isolate_more_than_its_parents_and_never_less() -> None:
    world = World()
    weak = _offered("bubblewrap", "container", "default")
    strong = _offered("docker-runsc", "kernel", "walled")
    node = world.request()
    granted = for_child(program(template="walled"), node, Limits(), (weak, strong), 0)
    assert granted.template == "walled"
    node.granted = granted
    assert for_child(program(), node, Limits(), (weak, strong), 0).template == "walled"
    with pytest.raises(Refused, match="isolation=container") as refused:
        for_child(program(template="default"), node, Limits(), (weak, strong), 0)
    assert refused.value.reason is Reason.GRANT_DENIED
