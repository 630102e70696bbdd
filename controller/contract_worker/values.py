"""Reads a value in its encoded form and refuses what is not well formed (docs/values.md).

Called by this package's `__main__`. The result has two sides: the value as it was encoded, for
words about places in it, and the instance for the contract, in which an `$object` stands as its
fields and an `$enum` as its value.
"""

from __future__ import annotations

import binascii
import json
import math
import re
import sys
from dataclasses import dataclass, field
from typing import Any, NoReturn

BYTES_MAX = 64 * 1024 * 1024
DEPTH_MAX = 100  # containers inside one another, in the encoded JSON
ELEMENTS_MAX = 2_000_000  # values in the encoded JSON, containers included
DIGITS_MAX = 4300
NAMED_MAX = 1000

_SHORT_TEXT = 1024
_LARGE = 4 * 1024 * 1024
# A value has at most so many commas and opening brackets for each element.
_SEPARATORS_PER_ELEMENT = 2
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"')
_ARTIFACT_ID = re.compile(r"art_[0-9a-z]{1,120}")
_TOOL_ID = re.compile(r"tool_[0-9A-Za-z_]{1,100}")
_FLOATS = frozenset({"nan", "inf", "-inf"})


class ValueInvalid(Exception):
    """The bytes are no value. `limit` names the limit when they are only too much."""

    def __init__(self, problem: str, limit: str = "") -> None:
        super().__init__(problem)
        self.limit = limit


@dataclass(slots=True, kw_only=True)
class Decoded:
    """A value that is well formed."""

    encoded: Any
    instance: Any = None
    artifact_ids: list[str] = field(default_factory=list)
    tool_ids: list[str] = field(default_factory=list)


def decode(data: bytes) -> Decoded:
    """Parses and checks a value.

    Raises:
        ValueInvalid: it is not well formed, or over a limit.
    """
    if len(data) > BYTES_MAX:
        raise ValueInvalid("the value is over 64 MiB", "64 MiB")
    if len(data) > _LARGE:
        _check_amount(data)
    decoded = Decoded(encoded=parse_json(data))
    walk = _Walk(decoded, check_text=b"\\ud" in data or b"\\uD" in data)
    decoded.instance = walk.value(decoded.encoded, 0)
    walk.finish()
    return decoded


def parse_json(data: bytes) -> Any:
    """Parses JSON more strictly than `json` does.

    Raises:
        ValueInvalid: it is not JSON, repeats a key, or is nested too deeply.
    """
    sys.set_int_max_str_digits(DIGITS_MAX)
    try:
        text = data.decode("utf-8")
        return json.loads(text, object_pairs_hook=_pairs, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ValueInvalid("it is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueInvalid(f"it is not JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise ValueInvalid("it is nested too deeply", "depth 100") from error
    except ValueError as error:  # what `int` raises
        raise ValueInvalid("an integer is too long", "4300 digits") from error


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueInvalid("an object names a key twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueInvalid(f"it is not JSON: {name}")


def _check_amount(data: bytes) -> None:
    """Bounds the elements of a large value before they cost memory."""
    bare = _STRING.sub(b"", data)
    if sum(map(bare.count, (b",", b"[", b"{"))) > ELEMENTS_MAX * _SEPARATORS_PER_ELEMENT:
        raise ValueInvalid("it has too many elements", "2,000,000 elements")


class _Walk:
    """One walk over an encoded value. Unchanged parts of the instance are the encoded ones."""

    def __init__(self, decoded: Decoded, *, check_text: bool) -> None:
        self._decoded = decoded
        self._check_text = check_text
        self._count = 0

    def value(self, node: Any, depth: int) -> Any:
        """Checks one value inside `depth` containers; returns it as the contract sees it."""
        kind = type(node)
        if kind is list:
            return self._items(node, depth)
        if kind is dict:
            if len(node) == 1 and (key := next(iter(node))).startswith("$"):
                self._enter(depth)
                return self._special(key, node, depth + 1)
            return self._members(node, depth)
        self._count += 1
        if kind is str:
            self._text(node)
        elif kind is float and not math.isfinite(node):
            raise ValueInvalid("a number is out of range")
        return node

    def finish(self) -> None:
        """Checks the number of elements of the whole value."""
        if self._count > ELEMENTS_MAX:
            raise ValueInvalid("it has too many elements", "2,000,000 elements")

    def _enter(self, depth: int) -> None:
        """Counts one container, and with it all scalars since the last one."""
        if depth >= DEPTH_MAX:
            raise ValueInvalid("it is nested too deeply", "depth 100")
        self._count += 1
        self.finish()

    def _text(self, text: str) -> None:
        if self._check_text and not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueInvalid("a text has a lone surrogate") from error

    def _items(self, node: list[Any], depth: int) -> list[Any]:
        self._enter(depth)
        changed: list[Any] | None = None
        for index, item in enumerate(node):
            seen = self.value(item, depth + 1)
            if seen is not item:
                changed = changed or list(node)
                changed[index] = seen
        return node if changed is None else changed

    def _members(self, node: dict[str, Any], depth: int) -> dict[str, Any]:
        self._enter(depth)
        changed: dict[str, Any] | None = None
        for key, item in node.items():
            self._text(key)
            seen = self.value(item, depth + 1)
            if seen is not item:
                changed = changed or dict(node)
                changed[key] = seen
        return node if changed is None else changed

    def _special(self, key: str, node: dict[str, Any], depth: int) -> Any:
        """Checks an object with one `$`-key; its body is inside `depth` containers."""
        body = node[key]
        match key:
            case "$tuple" | "$set" | "$frozenset":
                _demand(isinstance(body, list), key)
                seen: Any = self._items(body, depth)
            case "$map":
                seen = self._map(body, depth)
            case "$dict":
                _demand(isinstance(body, dict) and len(body) == 1, key)
                _demand(next(iter(body)).startswith("$"), key)
                seen = self._members(body, depth)
            case "$object":
                return self._object(body, depth)
            case "$enum":
                _demand(_has_keys(body, {"class", "name", "value"}), key)
                _demand(_is_text(body["class"]) and _is_text(body["name"]), key)
                return self.value(body["value"], depth + 1)
            case "$dataframe":
                seen = self._dataframe(body, depth)
            case "$artifact":
                _demand(isinstance(body, str) and bool(_ARTIFACT_ID.fullmatch(body)), key)
                _note(self._decoded.artifact_ids, body, "artifacts")
                return node
            case "$tool":
                _demand(isinstance(body, str) and bool(_TOOL_ID.fullmatch(body)), key)
                _note(self._decoded.tool_ids, body, "tools")
                return node
            case _:
                _demand(key in _PLAIN and _PLAIN[key](body), key)
                self._texts_of(body)
                return node
        return node if seen is body else {key: seen}

    def _texts_of(self, body: Any) -> None:
        """Checks the texts of a plain payload, whose shape is known to be flat."""
        if not self._check_text:
            return
        parts = (
            body.values() if isinstance(body, dict) else body if isinstance(body, list) else [body]
        )
        for part in parts:
            if isinstance(part, str):
                self._text(part)

    def _object(self, body: Any, depth: int) -> Any:
        _demand(_has_keys(body, {"class", "fields"}) and _is_text(body["class"]), "$object")
        fields = body["fields"]
        # A field like `$tuple` would let an object pass for what it is not.
        _demand(isinstance(fields, dict), "$object")
        _demand(not any(name.startswith("$") for name in fields), "$object")
        return self._members(fields, depth + 1)

    def _map(self, body: Any, depth: int) -> Any:
        _demand(isinstance(body, list), "$map")
        self._enter(depth)
        changed: list[Any] | None = None
        for index, pair in enumerate(body):
            _demand(isinstance(pair, list) and len(pair) == 2, "$map")
            seen = self._items(pair, depth + 1)
            if seen is not pair:
                changed = changed or list(body)
                changed[index] = seen
        return body if changed is None else changed

    def _dataframe(self, body: Any, depth: int) -> Any:
        _demand(isinstance(body, dict), "$dataframe")
        form = body.get("format")
        if form == "arrow":
            _demand(_is_base64(body.get("data")), "$dataframe")
            return body
        _demand(form == "columns" and isinstance(body.get("columns"), list), "$dataframe")
        for column in body["columns"]:
            _demand(isinstance(column, list) and len(column) == 2, "$dataframe")
            _demand(isinstance(column[1], list), "$dataframe")
        return self._members(body, depth)


def _note(known: list[str], name: str, kind: str) -> None:
    if name not in known:
        if len(known) >= NAMED_MAX:
            raise ValueInvalid(f"it names too many {kind}", f"1,000 {kind}")
        known.append(name)


def _demand(fits: bool, key: str) -> None:
    if not fits:
        shown = key if len(key) <= 40 else key[:40] + "..."
        raise ValueInvalid(f"{json.dumps(shown)} is not an encoded value as documented")


def _has_keys(body: Any, keys: set[str]) -> bool:
    return isinstance(body, dict) and body.keys() == keys


def _is_text(body: Any) -> bool:
    return isinstance(body, str) and len(body) <= _SHORT_TEXT


def _is_integer(body: Any) -> bool:
    return isinstance(body, int) and not isinstance(body, bool)


def _is_real(body: Any) -> bool:
    if isinstance(body, dict):
        return _has_keys(body, {"$float"}) and _is_float(body["$float"])
    return _is_integer(body) or (isinstance(body, float) and math.isfinite(body))


def _is_float(body: Any) -> bool:
    return isinstance(body, str) and body in _FLOATS


def _is_complex(body: Any) -> bool:
    return isinstance(body, list) and len(body) == 2 and all(map(_is_real, body))


def _is_three_integers(body: Any) -> bool:
    return isinstance(body, list) and len(body) == 3 and all(map(_is_integer, body))


def _is_base64(body: Any) -> bool:
    if not isinstance(body, str) or not body.isascii():
        return False
    try:
        binascii.a2b_base64(body, strict_mode=True)
    except binascii.Error:
        return body == ""
    return True


def _is_moment(body: Any) -> bool:
    if not isinstance(body, dict):
        return _is_text(body)
    zone = body.get("zone")
    return (
        body.keys() <= {"iso", "fold", "zone"}
        and _is_text(body.get("iso"))
        and body.get("fold", 0) in (0, 1)
        and (zone is None or _is_text(zone))
    )


def _is_long_text(body: Any) -> bool:
    return isinstance(body, str)


def _is_array(body: Any) -> bool:
    return (
        isinstance(body, dict)
        and body.keys() == {"dtype", "shape", "data"}
        and _is_text(body["dtype"])
        and isinstance(body["shape"], list)
        and len(body["shape"]) <= 64
        and all(_is_integer(size) and size >= 0 for size in body["shape"])
        and _is_base64(body["data"])
    )


_PLAIN = {
    "$bytes": _is_base64,
    "$str": _is_base64,
    "$complex": _is_complex,
    "$float": _is_float,
    "$datetime": _is_moment,
    "$time": _is_moment,
    "$date": _is_text,
    "$timedelta": _is_three_integers,
    "$decimal": _is_long_text,
    "$uuid": _is_text,
    "$path": _is_long_text,
    "$range": _is_three_integers,
    "$ndarray": _is_array,
}
