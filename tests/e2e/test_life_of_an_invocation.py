"""`docs/life-of-an-invocation.md` is what happens: its last column is a real run's journal."""

from __future__ import annotations

import re
import sqlite3

import hutch
from tests.support.repository import ROOT
from tests.support.stack import Stack

PROGRAM = """
from pathlib import Path
import hutch

Path("artifacts").mkdir()
Path("artifacts/note.txt").write_text("kept")
policies = [int] if contract else []
if hutch.current().depth == 1:
    return hutch.invoke(*policies, program=source, source=source, contract=contract)
return 7
"""


def _documented() -> list[str]:
    """The kinds of records in the order of the table, each where it is first named."""
    text = (ROOT / "docs" / "life-of-an-invocation.md").read_text(encoding="utf-8")
    kinds = re.findall(r"^\| \d+ \|.*\| `(\w+)` \|$", text, re.MULTILINE)
    return list(dict.fromkeys(kinds))


def _journal(
    stack: Stack, *, contract: bool
) -> tuple[list[str], list[str], list[tuple[bool, str]]]:
    """The kinds of the records of a parent, of its child, and of both with whose they are."""
    with hutch.connect(stack.target) as client:
        policies = [int] if contract else []
        inputs = {"source": PROGRAM, "contract": contract}
        root = client.spawn(*policies, program=PROGRAM, inputs=inputs)
        assert root.result() == 7
        root.cancel()  # changes nothing, and answers once every sandbox is proved gone
        [child] = [
            item.invocation_id
            for item in client.list_invocations(tree_of=root.id).invocations
            if item.parent_id == root.id
        ]
    stack.close()
    with sqlite3.connect(f"file:{stack.state}/journal.sqlite3?mode=ro", uri=True) as journal:
        rows = journal.execute(
            "SELECT invocation_id, kind FROM records ORDER BY sequence"
        ).fetchall()
    journal.close()
    return (
        [kind for owner, kind in rows if owner == root.id],
        [kind for owner, kind in rows if owner == child],
        [(owner == root.id, kind) for owner, kind in rows],
    )


def test_the_documented_life_is_the_journal_of_a_real_one(own_stack: Stack) -> None:
    documented = _documented()
    parent, child, order = _journal(own_stack, contract=False)
    assert parent == documented
    assert child == [kind for kind in documented if kind != "tree_ended"]
    # The child lives between the parent's start and the parent's end.
    assert order.index((True, "code_started")) < order.index((False, "admitted"))
    assert order.index((False, "ended")) < order.index((True, "cell_recorded"))


def test_with_a_contract_the_check_and_the_capture_are_beside_each_other(own_stack: Stack) -> None:
    documented = _documented()
    parent, child, order = _journal(own_stack, contract=True)
    assert sorted(parent) == sorted(documented)
    assert sorted(child) == sorted(kind for kind in documented if kind != "tree_ended")
    for kinds in (parent, child):
        for first, second in (
            ("cell_recorded", "value_checked"),
            ("value_checked", "ending_decided"),
            ("artifact_published", "capture_ended"),
            ("ending_decided", "ended"),
            ("capture_ended", "ended"),
            ("ended", "sandbox_removed"),
        ):
            assert kinds.index(first) < kinds.index(second)
    assert order.index((True, "code_started")) < order.index((False, "admitted"))
    assert order.index((False, "ended")) < order.index((True, "cell_recorded"))
