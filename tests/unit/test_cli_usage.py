"""Usage errors: exit code 2, a sentence on standard error, nothing connected to or started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hutch
from hutch import values
from hutch.cli import inputs
from hutch.cli.main import main


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with one program, and no controller to be reached."""
    (tmp_path / "program.py").write_text("return 1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HUTCH_TARGET", "nonsense")
    yield tmp_path
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["run"],
        ["run", "nothing.py"],
        ["run", "."],
        ["run", "program.py", "--input", "n"],
        ["run", "program.py", "--input", "no-name=1"],
        ["run", "program.py", "--input", "n=word"],
        ["run", "program.py", "--input", "n=@nothing.json"],
        ["run", "program.py", "--input", "n=1", "--input", "n=2"],
        ["run", "program.py", "--returns", "{"],
        ["run", "program.py", "--returns", "3"],
        ["run", "program.py", "--returns", "@nothing.json"],
        ["run", "program.py", "--max-depth", "0"],
        ["run", "program.py", "--timeout", "0"],
        ["run", "program.py", "--no-such-option"],
        ["run", "program.py"],
        ["no-such-command"],
        ["show"],
        ["up", "--listen", "0.0.0.0:80"],
        ["up", "--target", "unix:/x"],
        ["artifacts", "get", "inv_1", "--stdout", "--out", "x"],
    ],
)
def test_case_d20_bad_usage_is_exit_code_2(
    words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    shown = capfd.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("hutch")


def test_a_usage_error_with_json_is_one_document(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "nothing.py", "--json"]) == 2
    assert "nothing.py" in json.loads(capfd.readouterr().out)["error"]["message"]


def test_a_refusal_with_json_is_one_document(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "ps"]) == 2
    found = json.loads(capfd.readouterr().out)["error"]
    assert (found["reason"], found["details"]) == ("FIELD_INVALID", {"field": "target"})


@pytest.mark.parametrize("words", [["--task", "x"], ["program.py", "--model", "m"]])
def test_agents_are_said_to_be_not_built(
    words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *words]) == 2
    assert "agent mode is not built yet" in capfd.readouterr().err


def test_a_program_over_its_limit_is_named_so(
    nowhere: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (nowhere / "big.py").write_bytes(b"#" * 10_000_000)
    assert main(["run", "big.py"]) == 2
    assert "PAYLOAD_TOO_LARGE" in capfd.readouterr().err


def test_the_version_is_the_installed_one(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capfd.readouterr().out == f"hutch {hutch.__version__}\n"


def test_commands_that_are_not_built_are_not_listed(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capfd.readouterr().out
    for name in (
        "run",
        "up",
        "ps",
        "tree",
        "show",
        "logs",
        "story",
        "cancel",
        "artifacts",
        "doctor",
        "shell",
    ):
        assert name in shown
    for name in ("chat", "replay", "tenant", "--ephemeral"):
        assert name not in shown


def test_inputs_are_json_text_or_bytes_by_what_they_are(nowhere: Path) -> None:
    (nowhere / "a.json").write_text('{"$tuple": [1]}')
    (nowhere / "b.txt").write_text("[1, 2]")
    (nowhere / "c.bin").write_bytes(b"\xff\0")
    found = inputs.read_inputs(['n={"a": 1.5}', "a=@a.json", "b=@b.txt", "c=@c.bin"])
    decoded = {item.name: values.decode(item.json) for item in found}
    assert decoded == {"n": {"a": 1.5}, "a": {"$tuple": [1]}, "b": "[1, 2]", "c": b"\xff\0"}


def test_a_text_without_quotes_gets_a_hint(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "program.py", "--input", "n=word"]) == 2
    assert "--input 'n=\"...\"'" in capfd.readouterr().err


def test_a_configuration_in_the_working_directory_is_data_only(
    nowhere: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HUTCH_TARGET")
    (nowhere / "hutch.toml").write_text('[client]\ntarget = "also nonsense"\n')
    assert main(["ps"]) == 2
    assert "also nonsense" in capfd.readouterr().err


def test_nothing_of_the_working_directory_is_imported(nowhere: Path) -> None:
    """Also with `python -m`, which puts the working directory first."""
    for name in ("controller", "sandbox", "typer", "rich", "grpc"):
        (nowhere / name).mkdir()
        (nowhere / name / "__init__.py").write_text("raise SystemExit('imported from here')")
    for flags in (["-I"], []):
        done = subprocess.run(
            [sys.executable, *flags, "-m", "hutch.cli", "--version"],
            capture_output=True,
            text=True,
            cwd=nowhere,
            env={**os.environ, "PYTHONPATH": ""},
        )
        assert done.stdout == f"hutch {hutch.__version__}\n", done.stderr
