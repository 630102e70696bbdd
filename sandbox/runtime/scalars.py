"""Decoders of the encoded scalars of docs/values.md, one function for each `$`-key.

Called by `values`. Each takes the parsed JSON under its key and raises `ValueError`, `TypeError`
or the library's own error when it is not what `values` would have written.
"""

from __future__ import annotations

import base64
import datetime
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def decoders() -> dict[str, Callable[[Any], Any]]:
    """Returns the decoder of each key."""
    return {
        "$bytes": decode_bytes,
        "$complex": decode_complex,
        "$float": decode_float,
        "$str": decode_text,
        "$datetime": decode_datetime,
        "$date": decode_date,
        "$time": decode_time,
        "$timedelta": decode_timedelta,
        "$decimal": decode_decimal,
        "$uuid": decode_uuid,
        "$path": decode_path,
        "$range": decode_range,
    }


def decode_bytes(body: Any) -> bytes:
    """Reads canonical base64."""
    return base64.b64decode(_text(body).encode("ascii"), validate=True)


def decode_text(body: Any) -> str:
    """Reads text with lone surrogates."""
    return decode_bytes(body).decode("utf-8", "surrogatepass")


def decode_float(body: Any) -> float:
    """Reads what JSON has no number for."""
    if body not in ("nan", "inf", "-inf"):
        raise ValueError(body)
    return float(body)


def decode_complex(body: Any) -> complex:
    """Reads real and imaginary part, each a number or an encoded float."""
    real, imaginary = _items(body, 2)
    return complex(_real(real), _real(imaginary))


def decode_datetime(body: Any) -> datetime.datetime:
    """Reads ISO 8601, or an object with fold and zone."""
    if isinstance(body, str):
        return datetime.datetime.fromisoformat(body)
    fold, zone = _fold_and_zone(body)
    value = datetime.datetime.fromisoformat(_text(body["iso"])).replace(fold=fold)
    return value if zone is None else value.replace(tzinfo=zone)


def decode_time(body: Any) -> datetime.time:
    """Reads ISO 8601, or an object with fold and zone."""
    if isinstance(body, str):
        return datetime.time.fromisoformat(body)
    fold, zone = _fold_and_zone(body)
    value = datetime.time.fromisoformat(_text(body["iso"])).replace(fold=fold)
    return value if zone is None else value.replace(tzinfo=zone)


def decode_date(body: Any) -> datetime.date:
    """Reads ISO 8601."""
    return datetime.date.fromisoformat(_text(body))


def decode_timedelta(body: Any) -> datetime.timedelta:
    """Reads days, seconds and microseconds."""
    days, seconds, microseconds = (_integer(part) for part in _items(body, 3))
    return datetime.timedelta(days, seconds, microseconds)


def decode_decimal(body: Any) -> Any:
    """Reads a decimal, nan and infinities included."""
    import decimal

    return decimal.Decimal(_text(body))


def decode_uuid(body: Any) -> Any:
    """Reads a UUID in its usual form."""
    import uuid

    value = uuid.UUID(_text(body))
    if str(value) != body:
        raise ValueError(body)
    return value


def decode_path(body: Any) -> Any:
    """Reads a path's text, plain or with lone surrogates."""
    import pathlib

    if isinstance(body, dict) and set(body) == {"$str"}:
        return pathlib.Path(decode_text(body["$str"]))
    return pathlib.Path(_text(body))


def decode_range(body: Any) -> range:
    """Reads start, stop and step."""
    start, stop, step = (_integer(part) for part in _items(body, 3))
    return range(start, stop, step)


def _fold_and_zone(body: Any) -> tuple[int, Any]:
    if not isinstance(body, dict) or set(body) != {"iso", "fold", "zone"}:
        raise ValueError("iso, fold and zone")
    fold, zone = body["fold"], body["zone"]
    if type(fold) is not int or fold not in (0, 1):
        raise ValueError("fold")
    if zone is None:
        return fold, None
    # A zone is data of the receiver's system, named by a plain key: nothing else is opened.
    if not re.fullmatch(r"[A-Za-z0-9_+-]{1,32}(/[A-Za-z0-9_+-]{1,32}){0,3}", _text(zone)):
        raise ValueError("zone")
    import zoneinfo

    return fold, zoneinfo.ZoneInfo(zone)


def _real(node: Any) -> float:
    if isinstance(node, dict) and set(node) == {"$float"}:
        return decode_float(node["$float"])
    if type(node) not in (int, float):
        raise TypeError(node)
    return float(node)


def _items(body: Any, count: int) -> list[Any]:
    if type(body) is not list or len(body) != count:
        raise ValueError(f"{count} items")
    return body


def _integer(node: Any) -> int:
    if type(node) is not int:
        raise TypeError(node)
    return node


def _text(node: Any) -> str:
    if type(node) is not str:
        raise TypeError(node)
    return node
