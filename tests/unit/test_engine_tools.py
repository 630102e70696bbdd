"""The engine: tool calls and what they may ask for."""

from __future__ import annotations

import pytest

from controller.core.errors import Reason, Refused
from controller.core.ids import (
    LOCAL_TENANT,
    ArtifactId,
    CallId,
    InvocationId,
    SessionId,
    ToolCallId,
    ToolId,
    ToolServerId,
    tool_owner,
)
from controller.core.model import (
    CellOutcome,
    Failure,
    InvocationSpec,
    SpawnRequest,
    ToolGrant,
    ToolMethod,
    Value,
)
from controller.engine import commands as cmd
from controller.engine import events as ev
from controller.engine.implied import recovery, shown_state
from controller.engine.state import Node
from tests.support.engine_world import World, program

SERVER = ToolServerId("s" * 32)
CLIENT_TOOL = ToolId(f"tool_{SERVER}_1")


def client_tool(**fields: object) -> ToolGrant:
    return ToolGrant(tool_id=CLIENT_TOOL, name="search", **fields)  # type: ignore[arg-type]


def own_tool(node: Node, number: int = 1, **fields: object) -> ToolGrant:
    tool_id = ToolId(f"tool_{node.invocation_id}_{number}")
    return ToolGrant(tool_id=tool_id, name="own", **fields)  # type: ignore[arg-type]


def with_tools(*tools: ToolGrant, **fields: object) -> InvocationSpec:
    return program(tools=tools, **fields)


def use(
    world: World, node: Node, tool_id: str, call: str = "t1", *, method: str = "", named: str = ""
) -> tuple[str, str] | None:
    """The refusal, or None when the call is open; its tool call id is `tc_` and the call's."""
    world.post(
        ev.ToolRequested(
            invocation_id=node.invocation_id,
            sandbox_id=node.sandbox_id,
            call_id=CallId(call),
            tool_call_id=ToolCallId(f"tc_{call}"),
            tool_id=ToolId(tool_id),
            method=method,
            arguments=Value(json=b"{}"),
            artifact_ids=(ArtifactId(named),) if named else (),
        )
    )
    return node.calls[CallId(call)].refusal


def answers(
    world: World, owner: str, call: str = "t1", value: bytes | None = b"3", named: str = ""
) -> None:
    world.post(
        ev.ToolReturned(
            owner=ToolServerId(owner),
            tool_call_id=ToolCallId(f"tc_{call}"),
            value=Value(json=value) if value is not None else None,
            failure=None if value is not None else Failure(type_name="KeyError"),
            artifact_ids=(ArtifactId(named),) if named else (),
        )
    )


def replies(world: World, call: str = "t1") -> list[cmd.Reply]:
    return [
        item
        for item in world.take(cmd.Reply)
        if isinstance(item, cmd.Reply) and item.call_id == call
    ]


def reason_of(node: Node, call: str = "t1") -> str:
    found = node.calls[CallId(call)].tool
    assert found is not None
    assert found.failure is not None
    return found.failure.reason


def test_ids_say_who_owns_a_tool() -> None:
    assert tool_owner(CLIENT_TOOL) == SERVER
    assert tool_owner("tool_inv_0a1b_12") == "inv_0a1b"
    for text in ("", "tool_", "tool_inv_1", "tool_short_1", "tool_inv_a_0", "tool_inv_a/b_1"):
        assert tool_owner(text) == ""


def test_a_call_goes_to_its_owner_and_its_answer_to_the_caller() -> None:
    world = World()
    node = world.started(world.request(with_tools(client_tool())))
    assert use(world, node, CLIENT_TOOL) is None
    (call,) = world.take(cmd.CallTool)
    assert isinstance(call, cmd.CallTool)
    assert (call.owner, call.sandbox_id) == (SERVER, "")
    assert shown_state(node).value == "waiting"
    answers(world, SERVER)
    assert [item.value for item in replies(world)] == [Value(json=b"3")]
    assert [type(item) for item in world.take(cmd.EndToolCall)] == [cmd.EndToolCall]
    assert shown_state(node).value == "running"
    answers(world, SERVER, value=b"4")  # late and once more: nothing happens
    assert replies(world) == []


def test_a_tool_that_was_not_granted_is_refused() -> None:
    world = World()
    node = world.started(world.request(program()))
    refusal = use(world, node, CLIENT_TOOL)
    assert refusal is not None
    assert refusal[0] == Reason.GRANT_DENIED


def test_a_child_gets_its_parents_own_tools_and_those_it_may_pass_on() -> None:
    world = World()
    node = world.started(world.request(with_tools(client_tool(delegable=True))))
    forged = ToolGrant(tool_id=CLIENT_TOOL, name="forged", delegable=True, timeout_seconds=1)
    child = world.child(node, with_tools(own_tool(node), forged))
    assert child.granted.tools == (own_tool(node), client_tool(delegable=True))
    assert isinstance(world.spawn(child, with_tools(own_tool(node))), tuple)
    world.started(child)
    refusal = world.spawn(child, with_tools(own_tool(node)))
    assert isinstance(refusal, tuple)
    assert refusal[0] == Reason.GRANT_DENIED


def test_a_client_cannot_name_a_tool_of_an_invocation() -> None:
    world = World()
    other = world.started(world.request(program()))
    with pytest.raises(Refused) as refused:
        world.request(with_tools(own_tool(other)))
    assert refused.value.reason is Reason.GRANT_DENIED


def test_a_call_of_a_repls_tool_goes_to_its_sandbox() -> None:
    world = World()
    node = world.started(world.request(program()))
    child = world.started(world.child(node, with_tools(own_tool(node))))
    assert use(world, child, own_tool(node).tool_id) is None
    (call,) = world.take(cmd.CallTool)
    assert isinstance(call, cmd.CallTool)
    assert call.sandbox_id == node.sandbox_id


def test_only_the_owner_answers() -> None:
    world = World()
    node = world.started(world.request(with_tools(client_tool())))
    use(world, node, CLIENT_TOOL)
    answers(world, "z" * 32)
    answers(world, node.invocation_id)
    assert replies(world) == []
    answers(world, SERVER)
    assert len(replies(world)) == 1


def test_methods_are_those_of_the_grant() -> None:
    world = World()
    thing = client_tool(methods=(ToolMethod(name="get"),))
    node = world.started(world.request(with_tools(thing)))
    for call, method in (("a", ""), ("b", "__class__")):
        refusal = use(world, node, CLIENT_TOOL, call, method=method)
        assert refusal is not None
        assert refusal[0] == Reason.FIELD_INVALID
    assert use(world, node, CLIENT_TOOL, "c", method="get") is None


def test_a_server_that_died_leaves_its_calls_unknown_and_unsent_ones_refused() -> None:
    world = World()
    node = world.started(world.request(with_tools(client_tool())))
    use(world, node, CLIENT_TOOL, "sent")
    use(world, node, CLIENT_TOOL, "unsent")
    unsent = frozenset({ToolCallId("tc_unsent")})
    world.post(ev.ToolServerLost(server_id=SERVER, unsent=unsent))
    assert reason_of(node, "sent") == Reason.TOOL_OUTCOME_UNKNOWN
    assert reason_of(node, "unsent") == Reason.TOOL_UNREACHABLE


def test_a_repl_that_died_leaves_the_calls_of_its_tools_unknown() -> None:
    world = World()
    node = world.started(world.request(program()))
    child = world.started(world.child(node, with_tools(own_tool(node))))
    use(world, child, own_tool(node).tool_id)
    world.cell(node, CellOutcome.REPL_DIED)
    assert reason_of(child) == Reason.TOOL_OUTCOME_UNKNOWN


def test_a_call_that_takes_too_long_is_given_up_and_its_owner_is_told() -> None:
    world = World()
    node = world.started(world.request(with_tools(client_tool(timeout_seconds=2))))
    use(world, node, CLIENT_TOOL)
    (call,) = world.take(cmd.CallTool)
    assert isinstance(call, cmd.CallTool)
    assert call.deadline_us == world.now_us + 2_000_000
    world.post(ev.ToolTimeout(tool_call_id=ToolCallId("tc_t1")))
    assert reason_of(node) == Reason.TOOL_TIMED_OUT
    assert [item.cancel for item in world.take(cmd.EndToolCall)] == [True]  # type: ignore[union-attr]


def test_a_caller_that_ends_tells_the_owner_that_nobody_waits() -> None:
    world = World()
    node = world.started(world.request(with_tools(client_tool())))
    use(world, node, CLIENT_TOOL)
    world.cancel(node)
    assert [item.cancel for item in world.take(cmd.EndToolCall)] == [True]  # type: ignore[union-attr]
    assert world.state.tool_calls == {}
    answers(world, SERVER)
    assert replies(world) == []


def test_the_level_of_a_child_is_below_everyone_who_waits_for_its_parents_tools() -> None:
    world = World()
    node = world.started(world.request(program(spawn=SpawnRequest(max_depth=3))))
    child = world.started(world.child(node, with_tools(own_tool(node))))
    assert child.level == 2
    use(world, child, own_tool(node).tool_id)
    made_by_tool = world.child(node)
    assert (made_by_tool.depth, made_by_tool.level) == (2, 3)
    answers(world, node.invocation_id)
    assert world.child(node).level == 2


def test_a_level_below_the_tree_is_refused() -> None:
    world = World()
    node = world.started(world.request(program(spawn=SpawnRequest(max_depth=2))))
    child = world.started(world.child(node, with_tools(own_tool(node))))
    use(world, child, own_tool(node).tool_id)
    refusal = world.spawn(node)
    assert isinstance(refusal, tuple)
    assert refusal[0] == Reason.DEPTH_LIMIT_REACHED


def test_what_a_clients_tool_asks_for_belongs_to_the_callers_tree() -> None:
    world = World()
    node = world.started(world.request(with_tools(client_tool())))
    use(world, node, CLIENT_TOOL)

    def asked(request_id: str, tool_call_id: str) -> None:
        world.post(
            ev.InvocationRequested(
                tenant_id=LOCAL_TENANT,
                invocation_id=InvocationId(f"inv_{request_id}"),
                spec=program(),
                request_id=request_id,
                content_digest="",
                session_id=SessionId(""),
                cancel_on_disconnect=False,
                tool_call_id=ToolCallId(tool_call_id),
            )
        )

    asked("x1", "tc_t1")
    child = world.state.nodes[InvocationId("inv_x1")]
    assert (child.parent_id, child.depth, child.tree_id) == (node.invocation_id, 2, node.tree_id)
    with pytest.raises(Refused) as refused:
        asked("x2", "tc_none")
    assert refused.value.reason is Reason.FIELD_INVALID
    answers(world, SERVER)
    with pytest.raises(Refused):
        asked("x3", "tc_t1")


def test_artifacts_in_arguments_and_values_are_the_senders_own() -> None:
    world = World()
    node = world.started(world.request(program()))
    child = world.started(world.child(node, with_tools(own_tool(node))))
    refusal = use(world, child, own_tool(node).tool_id, "a", named="art_1")
    assert refusal is not None
    assert refusal[0] == Reason.GRANT_DENIED
    child.readable["art_2"] = None
    assert use(world, child, own_tool(node).tool_id, "b", named="art_2") is None
    assert "art_2" in node.readable
    answers(world, node.invocation_id, "b", named="art_3")
    assert reason_of(child, "b") == Reason.GRANT_DENIED


def test_the_next_controller_asks_open_calls_again_under_their_ids() -> None:
    world = World()
    node = world.started(world.request(with_tools(client_tool())))
    use(world, node, CLIENT_TOOL, "a")
    use(world, node, CLIENT_TOOL, "b")
    answers(world, SERVER, "a")
    state = world.refolded()
    found = [item for item in recovery(state) if isinstance(item, cmd.CallTool)]
    assert [item.tool_call_id for item in found] == ["tc_b"]
    answered = state.nodes[node.invocation_id].calls[CallId("a")].tool
    assert answered is not None
    assert answered.value == Value(json=b"3")
