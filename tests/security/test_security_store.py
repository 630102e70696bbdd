"""A store that fails while code runs: its sandbox ends, and nothing keeps its place."""

from __future__ import annotations

import pytest

import hutch
from tests.support.stack import Stack

GUARD_SECONDS = 30.0


def test_output_that_cannot_be_kept_ends_its_sandbox_only(
    attacked: Stack, client: hutch.Client
) -> None:
    folder = attacked.state / "output"
    aside = attacked.state / "output-aside"
    folder.rename(aside)
    folder.write_text("not a folder")
    try:
        handle = client.spawn(program="print('lost')\nreturn 1", timeout_seconds=600)
        with pytest.raises(hutch.InvocationFailed) as caught:
            handle.result(timeout_seconds=GUARD_SECONDS)
    finally:
        folder.unlink()
        aside.rename(folder)
    assert caught.value.ending == "sandbox_lost"
    assert client.invoke(program="print('kept')\nreturn 2", timeout_seconds=GUARD_SECONDS) == 2


def test_a_call_that_the_store_cannot_answer_is_refused_and_the_code_goes_on(
    attacked: Stack, client: hutch.Client
) -> None:
    program = """
import hutch
open("kept", "w").write("x")
for _ in range(2):
    try:
        hutch.artifacts.save("kept")
    except hutch.RequestRefused as refused:
        return refused.reason
"""
    folder = attacked.state / "artifacts"
    aside = attacked.state / "artifacts-aside"
    folder.rename(aside)
    folder.write_text("not a folder")
    try:
        handle = client.spawn(program=program, timeout_seconds=600)
        assert handle.result(timeout_seconds=GUARD_SECONDS) == "STORE_UNAVAILABLE"
    finally:
        folder.unlink()
        aside.rename(folder)
