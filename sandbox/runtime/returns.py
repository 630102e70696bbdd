"""Type hints as return contracts: a JSON Schema over the encoded value (docs/values.md).

Called by `guest`, for the hints that the standard library can express and for simple pydantic
models. The SDK has a generator of its own, on top of pydantic; both are held to the table in
`tests/unit/golden_contracts.json`.
"""

from __future__ import annotations

import collections.abc
import datetime
import decimal
import enum
import pathlib
import typing
import uuid
from typing import TYPE_CHECKING, Any

from . import fastjson, hints, values
from .errors import HintError

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_SCHEMA_BYTES = 65_536
_NONE = type(None)
_TEXT: dict[str, Any] = {"type": "string"}
_WHOLE: dict[str, Any] = {"type": "integer"}


def schema_json(hint: Any) -> bytes:
    """Returns the contract of a hint as bytes of JSON.

    Raises:
        HintError: a part of the hint cannot be expressed; the message names it.
    """
    data = fastjson.dumps(schema_of(hint)).encode("utf-8")
    if len(data) > MAX_SCHEMA_BYTES:
        raise HintError(
            f"the contract of {hints.describe(hint)} has {len(data)} bytes; "
            f"{MAX_SCHEMA_BYTES} are allowed",
            hint,
        )
    return data


def schema_of(hint: Any) -> dict[str, Any]:
    """Returns the contract of a hint.

    Raises:
        HintError: a part of the hint cannot be expressed; the message names it.
    """
    writer = _Writer()
    schema = writer.write(hint)
    if writer.definitions:
        return {**schema, "$defs": writer.definitions}
    return schema


def wrap(key: str, inner: dict[str, Any]) -> dict[str, Any]:
    """Describes an object with exactly one key."""
    return fields({key: inner}, [key])


def fields(properties: dict[str, Any], required: list[str], closed: bool = True) -> dict[str, Any]:
    """Describes an object by its fields."""
    schema = {"type": "object", "properties": properties, "required": required}
    return {**schema, "additionalProperties": False} if closed else schema


def sequence(items: dict[str, Any] | None = None) -> dict[str, Any]:
    """Describes an array of any length."""
    return {"type": "array"} if items is None else {"type": "array", "items": items}


def exactly(*items: dict[str, Any]) -> dict[str, Any]:
    """Describes an array of these items."""
    count = len(items)
    if not count:
        return {"type": "array", "maxItems": 0}
    return {
        "type": "array",
        "prefixItems": list(items),
        "items": False,
        "minItems": count,
        "maxItems": count,
    }


def repeated(item: dict[str, Any], count: int) -> dict[str, Any]:
    """Describes an array of so many equal items."""
    return {"type": "array", "items": item, "minItems": count, "maxItems": count}


def any_of(*choices: dict[str, Any]) -> dict[str, Any]:
    """Describes what fits one of the choices."""
    return {"anyOf": list(choices)}


def real() -> dict[str, Any]:
    """Describes a float: a number, or what JSON has no number for."""
    return any_of({"type": "number"}, wrap("$float", {"enum": ["nan", "inf", "-inf"]}))


def clock(key: str) -> dict[str, Any]:
    """Describes a datetime or time, with or without fold and zone."""
    zoned = fields(
        {"iso": _TEXT, "fold": {"enum": [0, 1]}, "zone": any_of(_TEXT, {"type": "null"})},
        ["iso", "fold", "zone"],
    )
    return wrap(key, any_of(_TEXT, zoned))


def text_keyed(
    item: dict[str, Any] | None = None, names: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Describes both forms of a dict whose keys are text: as it is, and escaped."""
    plain: dict[str, Any] = {"type": "object"}
    if names is not None:
        plain["propertyNames"] = names
    if item is not None:
        plain["additionalProperties"] = item
    single = {"minProperties": 1, "maxProperties": 1, "propertyNames": {"pattern": "^\\$"}}
    return [{**plain, "not": single}, wrap("$dict", plain)]


def scalars() -> dict[Any, Callable[[], dict[str, Any]]]:
    """Returns what describes each class without parameters."""
    return {
        object: dict,
        Any: dict,
        _NONE: lambda: {"type": "null"},
        bool: lambda: {"type": "boolean"},
        int: lambda: _WHOLE,
        float: real,
        str: lambda: _TEXT,
        bytes: lambda: wrap("$bytes", _TEXT),
        complex: lambda: wrap("$complex", repeated(real(), 2)),
        datetime.datetime: lambda: clock("$datetime"),
        datetime.time: lambda: clock("$time"),
        datetime.date: lambda: wrap("$date", _TEXT),
        datetime.timedelta: lambda: wrap("$timedelta", repeated(_WHOLE, 3)),
        decimal.Decimal: lambda: wrap("$decimal", _TEXT),
        uuid.UUID: lambda: wrap("$uuid", _TEXT),
        pathlib.Path: lambda: wrap("$path", _TEXT),
        pathlib.PurePath: lambda: wrap("$path", _TEXT),
        pathlib.PosixPath: lambda: wrap("$path", _TEXT),
        pathlib.PurePosixPath: lambda: wrap("$path", _TEXT),
        range: lambda: wrap("$range", repeated(_WHOLE, 3)),
    }


class _Writer:
    """One translation: knows the classes that it is inside of, so that recursion is found."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self._inside: list[Any] = []
        self._recursive: set[Any] = set()

    def write(self, hint: Any) -> dict[str, Any]:
        _refuse_constraints(hint)
        hint = hints.strip(hint)
        scalar = scalars().get(hint) if _is_hashable(hint) else None
        if scalar is not None:
            return scalar()
        if hints.is_union(hint):
            return any_of(*(self.write(member) for member in typing.get_args(hint)))
        origin = typing.get_origin(hint) or hint
        if origin is typing.Literal:
            return {"enum": [_constant(choice) for choice in typing.get_args(hint)]}
        if not isinstance(origin, type):
            raise self._inexpressible(hint)
        if issubclass(origin, enum.Enum):
            return {"enum": [_constant(member) for member in origin]}
        declared = hints.fields_of(origin)
        if declared is not None:
            return self._class(origin, declared, typing.get_args(hint))
        return self._container(hint, origin, typing.get_args(hint))

    def _container(self, hint: Any, origin: type, args: tuple[Any, ...]) -> dict[str, Any]:
        if origin is tuple:
            return wrap("$tuple", self._tuple(hint, args))
        if origin in hints.MAPPINGS:
            return self._mapping(args)
        if hasattr(origin, "__hutch_artifact__"):
            return wrap("$artifact", _TEXT)
        lists = (*hints.LISTS, *hints.SEQUENCES)
        if origin not in (set, frozenset, *hints.SETS, *lists):
            raise self._inexpressible(hint)
        item = self.write(args[0]) if args else None
        if origin in hints.LISTS:
            return sequence(item)
        if origin in hints.SEQUENCES:
            return any_of(sequence(item), wrap("$tuple", sequence(item)))
        if origin in (set, frozenset):
            return wrap(f"${origin.__name__}", sequence(item))
        return any_of(*(wrap(key, sequence(item)) for key in ("$set", "$frozenset")))

    def _tuple(self, hint: Any, args: tuple[Any, ...]) -> dict[str, Any]:
        if hint is tuple or hint is typing.Tuple:  # noqa: UP006
            return sequence()
        if len(args) == 2 and args[1] is Ellipsis:
            return sequence(self.write(args[0]))
        return exactly(*(self.write(arg) for arg in args if arg != ()))

    def _mapping(self, args: tuple[Any, ...]) -> dict[str, Any]:
        if not args:
            return any_of(*text_keyed(), wrap("$map", sequence()))
        key, item = hints.strip(args[0]), self.write(args[1])
        if key is str:
            return any_of(*text_keyed(item))
        if typing.get_origin(key) is typing.Literal:
            names = [_constant(choice) for choice in typing.get_args(key)]
            if all(type(name) is str for name in names):
                return any_of(*text_keyed(item, {"enum": names}))
        pairs = wrap("$map", sequence(exactly(self.write(key), item)))
        if _may_be_text(key):
            return any_of(*text_keyed(item), pairs)
        return any_of({"type": "object", "maxProperties": 0}, pairs)

    def _class(self, cls: Any, declared: hints.Fields, args: tuple[Any, ...]) -> dict[str, Any]:
        """Writes a class where it stands; one that contains itself is a definition."""
        name = cls.__name__
        reference = {"$ref": f"#/$defs/{name}"}
        if cls in self._inside:
            self._recursive.add(cls)
            return reference
        if cls in self._recursive:
            return reference
        if hints.is_model(cls):
            _refuse_model_constraints(cls)
        self._inside.append(cls)
        variables = dict(zip(getattr(cls, "__parameters__", ()), args))
        written = {
            field: self.write(variables.get(hint, hint) if _is_hashable(hint) else hint)
            for field, hint in declared.hints.items()
        }
        self._inside.pop()
        required = [field for field in declared.hints if field in declared.required]
        schema = fields(written, required, declared.closed)
        if cls not in self._recursive:
            return schema
        if name in self.definitions:
            raise HintError(f"two recursive classes are called {name}", cls)
        self.definitions[name] = schema
        return reference

    @staticmethod
    def _inexpressible(hint: Any) -> HintError:
        return HintError(
            f"{hints.describe(hint)} cannot be expressed as a contract here: "
            "use classes of the standard library, dataclasses or plain pydantic models",
            hint,
        )


def _constant(choice: Any) -> Any:
    """Returns how a constant stands in a contract: an enum as its value, encoded."""
    plain = choice.value if isinstance(choice, enum.Enum) else choice
    return values.parse(values.encode(plain, root=repr(choice)))


def _may_be_text(key: Any) -> bool:
    if key in (Any, object, str):
        return True
    if hints.is_union(key):
        return any(_may_be_text(hints.strip(member)) for member in typing.get_args(key))
    return False


def _is_hashable(hint: Any) -> bool:
    return isinstance(hint, collections.abc.Hashable)


def _refuse_constraints(hint: Any) -> None:
    """Refuses notes that would narrow the type: dropping them would accept what they forbid."""
    for note in getattr(hint, "__metadata__", ()):
        if type(note).__module__.split(".")[0] in ("annotated_types", "pydantic", "pydantic_core"):
            raise HintError(
                f"the constraint {note!r} cannot be expressed as a contract here; "
                "check it after the call",
                hint,
            )


def _refuse_model_constraints(cls: Any) -> None:
    for name, field in cls.model_fields.items():
        if field.metadata:
            raise HintError(
                f"the constraints of {cls.__name__}.{name} cannot be expressed as a contract here; "
                "check them after the call",
                cls,
            )
