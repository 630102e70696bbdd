"""What `run` reads before it asks for anything: the program, inputs, the contract.

Called by `hutch.cli.run`; calls `hutch.values`. A mistake in here is a usage error: exit code 2.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import typer

from hutch import types, values
from hutch.calls import PROGRAM_LIMIT_BYTES
from hutch.errors import HutchError


def read_program(file: str) -> str:
    """The program in a file, or on standard input when the file is `-`."""
    try:
        if file == "-":
            data = sys.stdin.buffer.read(PROGRAM_LIMIT_BYTES + 1)
        else:
            with Path(file).open("rb") as source:
                data = source.read(PROGRAM_LIMIT_BYTES + 1)
    except OSError as error:
        raise typer.BadParameter(f"{file}: {error.strerror or error}") from error
    if len(data) > PROGRAM_LIMIT_BYTES:
        raise typer.BadParameter(
            f"{file}: PAYLOAD_TOO_LARGE: a program has at most {PROGRAM_LIMIT_BYTES} bytes"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{file}: the program is not UTF-8 ({error.reason})") from error


def read_inputs(options: list[str]) -> tuple[types.NamedInput, ...]:
    """The named inputs of `--input NAME=JSON` and `--input NAME=@FILE`.

    The JSON is plain data. A file whose name ends with `.json` is read as JSON, any other as text,
    or as bytes when it is not UTF-8.
    """
    found: dict[str, types.NamedInput] = {}
    for option in options:
        name, equals, text = option.partition("=")
        if not equals or not name.isidentifier():
            raise typer.BadParameter(f"--input {option[:80]!r} is not NAME=JSON or NAME=@FILE")
        if name in found:
            raise typer.BadParameter(f"--input {name} is given twice")
        value = _read_file(Path(text[1:])) if text.startswith("@") else _parse(text, name)
        try:
            found[name] = types.NamedInput(name=name, json=values.encode(value, root=name))
        except HutchError as error:
            raise typer.BadParameter(f"--input {name}: {error}") from error
    return tuple(found.values())


def _read_file(path: Path) -> Any:
    try:
        with path.open("rb") as source:
            data = source.read(values.MAX_BYTES + 1)
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror or error}") from error
    if len(data) > values.MAX_BYTES:
        raise typer.BadParameter(f"{path}: an input has at most {values.MAX_BYTES} bytes")
    if path.suffix == ".json":
        return _parse(data, str(path))
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data


def _parse(text: str | bytes, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        hint = ""
        if isinstance(text, str):
            hint = f"; a text needs its quotes: --input '{name}=\"...\"'"
        raise typer.BadParameter(f"{name}: this is not JSON ({error}){hint}") from error


def read_contract(option: str | None) -> types.Contract | None:
    """The contract of `--returns SCHEMA` or `--returns @FILE`."""
    if option is None:
        return None
    text = option
    if option.startswith("@"):
        try:
            text = Path(option[1:]).read_text(encoding="utf-8")
        except OSError as error:
            raise typer.BadParameter(f"--returns {option}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise typer.BadParameter(f"--returns {option}: {error}") from error
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"--returns: this is not JSON ({error})") from error
    if not isinstance(schema, dict | bool):
        raise typer.BadParameter("--returns: a JSON Schema is an object, true or false")
    return types.Contract(schema_json=text.encode())
