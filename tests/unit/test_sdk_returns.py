"""Contracts from hints, and values back into them."""

from __future__ import annotations

import collections.abc
import datetime
import enum
import json
import pathlib
import typing
from typing import Annotated, Any, Literal

import jsonschema_rs
import pydantic
import pytest
import typing_extensions

from hutch import returns, schema_tidy
from hutch.errors import HintError, ReturnTypeError
from hutch.values import encode
from tests.support import contract_types

GOLDEN = json.loads((pathlib.Path(__file__).parent / "golden_contracts.json").read_text("utf-8"))
NAMES = {**vars(contract_types), "typing": typing}


def hint_of(text: str) -> Any:
    names = {**NAMES, "abc": collections.abc, "pathlib": pathlib}
    return eval(text, names)  # the golden table is ours


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: row["hint"])
def test_the_golden_hints_have_the_golden_schemas(row: dict[str, Any]) -> None:
    assert returns.schema(hint_of(row["hint"])) == row["schema"]


class User(pydantic.BaseModel):
    name: str = pydantic.Field(min_length=1, alias="userName")
    age: Annotated[int, pydantic.Field(ge=0)] = 0
    born: datetime.date | None = None
    tags: set[str] = set()


class Closed(pydantic.BaseModel, extra="forbid"):
    a: int


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"
    tricks: list[str] = []


Pet = Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]


class Nested(pydantic.BaseModel):
    user: User
    more: list[Nested] = []


class Even(pydantic.BaseModel):
    n: int

    @pydantic.field_validator("n")
    @classmethod
    def check(cls, value: int) -> int:
        if value % 2:
            raise ValueError("must be even")
        return value


class Numbers(pydantic.RootModel[list[int]]):
    pass


class Old(typing.TypedDict):
    title: str
    inner: OldInner


class OldInner(typing.TypedDict, total=False):
    n: int


class New(typing_extensions.TypedDict):
    n: typing_extensions.NotRequired[int]


class Flavour(enum.Enum):
    SWEET = ("s", 1)


CONSTRAINED = [
    (Annotated[int, pydantic.Field(ge=1, le=9)], [1, 9, 3.0], [0, 10, True, "1"]),
    (Annotated[str, pydantic.Field(pattern="^a+$", max_length=3)], ["a", "aaa"], ["b", "aaaa"]),
    (
        Annotated[list[int], pydantic.Field(min_length=1, max_length=2)],
        [[1], [1, 2]],
        [[], [1] * 3],
    ),
    (Annotated[float, pydantic.Field(gt=0)], [0.5, 1], [0, {"$float": "inf"}]),
    (pydantic.conint(multiple_of=5), [5, 10], [4]),
    (User, [{"name": "a"}, {"name": "a", "age": 1, "extra": 1}], [{"name": ""}, {"age": 1}]),
    (User, [{"name": "a", "born": {"$date": "2024-01-02"}}], [{"name": "a", "born": "2024-01-02"}]),
    (User, [{"name": "a", "tags": {"$set": ["x"]}}], [{"name": "a", "tags": ["x"]}]),
    (Closed, [{"a": 1}], [{"a": 1, "b": 2}, {}]),
    (Pet, [{"kind": "cat", "lives": 9}, {"kind": "dog"}], [{"kind": "cow"}, {"kind": "cat"}]),
    (
        Nested,
        [{"user": {"name": "a"}, "more": [{"user": {"name": "b"}}]}],
        [{"user": {"name": "a"}, "more": [{}]}],
    ),
    (Numbers, [[1, 2], {"root": [1]}], [["a"], {"root": ["a"]}, {}]),
    (Old, [{"title": "t", "inner": {}}], [{"title": "t"}, {"title": "t", "inner": {"n": "x"}}]),
    (New, [{}, {"n": 1}], [{"n": "x"}]),
    (dict[Annotated[str, pydantic.Field(pattern="^k")], int], [{"k1": 1}], [{"x": 1}]),
    (Flavour, [{"$tuple": ["s", 1]}], [["s", 1], "SWEET"]),
    (typing.Iterable[int], [[1], {"$tuple": [1]}], [{"$set": [1]}]),
]


@pytest.mark.parametrize(("hint", "accepted", "refused"), CONSTRAINED)
def test_a_hint_that_only_pydantic_knows_is_a_contract_too(
    hint: Any, accepted: list[Any], refused: list[Any]
) -> None:
    validator = jsonschema_rs.Draft202012Validator(returns.schema(hint))
    assert [value for value in accepted if not validator.is_valid(value)] == []
    assert [value for value in refused if validator.is_valid(value)] == []


def test_references_stay_only_where_a_schema_is_recursive() -> None:
    schema = returns.schema(Nested)
    assert list(schema["$defs"]) == ["Nested"]
    assert "$ref" not in json.dumps(returns.schema(list[User]))


def test_a_schema_with_doubling_references_is_not_written_out() -> None:
    """Level n refers twice to level n + 1: written out it would have 2^24 parts."""
    definitions: dict[str, Any] = {
        f"L{n}": {"type": "object", "properties": {k: {"$ref": f"#/$defs/L{n + 1}"} for k in "ab"}}
        for n in range(24)
    }
    definitions["L24"] = {"type": "integer", "title": "gone"}
    tidied = schema_tidy.tidy({"$ref": "#/$defs/L0", "$defs": definitions})
    assert len(json.dumps(tidied)) < 5000
    assert tidied["$defs"]["L24"] == {"type": "integer"}


def test_a_property_named_like_an_annotation_stays() -> None:
    assert list(returns.schema(Old)["properties"]) == ["title", "inner"]


class Opaque:
    pass


@pytest.mark.parametrize(
    "hint",
    [Opaque, list[Opaque], typing.Callable[[], int], type[int], tuple[int, *tuple[str, ...]]],
)
def test_a_hint_without_a_contract_is_an_error(hint: Any) -> None:
    with pytest.raises(HintError, match="cannot be"):
        returns.schema(hint)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (User(userName="a", tags={"x"}, born=datetime.date(2024, 1, 2)), User),
        ([Cat(lives=9), Dog(tricks=["sit"])], list[Pet]),
        (Nested(user=User(userName="a"), more=[Nested(user=User(userName="b"))]), Nested),
        (contract_types.Row(name="a", at=contract_types.Point(x=1, y=2.0)), contract_types.Row),
        (contract_types.Pair(1, "b"), contract_types.Pair),
        ({contract_types.Color.RED: 1}, dict[contract_types.Color, int]),
        ({1, 2}, typing.AbstractSet[int]),
        (frozenset({1}), typing.AbstractSet[int]),
        ((1, 2), typing.Sequence[int]),
        (range(0, 9, 2), range),
        (None, None),
        ({"title": "t", "inner": {"n": 1}}, Old),
        (datetime.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=datetime.UTC), datetime.datetime),
        (Flavour.SWEET, Flavour),
        ({"a": {1: b"x"}}, dict[str, dict[int, bytes]]),
        (Numbers([1, 2]), Numbers),
    ],
)
def test_an_accepted_value_comes_back_as_its_type(value: Any, hint: Any) -> None:
    found = returns.restore(encode(value), hint, "inv_1")
    assert found == value
    assert type(found) is type(value)
    if isinstance(value, datetime.datetime):
        assert found.fold == value.fold


def test_a_plain_dictionary_becomes_the_declared_class() -> None:
    point = returns.restore(b'{"x":1.0,"y":2}', contract_types.Point, "inv_1")
    assert point == contract_types.Point(x=1, y=2.0)
    assert (type(point.x), type(point.y)) == (int, float)
    assert returns.restore(b'{"name":"a"}', User, "inv_1").name == "a"
    assert returns.restore(b"[1,2]", Numbers, "inv_1") == Numbers([1, 2])


def test_a_validator_beyond_the_schema_is_a_misfit_with_its_path() -> None:
    with pytest.raises(ReturnTypeError, match="must be even") as caught:
        returns.restore(b'[{"n":2},{"n":3}]', list[Even], "inv_9")
    assert caught.value.path == 'result[1]["n"]'
    assert caught.value.child_id == "inv_9"
    assert caught.value.ending == "contract_violated"
    assert "3" in caught.value.got
