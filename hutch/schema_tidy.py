"""Makes a generated JSON Schema small: no annotations, and references only where it is recursive.

Called by `hutch.returns`; calls nothing.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_NODE_LIMIT = 5_000  # of the schema with references written out; above it they stay
_ANNOTATIONS = frozenset(
    {
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
    }
)
_MAPS = frozenset({"properties", "$defs", "patternProperties", "dependentSchemas"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SINGLES = frozenset(
    {
        "additionalProperties",
        "contains",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
_PREFIX = "#/$defs/"


def tidy(schema: Schema) -> Schema:
    """The same schema without annotations and without references that are not recursive."""
    stripped: Schema = _strip(schema)
    definitions: dict[str, Schema] = stripped.pop("$defs", {})
    recursive = {name for name in definitions if _reaches(name, definitions)}
    sizes: dict[str, int] = {}
    kept = recursive if _size(stripped, definitions, recursive, sizes) <= _NODE_LIMIT else None
    if kept is None:
        return {**stripped, "$defs": definitions} if definitions else stripped
    result: Schema = _inline(stripped, definitions, kept)
    if kept:
        result["$defs"] = {
            name: _inline(definitions[name], definitions, kept) for name in sorted(kept)
        }
    return result


def _children(schema: Any) -> list[Any]:
    if not isinstance(schema, dict):
        return []
    found: list[Any] = []
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            found.extend(value.values())
        elif key in _LISTS and isinstance(value, list):
            found.extend(value)
        elif key in _SINGLES:
            found.append(value)
    return found


def _map(schema: Any, change: Any) -> Any:
    """The schema with `change` applied to each schema directly inside it."""
    if not isinstance(schema, dict):
        return schema
    result: Schema = {}
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            result[key] = {name: change(inner) for name, inner in value.items()}
        elif key in _LISTS and isinstance(value, list):
            result[key] = [change(inner) for inner in value]
        elif key in _SINGLES:
            result[key] = change(value)
        else:
            result[key] = value
    return result


def _strip(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    own = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
    return _map(own, _strip)


def _target(schema: Any) -> str | None:
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    if isinstance(reference, str) and reference.startswith(_PREFIX):
        return reference.removeprefix(_PREFIX)
    return None


def _targets(schema: Any) -> set[str]:
    own = _target(schema)
    found = {own} if own is not None else set()
    for child in _children(schema):
        found |= _targets(child)
    return found


def _reaches(name: str, definitions: dict[str, Schema]) -> bool:
    """Whether a definition refers to itself, directly or through others."""
    seen: set[str] = set()
    open_names = list(_targets(definitions[name]))
    while open_names:
        current = open_names.pop()
        if current == name:
            return True
        if current not in seen and current in definitions:
            seen.add(current)
            open_names.extend(_targets(definitions[current]))
    return False


def _size(
    schema: Any, definitions: dict[str, Schema], recursive: set[str], sizes: dict[str, int]
) -> int:
    """How many schemas there are once references are written out."""
    target = _target(schema)
    if target is not None and target in definitions and target not in recursive:
        if target not in sizes:
            sizes[target] = _size(definitions[target], definitions, recursive, sizes)
        return sizes[target]
    return 1 + sum(_size(child, definitions, recursive, sizes) for child in _children(schema))


def _inline(schema: Any, definitions: dict[str, Schema], kept: set[str]) -> Any:
    target = _target(schema)
    if target is not None and target in definitions and target not in kept:
        return _inline(definitions[target], definitions, kept)
    return _map(schema, lambda inner: _inline(inner, definitions, kept))
