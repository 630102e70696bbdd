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
if hutch.current().depth == 1:
    return hutch.invoke(int, program=source, source=source)
return 7
"""


def _documented() -> list[str]:
    """The kinds of records in the order of the table, each where it is first named."""
    text = (ROOT / "docs" / "life-of-an-invocation.md").read_text(encoding="utf-8")
    kinds = re.findall(r"^\| \d+ \|.*\| `(\w+)` \|$", text, re.MULTILINE)
    return list(dict.fromkeys(kinds))


def test_the_documented_life_is_the_journal_of_a_real_one(own_stack: Stack) -> None:
    with hutch.connect(own_stack.target) as client:
        root = client.spawn(int, program=PROGRAM, inputs={"source": PROGRAM})
        assert root.result() == 7
        [child] = [
            item.invocation_id
            for item in client.list_invocations(tree_of=root.id).invocations
            if item.parent_id == root.id
        ]
    own_stack.close()  # ends gracefully, so that the sandboxes are gone and the journal is whole
    with sqlite3.connect(f"file:{own_stack.state}/journal.sqlite3?mode=ro", uri=True) as journal:
        rows = journal.execute(
            "SELECT invocation_id, kind FROM records ORDER BY sequence"
        ).fetchall()
    journal.close()
    documented = _documented()
    assert [kind for owner, kind in rows if owner == root.id] == documented
    assert [kind for owner, kind in rows if owner == child] == [
        kind for kind in documented if kind != "tree_ended"
    ]
    # The child lives between the parent's start and the parent's end.
    order = [(owner == root.id, kind) for owner, kind in rows]
    assert order.index((True, "code_started")) < order.index((False, "admitted"))
    assert order.index((False, "ended")) < order.index((True, "cell_recorded"))
