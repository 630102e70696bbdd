"""Says in Python's words where a value misses its contract, what is asked for, and what is there.

Called by this package's `__main__` with the first error of the validator. All texts are cut to
size: they quote hostile data.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jsonschema_rs

from controller.contract_worker.schemas import SchemaInvalid, resolve

TEXT_MAX = 2000
_SHOWN_MAX = 400
_ITEMS_SHOWN = 6
_DEPTH_SHOWN = 4
_WORDS = {
    "integer": "int",
    "number": "float",
    "string": "str",
    "boolean": "bool",
    "null": "None",
    "array": "list",
    "object": "dict",
}
_BOUNDS = {
    "minimum": ">= {}",
    "exclusiveMinimum": "> {}",
    "maximum": "<= {}",
    "exclusiveMaximum": "< {}",
    "multipleOf": "a multiple of {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "minProperties": "at least {} entries",
    "maxProperties": "at most {} entries",
    "pattern": "matching {}",
    "uniqueItems": "without repetition",
}
_NAMELESS_CLASSES = {"$dict": "dict", "$map": "dict", "$str": "str", "$float": "float"}


def describe_mismatch(
    error: jsonschema_rs.ValidationError, document: Any, encoded: Any
) -> tuple[str, str, str]:
    """Returns (path, expected, got) for the first error of a value."""
    error = _closest(error)
    path, node = _locate(encoded, error.instance_path)
    schema = _schema_at(document, error.schema_path[:-1])
    kind = error.kind
    match kind:
        case jsonschema_rs.ValidationErrorKind.Required(property=name) if name[:1] != "$":
            expected = f"a field {json.dumps(name)}"
        case jsonschema_rs.ValidationErrorKind.AdditionalProperties(unexpected=names):
            expected = f"{_Describer(document).describe(schema)} without {_quoted(names)}"
        case jsonschema_rs.ValidationErrorKind.FalseSchema():
            expected = "nothing here"
        case _:
            expected = _Describer(document).describe(schema)
    got = f"{_show(node, _DEPTH_SHOWN)[:_SHOWN_MAX]} ({_class_of(node)})"
    return _cut(path), _cut(expected), _cut(got)


def _closest(error: jsonschema_rs.ValidationError) -> jsonschema_rs.ValidationError:
    """Of a failed choice, the error in the one branch that got further into the value."""
    while True:
        kind = error.kind
        if not isinstance(
            kind,
            jsonschema_rs.ValidationErrorKind.AnyOf
            | jsonschema_rs.ValidationErrorKind.OneOfNotValid,
        ):
            return error
        firsts = [branch[0] for branch in kind.context if branch]
        deeper = [e for e in firsts if len(e.instance_path) > len(error.instance_path)]
        if len(deeper) != 1:
            return error
        error = deeper[0]


def _schema_at(document: Any, path: Sequence[str | int]) -> Any:
    node = document
    for step in path:
        try:
            node = node[step]
        except (KeyError, IndexError, TypeError):
            return True
    return node


def _locate(encoded: Any, path: Sequence[str | int]) -> tuple[str, Any]:
    """Follows a path of the checked instance through the encoded value, in Python's words."""
    text, node = "result", _unwrap(encoded)
    steps: list[Any] = list(path)
    try:
        while steps:
            more, node = _enter(node, steps)
            text, node = text + more, _unwrap(node)
    except (KeyError, IndexError, TypeError):
        pass  # the place is inside something that has no places in Python, such as a date
    return text, node


def _enter(node: Any, steps: list[Any]) -> tuple[str, Any]:
    """Takes the steps into one container: the text for them, and what is there."""
    key, body = _special(node)
    if key == "$object":
        return f".{steps[0]}", body["fields"][steps.pop(0)]
    if not key:
        return f"[{json.dumps(steps[0])}]", node[steps.pop(0)]
    if steps[0] == key:
        steps.pop(0)
    if not steps:
        return "", node
    step = steps.pop(0)
    if key == "$map":
        entry, value = body[step]
        shown = _show(entry, 2)[:100]
        if steps and steps.pop(0) == 0:
            return f" (key {shown})", entry
        return f"[{shown}]", value
    if key in ("$set", "$frozenset"):
        return f" (member {step})", body[step]
    return f"[{json.dumps(step)}]", body[step]


def _unwrap(node: Any) -> Any:
    """An enum member stands as its value."""
    while isinstance(node, dict) and len(node) == 1 and "$enum" in node:
        node = node["$enum"]["value"]
    return node


def _special(node: Any) -> tuple[str, Any]:
    if isinstance(node, dict) and len(node) == 1:
        key, body = next(iter(node.items()))
        if key.startswith("$"):
            return key, body
    return "", node


def _class_of(node: Any) -> str:
    key, body = _special(node)
    if key == "$object":
        return str(body["class"])[:100]
    if key:
        return _NAMELESS_CLASSES.get(key, key[1:])
    return "None" if node is None else type(node).__name__


def _show(node: Any, depth: int) -> str:
    """A short text for a value, close to its `repr`."""
    key, body = _special(node)
    if key == "$object":
        fields = _some(
            [f"{name}={_show(item, depth - 1)}" for name, item in _first(body["fields"].items())],
            len(body["fields"]),
        )
        return f"{body['class'][:100]}({fields})"
    if key in ("$tuple", "$set", "$frozenset"):
        return f"{key[1:]}({_some([_show(i, depth - 1) for i in _first(body)], len(body))})"
    if key == "$map":
        entries = [f"{_show(k, depth - 1)}: {_show(v, depth - 1)}" for k, v in _first(body)]
        return "{" + _some(entries, len(body)) + "}"
    if key == "$dict":
        node = body
    elif key:
        return f"{key[1:]}({str(body)[:100]})"
    if isinstance(node, dict | list) and depth <= 0:
        return "..."
    if isinstance(node, list):
        return "[" + _some([_show(i, depth - 1) for i in _first(node)], len(node)) + "]"
    if isinstance(node, dict):
        entries = [f"{k[:100]!r}: {_show(v, depth - 1)}" for k, v in _first(node.items())]
        return "{" + _some(entries, len(node)) + "}"
    if isinstance(node, str):
        return repr(node if len(node) <= _SHOWN_MAX // 2 else node[: _SHOWN_MAX // 2] + "...")
    if isinstance(node, int) and abs(node) >= 10**100:
        return f"an integer of {len(str(abs(node)))} digits"
    return repr(node)


def _first(items: Any) -> list[Any]:
    return [item for _, item in zip(range(_ITEMS_SHOWN), items, strict=False)]


def _some(shown: list[str], total: int) -> str:
    more = [f"... {total - len(shown)} more"] if total > len(shown) else []
    return ", ".join(shown + more)


def _quoted(names: Sequence[str]) -> str:
    return _some([json.dumps(name[:100]) for name in names[:_ITEMS_SHOWN]], len(names))


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 3] + "..."


class _Describer:
    """Says what a schema asks for, as a Python hint where there is one."""

    def __init__(self, document: Any) -> None:
        self._document = document

    def describe(self, schema: Any, depth: int = _DEPTH_SHOWN) -> str:
        """A short text for a schema."""
        if not isinstance(schema, dict):
            return "anything" if schema is not False else "nothing"
        if depth <= 0:
            return "..."
        if "$ref" in schema:
            try:
                return self.describe(resolve(self._document, str(schema["$ref"])), depth - 1)
            except SchemaInvalid:
                return "..."
        if "const" in schema:
            return _show(schema["const"], 2)
        if isinstance(schema.get("enum"), list):
            shown = [_show(item, 2) for item in schema["enum"][:20]]
            return "one of " + _some(shown, len(schema["enum"]))
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list):
                parts = [self.describe(part, depth - 1) for part in schema[name][:_ITEMS_SHOWN]]
                return " | ".join(dict.fromkeys(parts))
        return self._described_type(schema, depth) + self._bounds(schema)

    def _described_type(self, schema: dict[str, Any], depth: int) -> str:
        kind = schema.get("type")
        if isinstance(kind, list):
            return " | ".join(_WORDS.get(str(name), str(name)) for name in kind)
        properties = schema.get("properties")
        if isinstance(properties, dict) and len(properties) == 1:
            key, body = next(iter(properties.items()))
            if key.startswith("$"):
                return self._special(key, body, depth)
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array" and isinstance(schema.get("items"), dict):
            return f"list[{self.describe(schema['items'], depth - 1)}]"
        return _WORDS.get(str(kind), "a value") if kind is not None else "a value"

    def _object(self, schema: dict[str, Any], depth: int) -> str:
        title = schema.get("title")
        if isinstance(title, str) and "properties" in schema:
            return title[:100]
        values = schema.get("additionalProperties")
        if isinstance(values, dict) and "properties" not in schema:
            return f"dict[str, {self.describe(values, depth - 1)}]"
        return "dict"

    def _special(self, key: str, body: Any, depth: int) -> str:
        name = _NAMELESS_CLASSES.get(key, key[1:])
        if not isinstance(body, dict):
            return name
        fixed = body.get("prefixItems")
        if isinstance(fixed, list):
            parts = [self.describe(part, depth - 1) for part in fixed[:_ITEMS_SHOWN]]
            return f"{name}[{_some(parts, len(fixed))}]"
        if key in ("$tuple", "$set", "$frozenset") and isinstance(body.get("items"), dict):
            ending = ", ..." if key == "$tuple" else ""
            return f"{name}[{self.describe(body['items'], depth - 1)}{ending}]"
        return name

    def _bounds(self, schema: dict[str, Any]) -> str:
        found = [
            template.format(_show(schema[name], 1))
            for name, template in _BOUNDS.items()
            if name in schema and schema[name] is not False
        ]
        return f" ({', '.join(found)})" if found else ""
