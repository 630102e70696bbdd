"""Turns a decoded value into the type that its receiver declared.

Called by `values.decode` and, for its view of a hint, by `returns`. The hint is the receiver's own;
the value is data: its class names choose between the members of a union and nothing else. A
member of two packages (see docs/adr/0002).
"""

from __future__ import annotations

import collections.abc
import datetime
import decimal
import enum
import math
import pathlib
import sys
import types as types_module
import typing
import uuid
from typing import TYPE_CHECKING, Any, Union

from .errors import HintError, ValueDecodeError
from .records import Record
from .values import item_part

if TYPE_CHECKING:
    from collections.abc import Sequence

EXACT = (bool, str, bytes, complex, datetime.datetime, datetime.date, datetime.time)
EXACT += (datetime.timedelta, decimal.Decimal, uuid.UUID, range, Record)  # type: ignore[assignment]
PATHS = (pathlib.Path, pathlib.PurePath, pathlib.PosixPath, pathlib.PurePosixPath)
LISTS = (list, collections.abc.MutableSequence)
SEQUENCES = (
    collections.abc.Sequence,
    collections.abc.Collection,
    collections.abc.Iterable,
    collections.abc.Reversible,
)
MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
SETS = (collections.abc.Set,)
_NONE = type(None)
_FIELD_MARKS = ("Required", "NotRequired", "ReadOnly", "Final")


class Fields:
    """The fields of a dataclass, named tuple, typed dictionary or pydantic model."""

    __slots__ = ("closed", "hints", "required")

    def __init__(self, hints: dict[str, Any], required: set[str], closed: bool = True) -> None:
        """Holds each field's hint, which are required, and whether others are refused."""
        self.hints = hints
        self.required = required
        self.closed = closed


def convert(value: Any, hint: Any, *, types: Sequence[type] = (), root: str = "result") -> Any:
    """Turns a decoded value into the type of a hint.

    Args:
        value: what `values.decode` made, with records for classes.
        hint: any hint of the standard library, or a class of pydantic.
        types: classes that records of the same name become wherever they are.
        root: what the value is called in the paths of errors.

    Raises:
        ValueDecodeError: the value does not fit; the message names path, expected and got.
        HintError: the hint is none that a value can be turned into.
    """
    try:
        return _Converter({cls.__qualname__: cls for cls in types}).convert(value, hint)
    except _Misfit as problem:
        path = root + "".join(reversed(problem.parts))
        message = f"{path}: expected {problem.expected}, got {problem.got}"
        raise ValueDecodeError(message, path) from None


def strip(hint: Any) -> Any:
    """Removes what does not change the values of a hint: notes, new names, aliases, field marks."""
    while True:
        origin = typing.get_origin(hint)
        if _is_annotated(hint):
            hint = hint.__origin__
        elif origin is not None and getattr(origin, "_name", "") in _FIELD_MARKS:
            hint = typing.get_args(hint)[0]
        elif hasattr(hint, "__supertype__"):  # NewType
            hint = hint.__supertype__
        elif type(hint).__name__ == "TypeAliasType":
            hint = hint.__value__
        elif isinstance(hint, typing.TypeVar):
            hint = hint.__bound__ or (Union[hint.__constraints__] if hint.__constraints__ else Any)
        else:
            return _NONE if hint is None else hint


def describe(hint: Any) -> str:
    """Writes a hint as its author would."""
    if hint is _NONE or hint is None:
        return "None"
    if isinstance(hint, type) and typing.get_origin(hint) is None:
        return hint.__qualname__
    return str(hint).replace("typing.", "")


def is_union(hint: Any) -> bool:
    """Tells whether a hint is a union, written in either way."""
    union_type = getattr(types_module, "UnionType", None)
    origin = typing.get_origin(hint)
    return origin is Union or (union_type is not None and origin is union_type)


def is_named_tuple(hint: Any) -> bool:
    """Tells whether a hint is a named tuple's class."""
    return isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields")


def is_model(hint: Any) -> bool:
    """Tells whether a hint is a pydantic model's class."""
    base = getattr(sys.modules.get("pydantic"), "BaseModel", None)
    return base is not None and isinstance(hint, type) and issubclass(hint, base)


def fields_of(hint: Any) -> Fields | None:
    """Returns the fields of a class that has declared ones, else None.

    Raises:
        HintError: an annotation cannot be resolved.
    """
    if not isinstance(hint, type):
        return None
    if hasattr(hint, "__dataclass_fields__"):
        import dataclasses

        declared = [f for f in dataclasses.fields(hint) if f.init]
        missing = dataclasses.MISSING
        required = {
            f.name for f in declared if f.default is missing and f.default_factory is missing
        }
        hints = _hints(hint)
        return Fields({f.name: hints[f.name] for f in declared}, required)
    if is_named_tuple(hint):
        hints = _hints(hint)
        names: tuple[str, ...] = hint._fields  # type: ignore[attr-defined]
        defaults = getattr(hint, "_field_defaults", {})
        return Fields({n: hints.get(n, Any) for n in names}, set(names) - set(defaults))
    if issubclass(hint, dict) and hasattr(hint, "__required_keys__"):
        return Fields(_hints(hint), _required_keys(hint))
    if is_model(hint):
        model: Any = hint
        hints = {name: info.annotation for name, info in model.model_fields.items()}
        required = {name for name, info in model.model_fields.items() if info.is_required()}
        return Fields(hints, required, model.model_config.get("extra") == "forbid")
    return None


def _required_keys(hint: Any) -> set[str]:
    """Returns a typed dictionary's required keys; Python 3.9 and 3.10 do not resolve text marks."""
    required = set(hint.__required_keys__)
    for name, field in _hints(hint, strip_marks=False).items():
        mark = getattr(typing.get_origin(field), "_name", "")
        if mark == "NotRequired":
            required.discard(name)
        elif mark == "Required":
            required.add(name)
    return required


def _hints(cls: Any, strip_marks: bool = True) -> dict[str, Any]:
    try:
        found = typing.get_type_hints(cls, include_extras=True)
    except Exception as error:  # annotations are code of the hint's author
        message = f"the annotations of {describe(cls)} do not resolve: {error}"
        raise HintError(message, cls) from None
    if not strip_marks:
        return found
    return {name: _unmark(hint) for name, hint in found.items()}


def _unmark(hint: Any) -> Any:
    while getattr(typing.get_origin(hint), "_name", "") in _FIELD_MARKS:
        hint = typing.get_args(hint)[0]
    return hint


def _is_annotated(hint: Any) -> bool:
    return hasattr(hint, "__metadata__") and hasattr(hint, "__origin__")


class _Misfit(Exception):
    """A part does not fit; the path grows on the way out."""

    def __init__(self, expected: str, value: object) -> None:
        super().__init__(expected)
        self.expected = expected
        self.got = _shorten(value)
        self.parts: list[str] = []


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."


class _Converter:
    """One conversion; knows the classes given by name."""

    __slots__ = ("_classes",)

    def __init__(self, classes: dict[str, type]) -> None:
        self._classes = classes

    def convert(self, value: Any, hint: Any) -> Any:
        hint = strip(hint)
        if hint is Any or hint is object:
            return self._anything(value)
        if is_union(hint):
            return self._union(value, typing.get_args(hint), hint)
        origin = typing.get_origin(hint) or hint
        if origin is typing.Literal:
            return self._literal(value, hint)
        if not isinstance(origin, type):
            raise HintError(f"{describe(hint)} is no hint that a value can be turned into", hint)
        return self._class(value, origin, typing.get_args(hint), hint)

    def _class(self, value: Any, origin: Any, args: tuple[Any, ...], hint: Any) -> Any:
        if origin is _NONE:
            return self._exact(value, value is None, hint)
        if origin in (int, float):
            return self._number(value, origin, hint)
        if origin in EXACT:
            return self._exact(value, type(value) is origin, hint)
        if origin in PATHS:
            return self._exact(value, isinstance(value, pathlib.PurePath), hint)
        if issubclass(origin, enum.Enum):
            return self._enum(value, origin)
        fields = fields_of(origin)
        if fields is not None:
            return self._object(value, origin, fields, args)
        if origin is tuple:
            return self._tuple(value, args, hint)
        if origin in LISTS or origin in SEQUENCES:
            return self._sequence(value, origin, args, hint)
        if origin in (set, frozenset) or origin in SETS:
            return self._set(value, origin, args, hint)
        if origin in MAPPINGS:
            return self._mapping(value, args, hint)
        return self._foreign(value, origin, hint)

    def _exact(self, value: Any, fits: bool, hint: Any) -> Any:
        if not fits:
            raise _Misfit(describe(hint), value)
        return value

    def _number(self, value: Any, kind: Any, hint: Any) -> Any:
        if kind is int and type(value) is float and math.isfinite(value) and value.is_integer():
            return int(value)  # JSON Schema takes 1.0 for an integer
        if kind is float and type(value) is int:
            try:
                return float(value)
            except OverflowError:
                raise _Misfit(describe(hint), value) from None
        return self._exact(value, type(value) is kind, hint)

    def _literal(self, value: Any, hint: Any) -> Any:
        raw = value["value"] if isinstance(value, Record) and value._kind == "enum" else value
        for choice in typing.get_args(hint):
            plain = choice.value if isinstance(choice, enum.Enum) else choice
            if type(plain) is type(raw) and plain == raw:
                return choice
        raise _Misfit(describe(hint), value)

    def _enum(self, value: Any, kind: Any) -> Any:
        raw = value["value"] if isinstance(value, Record) and value._kind == "enum" else value
        if isinstance(raw, kind):
            return raw
        for member in kind:
            if type(member.value) is type(raw) and member.value == raw:
                return member
        if issubclass(kind, enum.Flag) and type(raw) is int:
            try:
                return kind(raw)  # flags have values that no single member has
            except ValueError:
                pass
        raise _Misfit(describe(kind), value)

    def _object(self, value: Any, cls: Any, fields: Fields, args: tuple[Any, ...]) -> Any:
        if not issubclass(cls, dict) and isinstance(value, cls):
            return value
        if isinstance(value, Record) and value._kind == "object":
            given = value._asdict()
        elif isinstance(value, dict) and all(type(name) is str for name in value):
            given = dict(value)
        else:
            raise _Misfit(describe(cls), value)
        unknown = sorted(set(given) - set(fields.hints)) if fields.closed else []
        missing = sorted(fields.required - set(given))
        if unknown or missing:
            names = ", ".join(unknown or missing)
            raise _Misfit(f"{describe(cls)} {'without' if unknown else 'with'} {names}", value)
        if is_model(cls):
            return self._model(given, cls)
        variables = dict(zip(getattr(cls, "__parameters__", ()), args))
        built = {}
        for name, item in given.items():
            hint = fields.hints.get(name, Any)
            built[name] = self._at(f".{name}", item, variables.get(hint, hint))
        return cls(**built)

    def _model(self, given: dict[str, Any], cls: Any) -> Any:
        plain: Any = {name: _unrecord(item) for name, item in given.items()}
        if getattr(cls, "__pydantic_root_model__", False) and set(plain) == {"root"}:
            plain = plain["root"]
        try:
            return cls.model_validate(plain, by_alias=True, by_name=True)
        except TypeError:
            pass  # pydantic before 2.11 has no such arguments
        except ValueError as error:
            raise _Misfit(f"{describe(cls)} ({error})"[:2000], given) from None
        try:
            return cls.model_validate(plain)
        except ValueError as error:
            raise _Misfit(f"{describe(cls)} ({error})"[:2000], given) from None

    def _foreign(self, value: Any, cls: Any, hint: Any) -> Any:
        if isinstance(value, cls):
            return value
        if hasattr(cls, "__get_pydantic_core_schema__") and "pydantic" in sys.modules:
            try:
                return sys.modules["pydantic"].TypeAdapter(cls).validate_python(_unrecord(value))
            except ValueError as error:
                raise _Misfit(f"{describe(hint)} ({error})"[:2000], value) from None
        # Handles, arrays and frames were built by the decoder: their classes need no conversion.
        if cls.__module__.split(".")[0] in ("numpy", "pandas") or hasattr(
            cls, "__hutch_artifact__"
        ):
            raise _Misfit(describe(hint), value)
        raise HintError(f"{describe(hint)} is no hint that a value can be turned into", hint)

    def _tuple(self, value: Any, args: tuple[Any, ...], hint: Any) -> Any:
        self._exact(value, type(value) is tuple, hint)
        if hint is tuple or hint is typing.Tuple:  # noqa: UP006
            return tuple(self._items(value, Any))
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(self._items(value, args[0]))
        if args == ((),):  # Tuple[()] before Python 3.11
            args = ()
        if len(value) != len(args):
            raise _Misfit(f"{describe(hint)} with {len(args)} items", value)
        return tuple(self._at(f"[{index}]", item, args[index]) for index, item in enumerate(value))

    def _sequence(self, value: Any, origin: Any, args: tuple[Any, ...], hint: Any) -> Any:
        allowed: tuple[type, ...] = (list,) if origin in LISTS else (list, tuple)
        self._exact(value, type(value) in allowed, hint)
        items = self._items(value, args[0] if args else Any)
        return tuple(items) if type(value) is tuple else items

    def _set(self, value: Any, origin: Any, args: tuple[Any, ...], hint: Any) -> Any:
        allowed = (set, frozenset) if origin in SETS else (origin,)
        self._exact(value, type(value) in allowed, hint)
        inner = args[0] if args else Any
        return type(value)(self._at("{...}", item, inner) for item in value)

    def _mapping(self, value: Any, args: tuple[Any, ...], hint: Any) -> Any:
        self._exact(value, type(value) is dict, hint)
        key_hint, item_hint = args if len(args) == 2 else (Any, Any)
        result = {}
        for key, item in value.items():
            part = item_part(key)
            new_key = self._at(part, key, key_hint)
            result[new_key] = self._at(part, item, item_hint)
        return result

    def _items(self, value: Any, hint: Any) -> list[Any]:
        return [self._at(f"[{index}]", item, hint) for index, item in enumerate(value)]

    def _at(self, part: str, value: Any, hint: Any) -> Any:
        try:
            return self.convert(value, hint)
        except _Misfit as problem:
            problem.parts.append(part)
            raise

    def _union(self, value: Any, members: tuple[Any, ...], hint: Any) -> Any:
        ordered = sorted(members, key=lambda member: not _is_likely(value, strip(member)))
        deepest: _Misfit | None = None
        for member in ordered:
            try:
                return self.convert(value, member)
            except _Misfit as problem:
                if problem.parts and (deepest is None or len(problem.parts) > len(deepest.parts)):
                    deepest = problem
        raise deepest or _Misfit(describe(hint), value)

    def _anything(self, value: Any) -> Any:
        """Looks for records of the classes given by name; everything else stays as it is."""
        if not self._classes:
            return value
        if isinstance(value, Record):
            cls = self._classes.get(value._class)
            if cls is not None:
                return self.convert(value, cls)
            fields = {name: self._at(f".{name}", value[name], Any) for name in value}
            return Record(value._class, fields, value._kind)
        if type(value) in (list, tuple):
            return type(value)(self._items(value, Any))
        if type(value) in (set, frozenset):
            return type(value)(self._at("{...}", item, Any) for item in value)
        if type(value) is dict:
            return self._mapping(value, (), dict)
        return value


def _is_likely(value: Any, member: Any) -> bool:
    """Tells whether a union's member should be tried first: the sender's class, the exact type."""
    origin = typing.get_origin(member) or member
    if isinstance(value, Record):
        return bool(getattr(origin, "__qualname__", "") == value._class)
    return type(value) is origin


def _unrecord(value: Any) -> Any:
    """Turns records into what pydantic takes for them: dictionaries, and an enum's value."""
    if isinstance(value, Record):
        if value._kind == "enum":
            return value["value"]
        return {name: _unrecord(value[name]) for name in value}
    if isinstance(value, dict):
        return {_unrecord(key): _unrecord(item) for key, item in value.items()}
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(_unrecord(item) for item in value)
    return value
