"""Packs `sandbox.runtime` into the archive that a sandbox's interpreter starts from.

Called by the drivers, once for each interpreter. It is the one module that may write an archive,
which is stored, not deflated, and holds code compiled by the very interpreter that will run it:
start-up is import and compile time. Inside, the package is called `hutch`.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
import zipfile  # noqa: TID251 - see above
from collections.abc import Callable, Sequence
from pathlib import Path

Run = Callable[[Sequence[str], bytes], bytes]

RUNTIME = Path(__file__).parent / "runtime"
PACKAGE = "hutch"
COMPILE_SECONDS = 60
STAMP = (1980, 1, 1, 0, 0, 0)  # archives of the same code are the same bytes

# Importing by hand, and not running the archive itself, spares the interpreter `runpy`.
BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    f"from {PACKAGE}.supervisor import main; main(sys.argv[2:])"
)
MAIN = f"import sys\nfrom {PACKAGE}.supervisor import main\nmain(sys.argv[1:])\n"

# Runs in the sandbox's interpreter: sources come in, code with an unchecked hash goes out.
COMPILER = """
import importlib._bootstrap_external as external, _imp, __future__, sys
future = b"from __future__ import annotations\\n"
source = sys.stdin.buffer
target = sys.stdout.buffer
while True:
    head = source.readline().split()
    if not head:
        break
    name, size = head[0].decode(), int(head[1])
    text = source.read(size)
    # What the statement asks for is given as a flag: it would import a module at the start.
    flags = __future__.annotations.compiler_flag if future in text else 0
    plain = text.replace(future, b"\\n", 1)
    code = compile(plain, "<hutch>/" + name, "exec", flags, dont_inherit=True, optimize=0)
    digest = _imp.source_hash(external._RAW_MAGIC_NUMBER, text)
    data = external._code_to_hash_pyc(code, digest, checked=False)
    target.write(b"%s %d\\n" % (name.encode(), len(data)))
    target.write(data)
"""


class PackingFailed(Exception):
    """The runtime could not be compiled; the text is what the interpreter said."""


def start_arguments(archive: str) -> list[str]:
    """Returns what follows the interpreter on a command line, up to the supervisor's options."""
    return ["-I", "-S", "-c", BOOT, archive]


def build_archive(python: str, destination: Path, run: Run | None = None) -> Path:
    """Writes the archive for one interpreter, unless it is there already.

    Args:
        python: the interpreter's path, as `run` understands it.
        destination: the archive's path. A file beside it, with `.key` added, says what it was
            built from; when that still holds, nothing is compiled.
        run: runs a command with bytes on its standard input and returns its output; by default as
            a plain process.

    Returns:
        The destination.

    Raises:
        PackingFailed: the interpreter could not compile the runtime.
    """
    run = run or run_plainly
    sources = read_sources()
    key = f"{digest_of(sources)} {_magic_number(python, run)}\n"
    mark = destination.with_name(destination.name + ".key")
    if destination.is_file() and mark.is_file() and mark.read_text() == key:
        return destination
    compiled = _compile(python, sources, run)
    _write_whole(destination, lambda path: _write_archive(path, compiled))
    _write_whole(mark, lambda path: path.write_text(key))
    return destination


def read_sources() -> dict[str, bytes]:
    """Returns the runtime's modules by file name."""
    return {path.name: path.read_bytes() for path in sorted(RUNTIME.glob("*.py"))}


def digest_of(sources: dict[str, bytes]) -> str:
    """Returns a digest of modules, their names and what starts them."""
    digest = hashlib.sha256((BOOT + MAIN + COMPILER).encode())
    for name, source in sources.items():
        digest.update(f"{name} {len(source)}\n".encode())
        digest.update(source)
    return digest.hexdigest()


def run_plainly(command: Sequence[str], given: bytes) -> bytes:
    """Runs a command as a process of its own, with nothing of the environment.

    Raises:
        PackingFailed: it failed or took too long.
    """
    try:
        done = subprocess.run(
            list(command),
            input=given,
            capture_output=True,
            timeout=COMPILE_SECONDS,
            env={"LC_ALL": "C.UTF-8"},
            cwd="/",
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PackingFailed(f"{command[0]} could not be run: {error}") from error
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace")[-2000:]
        raise PackingFailed(f"{command[0]} exited with {done.returncode}: {said}")
    return done.stdout


def _magic_number(python: str, run: Run) -> str:
    script = "import _imp, sys; from importlib.util import MAGIC_NUMBER as m; print(m.hex())"
    magic = run([python, "-I", "-S", "-c", script], b"").decode("ascii", "replace").strip()
    if not magic or len(magic) > 32:
        raise PackingFailed(f"{python} named no magic number but {magic[:80]!r}")
    return magic


def _compile(python: str, sources: dict[str, bytes], run: Run) -> dict[str, bytes]:
    given = b"".join(
        b"%s %d\n%s" % (name.encode(), len(source), source) for name, source in sources.items()
    )
    output = run([python, "-I", "-S", "-c", COMPILER], given)
    compiled = {}
    while output:
        head, _, rest = output.partition(b"\n")
        name, _, size = head.partition(b" ")
        if not size.isdigit() or len(rest) < int(size):
            raise PackingFailed(f"{python} gave no compiled code but {head[:80]!r}")
        compiled[name.decode()] = rest[: int(size)]
        output = rest[int(size) :]
    if set(compiled) != set(sources):
        raise PackingFailed(f"{python} compiled only {len(compiled)} of {len(sources)} modules")
    return compiled


def _write_archive(path: Path, compiled: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo("__main__.py", STAMP), MAIN)
        for name, data in compiled.items():
            archive.writestr(zipfile.ZipInfo(f"{PACKAGE}/{name}c", STAMP), data)


def _write_whole(destination: Path, write: Callable[[Path], object]) -> None:
    """Puts a file in its place only when it is complete; any uid may read it."""
    descriptor, name = tempfile.mkstemp(dir=destination.parent, prefix=destination.name)
    os.close(descriptor)
    path = Path(name)
    try:
        write(path)
        path.chmod(0o644)
        path.replace(destination)
    finally:
        path.unlink(missing_ok=True)
