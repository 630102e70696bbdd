"""Strict JSON by the interpreter's own C code, without the import cost of `json`.

Called by `frames` and `values`, in a sandbox before and while it greets its host: there `json` and
what it imports would cost more than everything else together. Where the C code is not there, `json`
does the same.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Pairs = Callable[[list[tuple[str, Any]]], Any]

SPACE = " \t\n\r"


class _Rules:
    """What the C scanner reads its rules from."""

    strict = True
    object_hook = None
    parse_int = int

    def __init__(self, pairs: Pairs, parse_float: Callable[[str], Any]) -> None:
        self.object_pairs_hook = pairs
        self.parse_float = parse_float
        self.parse_constant = refuse_constant
        self.memo: dict[str, str] = {}


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes an object of its pairs.

    Raises:
        ValueError: a key is named twice.
    """
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("an object names a key twice")
    return result


def refuse_constant(text: str) -> Any:
    """Refuses NaN and the infinities, which are not JSON."""
    raise ValueError(f"{text} is not JSON")


def loads(text: str, parse_float: Callable[[str], Any] = float) -> Any:
    """Parses one JSON value.

    Raises:
        ValueError: the text is something else, or an object names a key twice.
        RecursionError: it is nested too deeply for the parser.
    """
    try:
        from _json import make_scanner
    except ImportError:
        import json

        return json.loads(
            text,
            object_pairs_hook=unique,
            parse_float=parse_float,
            parse_constant=refuse_constant,
        )
    text = text.strip(SPACE)
    try:
        rules: Any = _Rules(unique, parse_float)
        value, end = make_scanner(rules)(text, 0)
    except StopIteration as stop:
        raise ValueError(f"no JSON value at character {stop.value}") from None
    if end != len(text):
        raise ValueError(f"more than one JSON value, at character {end}")
    return value


def dumps(value: Any) -> str:
    """Writes a value of plain JSON types, compact and without escaping what need not be.

    Raises:
        TypeError: a part has no JSON form.
        ValueError: a part is NaN or infinite.
    """
    try:
        from _json import encode_basestring, make_encoder

        encoder: Any = make_encoder(
            None, _refuse, encode_basestring, None, ":", ",", False, False, False
        )
    except (ImportError, TypeError):
        import json

        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    if type(value) in (str, int, float, bool, type(None)):
        value = [value]  # the C encoder is one of containers
        return "".join(encoder(value, 0))[1:-1]
    return "".join(encoder(value, 0))


def _refuse(value: object) -> Any:
    raise TypeError(f"a {type(value).__name__} has no JSON form")
