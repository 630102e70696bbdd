"""Values: exact round trips, limits, and errors that name the place."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import json
import math
import pathlib
import threading
import typing
import uuid
import zoneinfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.runtime.errors import ValueDecodeError, ValueEncodeError, ValueTooLargeError
from sandbox.runtime.values import ArtifactReference, Record, decode, encode

TEXT = st.text(st.characters(codec=None))  # lone surrogates included
ZONES = st.sampled_from([None, datetime.UTC, zoneinfo.ZoneInfo("Europe/Paris")])
HASHABLE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    TEXT,
    st.binary(),
    st.dates(),
    st.timedeltas(),
    st.uuids(),
)
SCALARS = st.one_of(
    HASHABLE,
    st.floats(),
    st.complex_numbers(),
    st.datetimes(timezones=ZONES, allow_imaginary=True),
    st.times(timezones=st.sampled_from([None, datetime.UTC])),
    st.decimals(),
    st.builds(range, st.integers(), st.integers(), st.integers(min_value=1)),
    st.builds(pathlib.PurePosixPath, TEXT.filter(lambda t: "\0" not in t)),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.sets(HASHABLE),
        st.frozensets(HASHABLE),
        st.dictionaries(TEXT, inner),
        st.dictionaries(st.sampled_from(["$tuple", "$dict", "$object", "$"]), inner),
        st.dictionaries(HASHABLE, inner),
    ),
    max_leaves=20,
)


def is_same(left: object, right: object) -> bool:
    """Compares exactly: types, signs of zero, nan, and fold and zone of times as well."""
    if isinstance(left, pathlib.PurePath):
        return isinstance(right, pathlib.PurePath) and str(left) == str(right)
    if type(left) is not type(right):
        return False
    if isinstance(left, (list, tuple)):
        assert isinstance(right, (list, tuple))
        return len(left) == len(right) and all(map(is_same, left, right))
    if isinstance(left, (set, frozenset)):
        assert isinstance(right, (set, frozenset))
        return sorted(map(exact, left)) == sorted(map(exact, right))
    if isinstance(left, dict):
        assert isinstance(right, dict)
        return is_same(list(left.items()), list(right.items()))
    return exact(left) == exact(right)


def exact(value: object) -> str:
    """Writes all that matters of a scalar."""
    if isinstance(value, (datetime.datetime, datetime.time)):
        return f"{value!r} {value.fold} {value.tzinfo!r}"
    if isinstance(value, frozenset):
        return str(sorted(map(exact, value)))
    return f"{type(value).__name__} {value!r}"


@given(VALUES)
def test_every_value_comes_back_exactly(value: object) -> None:
    data = encode(value)
    json.loads(data)
    assert is_same(decode(data), value)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_value_are_a_typed_error(data: bytes) -> None:
    try:
        decode(data)
    except (ValueDecodeError, ValueTooLargeError):
        pass


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(
            st.sampled_from(
                "$tuple $set $bytes $float $str $datetime $time $date $timedelta $decimal "
                "$uuid $path $range $map $dict $enum $object $complex $ndarray $dataframe "
                "$artifact $tool".split()
            ),
            inner,
            max_size=1,
        )
    ),
    max_leaves=20,
)


@given(JSON)
def test_malformed_forms_are_a_typed_error(tree: object) -> None:
    try:
        decode(json.dumps(tree).encode())
    except (ValueDecodeError, ValueTooLargeError):
        pass


def test_sets_are_encoded_in_one_order() -> None:
    assert encode({"b", "a", "c"}) == encode({"c", "b", "a"}) == b'{"$set":["a","b","c"]}'


class Color(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Row:
    name: str
    color: Color
    items: list[int] = dataclasses.field(default_factory=list)


class Pair(typing.NamedTuple):
    left: int
    right: str


def test_a_class_comes_as_a_read_only_record_without_a_hint() -> None:
    record = decode(encode(Row("a", Color.RED, [1])))
    assert isinstance(record, Record)
    assert (record.name, record["items"], record.color.value) == ("a", [1], "red")
    with pytest.raises(AttributeError, match="read-only"):
        record.name = "b"
    assert decode(encode(record)) == record


def test_a_class_comes_as_itself_where_the_hint_reaches_it() -> None:
    rows = [Row("a", Color.RED, [1]), Row("b", Color.RED)]
    assert decode(encode(rows), hint=list[Row]) == rows
    assert decode(encode({"k": rows}), hint=dict[str, list[Row]]) == {"k": rows}
    assert decode(encode(Pair(1, "a")), hint=Pair) == Pair(1, "a")
    assert decode(encode({"name": "a", "color": "red"}), hint=Row) == Row("a", Color.RED)


def test_a_class_comes_as_itself_where_types_name_it() -> None:
    value = {"deep": [(Row("a", Color.RED),)]}
    assert decode(encode(value), types=[Row]) == value


def test_a_union_takes_the_senders_class() -> None:
    assert decode(encode(Pair(1, "a")), hint=Row | Pair | None) == Pair(1, "a")


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"rows": [1, 2, 3, iter(())]}, 'result["rows"][3]'),
        ([threading.Lock()], "result[0]"),
        ({"a": {1: open}}, 'result["a"][1]'),
        (Row("a", Color.RED, [lambda: None]), "result.items[0]"),  # type: ignore[list-item]
        ((1, object()), "result[1]"),
    ],
)
def test_what_cannot_cross_is_named_by_its_path(value: object, path: str) -> None:
    with pytest.raises(ValueEncodeError) as caught:
        encode(value)
    assert caught.value.path == path
    assert str(caught.value).startswith(path)


def test_limits_are_named() -> None:
    deep: object = []
    for _ in range(100):
        deep = [deep]
    loop: list[object] = []
    loop.append(loop)
    for value, limit in [
        (deep, "depth 100"),
        (loop, "depth 100"),
        (10**4300, "4300 digits"),
        ([0] * 2_000_000, "2000000 elements"),
        ("x" * (64 * 1024 * 1024), "67108864 bytes"),
    ]:
        with pytest.raises(ValueTooLargeError) as caught:
            encode(value)
        assert caught.value.limit == limit
    assert decode(encode(10**4300 - 1)) == 10**4300 - 1


def test_values_just_within_the_depth_come_back() -> None:
    deep: object = 1
    for _ in range(100):
        deep = [deep]
    assert decode(encode(deep)) == deep
    pairs: object = 1
    for _ in range(50):
        pairs = (pairs,)
    assert decode(encode(pairs)) == pairs


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"a":' * 5_000, b"[" * 101 + b"]" * 101])
def test_hostile_nesting_is_refused(data: bytes) -> None:
    with pytest.raises((ValueTooLargeError, ValueDecodeError)):
        decode(data)


@pytest.mark.parametrize(
    "text",
    [
        "NaN",
        '{"a":1,"a":2}',
        "1e999",
        '{"$float":"1"}',
        '{"$set":[[1]]}',
        '{"$set":[1,1]}',
        '{"$map":[[1,2],[1,3]]}',
        '{"$enum":{"class":"A"}}',
        '{"$datetime":{"iso":"2024-01-01T00:00:00","fold":0,"zone":"../../etc/passwd"}}',
        '{"$tool":"x"}',
        '{"$nothing":1}',
        '{"$bytes":"*"}',
    ],
)
def test_lies_in_encoded_values_are_refused(text: str) -> None:
    with pytest.raises(ValueDecodeError):
        decode(text.encode())


def test_a_misfit_of_the_hint_names_path_expected_and_got() -> None:
    with pytest.raises(ValueDecodeError, match=r"expected int, got 'x'") as caught:
        decode(encode({"rows": [1, "x"]}), hint=dict[str, list[int]])
    assert caught.value.path == 'result["rows"][1]'
    for value, hint in [(True, int), (1, bool), ([1], tuple[int, ...]), ((1,), list[int])]:
        with pytest.raises(ValueDecodeError):
            decode(encode(value), hint=hint)
    assert decode(b"1.0", hint=int) == 1
    assert type(decode(b"1", hint=float)) is float


def test_artifacts_cross_as_their_ids() -> None:
    data = encode([ArtifactReference("art_1")])
    assert data == b'[{"$artifact":"art_1"}]'
    assert decode(data, artifact=str.upper) == ["ART_1"]


def test_subclasses_of_plain_types_cross_as_what_they_extend() -> None:
    class Name(str):
        pass

    assert decode(encode({Name("a"): Name("b")})) == {"a": "b"}
    assert math.isnan(decode(encode(math.nan)))
    assert decode(encode(uuid.UUID(int=5))) == uuid.UUID(int=5)
    assert decode(encode(decimal.Decimal("1.50"))).as_tuple().exponent == -2


TABLES = [
    b'{"$ndarray":{"dtype":"<i8","shape":[2],"data":"AAAAAAAAAAABAAAAAAAAAA=="}}',
    b'{"$dataframe":{"format":"columns","columns":[["a",[1,2]],["b",["x",{"$tuple":[]}]]]}}',
    b'{"$dataframe":{"format":"arrow","data":"AAAA"}}',
]


@pytest.mark.parametrize("data", TABLES)
def test_arrays_and_frames_pass_through_where_the_library_is_missing(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandbox.runtime.arrays._library", lambda name: None)
    record = decode(data)
    assert isinstance(record, Record)
    assert encode(record) == data


def test_a_tool_crosses_where_it_may_and_nowhere_else() -> None:
    data = encode([{"f": print}], tool=lambda given: given.__name__)
    assert data == b'[{"f":{"$tool":"print"}}]'
    assert decode(data, tool=lambda tool_id: tool_id * 2) == [{"f": "printprint"}]
    with pytest.raises(ValueEncodeError, match="as inputs only") as unsent:
        encode([{"f": print}])
    with pytest.raises(ValueDecodeError, match="where none may be") as unread:
        decode(data)
    assert unsent.value.path == unread.value.path == 'result[0]["f"]'
    assert decode(encode({"$tool": "x"})) == {"$tool": "x"}
