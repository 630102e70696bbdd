"""Packs `sandbox.runtime` into the bundle that a sandbox's interpreter starts from.

Called by the drivers, once for each interpreter. Start-up is import and compile time: the bundle is
an index and code, compiled by the very interpreter that will run it, as that interpreter wrote it.
This process never unpacks it. Inside, the package is called `hutch`.

The bundle: the size of the index in decimal digits, a newline, the index (a marshalled dictionary
from a module's name to where its code begins and ends), the code of all modules in turn. It is read
once, and every module's code is taken out of that one copy.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

Run = Callable[[Sequence[str], bytes], bytes]

RUNTIME = Path(__file__).parent / "runtime"
PACKAGE = "hutch"
COMPILE_SECONDS = 60

BOOT = f"""
import gc, sys, marshal
gc.disable()
with open(sys.argv[1], "rb", 0) as file:
    whole = file.read()
begin = whole.index(b"\\n") + 1
end = begin + int(whole[:begin])
places, code = marshal.loads(whole[begin:end]), memoryview(whole)[end:]
begin, end = places["{PACKAGE}.bundle"]
first = {{"__name__": "{PACKAGE}.bundle"}}
exec(marshal.loads(code[begin:end]), first)
first["install"]("{PACKAGE}", places, code)
from {PACKAGE}.start import main
main(sys.argv[2:])
"""

# Runs in the sandbox's interpreter: sources come in; their names and the bundle go out.
COMPILER = """
import __future__, marshal, sys
future = b"from __future__ import annotations\\n"
source = sys.stdin.buffer
places, codes, size = {}, [], 0
while True:
    head = source.readline().split()
    if not head:
        break
    name = head[0].decode()
    text = source.read(int(head[1]))
    # What the statement asks for is given as a flag: it would import a module at the start.
    flags = __future__.annotations.compiler_flag if future in text else 0
    plain = text.replace(future, b"\\n", 1)
    code = compile(plain, "<hutch>/" + name, "exec", flags, dont_inherit=True, optimize=0)
    stem = name[:-len(".py")]
    whole = sys.argv[1] if stem == "__init__" else sys.argv[1] + "." + stem
    codes.append(marshal.dumps(code))
    places[whole] = (size, size + len(codes[-1]))
    size += len(codes[-1])
index = marshal.dumps(places)
head = b"%s\\n%d\\n" % (" ".join(sorted(places)).encode(), len(index))
sys.stdout.buffer.write(head + index + b"".join(codes))
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
    bundle = _compile(python, sources, run)
    _write_whole(destination, lambda path: path.write_bytes(bundle))
    _write_whole(mark, lambda path: path.write_text(key))
    return destination


def read_sources() -> dict[str, bytes]:
    """Returns the runtime's modules by file name."""
    return {path.name: path.read_bytes() for path in sorted(RUNTIME.glob("*.py"))}


def digest_of(sources: dict[str, bytes]) -> str:
    """Returns a digest of modules, their names and what starts them."""
    digest = hashlib.sha256((BOOT + COMPILER).encode())
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


def _compile(python: str, sources: dict[str, bytes], run: Run) -> bytes:
    given = b"".join(
        b"%s %d\n%s" % (name.encode(), len(source), source) for name, source in sources.items()
    )
    output = run([python, "-I", "-S", "-c", COMPILER, PACKAGE], given)
    names, _, bundle = output.partition(b"\n")
    expected = sorted(
        PACKAGE if name == "__init__.py" else f"{PACKAGE}.{name.removesuffix('.py')}"
        for name in sources
    )
    if names.decode("utf-8", "replace").split() != expected or not bundle:
        raise PackingFailed(f"{python} gave no compiled code but {output[:80]!r}")
    return bundle


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
