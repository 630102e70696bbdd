"""The documents say what is: every reason, ending and case has its explanation and its test.

Called by `make check` and `make test`.
"""

from __future__ import annotations

import re

import pytest

from hutch.v1 import ending_pb2, error_reason_pb2
from sandbox.drivers import document
from tests.support import repository
from tests.support.repository import ROOT

REASONS = [
    name.removeprefix("ERROR_REASON_")
    for name in error_reason_pb2.ErrorReason.keys()
    if not name.endswith("_UNSPECIFIED")
]
KINDS = [
    name.removeprefix("ENDING_KIND_").lower()
    for name in ending_pb2.EndingKind.keys()
    if not name.endswith("_UNSPECIFIED")
]


def test_the_page_about_drivers_is_what_they_state() -> None:
    assert document.DOCUMENT.read_text(encoding="utf-8") == document.render()


def _rows(name: str) -> list[list[str]]:
    """The cells of every table row of a document."""
    return [
        [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        for line in (ROOT / "docs" / name).read_text(encoding="utf-8").splitlines()
        if line.startswith("| ")
    ]


def test_every_reason_is_explained_once() -> None:
    named = [row[0] for row in _rows("errors.md") if row[0].isupper()]
    assert sorted(named) == sorted(REASONS)


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_is_raised_by_a_test(reason: str) -> None:
    """A reason that no test raises is a promise that nobody keeps."""
    quoted = re.compile(rf"\b{reason}\b")
    assert any(
        quoted.search(path.read_text(encoding="utf-8"))
        for path in repository.python_files("tests")
        if "tidy" not in path.parts
    )


def test_every_ending_is_explained_once() -> None:
    named = [row[0].strip("`") for row in _rows("endings.md") if row[0].startswith("`")]
    assert sorted(named) == sorted(KINDS)


def _cases() -> list[list[str]]:
    return [row for row in _rows("cases.md") if re.fullmatch(r"[DSAR]?\d+", row[0])]


def test_every_case_has_a_known_state() -> None:
    states = {"passes", "in part", "not yet", "does not apply"}
    assert [row for row in _cases() if len(row) != 4 or row[2] not in states or not row[3]] == []
    numbers = [row[0] for row in _cases()]
    assert len(numbers) == len(set(numbers))


_SHOWN = ("passes", "in part")


def test_every_test_that_a_case_names_exists() -> None:
    existing = repository.test_names()
    named = {
        name for row in _cases() if row[2] in _SHOWN for name in re.findall(r"`(test_\w+)`", row[3])
    }
    assert named - existing == set()
    unproved = [
        row[0] for row in _cases() if row[2] in _SHOWN and not re.search(r"`test_\w+`", row[3])
    ]
    assert unproved == []


def test_every_test_of_a_case_is_named() -> None:
    named = set(re.findall(r"`(test_case_\w+)`", (ROOT / "docs" / "cases.md").read_text("utf-8")))
    written = {name for name in repository.test_names() if name.startswith("test_case_")}
    assert written - named == set()


def test_every_name_in_the_life_of_an_invocation_exists() -> None:
    """A file is followed by the names that it defines or uses."""
    missing = []
    for row in _rows("life-of-an-invocation.md"):
        for path, name in re.findall(r"`([\w./-]+\.(?:py|proto))` `(\w+)`", row[1]):
            if not re.search(rf"\b{name}\b", (ROOT / path).read_text(encoding="utf-8")):
                missing.append(f"{path} {name}")
    assert missing == []


def test_every_record_of_the_engine_is_in_the_life_of_an_invocation() -> None:
    """Except that of a lost attempt, which no good life has."""
    source = (ROOT / "controller" / "engine" / "records.py").read_text(encoding="utf-8")
    kinds = set(re.findall(r'kind: Literal\["(\w+)"\]', source)) - {"attempt_abandoned"}
    text = (ROOT / "docs" / "life-of-an-invocation.md").read_text(encoding="utf-8")
    assert {kind for kind in kinds if f"`{kind}`" not in text} == set()
