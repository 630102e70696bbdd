"""Values as only hostile code sends them, and contracts made to explode."""

from __future__ import annotations

import pytest

import hutch
from tests.support.hostile import hostile

GUARD_SECONDS = 30.0
OWNER_OF_ANOTHER = "art_0123456789abcdef0123456789abcdef"

VALUES = {
    "not UTF-8": b"\xff{[",
    "a key twice": b'{"a": 1, "a": 2}',
    "not a number": b"NaN",
    "two documents": b"1 2",
    "nested, small": b"[" * 2_000 + b"]" * 2_000,
    "nested, large": b"[" * 60_000 + b"]" * 60_000,
    "a huge integer": b"9" * 5_000,
    "a huge exponent": b"1e999999",
    "lone surrogates": b'"\\ud800"',
    "an unknown kind": b'{"$reduce": ["os.system", ["true"]]}',
    "a pickle": b'{"$pickle": "gASVJgAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjAtlY2hvIG93bmVklIWUUpQu"}',
    "an artifact of another": b'{"$artifact": "%s"}' % OWNER_OF_ANOTHER.encode(),
    "one with escapes": b'{"\\u0024artifact": "%s"}' % OWNER_OF_ANOTHER.encode(),
}


@pytest.mark.parametrize("name", VALUES)
def test_case_s7_a_value_that_is_none_is_refused_and_nothing_is_loaded(
    client: hutch.Client, name: str
) -> None:
    with pytest.raises(hutch.InvocationFailed) as caught:
        client.invoke(
            program=hostile(f"forge_done({VALUES[name]!r})"), timeout_seconds=GUARD_SECONDS
        )
    assert caught.value.ending == "contract_violated"


SCHEMAS = {
    "references that double": """{
"$ref": "#/$defs/d0", "$defs": {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n+1}"}] * 2}
for n in range(40)} | {"d40": {}}}""",
    "a file": '{"$ref": "file:///etc/passwd"}',
    "an address": '{"$ref": "http://127.0.0.1:1/schema"}',
    "another dialect": '{"$schema": "http://json-schema.org/draft-04/schema#"}',
    "a back reference": r'{"type": "string", "pattern": r"(a)\1"}',
    "a repeated repetition": '{"type": "string", "pattern": "((a{1000}){1000}){1000}"}',
    "too many nodes": '{"anyOf": [{"anyOf": [{}] * 120}] * 120}',
    "too deep": 'functools.reduce(lambda inner, _: {"not": inner}, range(500), {})',
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_contract_made_to_explode_is_refused(client: hutch.Client, name: str) -> None:
    program = f"""
import functools
schema = json.dumps({SCHEMAS[name]}).encode()
header = dict(detached=True, program=Place(0), task=None, inputs=[], tools=[],
              spawn={{}}, resources={{}},
    contract={{"schema": Place(1), "max_failures": 0}}, timeout_ms=0, template="", label="",
    artifact_patterns=[], retry_on_loss=False, output_view_bytes=0, output_limit_bytes=0)
return ask("spawn", [b"return 1", schema], **header).failure.reason
"""
    reason = client.invoke(program=hostile(program), timeout_seconds=GUARD_SECONDS)
    assert reason in ("FIELD_INVALID", "PAYLOAD_TOO_LARGE")


def test_a_pattern_that_backtracks_elsewhere_is_checked_in_linear_time(
    client: hutch.Client,
) -> None:
    program = """
schema = json.dumps({"type": "string", "pattern": "^(a+)+$"}).encode()
header = dict(detached=False, program=Place(0), task=None, inputs=[], tools=[],
              spawn={}, resources={},
    contract={"schema": Place(1), "max_failures": 0}, timeout_ms=0, template="", label="",
    artifact_patterns=[], retry_on_loss=False, output_view_bytes=0, output_limit_bytes=0)
return ask("spawn", [b"return 'a' * 50_000 + '!'", schema], **header).failure.ending
"""
    ending = client.invoke(program=hostile(program), timeout_seconds=GUARD_SECONDS)
    assert ending == "contract_violated"
