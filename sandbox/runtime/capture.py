"""Walks the workspace and sends the files that match, in a process of the code's uid.

Forked by `capturelink`. No process of the code is left when it runs, but what it left on disk is
hostile: nothing is followed, opened for long, or trusted to keep its size.
"""

from __future__ import annotations

import posix
from _stat import S_ISBLK, S_ISCHR, S_ISDIR, S_ISFIFO, S_ISLNK, S_ISREG, S_ISSOCK

from . import frames
from .confine import confine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, NoReturn

    from .settings import Settings

MAX_NAME_BYTES = 512
MAX_DEPTH = 64
MAX_ENTRIES = 1_000_000
UPLOAD_PREFIX = b".hutch-upload-"  # of `fileops`
END = -1  # beyond a `**` that ends a pattern: anything below matches
OPEN_FLAGS = posix.O_RDONLY | posix.O_NOFOLLOW | posix.O_NONBLOCK | posix.O_CLOEXEC | posix.O_NOCTTY


def run_child(
    socket: Any, settings: Settings, request: dict[str, Any], supervisor: int
) -> NoReturn:
    """Captures and exits."""
    try:
        confine(settings, supervisor, (socket.fileno(),))
        Capture(socket, request).run(settings.workspace)
    finally:
        posix._exit(0)


def matches(pattern: list[bytes], name: list[bytes], *, partly: bool = False) -> bool:
    """Tells whether a name matches a pattern, both cut at their slashes.

    Args:
        pattern: `**` stands for any folders (at the end: anything below), `*` and `?` stay inside
            one part. Takes time proportional to the product of the lengths.
        name: the parts of the name.
        partly: whether it is enough that something inside the folder of this name could match.
    """
    places = _with_skipped(pattern, {0})  # where in the pattern the next part may stand
    for part in name:
        following = set()
        for at in places:
            if at == len(pattern):
                continue
            if pattern[at] == b"**":
                following.add(at if at + 1 < len(pattern) else END)
            elif matches_part(pattern[at], part):
                following.add(at + 1)
        if END in following:
            return True
        places = _with_skipped(pattern, following)
    return bool(places) if partly else len(pattern) in places


def _with_skipped(pattern: list[bytes], places: set[int]) -> set[int]:
    """Adds the places that are reached where a `**` stands for no folder."""
    found = set()
    for at in places:
        found.add(at)
        while at + 1 < len(pattern) and pattern[at] == b"**":
            at += 1
            found.add(at)
    return found


def matches_part(pattern: bytes, part: bytes) -> bool:
    """Matches one part of a name, in time proportional to the product of the lengths."""
    at = mark = position = 0
    star = -1
    while position < len(part):
        wanted = pattern[at : at + 1]
        if wanted == b"*":
            star, mark, at = at, position, at + 1
        elif wanted and wanted in (b"?", part[position : position + 1]):
            at, position = at + 1, position + 1
        elif star >= 0:
            mark += 1
            at, position = star + 1, mark
        else:
            return False
    return not pattern[at:].strip(b"*")


class Refused(Exception):
    """One file is not captured; the text says why."""


class Capture:
    """One walk."""

    def __init__(self, socket: Any, request: dict[str, Any]) -> None:
        """Takes the patterns and limits of the request."""
        self._socket = socket
        self._patterns = [
            pattern.strip("/").encode("utf-8", "surrogateescape").split(b"/")
            for pattern in request["patterns"]
        ]
        self._files_left = request["max_files"]
        self._bytes_left = request["max_bytes"]
        self._entries_left = MAX_ENTRIES
        self._files = 0
        self._long_names = 150  # hundreds of bytes
        self._refused: list[dict[str, str]] = []

    def run(self, workspace: str) -> None:
        """Sends every file that matches, by name, then `captured`."""
        try:
            root = posix.open(workspace, posix.O_RDONLY | posix.O_DIRECTORY | posix.O_CLOEXEC)
        except OSError as error:
            self._refuse(b".", f"the workspace cannot be opened: {error.strerror}")
        else:
            for name, folder, entry in self._walk(root, b"", 0):
                try:
                    self._send(name, folder, entry)
                except Refused as reason:
                    self._refuse(name, str(reason))
                except OSError as error:
                    self._refuse(name, f"it cannot be read: {error.strerror}")
        self._say({"type": "captured", "files": self._files, "refused": self._refused})

    def _walk(self, folder: int, prefix: bytes, depth: int) -> Iterator[tuple[bytes, int, bytes]]:
        """Yields matching names with their open folder, sorted, and closes the folder."""
        try:
            try:
                # The folder's own path is not used: it may have been exchanged meanwhile.
                entries = sorted(name.encode("utf-8", "surrogateescape") for name in _list(folder))
            except OSError as error:
                self._refuse(prefix.rstrip(b"/") or b".", f"a folder: {error.strerror}")
                return
            for entry in entries:
                if entry.startswith(UPLOAD_PREFIX):
                    continue  # what an upload left behind that nobody finished
                self._entries_left -= 1
                if self._entries_left < 0:
                    self._refuse(prefix + entry, "too many entries in the workspace")
                    return
                name = prefix + entry
                if self._is_folder(folder, entry):
                    if self._fits(name, partly=True):
                        yield from self._descend(folder, entry, name, depth)
                elif self._fits(name):
                    yield name, folder, entry
        finally:
            posix.close(folder)

    def _descend(
        self, folder: int, entry: bytes, name: bytes, depth: int
    ) -> Iterator[tuple[bytes, int, bytes]]:
        if depth >= MAX_DEPTH:
            self._refuse(name, "folders nested too deeply")
            return
        try:
            inner = posix.open(entry, OPEN_FLAGS | posix.O_DIRECTORY, dir_fd=folder)
        except OSError as error:
            self._refuse(name, f"a folder: {error.strerror}")
            return
        yield from self._walk(inner, name + b"/", depth + 1)

    def _fits(self, name: bytes, *, partly: bool = False) -> bool:
        parts = name.split(b"/")
        return any(matches(pattern, parts, partly=partly) for pattern in self._patterns)

    @staticmethod
    def _is_folder(folder: int, entry: bytes) -> bool:
        try:
            return S_ISDIR(posix.stat(entry, dir_fd=folder, follow_symlinks=False).st_mode)
        except OSError:
            return False

    def _send(self, name: bytes, folder: int, entry: bytes) -> None:
        _check_name(name)
        _check_kind(posix.stat(entry, dir_fd=folder, follow_symlinks=False).st_mode)
        descriptor = posix.open(entry, OPEN_FLAGS, dir_fd=folder)
        try:
            found = posix.fstat(descriptor)
            _check_kind(found.st_mode)
            if self._files_left <= 0:
                raise Refused("too many files")
            if found.st_size > self._bytes_left:
                raise Refused("too many bytes")
            self._files_left -= 1
            self._bytes_left -= found.st_size
            self._send_content(name, descriptor, found.st_size)
            self._files += 1
        finally:
            posix.close(descriptor)

    def _send_content(self, name: bytes, descriptor: int, size: int) -> None:
        """Sends at most the size that the file had; a shorter one ends early."""
        offset = 0
        while True:
            data = posix.read(descriptor, min(frames.CHUNK_BYTES, size - offset))
            last = not data or offset + len(data) >= size
            header = {"type": "file", "name_hex": name.hex(), "offset": offset, "last": last}
            self._say(header, data)
            offset += len(data)
            if last:
                return

    def _refuse(self, name: bytes, reason: str) -> None:
        if len(self._refused) < frames.MAX_REFUSED_FILES:
            # One header has room for all of them only if not all are long.
            kept = name[: MAX_NAME_BYTES if self._long_names > 0 else 40].hex()
            self._long_names -= len(kept) // 100
            self._refused.append({"name_hex": kept, "reason": reason[:60]})

    def _say(self, header: dict[str, Any], payload: bytes = b"") -> None:
        self._socket.sendall(frames.encode(header, payload))


def _list(folder: int) -> list[str]:
    return posix.listdir(folder)


def _check_name(name: bytes) -> None:
    if len(name) > MAX_NAME_BYTES:
        raise Refused(f"a name of over {MAX_NAME_BYTES} bytes")
    try:
        text = name.decode("utf-8")
    except UnicodeDecodeError:
        raise Refused("a name that is not UTF-8") from None
    if not text.isprintable():
        raise Refused("a name with control characters")


def _check_kind(mode: int) -> None:
    if S_ISREG(mode):
        return
    for test, what in (
        (S_ISLNK, "a symbolic link"),
        (S_ISFIFO, "a fifo"),
        (S_ISSOCK, "a socket"),
        (S_ISCHR, "a device"),
        (S_ISBLK, "a device"),
    ):
        if test(mode):
            raise Refused(what)
    raise Refused("not a regular file")
