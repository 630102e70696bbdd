"""The project keeps to its own rules: sizes, homes of dangerous calls, imports, names in documents.

Called by `make check` and `make test`. Lists of exceptions here may only shrink.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import repository
from tests.support.repository import ROOT, name_of

FILE_LINES = 600
FUNCTION_LINES = 70
PROTO_LINES = 600

# Files and functions over the limits. Take out what has been mended; put nothing in.
LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}

# A call that exists in one place only, and why the place is right.
HOMES = {
    "eval": ("sandbox/runtime/",),  # the REPL
    "exec": ("sandbox/runtime/",),
    "pickle.loads": (),
    "marshal.loads": ("sandbox/runtime/",),
    "os.system": (),
    "os.popen": (),
    "yaml.load": (),
    "asyncio.gather": (),
    "tempfile.mktemp": (),
}


def test_files_are_short_enough() -> None:
    long = {
        name_of(path): lines
        for path in repository.python_files()
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > FILE_LINES
    }
    assert {name: n for name, n in long.items() if n > LONG_FILES.get(name, 0)} == {}
    assert set(LONG_FILES) <= set(long), "take the mended ones out of LONG_FILES"


def test_functions_are_short_enough() -> None:
    long = {
        f"{name_of(path)}:{function.name}": lines
        for path in repository.python_files()
        for function in repository.functions_of(repository.parse(path))
        if (lines := repository.code_lines(function)) > FUNCTION_LINES
    }
    assert {name: n for name, n in long.items() if n > LONG_FUNCTIONS.get(name, 0)} == {}
    assert set(LONG_FUNCTIONS) <= set(long), "take the mended ones out of LONG_FUNCTIONS"


def test_proto_files_are_short_enough() -> None:
    for path in sorted(ROOT.glob("proto/**/*.proto")):
        assert len(path.read_text().splitlines()) <= PROTO_LINES, name_of(path)


def test_every_module_says_what_it_is() -> None:
    silent = [
        name_of(path)
        for path in repository.python_files("bench", "controller", "hutch", "sandbox", "tests")
        if path.read_text(encoding="utf-8").strip()
        and ast.get_docstring(repository.parse(path)) is None
    ]
    assert silent == []


def test_public_names_of_the_product_have_docstrings() -> None:
    silent = []
    for path in repository.python_files("controller", "hutch", "sandbox"):
        if "migrations" in path.parts:
            continue
        for node in repository.parse(path).body:
            if (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                and not node.name.startswith("_")
                and ast.get_docstring(node) is None
                and "overload" not in [ast.unparse(d) for d in node.decorator_list]
            ):
                silent.append(f"{name_of(path)}:{node.lineno} {node.name}")
    assert silent == []


def test_dangerous_calls_stay_in_their_homes() -> None:
    strays = []
    for path in repository.python_files("controller", "hutch", "sandbox"):
        for node in ast.walk(repository.parse(path)):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            homes = HOMES.get(called)
            if homes is not None and not name_of(path).startswith(homes or ("\0",)):
                strays.append(f"{name_of(path)}:{node.lineno} {called}")
    assert strays == []


def test_the_runtime_needs_nothing_but_the_standard_library() -> None:
    """The archive in a sandbox has no other packages to find."""
    strays = [
        f"{name_of(path)}:{line} {module}"
        for path in repository.python_files("sandbox")
        if name_of(path).startswith("sandbox/runtime/")
        for line, module in repository.imports_of(path)
        if (top := module.partition(".")[0]) not in sys.stdlib_module_names
        and not module.startswith(("sandbox.runtime", "hutch"))
        and (top != "sandbox" or module != "sandbox")
        and top not in OPTIONAL_INSIDE
    ]
    assert strays == []


# What a sandbox's template may have; only ever looked at when the code of a user brought it in.
OPTIONAL_INSIDE = frozenset({"pydantic", "numpy", "pandas", "pyarrow", "matplotlib"})


@pytest.mark.parametrize("folder", ["controller", "sandbox"])
def test_the_server_side_knows_the_sdk_by_its_stubs_only(folder: str) -> None:
    strays = [
        f"{name_of(path)}:{line} {module}"
        for path in repository.python_files(folder)
        if not name_of(path).startswith("sandbox/runtime/")  # there, `hutch` is the guest's
        for line, module in repository.imports_of(path)
        if module.partition(".")[0] == "hutch" and not (module + ".").startswith("hutch.v1.")
    ]
    assert strays == []


def test_importing_the_stubs_loads_neither_pydantic_nor_the_client() -> None:
    program = (
        "import sys, hutch.v1.invocation_service_pb2_grpc\n"
        "print(*sorted(n for n in sys.modules if n.partition('.')[0] in ('hutch', 'pydantic')"
        " and not n.startswith('hutch.v1')))"
    )
    loaded = subprocess.run(
        [sys.executable, "-I", "-c", program], check=True, capture_output=True, text=True
    )
    assert loaded.stdout.split() == ["hutch"]


def test_links_share_modules_of_the_runtime_with_the_sdk_and_nothing_else() -> None:
    """See docs/adr/0002: what both sides must do alike is one file."""
    strays = {}
    for path in repository.tracked_files():
        if path.is_symlink():
            target = os.readlink(path)
            shared = path.parent == ROOT / "hutch" and target == f"../sandbox/runtime/{path.name}"
            if not shared or not path.resolve().is_file():
                strays[name_of(path)] = target
    assert strays == {}


# Written in pieces, so that this file does not find itself.
_FOREIGN = re.compile(
    "|".join(
        (
            "/" + r"work/(?:main|shared)\b",
            "/" + r"root/\.",
            "/" + r"home/(?!sandbox\b|me\b)[a-z]+/",
            "pypi" + r"\.org",
            "files" + r"\.pythonhosted",
            r"(?:deb|security)\." + r"debian\.org",
            "registry" + r"\.npmjs",
            r"extra-" + "index-url",
        )
    )
)


def test_no_file_names_a_machine_or_a_registry() -> None:
    found = []
    for path in repository.tracked_files():
        if path.is_symlink() or path.is_dir():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [
            f"{name_of(path)}:{number} {match.group()}"
            for number, line in enumerate(text.splitlines(), 1)
            if (match := _FOREIGN.search(line))
        ]
    assert found == []


_PATH_IN_TEXT = re.compile(
    r"`((?:\.ci|bench|controller|docs|examples|hutch|images|proto|sandbox|tests)/[\w./*-]*)`"
)
_LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(?:#[^)]*)?\)")


def _documents() -> list[Path]:
    return [path for path in repository.tracked_files() if path.suffix == ".md"]


@pytest.mark.parametrize("path", _documents(), ids=name_of)
def test_paths_in_documents_exist(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    missing = []
    for match in _PATH_IN_TEXT.finditer(text):
        name = match.group(1)
        if name.startswith("bench/results"):
            continue  # made by `make bench`
        if not (any(ROOT.glob(name)) if "*" in name else (ROOT / name).exists()):
            missing.append(name)
    for match in _LINK.finditer(text):
        if not (path.parent / match.group(1)).exists():
            missing.append(match.group(1))
    assert missing == []


def test_the_packages_are_the_listed_ones() -> None:
    """A folder with modules that nobody listed would be missing from an installation."""
    import tomllib

    listed = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    )
    found = {
        name_of(path.parent).replace("/", ".")
        for path in repository.tracked_files()
        if path.suffix == ".py"
        and path.relative_to(ROOT).parts[0] in ("controller", "hutch", "sandbox")
    }
    assert found - listed == set()
    assert listed - found == set()


def test_make_lists_every_target_it_has() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = set(re.findall(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)[0].split())
    described = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    assert phony - described == {"prerequisites"}
