"""Works on files as the code could, in a process of the code's uid.

Forked by `filelink`. Every operation names its file anew and nothing stays open between two, so
that another helper can go on. What a path leads to is hostile: nothing but a regular file is read
or written, and nothing is waited for.
"""

from __future__ import annotations

import os
from _bisect import bisect_right
from _stat import S_ISDIR, S_ISLNK, S_ISREG

from . import fastjson, frames, linux
from .confine import confine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from .settings import Settings

UPLOAD_PREFIX = ".hutch-upload-"
READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
WRITE_FLAGS = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOCTTY
LIST_BYTES = 48_000  # of one answer: its header has an end
KEPT_NAMES = 250_000  # of one folder, between two pages of its listing
END = "\U0010ffff"  # beyond every name
ENTRY_BYTES = 120  # of an entry, beside its name
PROBLEMS = {
    "ENOENT": "not_found",
    "ENOTDIR": "not_a_folder",
    "EISDIR": "not_a_file",
    "EACCES": "denied",
    "EPERM": "denied",
    "EROFS": "denied",
    "ENOSPC": "full",
    "EDQUOT": "full",
    "EFBIG": "full",
    "EINVAL": "invalid",
    "ENAMETOOLONG": "invalid",
    "ELOOP": "invalid",
    # The same may work later.
    "EAGAIN": "failed",
    "EMFILE": "failed",
    "ENFILE": "failed",
    "ENOMEM": "failed",
}


class Problem(Exception):
    """An operation that cannot be done: the problem's name, and a sentence."""


def run_child(socket: Any, settings: Settings, supervisor: int) -> NoReturn:
    """Serves operations until the supervisor is gone."""
    try:
        confine(settings, supervisor, (socket.fileno(),))
        linux.prctl(linux.PR_SET_DUMPABLE, 0)  # the code has this uid too
        listed = Listed()
        while True:
            packet = socket.recv(frames.MAX_FRAME_BYTES)
            if not packet:
                break
            frame = frames.decode_packet(packet)
            header, payload = answer(frame, settings.workspace, listed)
            socket.send(frames.encode(header, payload))
    finally:
        os._exit(0)


class Listed:
    """The names of the folder whose pages are being asked for: to read and sort them for each page
    would take time that grows with the square of their number."""

    __slots__ = ("_folder", "_names")

    def __init__(self) -> None:
        """Starts with no folder."""
        self._folder: tuple[object, ...] = ()
        self._names: list[tuple[str, str]] = []

    def after(self, path: str, shown: str) -> list[tuple[str, str]]:
        """Returns the names after one, sorted: each as it is shown, and as it is."""
        found = os.stat(path)
        folder = (path, found.st_dev, found.st_ino, found.st_mtime_ns)
        if not shown or folder != self._folder:
            names = sorted(
                (_shown(name), name)
                for name in os.listdir(path)
                if not name.startswith(UPLOAD_PREFIX)
            )
            kept = len(names) <= KEPT_NAMES
            self._folder, self._names = (folder, names) if kept else ((), [])
        else:
            names = self._names
        return names[bisect_right(names, (shown, END)) :] if shown else names

    def forget(self) -> None:
        """Frees what is kept: the last page was given."""
        self._folder, self._names = (), []


def answer(frame: frames.Frame, workspace: str, listed: Listed) -> tuple[dict[str, Any], bytes]:
    """Does one operation and returns the outcome's header and payload."""
    import errno

    header = frame.header
    outcome: dict[str, Any] = {
        "type": "file_outcome",
        "id": header["id"],
        "problem": "",
        "message": "",
        "entries": [],
        "more": False,
        "end": False,
    }
    try:
        path = os.path.join(workspace, header["path"])
        if "\0" in path:
            raise Problem("invalid", "a path with a zero byte")
        if header["op"] == "list":
            payload = _list(path, header, outcome, listed)
        else:
            payload = OPERATIONS[header["op"]](path, header, frame.payload, outcome)
    except Problem as problem:
        outcome["problem"], outcome["message"] = problem.args
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "")
        outcome["problem"] = PROBLEMS.get(name, "invalid")
        outcome["message"] = error.strerror or name
    else:
        return outcome, payload
    outcome.update(entries=[], more=False, end=False)
    return outcome, b""


def _stat(path: str, header: dict[str, Any], data: bytes, outcome: dict[str, Any]) -> bytes:
    name = os.path.basename(os.path.normpath(path))
    outcome["entries"] = [_entry(name, os.lstat(path))]
    return b""


def _list(path: str, header: dict[str, Any], outcome: dict[str, Any], listed: Listed) -> bytes:
    room = LIST_BYTES
    for shown, name in listed.after(path, header["after"]):
        room -= ENTRY_BYTES + len(fastjson.dumps(shown))
        if room < 0 or len(outcome["entries"]) >= header["max_entries"]:
            outcome["more"] = True
            break
        try:
            found = os.lstat(os.path.join(path, name))
        except FileNotFoundError:
            continue  # it went away meanwhile
        outcome["entries"].append(_entry(name, found))
    outcome["more"] = outcome["more"] and bool(outcome["entries"])
    if not outcome["more"]:
        listed.forget()
    return b""


def _read(path: str, header: dict[str, Any], data: bytes, outcome: dict[str, Any]) -> bytes:
    descriptor = os.open(path, READ_FLAGS)
    try:
        found = os.fstat(descriptor)
        _need_file(found.st_mode)
        offset = header["offset"]
        piece = os.pread(descriptor, min(header["max_bytes"], frames.CHUNK_BYTES), offset)
        # A file of /proc has no size: its end is where nothing comes any more.
        outcome["end"] = not piece or 0 < found.st_size <= offset + len(piece)
        return piece
    finally:
        os.close(descriptor)


def _write(path: str, header: dict[str, Any], data: bytes, outcome: dict[str, Any]) -> bytes:
    path = os.path.realpath(path)  # where an `open(path, "w")` of the code's would write
    folder, name = os.path.split(path)
    if not name:
        raise Problem("not_a_file", "a folder")
    temporary = os.path.join(folder, UPLOAD_PREFIX + header["upload"])
    if header["abandon"]:
        if os.path.lexists(temporary):
            os.unlink(temporary)
        return b""
    flags = WRITE_FLAGS
    if header["offset"] == 0:
        try:
            os.makedirs(folder, exist_ok=True)
        except FileExistsError:
            raise Problem("not_a_folder", "a file stands where a folder was to be made") from None
        flags |= os.O_CREAT
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        pass
    else:
        _need_file(found.st_mode)
    descriptor = os.open(temporary, flags, 0o600)
    try:
        found = os.fstat(descriptor)
        _need_file(found.st_mode)
        if found.st_size < header["offset"]:
            raise Problem("invalid", f"the upload has come up to {found.st_size}")
        os.ftruncate(descriptor, header["offset"])
        _write_all(descriptor, data, header["offset"])
        if header["last"]:
            os.fchmod(descriptor, 0o755 if header["executable"] else 0o644)
            os.rename(temporary, path)
            # What was made, not a link that led there.
            outcome["entries"] = [_entry(name, os.fstat(descriptor))]
    finally:
        os.close(descriptor)
    return b""


OPERATIONS = {"stat": _stat, "read": _read, "write": _write}


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _need_file(mode: int) -> None:
    if not S_ISREG(mode):
        raise Problem("not_a_file", "a folder" if S_ISDIR(mode) else "no regular file")


def _entry(name: str, found: os.stat_result) -> dict[str, Any]:
    kind = "other"
    for test, word in ((S_ISREG, "file"), (S_ISDIR, "folder"), (S_ISLNK, "link")):
        if test(found.st_mode):
            kind = word
    return {
        "name": _shown(name),
        "kind": kind,
        "size": found.st_size,
        "modified_us": max(0, found.st_mtime_ns // 1000),
        "mode": found.st_mode & 0o7777,
    }


def _shown(name: str) -> str:
    """Makes sound text of a name; bytes that are not UTF-8 are shown as `\\x..`."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
