"""Accepted values as the receiver's own types: what a contract accepts, the hint takes back."""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime
import json
import typing
from pathlib import Path
from typing import Any

import pydantic
import pytest

from sandbox.runtime.errors import HintError, ValueDecodeError
from sandbox.runtime.records import Record
from sandbox.runtime.values import decode, encode
from tests.support import contract_types
from tests.support.contract_types import Color, Level, Movie, Node, Options, Pair, Point, Row

TABLE = json.loads((Path(__file__).parent / "golden_contracts.json").read_text())
# A contract reads the encoded form, a hint the decoded value, which is the same for both forms.
SAME_VALUE = [("dict[str, int]", {"$map": []}), ("dict[Color, int]", {"red": 1})]


@pytest.mark.parametrize("row", TABLE, ids=[row["hint"] for row in TABLE])
def test_what_a_golden_contract_accepts_becomes_the_type(row: dict[str, Any]) -> None:
    hint = eval(row["hint"], contract_types.namespace())
    for accepted in row["accepts"]:
        decode(json.dumps(accepted).encode(), hint=hint)


@pytest.mark.parametrize("row", TABLE, ids=[row["hint"] for row in TABLE])
def test_what_a_golden_contract_refuses_does_not_become_the_type(row: dict[str, Any]) -> None:
    hint = eval(row["hint"], contract_types.namespace())
    for refused in row["refuses"]:
        if (row["hint"], refused) in SAME_VALUE:
            continue
        with pytest.raises(ValueDecodeError):
            decode(json.dumps(refused).encode(), hint=hint)


NODE = Node(1, [Node(2, [])])
CASES: list[tuple[Any, Any]] = [
    (Color.RED, Color),
    ([Level.LOW, Level.HIGH], list[Level]),
    ({Color.RED: 1}, dict[Color, int]),
    (Row("a", Point(1, 2.0), ["t"]), Row),
    ([NODE], list[Node]),
    (Pair(1, "a"), Pair),
    (Movie(title="a", year=1), Movie),
    (Options(), Options),
    ({1: [Pair(1)]}, dict[int, list[Pair]]),
    ((1, "a"), tuple[int, str]),
    (frozenset({1}), frozenset[int]),
    ({(1, 2): 0.5}, dict[tuple[int, int], float]),
    ([Point(1, 1.0), Pair(1), None], list[typing.Union[Point, Pair, None]]),  # noqa: UP007
    ([1, "a"], list[int | str]),
    (datetime.date(2024, 1, 2), datetime.date),
    ((1, 2), collections.abc.Sequence[int]),
]


@pytest.mark.parametrize(("value", "hint"), CASES, ids=[str(case[1]) for case in CASES])
def test_a_value_of_the_type_comes_back_equal(value: Any, hint: Any) -> None:
    result = decode(encode(value), hint=hint)
    assert result == value
    assert type(result) is type(value)


class Model(pydantic.BaseModel):
    name: str
    color: Color
    rows: list[Point] = []


def test_a_pydantic_model_is_validated_by_itself() -> None:
    model = Model(name="a", color=Color.RED, rows=[Point(1, 2.0)])
    assert decode(encode(model), hint=Model) == model
    assert decode(b'{"name":"a","color":"red"}', hint=list[Model] | Model) == Model(
        name="a", color=Color.RED
    )
    with pytest.raises(ValueDecodeError, match="color"):
        decode(b'{"name":"a","color":"green"}', hint=Model)


T = typing.TypeVar("T")


@dataclasses.dataclass
class Box(typing.Generic[T]):
    inner: T


def test_a_generic_dataclass_takes_its_parameters() -> None:
    assert decode(encode(Box(Point(1, 1.0))), hint=Box[Point]) == Box(Point(1, 1.0))
    with pytest.raises(ValueDecodeError, match=r"result\.inner: expected str"):
        decode(encode(Box(1)), hint=Box[str])


def test_the_name_of_a_class_in_a_value_is_never_looked_up() -> None:
    data = b'{"$object":{"class":"os.system","fields":{"command":"true"}}}'
    assert decode(data) == Record("os.system", {"command": "true"})
    with pytest.raises(ValueDecodeError):
        decode(data, hint=Point)


def test_the_deepest_misfit_of_a_union_is_told() -> None:
    with pytest.raises(ValueDecodeError, match=r"result\.at\.x: expected int, got 'x'"):
        decode(b'{"name":"a","at":{"x":"x","y":1}}', hint=Row | None)


def test_a_hint_that_is_no_type_of_values_is_named() -> None:
    with pytest.raises(HintError, match="memoryview"):
        decode(b"1", hint=memoryview)
