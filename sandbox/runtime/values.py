"""Python values as bytes of JSON (docs/values.md), both ways.

Called by the SDK, the guest and the REPL; calls `hints` to turn records into declared types. It
is a member of two packages (see docs/adr/0002), runs on Python 3.9 and needs the standard library
only: numpy, pandas and pydantic values are recognized where those libraries are loaded already.
Nothing that a value names is ever imported or looked up.
"""

from __future__ import annotations

import binascii
import math
import sys

from . import fastjson
from .errors import ValueDecodeError, ValueEncodeError, ValueTooLargeError
from .records import ArtifactReference, Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

__all__ = ["ArtifactReference", "Record", "decode", "encode", "parse"]

MAX_BYTES = 64 * 1024 * 1024
MAX_DEPTH = 100  # containers inside one another, in the encoded JSON
MAX_ELEMENTS = 2_000_000  # values in the encoded JSON, containers included
MAX_DIGITS = 4_300

_ABSENT: Any = object()
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_SMALL = 1 << 14_000  # certainly within the digits allowed


def encode(
    value: object, *, root: str = "result", tool: Callable[[Any], str] | None = None
) -> bytes:
    """Encodes a value.

    Args:
        value: any value of docs/values.md.
        root: what the value is called in the paths of errors.
        tool: gives the tool id of a function, or of what `tools` made; it may refuse with a
            ValueEncodeError. Without it neither can cross.

    Raises:
        ValueEncodeError: a part of it cannot cross; the message names its path.
        ValueTooLargeError: it is over one of the limits.
    """
    try:
        tree = _Encoder(tool).encode(value, 0)
        text = fastjson.dumps(tree)
    except _Unfit as problem:
        path = root + "".join(reversed(problem.parts))
        raise ValueEncodeError(f"{path} cannot cross: {problem.reason}", path) from None
    data = text.encode("utf-8")
    if len(data) > MAX_BYTES:
        raise ValueTooLargeError(
            f"the value has {len(data)} bytes when encoded; {MAX_BYTES} are allowed",
            f"{MAX_BYTES} bytes",
        )
    return data


def decode(
    data: bytes,
    *,
    hint: Any = _ABSENT,
    types: Sequence[type] = (),
    root: str = "result",
    artifact: Callable[[str], Any] | None = None,
    tool: Callable[[str], Any] | None = None,
) -> Any:
    """Decodes a value.

    Args:
        data: its encoded form.
        hint: the type it must be turned into; without one, classes come as `Record`.
        types: further classes that records of the same class name become.
        root: what the value is called in the paths of errors.
        artifact: makes the receiver's handle of an artifact from its id.
        tool: makes the receiver's stand-in of a tool from its id; without it there may be none.

    Raises:
        ValueDecodeError: the bytes are no encoded value, or the value does not fit the hint.
        ValueTooLargeError: it is over one of the limits.
        HintError: the hint is none that a value can be turned into.
    """
    decoder = _Decoder(artifact or ArtifactReference, tool)
    try:
        value = decoder.decode(parse(data), 0)
    except _Unfit as problem:
        path = root + "".join(reversed(problem.parts))
        raise ValueDecodeError(f"{path}: {problem.reason}", path) from None
    if hint is _ABSENT and not types:
        return value
    from .hints import convert

    return convert(value, object if hint is _ABSENT else hint, types=types, root=root)


def parse(data: bytes) -> Any:
    """Parses bytes as strict JSON: UTF-8, no key twice, no NaN.

    Raises:
        ValueDecodeError: they are something else.
        ValueTooLargeError: there are too many of them.
    """
    if len(data) > MAX_BYTES:
        raise ValueTooLargeError(
            f"the value has {len(data)} bytes; {MAX_BYTES} are allowed", f"{MAX_BYTES} bytes"
        )
    try:
        return fastjson.loads(data.decode("utf-8"))
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise ValueDecodeError(f"not an encoded value: {str(error)[:200]}") from None


class _Unfit(Exception):
    """A part cannot be encoded or decoded; the path grows on the way out."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.parts: list[str] = []


def _too_deep() -> ValueTooLargeError:
    return ValueTooLargeError(
        f"the value is nested deeper than {MAX_DEPTH} (or contains itself)", f"depth {MAX_DEPTH}"
    )


def _is_sound(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _base64(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode("ascii")


def _check_digits(value: int) -> None:
    if not -_SMALL < value < _SMALL and abs(value) >= 10**MAX_DIGITS:
        raise ValueTooLargeError(
            f"an integer has more than {MAX_DIGITS} digits", f"{MAX_DIGITS} digits"
        )


class _Encoder:
    """One encoding: counts elements and builds what `json.dumps` takes."""

    __slots__ = ("_elements", "_tool")

    def __init__(self, tool: Callable[[Any], str] | None) -> None:
        self._elements = 0
        self._tool = tool

    def encode(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind is dict or kind is list:
            return self._dict(value, depth) if kind is dict else self._list(value, depth)
        self._count(1)
        if kind is str:
            return self._text(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            _check_digits(value)
            return value
        if kind is float:
            return self._float(value)
        return self._other(value, depth)

    def _count(self, elements: int) -> None:
        self._elements += elements
        if self._elements > MAX_ELEMENTS:
            raise ValueTooLargeError(
                f"the value has more than {MAX_ELEMENTS} elements", f"{MAX_ELEMENTS} elements"
            )

    def _text(self, value: str) -> Any:
        if _is_sound(value):
            return value
        return {"$str": _base64(value.encode("utf-8", "surrogatepass"))}

    def _float(self, value: float) -> Any:
        if math.isfinite(value):
            return value
        return {"$float": "nan" if value != value else "inf" if value > 0 else "-inf"}

    def _list(self, value: Any, depth: int) -> list[Any]:
        if depth >= MAX_DEPTH:
            raise _too_deep()
        self._count(1)
        result: list[Any] = []
        try:
            for item in value:
                result.append(self.encode(item, depth + 1))  # noqa: PERF401 (its length is needed)
        except _Unfit as problem:
            problem.parts.append(f"[{len(result)}]")
            raise
        return result

    def _dict(self, value: dict[Any, Any], depth: int) -> dict[str, Any]:
        keys = list(value)
        if not all(type(key) is str and _is_sound(key) for key in keys):
            return self._map(value, depth)
        if len(keys) == 1 and keys[0].startswith("$"):
            return {"$dict": self._fields(value, depth + 1, item_part)}
        return self._fields(value, depth, item_part)

    def _map(self, value: dict[Any, Any], depth: int) -> dict[str, Any]:
        self._count(2)
        if depth + 2 >= MAX_DEPTH:
            raise _too_deep()
        pairs = []
        key: Any = None
        try:
            for key, item in value.items():
                pairs.append([self.encode(key, depth + 3), self.encode(item, depth + 3)])
        except _Unfit as problem:
            problem.parts.append(item_part(key))
            raise
        self._count(len(pairs))
        return {"$map": pairs}

    def _fields(
        self, fields: dict[str, Any], depth: int, part: Callable[[str], str]
    ) -> dict[str, Any]:
        if depth >= MAX_DEPTH:
            raise _too_deep()
        self._count(1)
        result = {}
        name = ""
        try:
            for name, item in fields.items():
                result[name] = self.encode(item, depth + 1)
        except _Unfit as problem:
            problem.parts.append(part(name))
            raise
        return result

    def _object(self, value: Any, fields: dict[str, Any], depth: int) -> dict[str, Any]:
        encoded = self._fields(fields, depth + 2, field_part)
        return {"$object": {"class": _class_name(value), "fields": encoded}}

    def _set(self, value: Any, depth: int) -> list[Any]:
        # Members have no order of their own: their text gives one that is the same everywhere.
        members = [(fastjson.dumps(item), item) for item in self._list(value, depth)]
        return [item for _, item in sorted(members, key=lambda member: member[0])]

    def _other(self, value: Any, depth: int) -> Any:
        """Encodes what is not plain JSON; each helper returns `_ABSENT` for what is not its own."""
        for step in (self._special, self._standard, self._library, self._plain_subclass):
            encoded = step(value, depth)
            if encoded is not _ABSENT:
                return encoded
        if callable(value) and not isinstance(value, type):
            return self._as_tool(value)
        raise _Unfit(_why_not(value))

    def _as_tool(self, value: Any) -> dict[str, str]:
        if self._tool is None:
            raise _Unfit(f"a {type(value).__name__}: functions cross as inputs only, as tools")
        try:
            return {"$tool": self._tool(value)}
        except ValueEncodeError as refusal:
            raise _Unfit(str(refusal)) from None

    def _special(self, value: Any, depth: int) -> Any:
        """Records, artifacts, enums, named tuples and dataclasses."""
        kind: Any = type(value)
        if kind is Record:
            if value._kind == "object":
                inner = self._fields(value._asdict(), depth + 2, field_part)
                return {"$object": {"class": value._class, "fields": inner}}
            if value._kind != "enum":
                from . import arrays

                body = arrays.encode_record(value, lambda v: self.encode(v, depth + 4))
                return {f"${value._kind}": body}
            inner = self.encode(value["value"], depth + 2)
            return {"$enum": {"class": value._class, "name": value["name"], "value": inner}}
        if hasattr(kind, "__hutch_artifact__"):
            return {"$artifact": str(value.__hutch_artifact__)}
        if hasattr(kind, "__hutch_tool__"):
            return self._as_tool(value)
        enum = sys.modules.get("enum")
        if enum is not None and isinstance(value, enum.Enum):
            inner = self.encode(value._value_, depth + 2)
            return {
                "$enum": {"class": _class_name(value), "name": value._name_ or "", "value": inner}
            }
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            fields = {name: item for name, item in zip(kind._fields, value)}  # noqa: C416
            return self._object(value, fields, depth)
        if hasattr(kind, "__dataclass_fields__"):
            names = [f.name for f in sys.modules["dataclasses"].fields(value)]
            return self._object(value, {name: getattr(value, name) for name in names}, depth)
        return _ABSENT

    def _standard(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind is tuple:
            return {"$tuple": self._list(value, depth + 1)}
        if kind is set or kind is frozenset:
            return {f"${kind.__name__}": self._set(value, depth + 1)}
        if isinstance(value, (bytes, bytearray, memoryview)):
            return {"$bytes": _base64(bytes(value))}
        if kind is complex:
            return {"$complex": [self._float(value.real), self._float(value.imag)]}
        if kind is range:
            for part in (value.start, value.stop, value.step):
                _check_digits(part)
            return {"$range": [value.start, value.stop, value.step]}
        if kind in (_loaded("datetime", "datetime"), _loaded("datetime", "time")):
            return {f"${kind.__name__}": _encode_clock(value)}
        if kind is _loaded("datetime", "date"):
            return {"$date": value.isoformat()}
        if kind is _loaded("datetime", "timedelta"):
            return {"$timedelta": [value.days, value.seconds, value.microseconds]}
        if isinstance(value, _loaded("decimal", "Decimal")):
            return {"$decimal": str(value)}
        if isinstance(value, _loaded("uuid", "UUID")):
            return {"$uuid": str(value)}
        if isinstance(value, _loaded("pathlib", "PurePath")):
            return {"$path": self._text(str(value))}
        return _ABSENT

    def _library(self, value: Any, depth: int) -> Any:
        if isinstance(value, _loaded("pydantic", "BaseModel")):
            fields = {n: value.__dict__[n] for n in type(value).model_fields if n in value.__dict__}
            fields.update(value.__pydantic_extra__ or {})
            return self._object(value, fields, depth)
        if isinstance(value, _loaded("numpy", "ndarray")):
            from . import arrays

            return {"$ndarray": arrays.encode_array(value, _Unfit)}
        if isinstance(value, _loaded("numpy", "generic")) and value.dtype.kind in "biufcU":
            return self.encode(value.item(), depth)
        if isinstance(value, _loaded("pandas", "DataFrame")):
            from . import arrays

            return {"$dataframe": arrays.encode_frame(value, lambda v: self.encode(v, depth + 4))}
        return _ABSENT

    def _plain_subclass(self, value: Any, depth: int) -> Any:
        """Subclasses of plain types cross as what they extend."""
        for base in (str, int, float, dict, list):
            if isinstance(value, base):
                return self.encode(_as_base(value, base), depth)
        return _ABSENT


def _as_base(value: Any, base: type) -> Any:
    if base is str:
        return str.__str__(value)
    if base is int:
        return int.__int__(value)
    if base is float:
        return float.__float__(value)
    if base is dict:
        return {_as_base(k, str) if isinstance(k, str) else k: v for k, v in dict.items(value)}
    return list(value)


def _encode_clock(value: Any) -> Any:
    """Encodes a datetime or time; fold and a zone's name are not in ISO 8601."""
    zone = value.tzinfo
    if zone is None or type(zone) is _loaded("datetime", "timezone"):
        if not value.fold:
            return value.isoformat()
        return {"iso": value.replace(fold=0).isoformat(), "fold": 1, "zone": None}
    if not isinstance(zone, _loaded("zoneinfo", "ZoneInfo")) or not zone.key:
        raise _Unfit(f"a time zone of class {type(zone).__name__}; use zoneinfo or a fixed offset")
    naive = value.replace(tzinfo=None, fold=0)
    return {"iso": naive.isoformat(), "fold": value.fold, "zone": zone.key}


def _loaded(module: str, name: str) -> Any:
    """Returns a class of a loaded module, else an empty tuple, of which nothing is an instance."""
    return getattr(sys.modules.get(module), name, ())


def _class_name(value: object) -> str:
    name = type(value).__qualname__
    return name if _is_sound(name) else "?"


def item_part(key: object) -> str:
    """Writes one step of a path into a mapping."""
    return f"[{fastjson.dumps(key)}]" if type(key) is str else f"[{_shorten(key)}]"


def field_part(name: str) -> str:
    """Writes one step of a path into an object."""
    return f".{name}"


def _shorten(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # the class is the caller's: its repr may do anything
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else text[:77] + "..."


def _why_not(value: object) -> str:
    name = type(value).__name__
    if isinstance(value, type):
        return f"the class {value.__name__}; give its instances"
    if hasattr(value, "__next__") or hasattr(value, "send"):
        return f"a {name}; give a list of its items"
    return f"a {name} has no encoded form; give its data, for example as a dict or dataclass"


class _Decoder:
    """One decoding: walks parsed JSON and builds the values."""

    __slots__ = ("_artifact", "_elements", "_tool")

    def __init__(self, artifact: Callable[[str], Any], tool: Callable[[str], Any] | None) -> None:
        self._artifact = artifact
        self._tool = tool
        self._elements = 0

    def decode(self, node: Any, depth: int) -> Any:
        self._elements += 1
        if self._elements > MAX_ELEMENTS:
            raise ValueTooLargeError(
                f"the value has more than {MAX_ELEMENTS} elements", f"{MAX_ELEMENTS} elements"
            )
        kind = type(node)
        if kind is list:
            return self._items(node, depth)
        if kind is dict:
            if len(node) == 1:
                (key,) = node
                if key.startswith("$"):
                    return self._special(key, node[key], depth + 1)
            return self._fields(node, depth, item_part)
        if kind is float and not math.isfinite(node):
            raise _Unfit("a number that no float can hold")
        if kind is int:
            _check_digits(node)
        return node

    def _items(self, node: Any, depth: int) -> list[Any]:
        if type(node) is not list:
            raise _Unfit("a list was expected inside the encoded value")
        if depth >= MAX_DEPTH:
            raise _too_deep()
        result: list[Any] = []
        try:
            for item in node:
                result.append(self.decode(item, depth + 1))  # noqa: PERF401 (its length is needed)
        except _Unfit as problem:
            problem.parts.append(f"[{len(result)}]")
            raise
        return result

    def _fields(self, node: Any, depth: int, part: Callable[[str], str]) -> dict[str, Any]:
        if type(node) is not dict:
            raise _Unfit("an object was expected inside the encoded value")
        if depth >= MAX_DEPTH:
            raise _too_deep()
        result = {}
        name = ""
        try:
            for name, item in node.items():
                result[name] = self.decode(item, depth + 1)
        except _Unfit as problem:
            problem.parts.append(part(name))
            raise
        return result

    def _special(self, key: str, body: Any, depth: int) -> Any:
        if key == "$tuple":
            return tuple(self._items(body, depth))
        if key in ("$set", "$frozenset"):
            return self._set(body, depth, set if key == "$set" else frozenset)
        if key == "$dict":
            return self._fields(body, depth, item_part)
        if key == "$map":
            return self._map(body, depth)
        if key == "$object":
            _check_keys(body, ("class", "fields"), key)
            fields = self._fields(body["fields"], depth + 1, field_part)
            return Record(_text(body["class"]), fields)
        if key == "$enum":
            _check_keys(body, ("class", "name", "value"), key)
            fields = {"name": _text(body["name"]), "value": self.decode(body["value"], depth + 1)}
            return Record(_text(body["class"]), fields, "enum")
        if key == "$artifact":
            return self._artifact(_text(body))
        if key == "$tool":
            if self._tool is None:
                raise _Unfit("a tool, where none may be: tools cross as inputs only")
            return self._tool(_text(body))
        if key in ("$ndarray", "$dataframe"):
            return self._table(key, body, depth)
        from . import scalars

        decoder = scalars.decoders().get(key)
        if decoder is None:
            raise _Unfit(f"{_shorten(key)} is no encoded form that this release knows")
        try:
            return decoder(body)
        except (ValueError, TypeError, ArithmeticError, LookupError, OSError, MemoryError):
            raise _Unfit(f"the content of {key} is malformed: {_shorten(body)}") from None

    def _set(self, body: Any, depth: int, kind: Any) -> Any:
        items = self._items(body, depth)
        try:
            result = kind(items)
        except TypeError:
            raise _Unfit("a set with a member that cannot be hashed") from None
        if len(result) != len(items):
            raise _Unfit("a set that names a member twice")
        return result

    def _map(self, body: Any, depth: int) -> dict[Any, Any]:
        result = {}
        for pair in self._items(body, depth):
            if type(pair) is not list or len(pair) != 2:
                raise _Unfit("a $map whose entries are not pairs")
            try:
                result[pair[0]] = pair[1]
            except TypeError:
                raise _Unfit("a $map with a key that cannot be hashed") from None
        if len(result) != len(body):
            raise _Unfit("a $map that names a key twice")
        return result

    def _table(self, key: str, body: Any, depth: int) -> Any:
        from . import arrays

        try:
            if key == "$ndarray":
                return arrays.decode_array(body)
            return arrays.decode_frame(body, lambda node: self.decode(node, depth + 3))
        except (ValueError, TypeError, KeyError, OverflowError, MemoryError) as error:
            raise _Unfit(f"the content of {key} is malformed: {str(error)[:200]}") from None


def _check_keys(body: Any, keys: tuple[str, ...], name: str) -> None:
    if type(body) is not dict or set(body) != set(keys):
        raise _Unfit(f"{name} must have exactly the keys {', '.join(keys)}")


def _text(node: Any) -> str:
    if type(node) is not str:
        raise _Unfit("a text was expected inside the encoded value")
    return node
