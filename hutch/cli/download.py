"""Writes artifacts into a folder, whatever their names say.

Called by `run --out` and `artifacts get`; calls the SDK and the operating system. A name is hostile
data: it is taken apart, each folder is opened without following a link, and a file appears under
its name only when it is complete and has its digest. It replaces a file of that name, never what a
link there points to.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hutch import types
from hutch.aio import AsyncClient
from hutch.errors import HutchError

_NAME_LIMIT_BYTES = 1024
_PART_LIMIT_BYTES = 255
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class NameRefused(HutchError):
    """A file is not written; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What became of one artifact: its path, or why there is none."""

    artifact: types.Artifact
    path: Path | None = None
    problem: str = ""


def parts_of(name: str) -> tuple[str, ...]:
    """A name's folders and file.

    Raises:
        NameRefused: It is absolute, leads out of its folder, or is no name of a file.
    """
    if not name or len(name.encode("utf-8", "surrogatepass")) > _NAME_LIMIT_BYTES:
        raise NameRefused("the name is empty or too long")
    if any(ord(character) < 0x20 or ord(character) == 0x7F for character in name):
        raise NameRefused("the name has control characters")
    parts = tuple(name.split("/"))
    for part in parts:
        if part in ("", ".", "..") or "\\" in part:
            raise NameRefused("the name leads out of the folder")
        try:
            if len(os.fsencode(part)) > _PART_LIMIT_BYTES:
                raise NameRefused("a part of the name is too long")
        except UnicodeEncodeError as error:
            raise NameRefused("the name cannot be written here") from error
    return parts


def open_base(folder: Path) -> int:
    """Opens the folder that artifacts go into, made where it is missing; the caller closes it.

    Raises:
        NameRefused: It cannot be used.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise NameRefused(f"the folder {str(folder)!r} cannot be used: {error.strerror}") from error


async def save_all(
    client: AsyncClient, artifacts: Sequence[types.Artifact], folder: Path
) -> list[Saved]:
    """Writes artifacts below a folder, which is made; one that is refused leaves the others alone.

    Raises:
        NameRefused: The folder itself cannot be used.
    """
    base = await asyncio.to_thread(open_base, folder)
    saved = []
    try:
        for artifact in artifacts:
            try:
                parts = parts_of(artifact.name)
                await _save(client, artifact, base, parts)
                saved.append(Saved(artifact=artifact, path=folder.joinpath(*parts)))
            except (HutchError, OSError) as error:
                saved.append(Saved(artifact=artifact, problem=str(error)))
    finally:
        os.close(base)
    return saved


async def _save(
    client: AsyncClient, artifact: types.Artifact, base: int, parts: tuple[str, ...]
) -> None:
    folder = _open_folder(base, parts[:-1])
    draft = f".hutch-{secrets.token_hex(8)}.part"
    try:
        _check_place(folder, parts[-1])
        handle = os.open(draft, _FILE_FLAGS, 0o644, dir_fd=folder)
        try:
            try:
                async for chunk in client.get_artifact(artifact.artifact_id):  # checks the digest
                    await asyncio.to_thread(_write, handle, chunk)
            finally:
                os.close(handle)
            os.rename(draft, parts[-1], src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.unlink(draft, dir_fd=folder)
            raise
    finally:
        os.close(folder)


def _write(handle: int, chunk: bytes) -> None:
    rest = memoryview(chunk)
    while rest:
        rest = rest[os.write(handle, rest) :]


def _open_folder(base: int, parts: tuple[str, ...]) -> int:
    """Opens a folder below `base`, made where it is missing; no part of the way may be a link."""
    current = os.dup(base)
    for part in parts:
        try:
            try:
                os.mkdir(part, 0o755, dir_fd=current)
            except FileExistsError:
                pass  # opening tells whether it is a folder
            following = os.open(part, _FOLDER_FLAGS, dir_fd=current)
        except NotADirectoryError as error:
            raise NameRefused(f"{part!r} is there and is no folder") from error
        finally:
            os.close(current)
        current = following
    return current


def _check_place(folder: int, name: str) -> None:
    """Only a file, or a link to be replaced, may be in the way."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISLNK(found.st_mode):
        raise NameRefused(f"{name!r} is there and is no file")
