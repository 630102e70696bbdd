"""Signatures of functions as text, and back, without running or looking up anything in them.

Called by `tools`; it calls nothing. It is a member of two packages (see docs/adr/0002), so it runs
on Python 3.9.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_SIGNATURE = 2_000
ANY_SIGNATURE = "(*args, **kwargs)"


class _Verbatim:
    """Stands in a signature for something that is written as this text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def written(function: Any) -> str:
    """Writes a signature so that it can be parsed again."""
    import inspect

    try:
        signature = inspect.signature(function)
        parameters = []
        for item in signature.parameters.values():
            if item.default is not item.empty:
                item = item.replace(default=_Verbatim(_expression(repr(item.default))))
            if isinstance(item.annotation, str):
                item = item.replace(annotation=_Verbatim(item.annotation))
            parameters.append(item)
        result = signature.return_annotation
        if isinstance(result, str):
            result = _Verbatim(result)
        text = str(signature.replace(parameters=parameters, return_annotation=result))
    except Exception:  # built in without one, or of a class of the caller's own
        return ANY_SIGNATURE
    return text if len(text) <= MAX_SIGNATURE and text.isprintable() else ANY_SIGNATURE


def _expression(text: str) -> str:
    """A default as it is written, where Python could read it."""
    import ast

    try:
        ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "..."
    return text


def parsed(text: str) -> Any:
    """Makes an `inspect.Signature` of its text; names in it are looked up nowhere."""
    import ast
    import inspect

    try:
        function = ast.parse(f"def tool{text}: pass").body[0]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return parsed(ANY_SIGNATURE)
    if not isinstance(function, ast.FunctionDef):
        return parsed(ANY_SIGNATURE)
    arguments = function.args

    def source(node: Any) -> Any:
        if node is None:
            return inspect.Parameter.empty
        return _Verbatim(ast.get_source_segment(f"def tool{text}: pass", node) or "...")

    kinds = inspect.Parameter
    plain: list[tuple[ast.arg, Any]]
    plain = [(item, kinds.POSITIONAL_ONLY) for item in arguments.posonlyargs]
    plain += [(item, kinds.POSITIONAL_OR_KEYWORD) for item in arguments.args]
    rows: list[Any] = []
    missing = len(plain) - len(arguments.defaults)
    for place, (item, kind) in enumerate(plain):
        default = arguments.defaults[place - missing] if place >= missing else None
        rows.append((item, kind, default))
    if arguments.vararg is not None:
        rows.append((arguments.vararg, kinds.VAR_POSITIONAL, None))
    for item, default in zip(arguments.kwonlyargs, arguments.kw_defaults):
        rows.append((item, kinds.KEYWORD_ONLY, default))
    if arguments.kwarg is not None:
        rows.append((arguments.kwarg, kinds.VAR_KEYWORD, None))
    parameters = [
        kinds(item.arg, kind, default=source(default), annotation=source(item.annotation))
        for item, kind, default in rows
    ]
    return inspect.Signature(parameters, return_annotation=source(function.returns))
