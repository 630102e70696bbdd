"""How the CLI writes: text of strangers made harmless, times, sizes, JSON.

Called by every command; calls Rich. Values go to standard output, everything for a person who
watches to standard error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import unicodedata
from collections.abc import Mapping
from datetime import datetime
from typing import IO, Any, cast

from rich.console import Console
from rich.text import Text

from hutch import types
from hutch.errors import Failure, HutchError, RequestRefused

_WIDTH_OF_FILES = 1000
_KEPT = frozenset("\n\t")
_ESCAPED = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
ENDING_STYLES = {"returned": "green", "cancelled": "yellow"}
STATE_STYLES = {"queued": "dim", "starting": "cyan", "running": "cyan", "waiting": "blue"}


def safe(text: str) -> str:
    """Text whose characters all are what they look like.

    Control characters (which move the cursor, change colours or a window's title, or answer back),
    characters that turn the direction of writing, and invisible ones are written as escapes. New
    lines and tabs stay.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_safe_character, text))


def _safe_character(character: str) -> str:
    if character in _KEPT or unicodedata.category(character) not in _ESCAPED:
        return character
    number = ord(character)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def line(text: str, limit: int = 120) -> str:
    """One safe line of at most `limit` characters."""
    flat = safe(" ".join(text[: limit * 4].split()))
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def complete_standard_files() -> None:
    """Opens what is closed of standard input, output and error.

    The next socket would take the number of a closed one. Writing to such an output still fails.
    """
    for number, name, flags in (
        (0, "stdin", os.O_RDONLY),
        (1, "stdout", os.O_RDONLY),
        (2, "stderr", os.O_WRONLY),
    ):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, flags)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8"))


def give_up(stream: IO[str]) -> None:
    """Lets nothing more reach a file that cannot be written, not even at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class _ForPeople:
    """Standard error, whose loss ends nothing: what is told there is not the result."""

    def write(self, text: str) -> int:
        try:
            return sys.stderr.write(text)
        except OSError:
            give_up(sys.stderr)
            return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


def error_console() -> Console:
    """Standard error, for people; nothing in a text is taken for markup."""
    return Console(
        file=cast("IO[str]", _ForPeople()),
        stderr=True,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=True,
    )


def output_console() -> Console:
    """Standard output, for tables; nothing in a text is taken for markup.

    Only a terminal has a width that tables must fit into.
    """
    width = None if sys.stdout.isatty() else _WIDTH_OF_FILES
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=False, width=width)


def age(value: float | None) -> str:
    """A long span in one unit."""
    if value is None:
        return "-"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if value >= length:
            return f"{int(value // length)} {unit}"
    return f"{int(max(value, 0))} s"


def seconds(value: float | None) -> str:
    """A span as people write it."""
    if value is None:
        return "-"
    if value < 10:
        return f"{value:.2f} s"
    if value < 600:
        return f"{value:.1f} s"
    minutes, rest = divmod(int(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def size(value: int) -> str:
    """A number of bytes as people write it."""
    if value < 1024:
        return f"{value} B"
    amount = float(value)
    for unit in ("KiB", "MiB", "GiB"):
        amount /= 1024
        if amount < 1024 or unit == "GiB":
            return f"{amount:.1f} {unit}"
    return f"{value} B"


def span(start: datetime | None, end: datetime | None) -> float | None:
    """The seconds between two times, where both are known."""
    return None if start is None or end is None else (end - start).total_seconds()


def outcome(invocation: types.Invocation) -> Text:
    """The ending kind, or the state while there is none, with its colour."""
    if invocation.ending is None:
        return Text(safe(invocation.state), style=STATE_STYLES.get(invocation.state, ""))
    kind = invocation.ending.kind
    return Text(safe(kind), style=ENDING_STYLES.get(kind, "red"))


def plain(value: Any) -> Any:
    """Dataclasses, times and failures as what JSON has; encoded values are left to `value_json`."""
    if isinstance(value, Failure):
        return {name: text for name, text in value.to_dict().items() if text}
    if isinstance(value, types.Value):
        return {
            "artifact_id": value.artifact_id,
            "sha256": value.sha256,
            "size_bytes": value.size_bytes,
        }
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def invocation_json(invocation: types.Invocation) -> dict[str, Any]:
    """An invocation as JSON, without its value, which is shown beside it."""
    document: dict[str, Any] = plain(dataclasses.replace(invocation, value=None))
    del document["value"]
    return document


def print_json(document: Any) -> None:
    """Prints one JSON document; what a terminal could take for a command is escaped in it."""
    text = json.dumps(plain(document), ensure_ascii=sys.stdout.isatty(), indent=2)
    write_output(text + "\n")


def write_output(text: str) -> None:
    """Writes to standard output as UTF-8; only a terminal gets it made harmless."""
    shown = safe(text) if sys.stdout.isatty() else text
    sys.stdout.buffer.write(shown.encode("utf-8", "backslashreplace"))
    sys.stdout.buffer.flush()


def error_json(error: HutchError) -> dict[str, Any]:
    """An error as JSON."""
    document: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, RequestRefused):
        document |= {"reason": error.reason, "details": error.details}
    return {"error": document}
