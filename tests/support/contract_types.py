"""The types that the hints of `tests/unit/golden_contracts.json` name.

Called by the tests of both schema generators, the runtime's and the SDK's.
"""

from __future__ import annotations

import collections.abc
import datetime
import decimal
import enum
import pathlib
import typing
import uuid
from dataclasses import dataclass, field


class Color(enum.Enum):
    """An enum with text values."""

    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    """An enum with whole numbers."""

    LOW = 1
    HIGH = 2


@dataclass
class Point:
    """A dataclass without defaults."""

    x: int
    y: float


@dataclass
class Row:
    """A dataclass with a default and another class inside."""

    name: str
    at: Point
    tags: list[str] = field(default_factory=list)


@dataclass
class Node:
    """A dataclass that contains itself."""

    value: int
    children: list[Node]


class Pair(typing.NamedTuple):
    """A named tuple with a default."""

    left: int
    right: str = ""


class Movie(typing.TypedDict):
    """A typed dictionary."""

    title: str
    year: int


class Options(typing.TypedDict, total=False):
    """A typed dictionary in which nothing is required."""

    verbose: bool


def namespace() -> dict[str, object]:
    """Returns the names in which a golden hint is evaluated."""
    types = (Color, Level, Point, Row, Node, Pair, Movie, Options)
    return {
        "typing": typing,
        "datetime": datetime,
        "decimal": decimal,
        "uuid": uuid,
        "pathlib": pathlib,
        "abc": collections.abc,
        **{cls.__name__: cls for cls in types},
    }
