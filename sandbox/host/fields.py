"""Reads a frame's header key by key, strictly.

Called by `inbound` and `calls`. Every key must be taken once and none may be left, so a header with
a missing or an additional key is a breach.
"""

from __future__ import annotations

from typing import Any

from sandbox.runtime import frames

MAX_ID = 64


class ProtocolBreach(Exception):
    """A sandbox sent what no sandbox may send; it is destroyed. The text quotes little of it."""


class Fields:
    """One JSON object that is read to its end."""

    __slots__ = ("_rest", "_where")

    def __init__(self, value: object, where: str) -> None:
        """Takes the object.

        Args:
            value: What was decoded.
            where: How a breach names it.

        Raises:
            ProtocolBreach: it is not an object.
        """
        if type(value) is not dict:
            raise ProtocolBreach(f"{where}: not an object")
        self._rest: dict[str, Any] = dict(value)
        self._where = where

    def take(self, key: str) -> Any:
        """Takes a value of any type.

        Raises:
            ProtocolBreach: the key is missing.
        """
        try:
            return self._rest.pop(key)
        except KeyError:
            raise self.breach(key, "missing") from None

    def has(self, key: str) -> bool:
        """Whether the key is there and was not taken."""
        return key in self._rest

    def text(self, key: str, limit: int = frames.MAX_TEXT) -> str:
        """Takes a text of at most `limit` characters."""
        value = self.take(key)
        if type(value) is not str or len(value) > limit:
            raise self.breach(key, f"not a text of at most {limit} characters")
        return value

    def identifier(self, key: str, limit: int = MAX_ID) -> str:
        """Takes an id: 1 to `limit` visible ASCII characters."""
        value = self.text(key, limit)
        if not value or not value.isascii() or not value.isprintable() or " " in value:
            raise self.breach(key, "not an id")
        return value

    def choice(self, key: str, choices: dict[str, Any]) -> Any:
        """Takes one of a few texts and returns what it stands for."""
        value = self.take(key)
        if type(value) is not str or value not in choices:
            raise self.breach(key, "not one of the texts that are allowed there")
        return choices[value]

    def number(self, key: str, limit: int = frames.MAX_INTEGER) -> int:
        """Takes a whole number from 0 to `limit`."""
        value = self.take(key)
        if type(value) is not int or not 0 <= value <= limit:
            raise self.breach(key, f"not a whole number from 0 to {limit}")
        return value

    def number_or_none(self, key: str, limit: int = frames.MAX_INTEGER) -> int | None:
        """Takes a whole number or null."""
        if self._rest.get(key, 0) is None:
            del self._rest[key]
            return None
        return self.number(key, limit)

    def flag(self, key: str) -> bool:
        """Takes a boolean."""
        value = self.take(key)
        if type(value) is not bool:
            raise self.breach(key, "not a boolean")
        return value

    def items(self, key: str, limit: int) -> list[Any]:
        """Takes a list of at most `limit` items."""
        value = self.take(key)
        if type(value) is not list or len(value) > limit:
            raise self.breach(key, f"not a list of at most {limit} items")
        return value

    def object(self, key: str) -> Fields:
        """Takes an object, to be read the same way."""
        return Fields(self.take(key), f"{self._where}.{key}")

    def object_or_none(self, key: str) -> Fields | None:
        """Takes an object or null."""
        value = self.take(key)
        return None if value is None else Fields(value, f"{self._where}.{key}")

    def end(self) -> None:
        """Says that all was taken.

        Raises:
            ProtocolBreach: a key is left.
        """
        if self._rest:
            key = min(self._rest)[:MAX_ID]
            raise ProtocolBreach(f"{self._where}: a key that does not belong there: {key!r}")

    def breach(self, key: str, problem: str) -> ProtocolBreach:
        """Makes the breach that names a key of this object."""
        return ProtocolBreach(f"{self._where}.{key}: {problem}")
