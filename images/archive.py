"""Turns the files of a root into an image: one layer, and the same bytes for the same files.

Called by `images.build`. Names are sorted, times fixed, owners are numbers, and what a sandbox has
no use for or must not have is left out: caches, logs, lists of packages that could be installed,
names of the machine it was made on, device files, set-user-id bits and file capabilities.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

# Folders that stay, empty.
EMPTIED = (
    "dev/",
    "proc/",
    "root/",
    "run/",
    "sys/",
    "tmp/",
    "var/backups/",
    "var/cache/",
    "var/lib/apt/",
    "var/log/",
    "var/tmp/",
)
DROPPED = (
    ".dockerenv",
    "etc/.pwd.lock",
    "etc/group-",
    "etc/gshadow-",
    "etc/hostname",
    "etc/hosts",
    "etc/machine-id",
    "etc/mtab",
    "etc/passwd-",
    "etc/resolv.conf",
    "etc/shadow-",
    "etc/subgid-",
    "etc/subuid-",
    "usr/share/info/",
    "usr/share/locale/",
    "usr/share/man/",
    "var/lib/dbus/machine-id",
    "var/lib/dpkg/lock",
    "var/lib/dpkg/lock-frontend",
    "var/lib/dpkg/status-old",
    "var/lib/dpkg/available",
    "var/lib/dpkg/diversions-old",
    "var/lib/dpkg/statoverride-old",
    "var/lib/dpkg/triggers/Lock",
)
DOCUMENTS = "usr/share/doc/"
WORKSPACE = "workspace"
MODE = 0o1777  # no set-user-id, no set-group-id


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """What was written."""

    image_id: str
    """`sha256:` and the digest of its configuration: what an engine calls it by."""
    size_bytes: int
    """Of all its files."""
    files: int
    """How many there are, folders and links too."""


def kept(name: str) -> bool:
    """Whether a path, relative to the root and without a slash at its end, stays in an image."""
    for folder in EMPTIED:
        if name.startswith(folder):
            return False
    for entry in DROPPED:
        if name == entry.rstrip("/") or (entry.endswith("/") and name.startswith(entry)):
            return False
    if name.startswith(DOCUMENTS):
        # The licences stay. Folders are made by whoever unpacks.
        return name.endswith("/copyright")
    return True


def write_layer(source: Path, target: Path, epoch: int) -> tuple[str, int, int]:
    """Writes the layer of an image.

    Args:
        source: A tar file of the whole root, not compressed.
        target: Where the layer goes.
        epoch: The time of every file, in seconds since 1970.

    Returns:
        The layer's digest in lower-case hexadecimal, the bytes of its files, how many there are.
    """
    size = count = 0
    with tarfile.open(source, "r:") as old, target.open("wb") as file:
        hashing = _Hashing(file)
        with tarfile.open(
            fileobj=cast("IO[bytes]", hashing), mode="w|", format=tarfile.GNU_FORMAT
        ) as new:
            for member, content in _members(old, epoch):
                new.addfile(member, old.extractfile(content) if content is not None else None)
                size += member.size
                count += 1
        return hashing.digest.hexdigest(), size, count


def _members(
    old: tarfile.TarFile, epoch: int
) -> Iterator[tuple[tarfile.TarInfo, tarfile.TarInfo | None]]:
    """The members of the new archive, in order, each with the one that has its content."""
    found: dict[str, tarfile.TarInfo] = {}
    for member in old.getmembers():
        name = _plain(member.name)
        if name and kept(name) and not (member.ischr() or member.isblk() or member.isfifo()):
            found[name] = member
    if WORKSPACE not in found:
        folder = tarfile.TarInfo(WORKSPACE)
        folder.type, folder.mode = tarfile.DIRTYPE, 0o755
        found[WORKSPACE] = folder
    first: dict[str, str] = {}  # of each content with several names, the first one
    for name in sorted(found):
        member = found[name]
        made = copy.copy(member)
        made.name, made.mtime, made.pax_headers = name, epoch, {}
        made.uname = made.gname = ""
        made.mode = member.mode & MODE
        content: tarfile.TarInfo | None = None
        if member.isreg() or member.islnk():
            origin = _plain(member.linkname) if member.islnk() else name
            if (earlier := first.setdefault(origin, name)) != name:
                made.type, made.linkname, made.size = tarfile.LNKTYPE, earlier, 0
            else:
                content = old.getmember(member.linkname) if member.islnk() else member
                made.type, made.linkname, made.size = tarfile.REGTYPE, "", content.size
        yield made, content


def _plain(name: str) -> str:
    return name.removeprefix("./").strip("/") if name != "." else ""


class _Hashing:
    """A file that is written and digested at once."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self._file.write(data)


def write_image(
    layer: Path, digest: str, target: Path, configuration: dict[str, Any], tag: str
) -> str:
    """Writes an image as an engine loads it (`docker load`).

    Args:
        layer: The layer, not compressed.
        digest: Its SHA-256.
        target: Where the image goes.
        configuration: The image's `config`, and `created` and `architecture`.
        tag: The name that the engine gives it.

    Returns:
        The image's id, `sha256:...`: the digest of its configuration.
    """
    document = {
        **configuration,
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    content = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    name = hashlib.sha256(content).hexdigest()
    manifest = [{"Config": f"{name}.json", "RepoTags": [tag], "Layers": [f"{digest}/layer.tar"]}]
    with tarfile.open(target, "w", format=tarfile.GNU_FORMAT) as archive:
        _add(archive, f"{name}.json", content)
        member = tarfile.TarInfo(f"{digest}/layer.tar")
        member.size = layer.stat().st_size
        with layer.open("rb") as file:
            archive.addfile(member, file)
        _add(archive, "manifest.json", json.dumps(manifest, sort_keys=True).encode())
    return f"sha256:{name}"


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))
