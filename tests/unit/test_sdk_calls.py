"""What a call asks for, and what is refused before anything is sent."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hutch
from hutch import calls, config
from hutch.calls import make_call
from hutch.errors import (
    FieldInvalidError,
    HintError,
    PayloadTooLargeError,
    ValueEncodeError,
)


def test_importing_the_wire_contract_loads_neither_pydantic_nor_the_client() -> None:
    code = (
        "import sys, hutch, hutch.v1.invocation_service_pb2\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('pydantic', 'typer', 'rich')"
        " or m in ('hutch.aio', 'hutch.client', 'hutch.calls', 'hutch.values')]\n"
        "sys.exit(repr(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_call_without_a_return_type_does_not_load_pydantic() -> None:
    code = (
        "import sys\nfrom hutch.calls import make_call\nmake_call(program='x', a=1)\n"
        "sys.exit('pydantic' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there() -> None:
    assert {name for name in hutch.__all__ if getattr(hutch, name, None) is None} == set()
    assert set(hutch.__all__) <= set(dir(hutch))
    with pytest.raises(AttributeError):
        hutch.nothing_of_that_name  # noqa: B018


def test_invoke_and_its_kin_have_one_signature() -> None:
    options = list(inspect.signature(make_call).parameters)
    for function in (hutch.invoke, hutch.ainvoke, hutch.spawn, hutch.aspawn):
        assert list(inspect.signature(function).parameters) == options
    for method in (hutch.Client.invoke, hutch.AsyncClient.spawn):
        assert list(inspect.signature(method).parameters) == ["self", *options]


def test_all_options_reach_the_spec() -> None:
    call = make_call(
        program="x",
        inputs={"label": 1},
        label="l",
        timeout_seconds=1.5,
        memory_limit_bytes=1,
        pids_limit=2,
        cpu_limit_millis=3,
        tmpfs_limit_bytes=4,
        open_files_limit=5,
        max_depth=6,
        max_children=7,
        max_concurrent=8,
        max_descendants=9,
        output_view_bytes=10,
        output_limit_bytes=11,
        artifact_patterns=["*.csv"],
        template="t",
        driver="d",
        retry_on_loss=True,
        cancel_on_disconnect=False,
        other="o",
    )
    spec = call.spec
    assert [(item.name, item.json) for item in spec.inputs] == [("label", b"1"), ("other", b'"o"')]
    assert (spec.label, spec.timeout_seconds, spec.template, spec.driver) == ("l", 1.5, "t", "d")
    assert (spec.artifact_patterns, spec.retry_on_loss) == (("*.csv",), True)
    grant, limits, output = spec.spawn, spec.resources, spec.output
    assert (grant.max_depth, grant.max_children, grant.max_concurrent) == (6, 7, 8)
    assert (grant.max_descendants, limits.memory_limit_bytes, limits.pids_limit) == (9, 1, 2)
    assert (limits.cpu_limit_millis, limits.tmpfs_limit_bytes, limits.open_files_limit) == (3, 4, 5)
    assert (output.output_view_bytes, output.output_limit_bytes) == (10, 11)
    assert call.cancel_on_disconnect is False


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"program": "x", "task": "y"},
        {"program": 3},
        {"program": "\ud800"},
        {"program": "x", "inputs": {"no name": 1}},
        {"program": "x", "inputs": {"class": 1}},
        {"program": "x", "inputs": ["a"]},
        {"program": "x", "pids_limit": "many"},
        {"program": "x", "pids_limit": True},
        {"program": "x", "max_children": -1},
        {"program": "x", "timeout_seconds": 0},
        {"program": "x", "timeout_seconds": float("nan")},
        {"program": "x", "label": 3},
        {"program": "x", "artifact_patterns": "*.csv"},
    ],
)
def test_a_bad_option_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(FieldInvalidError) as caught:
        make_call(**options)
    assert caught.value.details["field"]


def test_a_program_given_as_a_policy_is_refused_with_the_right_place() -> None:
    with pytest.raises(FieldInvalidError, match="a program goes into program="):
        make_call("return 1")


def test_two_return_types_are_refused() -> None:
    with pytest.raises(FieldInvalidError, match="two return types"):
        make_call(int, hutch.ReturnType(str), program="x")


def test_no_return_type_and_none_are_not_the_same() -> None:
    assert make_call(program="x").spec.contract is None
    contract = make_call(None, program="x").spec.contract
    assert contract is not None
    assert contract.schema_json == b'{"type":"null"}'
    assert make_call(hutch.ReturnType(None, max_failures=2), program="x").hint is None


def test_a_program_over_its_limit_is_refused_with_the_limit() -> None:
    make_call(program="#" * calls.PROGRAM_LIMIT_BYTES)
    with pytest.raises(PayloadTooLargeError) as caught:
        make_call(program="é" * (calls.PROGRAM_LIMIT_BYTES // 2 + 1))
    assert caught.value.details["limit"] == str(calls.PROGRAM_LIMIT_BYTES)


def test_an_input_that_cannot_cross_names_its_path() -> None:
    with pytest.raises(ValueEncodeError) as caught:
        make_call(program="x", rows={"a": [1, iter(())]})
    assert caught.value.path == 'rows["a"][1]'


def test_a_hint_that_no_contract_expresses_is_refused() -> None:
    class Opaque:
        pass

    with pytest.raises(HintError):
        make_call(Opaque, program="x")


def test_an_indented_program_loses_its_margin() -> None:
    program = """
        if x:
            return 1
    """
    assert make_call(program=program).spec.program == "\nif x:\n    return 1\n    "
    assert make_call(program="  a\n b").spec.program == " a\nb"
    assert make_call(program="a\n  b").spec.program == "a\n  b"


def test_settings_come_from_flags_then_environment_then_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("k\n")
    file = tmp_path / "hutch.toml"
    file.write_text(
        '[client]\ntarget = "127.0.0.1:1"\napi_key_file = "key"\n[host]\ncapacity = 3\n'
    )
    from_file = config.from_file(file)
    assert from_file == config.ClientSettings(target="127.0.0.1:1", api_key="k")
    environment = config.from_environment({"HUTCH_TARGET": "unix:/a", "HUTCH_API_KEY": "e"})
    assert environment.over(from_file).target == "unix:/a"
    flags = config.ClientSettings(target="127.0.0.1:2")
    assert flags.over(environment) == config.ClientSettings(target="127.0.0.1:2", api_key="e")
    assert config.ClientSettings(state="/s").over(environment).target == ""
    assert config.from_file(tmp_path / "none.toml") == config.ClientSettings()


def test_a_key_does_not_go_to_a_target_that_a_weaker_source_names() -> None:
    """A `hutch.toml` in somebody's folder must not fetch the key of the environment."""
    environment = config.ClientSettings(api_key="secret")
    assert environment.over(config.ClientSettings(target="127.0.0.1:9")).api_key == ""


@pytest.mark.parametrize(
    "text",
    ["[client", "[other]", "[client]\nkey = 1", "[client]\ntarget = 1", "client = 1"],
)
def test_a_configuration_that_is_not_understood_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "hutch.toml"
    file.write_text(text)
    with pytest.raises(FieldInvalidError, match=r"hutch\.toml"):
        config.from_file(file)
