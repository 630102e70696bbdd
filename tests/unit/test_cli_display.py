"""What the CLI shows of strangers' text, and how it draws a tree."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
from rich.console import Console

from hutch import types
from hutch.cli import display, download, story_words
from hutch.cli.tree import InvocationTree

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@hypothesis.given(st.text())
def test_no_control_character_is_left(text: str) -> None:
    shown = display.safe(text)
    assert all(not ord(c) < 0x20 or c in "\n\t" for c in shown)
    assert not set(shown) & set("\x1b\x07\x08\r\x7f\x9b\u202e\u2066\u200b\u2028")


def test_ordinary_text_is_left_alone() -> None:
    text = "héllo 世界 [bold]x[/bold] {n} %s\n\tend 🎉"
    assert display.safe(text) == text


def test_escapes_are_shown() -> None:
    assert display.safe("\x1b[2J\u202e\U000e0001\ud800") == "\\x1b[2J\\u202e\\U000e0001\\ud800"


def test_a_line_is_one_line_and_short() -> None:
    assert display.line("a\nb\r\x1bc" + "d" * 500, 12) == "a b \\x1bcdd…"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.5, "0.50 s"), (59.94, "59.9 s"), (601, "10 min 01 s"), (7300, "2 h 01 min")],
)
def test_times_are_readable(seconds: float | None, text: str) -> None:
    assert display.seconds(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB")]
)
def test_sizes_are_readable(size: int, text: str) -> None:
    assert display.size(size) == text


def invocation(id_: str, parent: str = "", **fields: Any) -> types.Invocation:
    depth = 2 if parent else 1
    lineage = (parent,) if parent else ()
    return types.Invocation(
        invocation_id=id_, parent_id=parent, depth=depth, lineage=lineage, create_time=NOW, **fields
    )


def event(id_: str, detail: types.EventDetail, sequence: int = 1) -> types.Event:
    return types.Event(
        sequence=sequence,
        event_time=NOW + timedelta(seconds=1),
        invocation_id=id_,
        kind="k",
        detail=detail,
    )


def drawn(tree: InvocationTree, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=200, markup=False, color_system=None)
    console.print(tree.render(**options))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_tree_follows_its_events() -> None:
    tree = InvocationTree("inv_1")
    tree.fold(event("inv_1", types.Accepted(invocation=invocation("inv_1", label="root"))))
    child = invocation("inv_2", "inv_1", label="\x1b[31m[red]child")
    tree.fold(event("inv_2", types.Accepted(invocation=child)))
    tree.fold(event("inv_2", types.Accepted(invocation=child)))
    tree.fold(event("inv_2", types.StateChanged(state="running", sandbox_id="sbx_2")))
    ended = types.Ending(kind="raised")
    node = tree.fold(event("inv_2", types.Ended(ending=ended)))
    assert node is tree.nodes["inv_2"]
    assert tree.fold(event("inv_9", types.Ended(ending=ended))) is None
    assert tree.fold(event("inv_1", types.UnknownEvent())) is None
    text = drawn(tree)
    assert "\x1b" not in text
    assert "└── \\x1b[31m[red]child  raised  0.00 s  inv_2" in text
    assert tree.sandboxes == 1
    assert tree.to_json()["children"][0]["ending"] == "raised"


def test_a_wide_tree_collapses_and_shows_the_busy_ones() -> None:
    tree = InvocationTree("r")
    tree.add(invocation("r", state="waiting"))
    for number in range(500):
        ending = types.Ending(kind="returned") if number < 480 else None
        state = "ended" if ending else "running"
        tree.add(invocation(f"c{number}", "r", state=state, ending=ending))
    text = drawn(tree)
    assert len(text.splitlines()) < 20
    assert "c481" in text
    assert "… and 488 more: 480 returned, 20 running" in text
    assert len(drawn(tree, everything=True).splitlines()) == 501


def test_a_deep_tree_stays_within_its_rows() -> None:
    tree = InvocationTree("n0")
    tree.add(invocation("n0"))
    for level in range(1, 12):
        for branch in range(5):
            parent = f"n{level - 1}" if level == 1 else f"n{level - 1}.0"
            tree.add(invocation(f"n{level}.{branch}", parent, state="running"))
    assert len(drawn(tree, rows=10).splitlines()) < 40


@pytest.mark.parametrize(
    ("detail", "words"),
    [
        (types.Accepted(invocation=invocation("i", "p")), "was accepted at depth 2, child of p"),
        (
            types.StateChanged(state="starting", sandbox_id="s", attempt=2),
            "gets s (attempt 2",
        ),
        (
            types.CallRefused(reason="DEPTH_LIMIT_REACHED", message="m"),
            "in vain: DEPTH_LIMIT_REACHED",
        ),
        (
            types.CellCompleted(cell_id="c", outcome="returned", stdout_bytes=3),
            "returned, 3 B printed",
        ),
        (types.ContractChecked(accepted=True), "was accepted"),
        (types.ContractChecked(accepted=False, path="result", got="\x07"), "at result: expected"),
        (types.Ended(ending=types.Ending(kind="cancelled", cause="client")), "cancelled by client"),
        (types.UnknownEvent(), "does not know"),
    ],
)
def test_events_are_told_in_plain_words(detail: types.EventDetail, words: str) -> None:
    told = story_words.sentence(event("inv_1", detail), with_id=True)
    assert words in told
    assert "\x07" not in told
    assert story_words.event_json(event("inv_1", detail))["invocation_id"] == "inv_1"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/etc/passwd",
        "../x",
        "a/../x",
        "a//b",
        "./a",
        "a/.",
        "a\x00b",
        "a\nb",
        "x" * 300,
        "a\\b",
    ],
)
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(download.NameRefused):
        download.parts_of(name)


def test_a_proper_name_is_taken_apart() -> None:
    assert download.parts_of("a b/ü.txt") == ("a b", "ü.txt")
