"""Reads a contract's schema, refuses what is not allowed, and compiles it.

Called by this package's `__main__`. Calls jsonschema-rs with retrieval switched off and patterns in
linear time. References stay within the document, so nothing could be fetched anyway: this is said
twice because the library would otherwise open files and addresses that a tenant names.
"""

from __future__ import annotations

from typing import Any

import jsonschema_rs

from controller.contract_worker.values import ValueInvalid, parse_json

BYTES_MAX = 64 * 1024
DEPTH_MAX = 64
NODES_MAX = 10_000
_DIALECT = "https://json-schema.org/draft/2020-12/schema"

_ONE = (
    "items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "contains",
    "propertyNames", "not", "if", "then", "else", "contentSchema", "additionalItems",
)  # fmt: skip
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "dependentSchemas", "dependencies")
_DEFINED = ("$defs", "definitions")
_REFUSED = ("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "$vocabulary")


class SchemaInvalid(Exception):
    """The schema may not be a contract; the text says why."""


def compile_schema(data: bytes) -> tuple[Any, jsonschema_rs.Validator]:
    """Parses, checks and compiles a schema; returns the document and its validator.

    Raises:
        SchemaInvalid: with the reason.
    """
    if len(data) > BYTES_MAX:
        raise SchemaInvalid("it is over 64 KiB")
    try:
        document = parse_json(data)
    except ValueInvalid as error:
        raise SchemaInvalid(str(error)) from error
    if not isinstance(document, dict | bool):
        raise SchemaInvalid("it is neither an object nor a boolean")
    if _json_depth(document) > DEPTH_MAX:
        raise SchemaInvalid("it is nested more than 64 deep")
    try:
        if _Survey(document).count(document) > NODES_MAX:
            raise SchemaInvalid("it has more than 10,000 nodes with references expanded")
    except RecursionError as error:
        raise SchemaInvalid("its references lead too deep") from error
    if isinstance(document, dict):
        document = {key: value for key, value in document.items() if key != "$id"}
    return document, _compile(document)


def _compile(document: Any) -> jsonschema_rs.Validator:
    try:
        return jsonschema_rs.Draft202012Validator(
            document,
            offline=True,
            validate_formats=False,
            pattern_options=jsonschema_rs.RegexOptions(),
            mask="the value",
        )
    except jsonschema_rs.ValidationError as error:
        place = "/".join(["#", *map(str, error.instance_path)])
        if 'is not a "regex"' in error.message:
            raise SchemaInvalid(
                f"at {place}: the pattern is not a regular expression that runs in linear time"
            ) from error
        raise SchemaInvalid(f"at {place}: {error.message}"[:1000]) from error
    except (ValueError, UnicodeEncodeError) as error:
        raise SchemaInvalid(f"it is not a schema: {error}"[:1000]) from error


def _json_depth(document: Any) -> int:
    """How many containers are inside one another."""
    depth, level = 0, [document]
    while level := [node for node in level if isinstance(node, dict | list)]:
        depth += 1
        level = [
            child for node in level for child in (node.values() if isinstance(node, dict) else node)
        ]
    return depth


def resolve(document: Any, pointer: str) -> Any:
    """The part of a document that a fragment like `#/$defs/x` names.

    Raises:
        SchemaInvalid: there is none.
    """
    node = document
    for part in pointer.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and name in node:
            node = node[name]
        elif isinstance(node, list) and name.isascii() and name.isdigit() and len(name) < 7:
            if int(name) >= len(node):
                raise SchemaInvalid(f"{pointer[:200]} leads nowhere")
            node = node[int(name)]
        else:
            raise SchemaInvalid(f"{pointer[:200]} leads nowhere")
    return node


class _Survey:
    """Counts the nodes of a schema with its references expanded, and refuses what may not be.

    A reference counts as what it leads to, each time; one that leads back to where it stands counts
    once, for such schemas are as long as the value. What was counted once is remembered, so the
    survey itself takes time in the document's size only.
    """

    def __init__(self, document: Any) -> None:
        self._document = document
        self._known: dict[int, int] = {}
        self._open: set[int] = set()

    def count(self, schema: Any) -> int:
        """The number of nodes below and with this one."""
        if not isinstance(schema, dict):
            return 1
        key = id(schema)
        if key in self._open:
            return 1
        if key not in self._known:
            self._open.add(key)
            self._check(schema)
            for name in _DEFINED:
                # Looked at, but counted where a reference leads to them.
                if isinstance(schema.get(name), dict):
                    for child in schema[name].values():
                        self.count(child)
            self._known[key] = 1 + sum(map(self.count, self._children(schema)))
            self._open.remove(key)
        return self._known[key]

    def _children(self, schema: dict[str, Any]) -> list[Any]:
        found = [schema[name] for name in _ONE if name in schema]
        for name in _LISTS:
            if isinstance(schema.get(name), list):
                found += schema[name]
        for name in _NAMED:
            if isinstance(schema.get(name), dict):
                found += schema[name].values()
        if "$ref" in schema:
            found.append(self._target(schema["$ref"]))
        return [child for child in found if isinstance(child, dict | bool)]

    def _check(self, schema: dict[str, Any]) -> None:
        dialect = schema.get("$schema", _DIALECT)
        if not isinstance(dialect, str) or dialect.rstrip("#") != _DIALECT:
            raise SchemaInvalid("its $schema is not draft 2020-12")
        for name in _REFUSED:
            if name in schema:
                raise SchemaInvalid(f"{name} is not supported in a contract")
        if "$id" in schema and schema is not self._document:
            raise SchemaInvalid("an $id inside the document is not supported in a contract")

    def _target(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise SchemaInvalid("a $ref leads outside the document")
        if reference != "#" and not reference.startswith("#/"):
            raise SchemaInvalid("a $ref is not a pointer like #/$defs/name")
        if "%" in reference:
            raise SchemaInvalid("a $ref is percent-encoded")
        return resolve(self._document, reference)
