"""Lets processes that `multiprocessing` spawns find what cells have defined.

Called by `repl` when the code has imported `multiprocessing.spawn`. A spawned process runs the file
of the main module; cells have none, so one is made in memory. It holds what can be run again
without harm: imports, functions, classes and constants. Any other name of a cell is a clear error
in the spawned process, where a plain one would make a pool start its workers again for ever.
"""

from __future__ import annotations

import posix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PRELUDE = """
def __getattr__(name):
    if name[:2] == "__":
        raise AttributeError(name)
    def refuse(*given, **named):
        raise RuntimeError(
            f"a spawned process has no {name!r}: of cells it has their imports, functions, classes"
            " and constants; with the start method 'fork' it has everything"
        )
    def make(cls, *given, **named):
        return object.__new__(cls)
    kind = type("Missing", (type,), {"__call__": refuse})
    parts = {"__new__": make, "__setstate__": lambda self, state: None, "__getattr__": refuse}
    return kind(name, (), parts)
"""


def complete(spawning: Any, sources: dict[str, str]) -> None:
    """Gives every spawned process the definitions of the cells so far.

    Args:
        spawning: the module `multiprocessing.spawn`.
        sources: the sources of cells by file name.
    """
    original = spawning.get_preparation_data
    made = {"": ""}  # the paths of what was made, by text

    def get_preparation_data(name: str) -> Any:
        data = original(name)
        if "init_main_from_name" not in data and "init_main_from_path" not in data:
            text = definitions(list(sources.values()))
            if text not in made:
                made[text] = _in_memory(text)
            data["init_main_from_path"] = made[text]
        return data

    spawning.get_preparation_data = get_preparation_data


def definitions(sources: list[str]) -> str:
    """Returns a module with what cells define; what fails there is left out."""
    import ast

    kept: list[ast.stmt] = []
    future: list[ast.stmt] = []
    plain = (ast.Import, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for source in sources:
        try:
            statements = ast.parse(source).body
        except (SyntaxError, ValueError):
            continue  # a cell that never ran
        for statement in statements:
            if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
                future.append(statement)
            elif isinstance(statement, (*plain, ast.ImportFrom)) or _is_constant(statement):
                skip = ast.ExceptHandler(ast.Name("Exception", ast.Load()), None, [ast.Pass()])
                kept.append(ast.Try([statement], [skip], [], []))
    module = ast.Module([*future, *ast.parse(PRELUDE).body, *kept], [])
    return ast.unparse(ast.fix_missing_locations(module))


def _is_constant(statement: Any) -> bool:
    import ast

    if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or statement.value is None:
        return False
    try:
        ast.literal_eval(statement.value)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return False
    return True


def _in_memory(text: str) -> str:
    """Keeps a text for as long as this process lives; returns a path to it."""
    descriptor = posix.memfd_create("cells", posix.MFD_CLOEXEC)
    with open(descriptor, "w", encoding="utf-8", closefd=False) as file:
        file.write(text)
    return f"/proc/{posix.getpid()}/fd/{descriptor}"
