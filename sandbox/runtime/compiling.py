"""Compiles a cell: module code that may also `return` and `await` at its top level.

Called by `cells`. It uses the interpreter's own tree classes (`_ast`): the module `ast` would cost
more to import than a cell costs to compile.

* A cell without a top-level `return` stays plain module code.
* A cell with one becomes the body of a function in which every name that the cell binds is global;
  the flags that give a function locals of its own are cleared: the body runs in the namespace.
* A cell with a top-level `await` gives a coroutine, in either form.
"""

from __future__ import annotations

import _ast

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType
    from typing import Any

ONLY_TREE = 0x400
TOP_LEVEL_AWAIT = 0x2000
OPTIMIZED_NEW_LOCALS = 0x1 | 0x2
COROUTINE = 0x80
FUNCTIONS = (_ast.FunctionDef, _ast.AsyncFunctionDef)
END = "\0hutch: the cell ran to its end"


class Raise:
    """One top-level `raise X(...)`.

    Attributes:
        first, last: its lines.
        caught: what the handlers around it catch, as trees; None stands for everything. The
            language leaves no trace of a bare `raise`, so what one of them catches has not left
            the cell by this statement, whatever its handler does.
    """

    __slots__ = ("caught", "first", "last")

    def __init__(self, first: int, last: int, caught: list[Any]) -> None:
        """Holds the parts."""
        self.first = first
        self.last = last
        self.caught = caught

    def is_caught(self, error: BaseException, namespace: dict[str, Any]) -> bool:
        """Tells whether a handler around it catches an exception."""
        return any(node is None or _catches(node, error, namespace) for node in self.caught)


def _catches(node: Any, error: BaseException, namespace: dict[str, Any]) -> bool:
    if isinstance(node, _ast.Tuple):
        return any(_catches(item, error, namespace) for item in node.elts)
    try:
        return isinstance(error, _look_up(node, namespace))
    except BaseException:  # what cannot be told without running code of the cell again
        return True


def _look_up(node: Any, namespace: dict[str, Any]) -> Any:
    if isinstance(node, _ast.Name):
        builtins = namespace["__builtins__"].__dict__
        return namespace[node.id] if node.id in namespace else builtins[node.id]
    if isinstance(node, _ast.Attribute):
        return getattr(_look_up(node.value, namespace), node.attr)
    raise LookupError


class Cell:
    """A compiled cell.

    Attributes:
        body: its code, to be evaluated in the namespace; with `is_async` it gives a coroutine.
        shown: the code of a trailing expression, or None.
        is_function: whether `body` gives the cell's value, or `(END, shown)` when it ran to an end.
        raises: every top-level `raise X(...)`.
    """

    __slots__ = ("body", "is_async", "is_function", "raises", "shown")

    def __init__(
        self,
        body: CodeType,
        shown: CodeType | None,
        is_async: bool,
        is_function: bool,
        raises: list[Raise],
    ) -> None:
        """Holds the parts."""
        self.body = body
        self.shown = shown
        self.is_async = is_async
        self.is_function = is_function
        self.raises = raises

    def returned(self, result: Any) -> bool:
        """Tells whether what the body gave is the cell's value."""
        if not self.is_function:
            return False
        is_pair = type(result) is tuple and len(result) == 2
        return not (is_pair and type(result[0]) is str and result[0] == END)


def compile_cell(source: str, filename: str) -> Cell:
    """Compiles a cell.

    Raises:
        SyntaxError: it is no cell; also ValueError, MemoryError, RecursionError from the compiler.
    """
    tree: Any = compile(source, filename, "exec", ONLY_TREE, dont_inherit=True)
    found = list(_scope(tree.body))
    is_async = any(_is_await(node) for node in found)
    raises = _new_raises(found)
    if any(isinstance(node, _ast.Return) for node in found):
        body = _compile_function(tree, found, source, filename, is_async)
        return Cell(body, None, is_async, True, raises)
    flags = TOP_LEVEL_AWAIT if is_async else 0
    shown = None
    if tree.body and isinstance(tree.body[-1], _ast.Expr):
        last = _ast.Expression(tree.body.pop().value)
        shown = compile(last, filename, "eval", flags, dont_inherit=True)
    body = compile(tree, filename, "exec", flags, dont_inherit=True)
    return Cell(body, shown, is_async, False, raises)


def _compile_function(
    tree: Any, found: list[Any], source: str, filename: str, is_async: bool
) -> CodeType:
    _refuse_yield(found, source, filename)
    future = []
    while tree.body and _is_future(tree.body[0]):
        future.append(tree.body.pop(0))
    body = [new for statement in tree.body for new in _rewrite(statement)]
    body = [_transform(statement) for statement in body]
    last = body.pop() if body and isinstance(body[-1], _ast.Expr) else None
    shown = last.value if last is not None else _ast.Constant(None)
    end = _ast.Return(_ast.Tuple([_ast.Constant(END), shown], _ast.Load()))
    names = sorted({name for node in found for name in _bound_names(node)})
    start = [_ast.Global(names)] if names else []
    arguments = _ast.arguments([], [], None, [], [], None, [])
    kind: Any = _ast.AsyncFunctionDef if is_async else _ast.FunctionDef
    function = kind("<module>", arguments, [*start, *body, end], [], None)
    if hasattr(function, "type_params") or "type_params" in kind._fields:
        function.type_params = []
    _locate(function, 1, 0)
    module: Any = _ast.Module([*future, function], [])
    outer = compile(module, filename, "exec", 0, dont_inherit=True)
    codes = [const for const in outer.co_consts if hasattr(const, "co_code")]
    code: CodeType = codes[-1]
    return code.replace(co_flags=code.co_flags & ~OPTIMIZED_NEW_LOCALS, co_firstlineno=1)


def _new_raises(found: list[Any]) -> list[Raise]:
    """Returns every `raise X(...)` of the cell's scope, with the handlers around it."""
    raises = [
        node for node in found if isinstance(node, _ast.Raise) and isinstance(node.exc, _ast.Call)
    ]
    around: dict[int, list[Any]] = {id(node): [] for node in raises}
    for node in found:  # outer blocks before the inner ones
        handlers: list[Any] = getattr(node, "handlers", [])
        for inner in _scope(node.body) if handlers else ():
            if id(inner) in around:
                around[id(inner)] = [*handlers, *around[id(inner)]]
    return [
        Raise(node.lineno, node.end_lineno or node.lineno, [h.type for h in around[id(node)]])
        for node in raises
    ]


def _scope(nodes: list[Any]) -> Iterator[Any]:
    """Walks the nodes of the cell's own scope, not those of functions and classes inside it."""
    pending = list(reversed(nodes))
    while pending:
        node = pending.pop()
        yield node
        pending.extend(reversed(list(_children_in_scope(node))))


def _children_in_scope(node: Any) -> Iterator[Any]:
    if isinstance(node, FUNCTIONS):
        fields: tuple[str, ...] = ("decorator_list", "args", "returns")
    elif isinstance(node, _ast.ClassDef):
        fields = ("decorator_list", "bases", "keywords")
    elif isinstance(node, _ast.Lambda):
        fields = ("args",)
    elif isinstance(node, _ast.GeneratorExp):
        yield node.generators[0].iter  # all that runs outside the generator itself
        return
    elif isinstance(node, _ast.comprehension):
        fields = ("iter", "ifs")  # its target is a name of its own scope
    else:
        fields = node._fields
    for field in fields:
        value = getattr(node, field, None)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, _ast.AST):
                yield item


def _is_await(node: Any) -> bool:
    if isinstance(node, (_ast.Await, _ast.AsyncFor, _ast.AsyncWith)):
        return True
    return isinstance(node, _ast.comprehension) and bool(node.is_async)


def _is_future(node: Any) -> bool:
    return isinstance(node, _ast.ImportFrom) and node.module == "__future__"


def _refuse_yield(found: list[Any], source: str, filename: str) -> None:
    """Says what the compiler says of module code: inside a function it would be allowed."""
    for node in found:
        if isinstance(node, (_ast.Yield, _ast.YieldFrom)):
            lines = source.splitlines()
            text = lines[node.lineno - 1] if node.lineno <= len(lines) else ""
            place = (filename, node.lineno, node.col_offset + 1, text)
            raise SyntaxError("'yield' outside function", place)


def _bound_names(node: Any) -> Iterator[str]:
    """Returns the names that a node binds in its scope."""
    if isinstance(node, _ast.Name) and not isinstance(node.ctx, _ast.Load):
        yield node.id
    elif isinstance(node, (*FUNCTIONS, _ast.ClassDef)):
        yield node.name
    elif isinstance(node, (_ast.Import, _ast.ImportFrom)):
        for alias in node.names:
            if alias.name != "*":
                yield alias.asname or alias.name.split(".")[0]
    elif isinstance(node, _ast.ExceptHandler) and node.name:
        yield node.name
    elif type(node).__name__ in ("MatchAs", "MatchStar") and node.name:
        yield node.name
    elif type(node).__name__ == "MatchMapping" and node.rest:
        yield node.rest
    elif isinstance(node, _ast.Global):
        yield from node.names


def _transform(statement: Any) -> Any:
    """Rewrites the statements inside a compound one, in place, and returns it."""
    for node in _scope([statement]):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list) and not isinstance(node, (*FUNCTIONS, _ast.ClassDef)):
                setattr(node, field, [new for inner in block for new in _rewrite(inner)])
    return statement


def _rewrite(statement: Any) -> list[Any]:
    """Replaces what module code allows and a function's body does not."""
    line = getattr(statement, "lineno", 1), getattr(statement, "col_offset", 0)
    if isinstance(statement, _ast.Global):
        return [_locate(_ast.Pass(), *line)]  # declared at the top, with all the others
    if isinstance(statement, _ast.AnnAssign) and isinstance(statement.target, _ast.Name):
        return _rewrite_annotation(statement, *line)
    if isinstance(statement, _ast.ImportFrom) and statement.names[0].name == "*":
        source = f"from {'.' * (statement.level or 0)}{statement.module or ''} import *"
        call = f"__import__('builtins').exec({source!r})"
        return [_statement(call, *line)]
    return [statement]


def _rewrite_annotation(statement: Any, line: int, column: int) -> list[Any]:
    """Makes `name: hint = value` two assignments: an annotated name cannot be global."""
    result = []
    if statement.value is not None:
        result.append(_locate(_ast.Assign([statement.target], statement.value), line, column))
    if statement.simple:
        place = _ast.Subscript(
            _ast.Name("__annotations__", _ast.Load()),
            _ast.Constant(statement.target.id),
            _ast.Store(),
        )
        result.append(_locate(_ast.Assign([place], statement.annotation), line, column))
    return result or [_locate(_ast.Pass(), line, column)]


def _statement(source: str, line: int, column: int) -> Any:
    tree: Any = compile(source, "<cell>", "exec", ONLY_TREE, dont_inherit=True)
    statement = tree.body[0]
    for node in _scope([statement]):
        if hasattr(node, "lineno"):
            node.lineno = node.end_lineno = line
            node.col_offset = node.end_col_offset = column
    return statement


def _locate(node: Any, line: int, column: int) -> Any:
    """Gives a place to every node that has none: its parent's."""
    if "lineno" in node._attributes:
        if not hasattr(node, "lineno"):
            node.lineno, node.col_offset = line, column
        if getattr(node, "end_lineno", None) is None:
            node.end_lineno, node.end_col_offset = node.lineno, node.col_offset
        line, column = node.lineno, node.col_offset
    for field in node._fields:
        value = getattr(node, field, None)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, _ast.AST):
                _locate(item, line, column)
    return node
