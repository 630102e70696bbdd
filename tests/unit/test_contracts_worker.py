"""What the contract worker does with one value and one schema, without its process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given

from controller.contract_worker.schemas import SchemaInvalid, compile_schema
from controller.contract_worker.values import ValueInvalid, decode
from controller.contract_worker.wording import describe_mismatch
from sandbox.runtime.values import encode
from tests.unit.test_runtime_values import VALUES

GOLDEN = json.loads(Path(__file__).with_name("golden_contracts.json").read_text())


def dump(value: Any) -> bytes:
    return json.dumps(value).encode()


def judge(schema: Any, value: Any) -> tuple[str, str, str] | None:
    """The mismatch of a value with a schema, or None."""
    document, validator = compile_schema(dump(schema))
    decoded = decode(dump(value))
    try:
        validator.validate(decoded.instance)
    except jsonschema_rs.ValidationError as error:
        return describe_mismatch(error, document, decoded.encoded)
    return None


TUPLE = {
    "type": "object",
    "properties": {
        "$tuple": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}]}
    },
    "required": ["$tuple"],
}


@given(VALUES)
def test_whatever_a_sandbox_can_encode_is_well_formed(value: Any) -> None:
    decode(encode(value))


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: str(row["hint"]))
def test_golden_contracts_accept_and_refuse_what_the_table_says(row: dict[str, Any]) -> None:
    for value in row["accepts"]:
        assert judge(row["schema"], value) is None, value
    for value in row["refuses"]:
        try:
            assert judge(row["schema"], value) is not None, value
        except ValueInvalid:
            pass  # no value at all


@pytest.mark.parametrize(
    ("value", "fits"),
    [(True, False), (False, False), (1.0, True), (1, True), (10**400, True), (1.5, False)],
)
def test_true_is_no_int_and_one_point_zero_is(value: object, fits: bool) -> None:
    assert (judge({"type": "integer"}, value) is None) is fits


def test_an_object_stands_as_its_fields_and_an_enum_as_its_value() -> None:
    schema = {"type": "object", "properties": {"x": {"enum": [3]}}, "required": ["x"]}
    color = {"$enum": {"class": "Color", "name": "RED", "value": 3}}
    assert judge(schema, {"$object": {"class": "Point", "fields": {"x": color}}}) is None
    assert judge(schema, {"x": 3}) is None


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        (
            {"items": {"type": "integer"}},
            [1, {"$enum": {"class": "C", "name": "A", "value": "x"}}],
            ("result[1]", "int", "'x' (str)"),
        ),
        (
            {"properties": {"rows": {"items": TUPLE}}},
            {"rows": [{"$tuple": ["a", 1]}, {"$tuple": ["a", "b"]}]},
            ('result["rows"][1][1]', "int", "'b' (str)"),
        ),
        (
            {"properties": {"rows": {"items": TUPLE}}},
            {"rows": [["a", 1]]},
            ('result["rows"][0]', "tuple[str, int]", "['a', 1] (list)"),
        ),
        (
            {"properties": {"x": {"type": "integer"}}},
            {"$object": {"class": "P", "fields": {"x": None}}},
            ("result.x", "int", "None (None)"),
        ),
        (
            {"type": "object", "required": ["y"]},
            {"$object": {"class": "P", "fields": {"x": 1}}},
            ("result", 'a field "y"', "P(x=1) (P)"),
        ),
        (
            {"properties": {"$map": {"items": {"prefixItems": [{}, {"type": "string"}]}}}},
            {"$map": [[1, "a"], [{"$tuple": [2, 3]}, 4]]},
            ("result[tuple(2, 3)]", "str", "4 (int)"),
        ),
        (
            {"properties": {"$set": {"items": {"type": "string"}}}},
            {"$set": [4]},
            ("result (member 0)", "str", "4 (int)"),
        ),
        (
            {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "integer"}}]},
            [1, "x"],
            ("result[1]", "int", "'x' (str)"),
        ),
        (
            {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "x",
            ("result", "int | None", "'x' (str)"),
        ),
        (
            {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 2, "$defs": {"n": {}}},
            [],
            ("result", "list[a value] (at least 2 items)", "[] (list)"),
        ),
    ],
)
def test_a_mismatch_is_named_in_the_terms_of_python(
    schema: Any, value: Any, expected: tuple[str, str, str]
) -> None:
    assert judge(schema, value) == expected


def test_the_words_for_a_mismatch_are_short_whatever_the_value() -> None:
    huge = {"k" * 100_000: ["x" * 100_000] * 50, "n": int("9" * 4000)}
    schema = {"additionalProperties": {"type": "object", "title": "t" * 50_000}}
    for words in (
        judge({"type": "integer"}, huge),
        judge(schema, huge),
        judge({"enum": ["y" * 500] * 100}, huge),
        judge({"additionalProperties": False}, huge),
    ):
        assert words is not None
        assert all(len(text) <= 2000 for text in words)


@pytest.mark.parametrize(
    "value",
    [
        {"$nope": 1},
        {"$ref": "#"},
        {"$tuple": 1},
        {"$set": {}},
        {"$bytes": "AA="},
        {"$bytes": [1]},
        {"$float": "1.5"},
        {"$complex": [1]},
        {"$complex": [True, 1]},
        {"$timedelta": [1, 2]},
        {"$range": [1, 2, "3"]},
        {"$map": [[1]]},
        {"$map": {"a": 1}},
        {"$dict": {"a": 1}},
        {"$dict": {"$a": 1, "b": 2}},
        {"$enum": {"class": "C", "value": 1}},
        {"$object": {"class": "C"}},
        {"$object": {"class": 1, "fields": {}}},
        {"$object": {"class": "C", "fields": {"$tuple": []}}},
        {"$datetime": {"iso": "x", "more": 1}},
        {"$ndarray": {"dtype": "<i8", "shape": [-1], "data": ""}},
        {"$dataframe": {"format": "pickle", "data": ""}},
        {"$dataframe": {"format": "columns", "columns": [["a"]]}},
        {"$artifact": "../../etc/passwd"},
        {"$artifact": ["art_1"]},
        [{"deep": [{"$nope": 1}]}],
    ],
)
def test_what_is_no_encoded_value_is_refused(value: object) -> None:
    with pytest.raises(ValueInvalid) as caught:
        decode(dump(value))
    assert caught.value.limit == ""


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"NaN",
        b"[Infinity]",
        b"1e999",
        b'{"a": 1, "a": 2}',
        b'"\\ud800"',
        b'{"\\uDfff": 1}',
        b"\xff",
        b"\x80\x04K\x01.",
        b"1 2",
        b"[1,]",
    ],
)
def test_case_s7_what_is_no_strict_json_is_refused(data: bytes) -> None:
    with pytest.raises(ValueInvalid):
        decode(data)


def test_a_dict_with_several_keys_may_have_any() -> None:
    decoded = decode(dump({"$nope": 1, "b": 2}))
    assert decoded.instance == {"$nope": 1, "b": 2}


@pytest.mark.parametrize(
    ("data", "limit"),
    [
        (b"[" * 101 + b"]" * 101, "depth 100"),
        (b"[" * 100_000, "depth 100"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "depth 100"),
        (b'{"$tuple":[' * 51 + b"]}" * 51, "depth 100"),
        (b"9" * 4301, "4300 digits"),
        (b"[" + b"1," * 2_000_000 + b"1]", "2,000,000 elements"),
        (b"[" + b"[]," * 20_000_000 + b"1]", "2,000,000 elements"),
        (b'"' + b"x" * (64 * 1024 * 1024) + b'"', "64 MiB"),
    ],
    ids=["depth", "open", "objects", "tuples", "digits", "numbers", "lists", "bytes"],
)
def test_a_value_over_a_limit_is_refused_by_that_limit(data: bytes, limit: str) -> None:
    with pytest.raises(ValueInvalid) as caught:
        decode(data)
    assert caught.value.limit == limit


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 100 + b"]" * 100,
        b'{"$tuple":[' * 50 + b"]}" * 50,
        b"9" * 4300,
        b"[" + b"1," * 1_999_998 + b"1]",
        b'["' + b"[," * 5_000_000 + b'"]',
    ],
    ids=["depth", "tuples", "digits", "numbers", "commas in a text"],
)
def test_a_value_at_a_limit_is_accepted(data: bytes) -> None:
    decode(data)


def test_artifacts_are_reported_once_and_tools_are_seen() -> None:
    handle = {"$artifact": "art_7f"}
    decoded = decode(dump([handle, {"a": handle, "b": {"$tool": "tool_inv_1_1"}}]))
    assert decoded.artifact_ids == ["art_7f"]
    assert decoded.tool_ids == ["tool_inv_1_1"]


def doubling(levels: int) -> dict[str, Any]:
    """A schema in which every level has the next one twice."""
    names = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(levels)}
    return {"$defs": {**names, f"d{levels}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (b"{", "not JSON"),
        (b"3", "neither an object nor a boolean"),
        (b'{"type": "integer", "type": "string"}', "twice"),
        (b'{"title": "' + b"x" * 65536 + b'"}', "64 KiB"),
        (b'{"not":' * 64 + b"{}" + b"}" * 64, "64 deep"),
        (b'{"not":' * 5000 + b"{}" + b"}" * 5000, "deep"),
        (dump(doubling(30)), "10,000 nodes"),
        (dump({"$ref": "http://127.0.0.1:9/x"}), "outside the document"),
        (dump({"$ref": "file:///etc/passwd"}), "outside the document"),
        (dump({"items": {"$ref": "other.json"}}), "outside the document"),
        (dump({"$defs": {"unused": {"$ref": "http://127.0.0.1:9/x"}}}), "outside the document"),
        (dump({"$ref": "#/$defs/none"}), "leads nowhere"),
        (dump({"$ref": "#name"}), "not a pointer"),
        (dump({"$ref": 3}), "outside the document"),
        (dump({"$dynamicRef": "#x"}), "not supported"),
        (dump({"properties": {"a": {"$id": "http://127.0.0.1:9/"}}}), "not supported"),
        (dump({"$schema": "http://json-schema.org/draft-07/schema#"}), "2020-12"),
        (dump({"items": {"$schema": "http://127.0.0.1:9/schema"}}), "2020-12"),
        (dump({"type": "whole"}), "#/type"),
        (dump({"minimum": "x"}), "#/minimum"),
        (dump({"pattern": "(?=a)"}), "linear time"),
        (dump({"pattern": r"(a)\1"}), "linear time"),
        (dump({"pattern": "("}), "linear time"),
        (dump({"pattern": "((a{1000}){1000}){1000}"}), "linear time"),
        (dump({"patternProperties": {"(?<!a)b": {}}}), "linear time"),
    ],
)
def test_a_schema_that_may_be_no_contract_is_refused_with_the_reason(
    schema: bytes, reason: str
) -> None:
    with pytest.raises(SchemaInvalid, match=reason):
        compile_schema(schema)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "integer"}, 1),
        ({"$id": "http://127.0.0.1:9/root", "$ref": "#/$defs/a~1b", "$defs": {"a/b": {}}}, 1),
        ({"properties": {"$ref": {"type": "integer"}}}, {"$ref": 1, "b": 2}),
        ({"const": {"a": {"$ref": "http://127.0.0.1:9/data"}}}, {"a": {"$dict": {"$ref": "x"}}}),
        (doubling(8), 1),
        (True, 1),
    ],
)
def test_schemas_that_only_look_dangerous_are_contracts(schema: Any, value: Any) -> None:
    compile_schema(dump(schema))[1].is_valid(decode(dump(value)).instance)


def test_a_recursive_schema_is_a_contract() -> None:
    node = {"type": "array", "items": {"$ref": "#/$defs/node"}}
    schema = {"$ref": "#/$defs/node", "$defs": {"node": node}}
    assert judge(schema, [[], [[]]]) is None
    assert judge(schema, [[], [1]]) == ("result[1][0]", "list[list[...]]", "1 (int)")
