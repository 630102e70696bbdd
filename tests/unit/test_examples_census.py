"""The demo's program, without sandboxes: a small `hutch` runs the children in this process."""

from __future__ import annotations

import ast
import csv
import io
import json
import sys
import types
import xml.etree.ElementTree as ET
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from tests.support.repository import ROOT

PROGRAMS = ROOT / "examples" / "programs"


class _LimitReached(Exception):
    reason = "DEPTH_LIMIT_REACHED"


class _Misfit(Exception):
    path, expected, got = 'result[0]["lines"]', "an integer", "'28 lines'"


class _Failed(Exception):
    pass


def _run(source: str, inputs: dict[str, Any]) -> Any:
    """Runs a program with a top-level `return`."""
    tree = ast.parse("def program(): pass")
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = ast.parse(source).body
    assigned = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)} | {
        node.name for node in function.body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    imported = {
        alias.asname or alias.name
        for node in function.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    function.body.insert(0, ast.Global(names=sorted(assigned | imported)))
    namespace: dict[str, Any] = {"__name__": "__main__", **inputs}
    exec(compile(ast.fix_missing_locations(tree), "<program>", "exec"), namespace)
    return namespace["program"]()


class _SmallHutch:
    """Enough of `hutch` for these programs: depth, one contract, inputs by name."""

    def __init__(self, max_depth: int) -> None:
        self.depth, self.max_depth, self.spawned = 1, max_depth, 0

    def invoke(
        self, *policies: Callable[[Any], Any], program: str, label: str = "", **inputs: Any
    ) -> Any:
        if self.depth == self.max_depth:
            raise _LimitReached(f"depth {self.depth + 1} is over {self.max_depth}")
        self.depth += 1
        self.spawned += 1
        try:
            value = json.loads(json.dumps(_run(program, inputs)))
        finally:
            self.depth -= 1
        for policy in policies:
            value = policy(value)
        return value

    def return_type(self, hint: Any) -> Callable[[Any], Any]:
        def check(value: Any) -> Any:
            if hint is int:
                return value
            if not all(isinstance(row["lines"], int) for row in value):
                raise _Misfit
            return [hint.__args__[0](**row) for row in value]

        return check

    def module(self) -> types.ModuleType:
        module = types.ModuleType("hutch")
        for name, member in {
            "invoke": self.invoke,
            "ReturnType": self.return_type,
            "ReturnTypeError": _Misfit,
            "RecursionLimitError": _LimitReached,
            "InvocationFailed": _Failed,
        }.items():
            setattr(module, name, member)
        return module


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library of four modules, three levels deep, that the program takes for the standard one."""
    root = tmp_path / "library"
    for name, text in {
        "this.py": "x = 1\n",
        "deep/__init__.py": "def f():\n    return 1\n\n\nclass C:\n    pass\n",
        "deep/er/__init__.py": "import os\n",
        "deep/er/est/__init__.py": "",
        "test/__init__.py": "never measured",
    }.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr("os.__file__", str(root / "os.py"))
    monkeypatch.chdir(tmp_path)
    return root


def test_the_census_measures_every_module_and_survives_its_planted_faults(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = _SmallHutch(max_depth=3)
    monkeypatch.setitem(sys.modules, "hutch", small.module())
    source = (PROGRAMS / "stdlib_census.py").read_text().replace("AT_ONCE = 8", "AT_ONCE = 1")
    printed = io.StringIO()
    with redirect_stdout(printed):
        rows = _run(source, {})
    assert [(row.name, row.lines) for row in rows] == [
        ("deep", 6),
        ("deep.er", 1),
        ("deep.er.est", 0),
        ("this", 1),
    ]
    assert (rows[0].functions, rows[0].classes, rows[0].longest_function_lines) == (1, 1, 2)
    assert "at result[0][\"lines\"]: expected an integer, got '28 lines'" in printed.getvalue()
    assert "DEPTH_LIMIT_REACHED, an exception like any other: depth 4" in printed.getvalue()
    # this, this again, deep, deep.er, two levels of the endless one; deep.er.est found no level
    assert small.spawned == 6
    with (tmp_path / "artifacts" / "report.csv").open() as table:
        assert [line["name"] for line in csv.DictReader(table)] == [row.name for row in rows]
    chart = ET.fromstring((tmp_path / "artifacts" / "report.svg").read_text())
    assert len(chart.findall(".//{http://www.w3.org/2000/svg}rect")) == 2


def test_the_census_schema_takes_its_rows_and_nothing_else() -> None:
    schema = json.loads((PROGRAMS / "stdlib_census.schema.json").read_text())
    validator = jsonschema_rs.validator_for(schema)
    row = {
        "name": "this",
        "lines": 1,
        "functions": 0,
        "classes": 0,
        "imports": 0,
        "longest_function": "",
        "longest_function_lines": 0,
    }
    assert validator.is_valid([row])
    assert not validator.is_valid([])
    assert not validator.is_valid([{**row, "lines": "1 lines"}])
    assert not validator.is_valid([{**row, "more": 1}])


def test_the_first_program_is_five_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    small = _SmallHutch(max_depth=4)
    monkeypatch.setitem(sys.modules, "hutch", small.module())
    source = (PROGRAMS / "hello.py").read_text()
    assert len(source.splitlines()) == 5
    with redirect_stdout(io.StringIO()):
        assert _run(source, {}) == 14
