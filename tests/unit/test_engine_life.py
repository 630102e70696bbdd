"""The engine: what follows from each event over the life of an invocation."""

from __future__ import annotations

import pytest

from controller.core.errors import Reason, Refused
from controller.core.ids import CallId, SessionId
from controller.core.model import (
    Cause,
    CellOutcome,
    EndingKind,
    Evidence,
    Failure,
    GoneCause,
    InvocationSpec,
    Mismatch,
    SpawnRequest,
    State,
    Value,
)
from controller.engine import commands as cmd
from controller.engine import events as ev
from controller.engine.implied import recovery, shown_state
from controller.engine.state import Node
from tests.support.engine_world import HOST, World, program


def state_of(node: Node) -> State:
    return node.state  # a call, so that a type checker does not think it fixed


def ending_of(node: Node) -> EndingKind:
    assert node.ending is not None
    return node.ending.kind


def test_a_program_returns_after_its_check_its_capture_and_its_end() -> None:
    world = World()
    node = world.request()
    assert state_of(node) is State.STARTING
    world.started(node)
    assert state_of(node) is State.RUNNING
    world.cell(node, value=b"41")
    assert node.ending is None
    world.accept(node)
    assert (ending_of(node), node.value) == (EndingKind.RETURNED, Value(json=b"41"))
    assert state_of(node) is State.ENDING
    world.captured(node)
    assert state_of(node) is State.ENDED
    assert [type(item) for item in world.take(cmd.DestroySandbox)] == [cmd.DestroySandbox]
    world.gone(node)
    assert world.state.trees[node.tree_id].over


@pytest.mark.parametrize(
    ("outcome", "evidence", "cut", "kind"),
    [
        (CellOutcome.RAISED, Evidence(), False, EndingKind.RAISED),
        (CellOutcome.ERRORED, Evidence(), False, EndingKind.RAISED),
        (CellOutcome.INTERRUPTED, Evidence(), False, EndingKind.CANCELLED),
        (CellOutcome.TIMED_OUT, Evidence(), False, EndingKind.DEADLINE_EXCEEDED),
        (CellOutcome.REPL_DIED, Evidence(signal=11), False, EndingKind.CRASHED),
        (CellOutcome.REPL_DIED, Evidence(exit_code=3), False, EndingKind.EXITED),
        (
            CellOutcome.REPL_DIED,
            Evidence(signal=9, oom_kill_count=1),
            False,
            EndingKind.MEMORY_EXCEEDED,
        ),
        # A process beside the REPL was killed for memory; it did not die of that.
        (CellOutcome.REPL_DIED, Evidence(signal=11, oom_kill_count=1), False, EndingKind.CRASHED),
        (CellOutcome.REPL_DIED, Evidence(exit_code=3, oom_kill_count=1), False, EndingKind.EXITED),
        (CellOutcome.RETURNED, Evidence(), True, EndingKind.OUTPUT_EXCEEDED),
    ],
)
def test_every_cell_outcome_of_a_program_has_its_ending(
    outcome: CellOutcome, evidence: Evidence, cut: bool, kind: EndingKind
) -> None:
    world = World()
    node = world.started(world.request())
    failure = Failure(type_name="ValueError", message="no") if outcome != "returned" else None
    world.cell(node, outcome, evidence=evidence, output_cut=cut, failure=failure)
    assert ending_of(node) is kind


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (GoneCause.START_FAILED, EndingKind.START_FAILED),
        (GoneCause.DENIED, EndingKind.DENIED),
        (GoneCause.LOST, EndingKind.SANDBOX_LOST),
        (GoneCause.DIED, EndingKind.CRASHED),
    ],
)
def test_a_sandbox_that_ends_first_gives_the_ending_its_host_names(
    cause: GoneCause, kind: EndingKind
) -> None:
    world = World()
    node = world.started(world.request())
    world.gone(node, cause)
    assert (ending_of(node), node.gone) == (kind, True)
    assert not world.take(cmd.DestroySandbox)


def test_a_sandbox_that_dies_after_its_value_was_given_takes_nothing_back() -> None:
    world = World()
    node = world.started(world.request())
    world.cell(node, value=b"5")
    world.gone(node, GoneCause.DIED)
    assert node.ending is None
    world.accept(node)
    assert (ending_of(node), node.value, node.gone) == (
        EndingKind.RETURNED,
        Value(json=b"5"),
        True,
    )


def test_files_are_captured_while_the_value_is_checked() -> None:
    world = World()
    node = world.started(world.request())
    world.cell(node)
    assert len(world.take(cmd.CaptureArtifacts)) == 1
    world.captured(node)
    assert node.ending is None
    world.accept(node)
    assert node.ended
    assert not world.take(cmd.CaptureArtifacts)


def test_a_refused_value_names_path_expected_and_got() -> None:
    world = World()
    node = world.started(world.request())
    world.cell(node)
    mismatch = Mismatch(path='result["a"]', expected="integer", got="'x'")
    world.post(
        ev.ContractChecked(invocation_id=node.invocation_id, accepted=False, mismatch=mismatch)
    )
    assert ending_of(node) is EndingKind.CONTRACT_VIOLATED
    assert node.ending is not None
    assert node.ending.failure is not None
    assert node.ending.failure.mismatch == mismatch
    assert node.value is None


def test_a_value_may_not_name_an_artifact_that_its_sender_cannot_read() -> None:
    world = World()
    node = world.started(world.request())
    world.cell(node)
    world.post(
        ev.ContractChecked(
            invocation_id=node.invocation_id, accepted=True, artifact_ids=("art_other",)
        )
    )
    assert ending_of(node) is EndingKind.CONTRACT_VIOLATED


def test_a_child_gets_depth_and_lineage_from_its_parent_and_answers_the_call() -> None:
    world = World()
    root = world.started(world.request())
    child = world.child(root)
    assert (child.depth, child.lineage) == (2, (root.invocation_id,))
    assert shown_state(root) is State.WAITING
    world.started(child)
    world.cell(child, value=b'"yes"')
    world.accept(child)
    assert not world.take(cmd.Reply)
    world.captured(child)
    (reply,) = world.take(cmd.Reply)
    assert isinstance(reply, cmd.Reply)
    assert (reply.sandbox_id, reply.value) == (root.sandbox_id, Value(json=b'"yes"'))
    assert shown_state(root) is State.RUNNING


def test_a_childs_failure_is_the_answer_with_its_kind_and_id() -> None:
    world = World()
    root = world.started(world.request())
    child = world.started(world.child(root))
    world.cell(child, CellOutcome.RAISED, failure=Failure(type_name="KeyError", message="'k'"))
    world.captured(child)
    (reply,) = world.take(cmd.Reply)
    assert isinstance(reply, cmd.Reply)
    assert reply.failure is not None
    assert reply.failure.type_name == "KeyError"
    assert reply.failure.ending is EndingKind.RAISED
    assert reply.failure.invocation_id == child.invocation_id


def test_a_detached_spawn_answers_with_the_id_and_the_value_can_be_awaited_later() -> None:
    world = World()
    root = world.started(world.request())
    child = world.spawn(root, detached=True)
    assert isinstance(child, Node)
    (reply,) = world.take(cmd.Reply)
    assert isinstance(reply, cmd.Reply)
    assert reply.value == Value(json=f'"{child.invocation_id}"'.encode())
    world.started(child)
    world.finish(child)
    assert not world.take(cmd.Reply)
    world.post(
        ev.AwaitRequested(
            parent_id=root.invocation_id,
            sandbox_id=root.sandbox_id,
            call_id=CallId("later"),
            child_id=child.invocation_id,
        )
    )
    (reply,) = world.take(cmd.Reply)
    assert isinstance(reply, cmd.Reply)
    assert reply.value == Value(json=b"1")


def test_the_same_spawn_told_twice_makes_one_child() -> None:
    world = World()
    root = world.started(world.request())
    world.post(world.spawn_event(root, CallId("c1")))
    world.post(world.spawn_event(root, CallId("c1")))
    assert root.child_count == 1


def test_a_child_below_the_depth_limit_is_refused_by_the_controller() -> None:
    world = World()
    root = world.started(world.request(program_with_depth(2)))
    child = world.started(world.child(root))
    refused = world.spawn(child)
    assert isinstance(refused, tuple)
    assert refused[0] == Reason.DEPTH_LIMIT_REACHED
    (reply,) = world.take(cmd.Reply)
    assert isinstance(reply, cmd.Reply)
    assert reply.failure is not None
    assert reply.failure.reason == "DEPTH_LIMIT_REACHED"


def program_with_depth(depth: int) -> InvocationSpec:
    return program(spawn=SpawnRequest(max_depth=depth))


def test_a_parent_that_returns_ends_its_live_children_first() -> None:
    world = World()
    root = world.started(world.request())
    child = world.started(world.child(root))
    grandchild = world.child(child)
    world.cell(root)
    world.accept(root)
    for node in (child, grandchild):
        assert ending_of(node) is EndingKind.CANCELLED
        assert node.ending is not None
        assert node.ending.cause is Cause.PARENT_ENDED
    world.captured(root)
    assert root.state is State.ENDING
    world.gone(grandchild)
    world.captured(child)
    assert root.state is State.ENDING
    world.gone(child)
    assert (root.state, ending_of(root)) == (State.ENDED, EndingKind.RETURNED)


def test_case_d10_cancelling_one_sibling_leaves_the_other_and_a_late_result_changes_nothing() -> (
    None
):
    world = World()
    root = world.started(world.request())
    first, second = (world.started(world.child(root)) for _ in range(2))
    world.cancel(first)
    world.cell(first)
    world.accept(first)
    assert ending_of(first) is EndingKind.CANCELLED
    assert second.ending is None
    world.cancel(root)
    assert ending_of(second) is EndingKind.CANCELLED


def test_cancelling_a_queued_invocation_leaves_an_ended_one_without_a_sandbox() -> None:
    world = World(capacity=4)
    world.request()
    queued = world.request()
    assert queued.state is State.QUEUED
    world.cancel(queued)
    assert (queued.state, queued.attempt, ending_of(queued)) == (
        State.ENDED,
        0,
        EndingKind.CANCELLED,
    )


def test_the_first_cause_wins() -> None:
    world = World()
    node = world.started(world.request())
    world.cancel(node)
    world.now_us = node.granted.deadline_us
    world.post(ev.DeadlinePassed(invocation_id=node.invocation_id))
    assert ending_of(node) is EndingKind.CANCELLED


def test_a_cell_that_ends_while_its_cancelled_invocation_is_captured_does_not_end_the_capture() -> (
    None
):
    world = World()
    node = world.started(world.request())
    world.cancel(node)
    world.cell(node, CellOutcome.INTERRUPTED)
    assert state_of(node) is State.ENDING
    world.captured(node)
    assert state_of(node) is State.ENDED


def test_deadlines_cascade_and_end_the_tree() -> None:
    world = World()
    root = world.started(world.request(program(timeout_seconds=5.0)))
    child = world.child(root, program(timeout_seconds=100.0))
    assert child.granted.deadline_us == root.granted.deadline_us
    world.post(ev.DeadlinePassed(invocation_id=root.invocation_id))
    assert root.ending is None
    world.now_us = root.granted.deadline_us
    world.post(ev.DeadlinePassed(invocation_id=root.invocation_id))
    assert ending_of(root) is EndingKind.DEADLINE_EXCEEDED
    assert ending_of(child) is EndingKind.CANCELLED


def test_a_lost_session_cancels_only_what_was_bound_to_it() -> None:
    world = World()
    bound = world.request(session_id="s1", cancel_on_disconnect=True)
    free = world.request(session_id="s1")
    other = world.request(session_id="s2", cancel_on_disconnect=True)
    world.post(ev.SessionLost(session_id=SessionId("s1")))
    assert bound.ending is not None
    assert bound.ending.cause is Cause.DISCONNECTED
    assert free.ending is None
    assert other.ending is None


def test_case_d3_the_same_request_twice_is_one_invocation_and_other_content_is_refused() -> None:
    world = World()
    first = world.request(program(label="a"), request_id="r")
    again = world.request(program(label="a"), request_id="r")
    assert first is again
    with pytest.raises(Refused) as refused:
        world.request(program(label="b"), request_id="r")
    assert refused.value.reason is Reason.REQUEST_ID_REUSED


def test_a_lost_sandbox_runs_again_only_where_the_caller_said_so() -> None:
    world = World()
    node = world.started(world.request(program(retry_on_loss=True)))
    child = world.started(world.child(node))
    world.gone(node, GoneCause.LOST)
    assert node.ending is None
    assert node.state is State.QUEUED  # its first attempt's child is not gone yet
    world.captured(child)
    world.gone(child)
    assert (node.state, node.attempt) == (State.STARTING, 2)
    world.started(node)
    world.gone(node, GoneCause.LOST)
    assert ending_of(node) is EndingKind.SANDBOX_LOST


def test_case_d8_a_host_that_comes_back_in_a_new_generation_has_lost_its_sandboxes() -> None:
    world = World()
    node = world.started(world.request())
    again = world.started(world.request(program(retry_on_loss=True)))
    world.join(16, generation=2)
    assert ending_of(node) is EndingKind.HOST_LOST
    assert again.ending is None
    assert again.attempt == 2


def test_a_host_that_comes_back_with_its_sandboxes_has_lost_nothing() -> None:
    world = World()
    node = world.started(world.request())
    cancelled = world.request()  # its start may be on the way to the host
    world.cancel(cancelled)
    world.join(16)
    assert node.ending is None
    assert cancelled.slot is not None
    world.gone(cancelled)
    assert cancelled.slot is None


def test_a_lost_host_ends_what_ran_there_and_never_runs_it_again_elsewhere() -> None:
    world = World()
    node = world.started(world.request(program(retry_on_loss=True)))
    world.post(ev.HostLost(host_id=HOST))
    assert ending_of(node) is EndingKind.HOST_LOST


def test_recovery_reaches_the_same_state_and_issues_what_is_outstanding() -> None:
    world = World()
    root = world.started(world.request())
    child = world.started(world.child(root))
    world.cell(child)
    done = world.started(world.request())
    world.finish(done)
    state = world.refolded()
    assert set(state.nodes) == {root.invocation_id, child.invocation_id}
    for invocation_id, node in state.nodes.items():
        assert (node.state, node.attempt, node.calls, node.checking) == (
            world.state.nodes[invocation_id].state,
            world.state.nodes[invocation_id].attempt,
            world.state.nodes[invocation_id].calls,
            world.state.nodes[invocation_id].checking,
        )
    kinds = [type(item).__name__ for item in recovery(state)]
    assert sorted(kinds) == [
        "CaptureArtifacts",
        "CheckContract",
        "SetDeadline",
        "SetDeadline",
        "StartSandbox",
        "StartSandbox",
    ]
    starts = [item for item in recovery(state) if isinstance(item, cmd.StartSandbox)]
    assert [item.run for item in starts] == [True, False]


def test_case_d5_a_parent_that_is_ending_gets_no_further_child() -> None:
    world = World()
    root = world.started(world.request())
    world.cancel(root)
    refused = world.spawn(root)
    assert isinstance(refused, tuple)
    assert refused[0] == "INVOCATION_ENDED"
    assert root.child_count == 0
