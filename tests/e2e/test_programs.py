"""Programs in real sandboxes: values, endings, output, artifacts."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hutch
from hutch import ReturnType, types


@dataclasses.dataclass
class Row:
    """One row."""

    name: str
    size: int


def printed(chunks: Iterator[types.OutputChunk]) -> bytes:
    return b"".join(chunk.data for chunk in chunks)


def test_the_readme_example_returns_a_typed_value(client: hutch.Client) -> None:
    total = client.invoke(ReturnType(int), program="return sum(items)", items=[1, 2, 3])
    assert total == 6


def test_a_program_that_runs_to_its_end_returns_none(client: hutch.Client) -> None:
    assert client.invoke(program="x = 1") is None


def test_values_of_every_kind_come_back_as_they_went(client: hutch.Client) -> None:
    given = {
        "tuple": (1, "a"),
        "set": {1, 2},
        "bytes": b"\x00\xff",
        "when": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
        "nested": [{"a": None}, {1: 2}],
        "nan": float("inf"),
    }
    assert client.invoke(program="return given", given=given) == given


def test_an_accepted_value_comes_back_as_its_class(client: hutch.Client) -> None:
    rows = client.invoke(
        ReturnType(list[Row]), program="return [{'name': 'a', 'size': 1}, {'name': 'b', 'size': 2}]"
    )
    assert rows == [Row("a", 1), Row("b", 2)]


def test_a_value_over_one_mebibyte_moves_both_ways(client: hutch.Client) -> None:
    text = "x" * (3 * 1024 * 1024)
    assert client.invoke(program="return text + 'y'", text=text) == text + "y"


def test_a_misfit_names_path_expected_and_got(client: hutch.Client) -> None:
    with pytest.raises(hutch.ReturnTypeError) as caught:
        client.invoke(ReturnType(dict[str, list[int]]), program="return {'rows': [1, 'two']}")
    assert caught.value.path == 'result["rows"][1]'
    assert caught.value.expected == "int"
    assert "two" in caught.value.got


def test_an_exception_of_the_program_arrives_with_its_type_and_traceback(
    client: hutch.Client,
) -> None:
    with pytest.raises(hutch.InvocationFailed) as caught:
        client.invoke(program="def f():\n    raise KeyError('missing')\nf()")
    assert caught.value.ending == "raised"
    failure = caught.value.failure
    assert failure is not None
    assert failure.type_name == "KeyError"
    assert "in f" in failure.traceback


@pytest.mark.parametrize(
    ("program", "ending"),
    [
        ("raise ValueError('x')", "raised"),
        ("1 +", "raised"),
        ("import os; os._exit(3)", "exited"),
        ("import os; os.kill(os.getpid(), 11)", "crashed"),
        ("import sys; sys.exit(4)", "raised"),
    ],
)
def test_programs_that_fail_have_their_ending(
    client: hutch.Client, program: str, ending: str
) -> None:
    with pytest.raises(hutch.InvocationFailed) as caught:
        client.invoke(program=program)
    assert caught.value.ending == ending


def test_a_deadline_ends_a_spin_that_catches_everything(client: hutch.Client) -> None:
    program = "while True:\n    try:\n        while True: pass\n    except BaseException: pass"
    with pytest.raises(hutch.InvocationFailed) as caught:
        client.invoke(program=program, timeout_seconds=1.0)
    assert caught.value.ending == "deadline_exceeded"


def test_output_is_kept_exactly_per_stream_and_read_from_any_byte(client: hutch.Client) -> None:
    handle = client.spawn(
        program="import os, sys\nprint('out')\nos.write(2, b'\\xff\\x00err')\nos.system('echo sub')"
    )
    handle.result()
    assert printed(client.read_output(handle.id, "stdout")) == b"out\nsub\n"
    assert printed(client.read_output(handle.id, "stderr")) == b"\xff\x00err"
    assert printed(client.read_output(handle.id, "stdout", offset=4)) == b"sub\n"


def test_case_12_both_pipes_are_drained_at_once(client: hutch.Client) -> None:
    program = (
        "import os\n"
        "for fd in (2, 1):\n"
        "    for _ in range(80):\n"
        "        data = b'x' * 131072\n"
        "        while data:\n"
        "            data = data[os.write(fd, data):]\n"
    )
    handle = client.spawn(program=program)
    handle.result()
    for stream in ("stdout", "stderr"):
        size = len(printed(client.read_output(handle.id, stream)))
        assert size == 80 * 131072


def test_output_over_its_limit_is_cut_cleanly_and_ends_the_invocation(
    client: hutch.Client,
) -> None:
    handle = client.spawn(
        program="while True: print('0123456789' * 10)", output_limit_bytes=100_000
    )
    with pytest.raises(hutch.InvocationFailed) as caught:
        handle.result()
    assert caught.value.ending == "output_exceeded"
    data = printed(client.read_output(handle.id, "stdout"))
    line = b"0123456789" * 10 + b"\n"
    assert len(data) <= 100_000
    assert data == (line * 1000)[: len(data)]


def test_files_that_match_are_artifacts_also_of_a_program_that_failed(
    client: hutch.Client, tmp_path: Path
) -> None:
    program = (
        "import os\n"
        "os.makedirs('artifacts/sub')\n"
        "open('artifacts/a.txt', 'w').write('hello')\n"
        "open('artifacts/sub/b.bin', 'wb').write(b'\\0' * 300000)\n"
        "os.symlink('/etc/passwd', 'artifacts/link')\n"
        "os.mkfifo('artifacts/fifo')\n"
        "open('other.txt', 'w').write('not declared')\n"
        "raise ValueError('after all')\n"
    )
    handle = client.spawn(program=program)
    with pytest.raises(hutch.InvocationFailed):
        handle.result()
    page = client.list_artifacts(handle.id)
    assert [item.name for item in page.artifacts] == ["a.txt", "sub/b.bin"] or [
        item.name for item in page.artifacts
    ] == ["artifacts/a.txt", "artifacts/sub/b.bin"]
    assert {item.name.rpartition("/")[2] for item in page.refusals} == {"link", "fifo"}
    large = page.artifacts[1]
    data = b"".join(client.get_artifact(large.artifact_id))
    assert hashlib.sha256(data).hexdigest() == large.sha256
    assert b"".join(client.get_artifact(large.artifact_id, offset=299_999)) == b"\0"


def test_saved_artifacts_are_published_once_per_name(client: hutch.Client) -> None:
    program = (
        "import hutch\n"
        "first = hutch.artifacts.save(b'one', name='x.txt')\n"
        "try:\n"
        "    hutch.artifacts.save(b'two', name='x.txt')\n"
        "except hutch.HutchError as problem:\n"
        "    return [first.read(), str(problem)]\n"
    )
    data, problem = client.invoke(program=program)
    assert data == b"one"
    assert "x.txt" in problem


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"program": ""}, hutch.FieldInvalidError),
        ({"program": "x\0y"}, hutch.FieldInvalidError),
        ({"program": "#" * (10 * 1024 * 1024)}, hutch.PayloadTooLargeError),
        ({"program": "x", "max_depth": 99}, hutch.FieldInvalidError),
        ({"program": "x", "template": "none"}, hutch.FieldInvalidError),
        ({"program": "x", "timeout_seconds": -1.0}, hutch.FieldInvalidError),
        ({"task": "do it"}, hutch.NotBuiltError),
    ],
)
def test_bad_requests_are_typed_errors_and_start_nothing(
    client: hutch.Client, options: dict[str, Any], error: type[Exception]
) -> None:
    before = len(list(_ids(client)))
    with pytest.raises(error):
        client.invoke(**options)
    assert len(list(_ids(client))) == before


def _ids(client: hutch.Client) -> Iterator[str]:
    token = ""
    while True:
        page = client.list_invocations(page_token=token)
        yield from (item.invocation_id for item in page.invocations)
        token = page.next_page_token
        if not token:
            return


def test_values_that_cannot_cross_are_named_before_anything_is_spawned(
    client: hutch.Client,
) -> None:
    with pytest.raises(hutch.ValueEncodeError, match=r"items\[1\]"):
        client.invoke(program="return 1", items=[1, (number for number in range(3))])


def test_unknown_ids_are_not_found(client: hutch.Client) -> None:
    for invocation_id in ("inv_" + "0" * 32, "nonsense", ""):
        with pytest.raises(hutch.NotFoundError):
            client.get_invocation(invocation_id)
    with pytest.raises(hutch.NotFoundError):
        client.stat_artifact("art_" + "0" * 32)


def test_cancelling_twice_answers_with_the_ending_that_stands(client: hutch.Client) -> None:
    handle = client.spawn(program="while True: pass")
    first = handle.cancel()
    again = handle.cancel()
    assert first.ending is not None
    assert again.ending is not None
    assert (first.ending.kind, again.ending.kind) == ("cancelled", "cancelled")
    done = client.spawn(program="return 1")
    done.result()
    stands = done.cancel().ending
    assert stands is not None
    assert stands.kind == "returned"
