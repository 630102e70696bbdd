"""Writes `docs/drivers.md` from what the drivers state, or with `--check` says if it is current.

Called by whoever changes a driver, and checked by a test.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sandbox.drivers import NAMES, arguments, docker_spec, gaps
from sandbox.drivers.docker_settings import RUNTIMES

DOCUMENT = Path(__file__).parents[2] / "docs" / "drivers.md"
_HEAD = """# Drivers

Made by `python -m sandbox.drivers.document` from what the drivers state: do not edit.

A driver makes sandboxes on one technology. All of them run one conformance suite
(`tests/conformance`), whatever stands between a sandbox and the machine; what a driver does not
hold it states itself, and `hutch doctor` shows the statement for the machine at hand.

| driver | a sandbox is | isolation | needs |
| --- | --- | --- | --- |
{table}

A template chooses its driver by its image and its runtime, in the host's configuration:

```toml
[host]
driver = "docker"

[docker]
engine = "unix:///var/run/docker.sock"       # the host alone opens it
allow_known_escapes = ["runc 1.1.5+ds1"]      # only what hutch doctor names, and only by name

[templates.default]
image = "sha256:..."                          # by digest: an image with Python 3.9 or newer

[templates.strong]
image = "sha256:..."
runtime = "runsc"                             # a kernel of its own

[templates.small]
root = "/srv/hutch/base"                      # no image: bubblewrap, with this root file system

[templates.numbers]
preload = ["decimal", "numpy"]                # no image: bubblewrap, with these imported once
```
"""
_WALLS = """
## What an engine is told of a container

No network, a read-only root, no new privileges, the system call filter of
`sandbox/drivers/seccomp` (one policy; bubblewrap's filter is compiled from the same one), the
capabilities {capabilities} for the supervisor and none for code, which runs as uid {uid}; memory
without swap, processes, CPU and open files limited; a tmpfs of limited size at each of {writable};
no log, no restart, no terminal, no health check of the image's. An image that declares volumes is
refused. Empty inside:

{masked}
"""
_GAPS = """
## What `{name}` does not hold

| gap | when | reason |
| --- | --- | --- |
"""
_ABOUT = {
    "bubblewrap": ("namespaces made by bwrap", "container", "Linux; nothing else"),
    "docker": ("a container run by runc", "container", "a Docker engine and an image"),
    "docker-runsc": (
        "a container run by gVisor",
        "kernel",
        "a Docker engine that knows `runsc`, and an image",
    ),
    "fake": ("a plain process", "process", "nothing; for tests only"),
}


def render() -> str:
    """The whole document."""
    table = "\n".join(f"| `{name}` | {' | '.join(_ABOUT[name])} |" for name in NAMES)
    parts = [_HEAD.format(table=table)]
    for name in NAMES:
        parts.append(_GAPS.format(name=name))
        parts += [f"| {gap.words} | {gap.when} | {gap.reason} |\n" for gap in gaps.BY_DRIVER[name]]
    walls = docker_spec.build_walls(next(iter(RUNTIMES.values())))
    parts.append(
        _WALLS.format(
            capabilities=", ".join(walls["CapAdd"]),
            uid=docker_spec.REPL_UID,
            writable=", ".join(f"`{path}`" for path in arguments.WRITABLE),
            masked=", ".join(f"`{path}`" for path in walls["MaskedPaths"]) + ".",
        )
    )
    return "".join(parts)


def main(arguments: list[str]) -> int:
    """Writes the document, or with `--check` says whether it is what would be written."""
    if arguments == ["--check"]:
        if DOCUMENT.is_file() and DOCUMENT.read_text(encoding="utf-8") == render():
            return 0
        sys.stderr.write(f"{DOCUMENT} is not current: run this without --check\n")
        return 1
    DOCUMENT.write_text(render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
