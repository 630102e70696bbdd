"""Schemas of contracts that nobody would write: one is a contract or is refused by the reason."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from controller.contract_worker.schemas import SchemaInvalid, compile_schema

_WORDS = (
    "$ref", "$defs", "$id", "$schema", "$anchor", "$dynamicRef", "type", "properties", "items",
    "prefixItems", "allOf", "anyOf", "not", "if", "enum", "const", "pattern", "patternProperties",
    "minimum", "multipleOf", "minLength", "maxItems", "required", "dependentSchemas", "format",
    "unevaluatedProperties", "additionalProperties", "contains", "minContains",
)  # fmt: skip
_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        ("#", "#/$defs/a", "#/items", "#/allOf/0", "#/$defs/~2", "integer", "(a+)+$", "x{999}", "[")
    )
)
_DOCUMENTS = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(_WORDS) | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=24,
)


def check(data: bytes) -> None:
    """Compiles it, and tries values on it if it is a contract; any other error fails the test."""
    try:
        _, validator = compile_schema(data)
    except SchemaInvalid:
        return
    values: tuple[Any, ...] = (None, 1, "x" * 64, [1, []], {"a": {}})
    for value in values:
        validator.is_valid(value)


@given(_DOCUMENTS)
@example({"$ref": "#"})
@example({"allOf": [{"$ref": "#/allOf/1"}, {"$ref": "#/allOf/0"}]})
@example({"$ref": "#/items/~"})
@example({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"})
@example({"enum": []})
@example({"multipleOf": 0})
@example({"minLength": 1e400})
def test_whatever_a_schema_holds_it_is_a_contract_or_refused(document: Any) -> None:
    check(json.dumps(document).encode())


@given(st.binary(max_size=64) | st.text(max_size=64).map(str.encode))
@example(b"\xff\xfe{\x00}\x00")
@example(b'{"const":"\\ud800"}')
@example(b'{"const":' + b"9" * 5000 + b"}")
def test_whatever_bytes_a_schema_is_they_are_a_contract_or_refused(data: bytes) -> None:
    check(data)
