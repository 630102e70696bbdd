"""The worker's loop: one request on standard input, one check, the answers on standard output.

Started by `controller.contracts`, whose module text says what the messages are. It ends when its
standard input does, or with its parent.
"""

from __future__ import annotations

import collections
import ctypes
import hashlib
import json
import os
import resource
import signal
import struct
import sys
from typing import Any

import jsonschema_rs

from controller.contract_worker.schemas import SchemaInvalid, compile_schema
from controller.contract_worker.values import BYTES_MAX, Decoded, ValueInvalid, decode
from controller.contract_worker.wording import describe_mismatch

_PR_SET_PDEATHSIG = 1
_SCHEMAS_KEPT = 64
_NICENESS = 5
_SPARE_CPU_SECONDS = 1

_Compiled = tuple[Any, jsonschema_rs.Validator]


def main() -> int:
    """Runs until the input ends."""
    _limit_self(parent=int(sys.argv[1]), memory_bytes=int(sys.argv[2]))
    schemas: collections.OrderedDict[bytes, _Compiled] = collections.OrderedDict()
    _send({"outcome": "ready"})
    while request := _read_request():
        header, schema, value = request
        _limit_cpu(float(header["cpu_seconds"]))
        try:
            answer = _serve(header, schema, value, schemas)
        except MemoryError:
            answer = {"outcome": "exhausted", "problem": "the check needs too much memory"}
        _send(answer)
    return 0


def _serve(
    header: dict[str, Any],
    schema: bytes,
    value: bytes,
    schemas: collections.OrderedDict[bytes, _Compiled],
) -> dict[str, Any]:
    try:
        compiled = _compiled(schema, schemas) if header["has_schema"] else None
    except SchemaInvalid as error:
        return {"outcome": "schema_invalid", "problem": str(error)[:2000]}
    if not header["has_value"]:
        return {"outcome": "accepted"}
    try:
        decoded = decode(_read_file(header["path"]) if header["path"] else value)
    except ValueInvalid as error:
        return {"outcome": "value_invalid", "problem": str(error)[:2000], "limit": error.limit}
    # The time for reading depends on the size, that for the check does not: a new clock begins.
    _send({"outcome": "decoded"})
    answer = _check(compiled, decoded) if compiled is not None else {"outcome": "accepted"}
    return answer | {"artifact_ids": decoded.artifact_ids, "tool_ids": decoded.tool_ids}


def _check(compiled: _Compiled, decoded: Decoded) -> dict[str, Any]:
    document, validator = compiled
    try:
        validator.validate(decoded.instance)
    except jsonschema_rs.ValidationError as error:
        path, expected, got = describe_mismatch(error, document, decoded.encoded)
        return {"outcome": "mismatch", "path": path, "expected": expected, "got": got}
    return {"outcome": "accepted"}


def _compiled(schema: bytes, schemas: collections.OrderedDict[bytes, _Compiled]) -> _Compiled:
    key = hashlib.sha256(schema).digest()
    if key not in schemas:
        schemas[key] = compile_schema(schema)
        if len(schemas) > _SCHEMAS_KEPT:
            schemas.popitem(last=False)
    schemas.move_to_end(key)
    return schemas[key]


def _limit_self(*, parent: int, memory_bytes: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before the line above
        sys.exit(0)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
    os.nice(_NICENESS)


def _limit_cpu(seconds: float) -> None:
    """Lets the kernel end this process if the check uses more CPU time than this."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime + seconds) + 1 + _SPARE_CPU_SECONDS
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))


def _read_request() -> tuple[dict[str, Any], bytes, bytes] | None:
    source = sys.stdin.buffer
    prefix = source.read(12)
    if len(prefix) < 12:
        return None
    header, schema, value = (source.read(size) for size in struct.unpack(">III", prefix))
    return json.loads(header), schema, value


def _read_file(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        return file.read(BYTES_MAX + 1)


def _send(answer: dict[str, Any]) -> None:
    data = json.dumps(answer).encode()
    sys.stdout.buffer.write(struct.pack(">I", len(data)) + data)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
