"""From a type hint to a return contract, and from an accepted value back to that type.

Called by `hutch.calls` and `hutch.aio` when a caller declares a type; calls pydantic,
`hutch.values` and `hutch.hints`. The schema describes the *encoded* form of docs/values.md, except
that an `$object` stands as its fields and an `$enum` as its value, so that list, tuple and set are
told apart by JSON Schema alone. A sandbox without pydantic derives the same schemas for the hints
that it knows; one golden table tests both.
"""

from __future__ import annotations

import collections.abc
import json
import pathlib
import sys
import types as python_types
import typing
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import pydantic
import typing_extensions
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticOmit, SchemaError

from hutch import schema_tidy, values
from hutch.errors import Failure, HintError, HutchError, ValueDecodeError, failed
from hutch.records import Record

Schema = dict[str, Any]

_FLOAT_MARK: Schema = {"enum": ["nan", "inf", "-inf"]}
_CLOCK: Schema = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "object",
            "properties": {
                "iso": {"type": "string"},
                "fold": {"enum": [0, 1]},
                "zone": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
            "required": ["iso", "fold", "zone"],
            "additionalProperties": False,
        },
    ]
}
# A plain object whose only key starts with `$` would be another value's encoding.
_NOT_TAGGED: Schema = {
    "minProperties": 1,
    "maxProperties": 1,
    "propertyNames": {"pattern": "^\\$"},
}


class _OldDict(typing.TypedDict):
    """Nothing but a sample of the standard library's own kind."""


_ITERABLES = (
    collections.abc.Iterable,
    collections.abc.Collection,
    collections.abc.Reversible,
)


def schema_json(hint: Any) -> bytes:
    """The contract of a hint as JSON bytes.

    Raises:
        HintError: No contract can express the hint.
    """
    return json.dumps(schema(hint), ensure_ascii=False, separators=(",", ":")).encode()


def schema(hint: Any) -> Schema:
    """The contract of a hint as a JSON Schema (2020-12).

    Raises:
        HintError: No contract can express the hint.
    """
    try:
        raw = _adapter(hint).json_schema(
            by_alias=False, schema_generator=EncodedJsonSchema, mode="validation"
        )
    except HutchError:
        raise
    except (PydanticUserError, SchemaError, PydanticOmit, TypeError, ValueError) as error:
        raise HintError(f"{hint!r} cannot be a return type: {error}", hint) from error
    return schema_tidy.tidy(raw)


def restore(data: bytes, hint: Any, invocation_id: str) -> Any:
    """Turns an accepted value into its hint.

    Args:
        data: The value's JSON bytes.
        hint: The hint that its contract was made from.
        invocation_id: Whose value it is, for the error.

    Raises:
        ReturnTypeError: Validators of the hint refuse what the contract accepts.
    """
    try:
        value = values.decode(data, hint=hint)
    except (HintError, ValueDecodeError):
        value = plain(values.decode(data))  # a hint that only pydantic knows
    try:
        return _adapter(hint).validate_python(value)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        failure = Failure(
            type_name="ReturnTypeError",
            path="result" + "".join(_step(part) for part in first["loc"]),
            expected=first["msg"],
            got=repr(first["input"])[:2000],
        )
        raise failed("contract_violated", invocation_id, failure) from error


def _step(part: int | str) -> str:
    return f"[{part}]" if isinstance(part, int) else f"[{json.dumps(part)}]"


def plain(value: Any) -> Any:
    """Records as dictionaries and enumerators as their values: what pydantic validates from."""
    if isinstance(value, Record):
        if value._kind == "enum":
            return plain(value["value"])
        return {name: plain(value[name]) for name in value}
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return type(value)(plain(item) for item in value)
    return value


def _adapter(hint: Any) -> pydantic.TypeAdapter[Any]:
    prepared = _prepare(hint)
    try:
        return pydantic.TypeAdapter(
            prepared, config=pydantic.ConfigDict(arbitrary_types_allowed=True)
        )
    except PydanticUserError as error:
        if error.code != "type-adapter-config-unused":
            raise HintError(f"{hint!r} cannot be a return type: {error}", hint) from error
    except (SchemaError, TypeError, NameError) as error:
        raise HintError(f"{hint!r} cannot be a return type: {error}", hint) from error
    try:
        return pydantic.TypeAdapter(prepared)
    except (PydanticUserError, SchemaError, TypeError, NameError) as error:
        raise HintError(f"{hint!r} cannot be a return type: {error}", hint) from error


def _prepare(hint: Any, above: tuple[Any, ...] = ()) -> Any:
    """Writes out what pydantic would merge: an abstract set, and what can only be iterated."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if getattr(hint, "__unpacked__", False) or origin is typing.Unpack:
        raise HintError(f"{hint!r} cannot be part of a return type: nothing checks it", hint)
    if hint is collections.abc.Set or origin is collections.abc.Set:
        inner = (_prepare(args[0], above),) if args else (Any,)
        return set[inner] | frozenset[inner]  # type: ignore[valid-type]
    if hint in _ITERABLES or origin in _ITERABLES:
        return Sequence[_prepare(args[0], above) if args else Any]  # type: ignore[misc]
    if origin is typing.Annotated:
        return typing.Annotated[_prepare(args[0], above), *hint.__metadata__]
    if origin is typing.Union or origin is python_types.UnionType:
        return typing.Union[tuple(_prepare(arg, above) for arg in args)]  # noqa: UP007
    if sys.version_info < (3, 12) and type(hint) is type(_OldDict):
        return _typed_dict(hint, above)
    if origin in (list, tuple, set, frozenset, dict) and args:
        return origin[tuple(arg if arg is Ellipsis else _prepare(arg, above) for arg in args)]
    return hint


def _typed_dict(hint: Any, above: tuple[Any, ...]) -> Any:
    """The same by `typing_extensions`, which pydantic asks for before Python 3.12."""
    if hint in above:
        raise HintError(
            f"{hint!r} is recursive: make it with typing_extensions.TypedDict, or use Python 3.12",
            hint,
        )
    above = (*above, hint)
    fields = {}
    for name, inner in typing.get_type_hints(hint, include_extras=True).items():
        if typing.get_origin(inner) in (typing.Required, typing.NotRequired):
            inner = typing.get_args(inner)[0]
        mark: Any = typing.Required if name in hint.__required_keys__ else typing.NotRequired
        fields[name] = mark[_prepare(inner, above)]
    return typing_extensions.TypedDict(hint.__name__, fields)  # type: ignore[operator]


def _tagged(tag: str, inner: Schema) -> Schema:
    """The encoding of one special value: an object with nothing but its tag."""
    return {
        "type": "object",
        "properties": {tag: inner},
        "required": [tag],
        "additionalProperties": False,
    }


def _encoded(value: Any) -> Any:
    """A constant as it is encoded; an enumerator as its value."""
    return json.loads(values.encode(value.value if isinstance(value, Enum) else value))


def _any_of(members: Iterable[Schema]) -> Schema:
    distinct: list[Schema] = []
    for member in members:
        if member not in distinct:
            distinct.append(member)
    return distinct[0] if len(distinct) == 1 else {"anyOf": distinct}


class EncodedJsonSchema(GenerateJsonSchema):
    """Pydantic's generator, writing the encoded form of each value."""

    ignored_warning_kinds: typing.ClassVar[set[Any]] = {  # type: ignore[misc]
        "skipped-choice",
        "non-serializable-default",
        "skipped-discriminator",
    }

    def generate_inner(self, schema: Any) -> Schema:
        """Takes the encoded form where it is not pydantic's own."""
        own = self._own(schema)
        return own if own is not None else super().generate_inner(schema)

    def _own(self, schema: Any) -> Schema | None:
        """What hooks of pydantic's own types would otherwise overwrite."""
        match schema["type"]:
            case "enum":
                return {"enum": [_encoded(member) for member in schema["members"]]}
            case "json-or-python" | "lax-or-strict":
                return self._by_instance(schema)
            case "generator":
                return self._sequence(schema.get("items_schema"), schema)
            case _:
                return None

    def _by_instance(self, schema: Any) -> Schema | None:
        """Paths and sequences, which pydantic knows by the class of their Python form."""
        strict = schema.get("strict_schema", schema)
        inside = strict.get("python_schema", strict)
        steps = inside["steps"] if inside["type"] == "chain" else [inside]
        cls = steps[0].get("cls") if steps[0]["type"] == "is-instance" else None
        if isinstance(cls, type) and issubclass(cls, pathlib.PurePath):
            return _tagged("$path", {"type": "string"})
        if cls in (typing.Sequence, collections.abc.Sequence):
            items = schema.get("json_schema", {})
            return self._sequence(items.get("items_schema"), items)
        return None

    def _items(self, items: Any, limits: Mapping[str, Any]) -> Schema:
        inner = {} if items is None else self.generate_inner(items)
        result: Schema = {"type": "array"}
        if inner:
            result["items"] = inner
        for name, key in (("min_length", "minItems"), ("max_length", "maxItems")):
            if limits.get(name) is not None:
                result[key] = limits[name]
        return result

    def _sequence(self, items: Any, limits: Mapping[str, Any]) -> Schema:
        inner = self._items(items, limits)
        return _any_of([inner, _tagged("$tuple", inner)])

    # One method per core type, named by pydantic.

    def float_schema(self, schema: Any) -> Schema:
        """A number, or one of the three that JSON lacks."""
        bounded = super().float_schema(schema)
        if len(bounded) > 1 or schema.get("allow_inf_nan") is False:
            return bounded
        return {"anyOf": [bounded, _tagged("$float", _FLOAT_MARK)]}

    def bytes_schema(self, schema: Any) -> Schema:
        """Base64."""
        return _tagged("$bytes", {"type": "string"})

    def complex_schema(self, schema: Any) -> Schema:
        """Two numbers."""
        part = self.float_schema({"type": "float"})
        return _tagged("$complex", {"type": "array", "items": part, "minItems": 2, "maxItems": 2})

    def decimal_schema(self, schema: Any) -> Schema:
        """Its text; bounds are validated when the value is turned back."""
        return _tagged("$decimal", {"type": "string"})

    def uuid_schema(self, schema: Any) -> Schema:
        """Its text."""
        return _tagged("$uuid", {"type": "string"})

    def date_schema(self, schema: Any) -> Schema:
        """ISO 8601."""
        return _tagged("$date", {"type": "string"})

    def datetime_schema(self, schema: Any) -> Schema:
        """ISO 8601, or with fold and zone."""
        return _tagged("$datetime", _CLOCK)

    def time_schema(self, schema: Any) -> Schema:
        """ISO 8601, or with fold and zone."""
        return _tagged("$time", _CLOCK)

    def timedelta_schema(self, schema: Any) -> Schema:
        """Days, seconds, microseconds."""
        return _tagged(
            "$timedelta",
            {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 3},
        )

    def list_schema(self, schema: Any) -> Schema:
        """An array."""
        return self._items(schema.get("items_schema"), schema)

    def set_schema(self, schema: Any) -> Schema:
        """Its members."""
        return _tagged("$set", self._items(schema.get("items_schema"), schema))

    def frozenset_schema(self, schema: Any) -> Schema:
        """Its members."""
        return _tagged("$frozenset", self._items(schema.get("items_schema"), schema))

    def tuple_schema(self, schema: Any) -> Schema:
        """Its items, each by its place and then by the variadic one."""
        items, variadic = schema["items_schema"], schema.get("variadic_item_index")
        if variadic == 0 and len(items) == 1:
            return _tagged("$tuple", self._items(items[0], schema))
        if variadic is None:
            if not items:
                return _tagged("$tuple", {"type": "array", "maxItems": 0})
            count = len(items)
            fixed = {
                "type": "array",
                "prefixItems": [self.generate_inner(item) for item in items],
                "items": False,
                "minItems": count,
                "maxItems": count,
            }
            return _tagged("$tuple", fixed)
        prefix = [self.generate_inner(item) for item in items[:variadic]]
        rest = _any_of(self.generate_inner(item) for item in items[variadic:])
        opened: Schema = {"type": "array", "items": rest, "minItems": len(items) - 1}
        if prefix:
            opened["prefixItems"] = prefix
        return _tagged("$tuple", opened)

    def dict_schema(self, schema: Any) -> Schema:
        """An object where keys are texts, `$map` where they are not, both where either may be."""
        keys = schema.get("keys_schema") or {"type": "any"}
        items = schema.get("values_schema") or {"type": "any"}
        text, other = self._key_kinds(keys)
        value = self.generate_inner(items)
        forms: list[Schema] = []
        if text:
            inner: Schema = {"type": "object"}
            if not other:
                names = {k: v for k, v in self.generate_inner(keys).items() if k != "title"}
                if names != {"type": "string"}:
                    inner["propertyNames"] = names
            if value:
                inner["additionalProperties"] = value
            for name, key in (("min_length", "minProperties"), ("max_length", "maxProperties")):
                if schema.get(name) is not None:
                    inner[key] = schema[name]
            forms += [{**inner, "not": _NOT_TAGGED}, _tagged("$dict", inner)]
        elif not schema.get("min_length"):
            forms.append({"type": "object", "maxProperties": 0})
        if other:
            pair: Schema = {
                "type": "array",
                "prefixItems": [self.generate_inner(keys), value],
                "items": False,
                "minItems": 2,
                "maxItems": 2,
            }
            pairs = self._items(None, schema)
            if value or pair["prefixItems"][0]:
                pairs["items"] = pair
            forms.append(_tagged("$map", pairs))
        return {"anyOf": forms}

    def _key_kinds(self, keys: Any) -> tuple[bool, bool]:
        """Whether keys may be texts, and whether they may be something else."""
        match keys["type"]:
            case "str":
                return True, False
            case "any":
                return True, True
            case "literal":
                texts = [type(value) is str for value in keys["expected"]]
                return any(texts), not all(texts)
            case "union":
                members = [c[0] if isinstance(c, tuple) else c for c in keys["choices"]]
                kinds = [self._key_kinds(member) for member in members]
                return any(text for text, _ in kinds), any(other for _, other in kinds)
            case "nullable":
                return self._key_kinds(keys["schema"])[0], True
            case "default" | "function-after" | "function-before" | "function-wrap":
                return self._key_kinds(keys["schema"])
            case _:
                return False, True

    def literal_schema(self, schema: Any) -> Schema:
        """Its choices."""
        return {"enum": [_encoded(value) for value in schema["expected"]]}

    def nullable_schema(self, schema: Any) -> Schema:
        """The inner one or null."""
        inner = schema["schema"]
        members = self._members(inner) if inner["type"] == "union" else [self.generate_inner(inner)]
        return _any_of([*members, {"type": "null"}])

    def union_schema(self, schema: Any) -> Schema:
        """Any of its members."""
        return _any_of(self._members(schema))

    def _members(self, schema: Any) -> list[Schema]:
        members = (
            choice[0] if isinstance(choice, tuple) else choice for choice in schema["choices"]
        )
        return [self.generate_inner(member) for member in members]

    def tagged_union_schema(self, schema: Any) -> Schema:
        """Any of its members: their own tag fields tell them apart."""
        choices = (choice for choice in schema["choices"].values() if not isinstance(choice, str))
        return _any_of(self.generate_inner(choice) for choice in choices)

    def default_schema(self, schema: Any) -> Schema:
        """The inner one: a default is not part of a value's shape."""
        return self.generate_inner(schema["schema"])

    def is_instance_schema(self, schema: Any) -> Schema:
        """The few classes without a shape of their own that values know."""
        cls = schema["cls"]
        if cls is range:
            return _tagged(
                "$range",
                {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 3},
            )
        name = f"{cls.__module__.partition('.')[0]}.{cls.__qualname__}"
        tag = {"numpy.ndarray": "$ndarray", "pandas.DataFrame": "$dataframe"}.get(name)
        if tag is None and hasattr(cls, "__hutch_artifact__"):
            return _tagged("$artifact", {"type": "string"})
        if tag is None:
            raise PydanticInvalidForJsonSchema(f"values of {cls!r} do not cross boundaries")
        return _tagged(tag, {"type": "object"})

    def is_subclass_schema(self, schema: Any) -> Schema:
        """Classes do not cross boundaries."""
        raise PydanticInvalidForJsonSchema("classes do not cross boundaries")

    def model_schema(self, schema: Any) -> Schema:
        """A model's fields; others are refused only where the model forbids them."""
        if schema.get("root_model"):
            inner = self.generate_inner(schema["schema"])
            wrapped = {"type": "object", "properties": {"root": inner}, "required": ["root"]}
            return _any_of([{**wrapped, "additionalProperties": False}, inner])
        result = self.generate_inner(schema["schema"])
        if schema["cls"].model_config.get("extra") == "forbid":
            return result
        return {key: value for key, value in result.items() if key != "additionalProperties"}

    def model_fields_schema(self, schema: Any) -> Schema:
        """A model's fields by their names."""
        return self._object(
            (name, field["schema"], field["schema"]["type"] != "default")
            for name, field in schema["fields"].items()
        )

    def dataclass_schema(self, schema: Any) -> Schema:
        """A dataclass's fields."""
        return self.generate_inner(schema["schema"])

    def dataclass_args_schema(self, schema: Any) -> Schema:
        """A dataclass's fields by their names."""
        return self._object(
            (
                field["name"],
                field["schema"],
                field["schema"]["type"] != "default" and field.get("init", True),
            )
            for field in schema["fields"]
            if not field.get("init_only")
        )

    def typed_dict_schema(self, schema: Any) -> Schema:
        """A typed dictionary's keys."""
        total = schema.get("total", True)
        return self._object(
            (name, field["schema"], field.get("required", total))
            for name, field in schema["fields"].items()
        )

    def named_tuple_schema(self, schema: Any) -> Schema:
        """A named tuple's fields."""
        return self._object(
            (field["name"], field["schema"], field["schema"]["type"] != "default")
            for field in schema["fields"]
        )

    def call_schema(self, schema: Any) -> Schema:
        """A named tuple as releases of pydantic before its own core type write it."""
        arguments = schema["arguments_schema"]
        while "arguments_schema" not in arguments:
            arguments = arguments["schema"]
        return self._object(
            (field["name"], field["schema"], field["schema"]["type"] != "default")
            for field in arguments["arguments_schema"]
        )

    def _object(self, fields: Iterable[tuple[str, Any, bool]]) -> Schema:
        properties, required = {}, []
        for name, inner, is_required in fields:
            properties[name] = self.generate_inner(inner)
            if is_required:
                required.append(name)
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }
