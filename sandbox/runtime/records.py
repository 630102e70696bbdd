"""What stands for a class or an artifact that the receiver of a value did not declare.

Called by `values` and `hints`. A member of two packages (see docs/adr/0002).
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


class Record:
    """A read-only object of a class that the receiver did not declare.

    Fields are attributes and items. `_class` is the sender's name for the class, `_kind` is
    `object`, `enum` (with the fields `name` and `value`), or `ndarray` or `dataframe` where the
    library is missing.
    """

    __slots__ = ("_class", "_fields", "_kind")
    _class: str
    _fields: dict[str, Any]
    _kind: str

    def __init__(self, class_name: str, fields: dict[str, Any], kind: str = "object") -> None:
        """Makes a record; the fields are copied."""
        object.__setattr__(self, "_class", class_name)
        object.__setattr__(self, "_fields", dict(fields))
        object.__setattr__(self, "_kind", kind)

    def __getattr__(self, name: str) -> Any:
        """Returns a field."""
        if name.startswith("__") or name in Record.__slots__:
            raise AttributeError(name)
        try:
            return self._fields[name]
        except KeyError:
            raise AttributeError(f"{self._class} has no field {name!r}") from None

    def __setattr__(self, name: str, value: object) -> None:
        """Refuses: records are read-only."""
        raise AttributeError("a Record is read-only")

    def __delattr__(self, name: str) -> None:
        """Refuses: records are read-only."""
        raise AttributeError("a Record is read-only")

    def __getitem__(self, name: str) -> Any:
        """Returns a field, also one whose name is no identifier."""
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        """Iterates over the fields' names."""
        return iter(self._fields)

    def __len__(self) -> int:
        """Counts the fields."""
        return len(self._fields)

    def __contains__(self, name: object) -> bool:
        """Tells whether there is such a field."""
        return name in self._fields

    def _asdict(self) -> dict[str, Any]:
        """Returns the fields as a new dictionary."""
        return dict(self._fields)

    def __eq__(self, other: object) -> bool:
        """Records are equal when class, kind and fields are."""
        if not isinstance(other, Record):
            return NotImplemented
        mine = (self._kind, self._class, self._fields)
        return mine == (other._kind, other._class, other._fields)

    def __hash__(self) -> int:
        """Hashes class and field names: fields may hold what cannot be hashed."""
        return hash((self._kind, self._class, frozenset(self._fields)))

    def __repr__(self) -> str:
        """Looks like a call of the class."""
        inner = ", ".join(f"{name}={value!r}" for name, value in self._fields.items())
        return f"{self._class}({inner})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles by its parts."""
        return (Record, (self._class, self._fields, self._kind))


class ArtifactReference:
    """An artifact named by a value, where the receiver gave no class of its own for them."""

    __slots__ = ("artifact_id",)

    def __init__(self, artifact_id: str) -> None:
        """Names an artifact by its id."""
        self.artifact_id = artifact_id

    @property
    def __hutch_artifact__(self) -> str:
        """The id; whatever has this attribute crosses as an artifact."""
        return self.artifact_id

    def __eq__(self, other: object) -> bool:
        """References are equal when they name the same artifact."""
        if not isinstance(other, ArtifactReference):
            return NotImplemented
        return self.artifact_id == other.artifact_id

    def __hash__(self) -> int:
        """Hashes the id."""
        return hash(self.artifact_id)

    def __repr__(self) -> str:
        """Names the id."""
        return f"ArtifactReference({self.artifact_id!r})"
