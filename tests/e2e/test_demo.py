"""The demo: the census of the standard library on real sandboxes, as `make demo` runs it."""

from __future__ import annotations

import csv
import io
import json
import xml.etree.ElementTree as ET

import pytest

import hutch
from hutch import types
from tests.support.repository import ROOT
from tests.support.stack import Stack

PROGRAMS = ROOT / "examples" / "programs"


@pytest.mark.timeout(300)
def test_the_census_measures_the_standard_library_with_a_tree_of_sandboxes(
    shared_stack: Stack,
) -> None:
    with hutch.connect(shared_stack.target) as client:
        handle = client.spawn(program=(PROGRAMS / "stdlib_census.py").read_text(), max_depth=3)
        rows = handle.result(timeout_seconds=280)
        printed = handle.output().decode()
        invocation = handle.invocation()
        files = {item.name: item for item in handle.artifacts}
        contents = {
            name: b"".join(client.get_artifact(item.artifact_id)).decode()
            for name, item in files.items()
        }
    assert "left out" not in printed
    assert "at result[0][\"lines\"]: expected int, got '28 lines' (str)" in printed
    assert "DEPTH_LIMIT_REACHED" in printed
    lines = {row.name: row.lines for row in rows}
    assert {"this", "asyncio.tasks", "xml.etree.ElementTree"} <= set(lines)
    assert all(count >= 0 for count in lines.values())
    # An item each, the planted one twice, two levels of the endless one, and the sub-packages.
    assert invocation.descendant_count > invocation.child_count > 150
    table = list(csv.DictReader(io.StringIO(contents["artifacts/report.csv"])))
    assert {line["name"]: int(line["lines"]) for line in table} == lines
    assert ET.fromstring(contents["artifacts/report.svg"]).tag.endswith("svg")


def test_the_first_program_returns_what_the_readme_says(shared_stack: Stack) -> None:
    source = (PROGRAMS / "hello.py").read_text()
    assert source in (ROOT / "README.md").read_text()
    with hutch.connect(shared_stack.target) as client:
        assert client.invoke(int, program=source) == 14


def test_the_schema_of_the_demo_is_a_contract(shared_stack: Stack) -> None:
    """What `make demo` gives to `--returns`; the whole value is checked against it."""
    schema = (PROGRAMS / "stdlib_census.schema.json").read_bytes()
    spec = hutch.Spec(
        program="return [{'name': 'this', 'lines': '28 lines'}]",
        contract=types.Contract(schema_json=schema),
    )
    with hutch.connect(shared_stack.target) as client:
        ended = client.wait_invocation(client.create_invocation(spec).invocation_id)
    assert ended.ending is not None
    assert ended.ending.kind == "contract_violated"
    assert json.loads(schema)["minItems"] == 1
