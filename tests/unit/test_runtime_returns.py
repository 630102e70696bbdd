"""Contracts of hints, inside a sandbox: the golden table, and what cannot be expressed."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import pydantic
import pytest

from sandbox.runtime.errors import HintError
from sandbox.runtime.returns import schema_json, schema_of
from tests.support import contract_types

TABLE = json.loads((Path(__file__).parent / "golden_contracts.json").read_text())


@pytest.mark.parametrize("row", TABLE, ids=[row["hint"] for row in TABLE])
def test_every_golden_hint_has_its_schema(row: dict[str, Any]) -> None:
    hint = eval(row["hint"], contract_types.namespace())
    assert schema_of(hint) == row["schema"]


@pytest.mark.parametrize("row", TABLE, ids=[row["hint"] for row in TABLE])
def test_every_golden_schema_takes_and_refuses_what_the_table_says(row: dict[str, Any]) -> None:
    validator = jsonschema_rs.Draft202012Validator(row["schema"])
    assert [item for item in row["accepts"] if not validator.is_valid(item)] == []
    assert [item for item in row["refuses"] if validator.is_valid(item)] == []


class Plain(pydantic.BaseModel):
    name: str
    size: int = 0


class Narrow(pydantic.BaseModel):
    size: int = pydantic.Field(gt=0)


def test_a_plain_model_of_pydantic_is_its_fields() -> None:
    assert schema_of(Plain) == {
        "type": "object",
        "properties": {"name": {"type": "string"}, "size": {"type": "integer"}},
        "required": ["name"],
    }


T = typing.TypeVar("T")


@dataclasses.dataclass
class Box(typing.Generic[T]):
    inner: T


def test_a_generic_dataclass_takes_its_parameters() -> None:
    assert schema_of(Box[int])["properties"] == {"inner": {"type": "integer"}}


@pytest.mark.parametrize(
    ("hint", "named"),
    [
        (Callable[[], int], "Callable"),
        (list[Callable[..., int]], "Callable"),
        (Narrow, "Narrow.size"),
        (typing.Annotated[int, pydantic.Field(gt=0)], "gt=0"),
        (type, "type"),
        (memoryview, "memoryview"),
    ],
)
def test_a_hint_that_cannot_be_expressed_is_named(hint: Any, named: str) -> None:
    with pytest.raises(HintError, match=named):
        schema_json(hint)


def test_a_contract_over_the_limit_is_refused() -> None:
    with pytest.raises(HintError, match="65536 are allowed"):
        schema_json(typing.Literal["x" * 70_000])
