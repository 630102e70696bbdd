"""The project's own files, as the tidy tests look at them. Called by `tests/tidy`."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON_FOLDERS = ("controller", "hutch", "sandbox", "tests", "bench", "examples")


def tracked_files() -> list[Path]:
    """Every file that git has or would add, that exists."""
    listing = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "-co", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout
    names = sorted({name for name in listing.decode().split("\0") if name})
    return [path for path in (ROOT / name for name in names) if path.exists() or path.is_symlink()]


def is_generated(path: Path) -> bool:
    """Whether `make proto` or `make lock` wrote it."""
    return "_pb2" in path.name or path.name == "requirements.lock"


def python_files(*folders: str) -> list[Path]:
    """The Python files below some folders, each once, without generated ones and links."""
    return [
        path
        for path in tracked_files()
        if path.suffix == ".py"
        and path.relative_to(ROOT).parts[0] in (folders or PYTHON_FOLDERS)
        and not is_generated(path)
        and not path.is_symlink()
    ]


def parse(path: Path) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def name_of(path: Path) -> str:
    """A file's name in the project."""
    return path.relative_to(ROOT).as_posix()


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Every imported module of a file, wherever in it, with its line."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:  # relative: from the package that holds the file
                package = path.relative_to(ROOT).parts[: -node.level]
                module = ".".join((*package, *filter(None, [module])))
            yield node.lineno, module
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def functions_of(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function without its docstring."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function, clean=False) is not None:
        docstring = function.body[0]
        lines -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return lines


def test_names() -> set[str]:
    """The names of all test functions."""
    return {
        function.name
        for path in python_files("tests")
        for function in functions_of(parse(path))
        if function.name.startswith("test_")
    }
