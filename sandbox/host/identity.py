"""Who the host is: its id, its generation, its version.

Called by the daemon at its start and by the servicer.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from sandbox.host.errors import field_invalid


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The id is kept; the generation rises with every start."""

    host_id: str
    generation: int


class StateDamaged(Exception):
    """A file of the state folder is not what the host wrote; it is named and left as it is."""


def next_identity(state: Path) -> Identity:
    """Reads the identity of the state folder and takes the next generation.

    Raises:
        StateDamaged: the file cannot be understood.
    """
    path = state / "identity.json"
    host_id, generation = f"hst_{secrets.token_hex(16)}", 0
    if path.exists():
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            host_id, generation = document["host_id"], document["host_generation"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise StateDamaged(f"{path} is damaged: {error}; move it away to go on") from error
        if not isinstance(host_id, str) or type(generation) is not int or generation < 0:
            raise StateDamaged(f"{path} is damaged; move it away to go on")
    identity = Identity(host_id=host_id, generation=generation + 1)
    write_json(path, {"host_id": identity.host_id, "host_generation": identity.generation})
    return identity


def write_json(path: Path, document: dict[str, object]) -> None:
    """Replaces a file as a whole, durably, readable by the owner only."""
    temporary = path.with_name(path.name + ".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(document, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def version() -> str:
    """The version of this installation."""
    return metadata.version("hutch")


def check_version(theirs: str, ours: str) -> None:
    """Checks that a controller's version works with this host's: the same or one minor apart.

    Raises:
        HostError: FIELD_INVALID.
    """
    if not theirs:
        return  # a tool that only looks
    try:
        their_major, their_minor = _numbers(theirs)
    except ValueError:
        raise field_invalid("controller_version", f"{theirs[:100]!r} is not a version") from None
    our_major, our_minor = _numbers(ours)
    if their_major != our_major or abs(their_minor - our_minor) > 1:
        raise field_invalid(
            "controller_version", f"{theirs} does not work with a host of version {ours}"
        )


def _numbers(text: str) -> tuple[int, int]:
    parts = text.split(".")
    if len(parts) < 2 or len(text) > 100:
        raise ValueError(text)
    return int(parts[0]), int(parts[1])


def start_time_of_this_process() -> str:
    """Field 22 of /proc/self/stat: with the pid it names one process for good."""
    stat = Path("/proc/self/stat").read_text(encoding="utf-8")
    return stat.rpartition(")")[2].split()[19]
