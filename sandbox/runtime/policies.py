"""Policies: rules given to one call, or to all calls inside a `with` block.

Called by the SDK's and the guest's `invoke`. A member of two packages (see docs/adr/0002).
"""

from __future__ import annotations

from contextvars import ContextVar

from .errors import FieldInvalidError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from contextvars import Token
    from typing import Any, Union

_inherited: ContextVar[tuple[RecursionLimit, ...]] = ContextVar("hutch_policies", default=())


class ReturnType:
    """The declared shape of the value: a mismatch is `ReturnTypeError`.

    Attributes:
        hint: the type, any that a contract can express.
        max_failures: how many misfits are answered with feedback; 0 for programs.
    """

    __slots__ = ("hint", "max_failures")

    def __init__(self, hint: Any, max_failures: int = 0) -> None:
        """Declares the type.

        Raises:
            FieldInvalidError: `max_failures` is no whole number from 0.
        """
        if type(max_failures) is not int or max_failures < 0:
            raise _invalid("max_failures", f"max_failures is {max_failures!r}; 0 or more is needed")
        self.hint = hint
        self.max_failures = max_failures

    def __repr__(self) -> str:
        """Looks like its call."""
        return f"ReturnType({self.hint!r})"


class RecursionLimit:
    """The deepest level of invocations, counted from the root = 1.

    Given to a call it binds that child and all below it; as a `with` block it binds every call
    made inside. The tightest one counts.
    """

    __slots__ = ("_tokens", "max_depth")

    def __init__(self, max_depth: int) -> None:
        """Names the deepest level.

        Raises:
            FieldInvalidError: it is no whole number from 1.
        """
        if type(max_depth) is not int or max_depth < 1:
            raise _invalid("max_depth", f"max_depth is {max_depth!r}; 1 or more is needed")
        self.max_depth = max_depth
        self._tokens: list[Token[tuple[RecursionLimit, ...]]] = []

    def __enter__(self) -> RecursionLimit:
        """Binds the calls made from here on."""
        self._tokens.append(_inherited.set((*_inherited.get(), self)))
        return self

    def __exit__(self, *details: object) -> None:
        """Ends the block."""
        _inherited.reset(self._tokens.pop())

    def __repr__(self) -> str:
        """Looks like its call."""
        return f"RecursionLimit(max_depth={self.max_depth})"


if TYPE_CHECKING:
    Policy = Union[ReturnType, RecursionLimit]
else:
    Policy = object  # for annotations only, which are never evaluated


def inherited() -> tuple[RecursionLimit, ...]:
    """Returns the policies of the `with` blocks around, outermost first."""
    return _inherited.get()


def declared(policy: Any) -> ReturnType:
    """Returns the return type that a positional argument of a call means.

    Raises:
        FieldInvalidError: it is a text, most likely the program.
    """
    if isinstance(policy, str):
        message = "a call's positional arguments are policies; a program goes into program="
        raise _invalid("program", message)
    return policy if isinstance(policy, ReturnType) else ReturnType(policy)


def _invalid(field: str, message: str) -> FieldInvalidError:
    return FieldInvalidError(message, "FIELD_INVALID", {"field": field})
