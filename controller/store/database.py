"""One SQLite database: its opening with every check, its connections, its errors.

Called by `controller.store.open` and by the writer and readers of this package. Calls SQLAlchemy
and, only when the schema is not the newest, Alembic.

Durability: write-ahead log with `synchronous=FULL`, so a commit that returned was synced and
survives a loss of power. A commit that failed for space is undone by SQLite and may be tried again.
When a sync fails nobody knows what the disk holds: the writer then refuses all further work.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy
from sqlalchemy import event, exc, pool

from controller.store import schema
from controller.store.ports import (
    StoreConflict,
    StoreDamaged,
    StoreError,
    StoreFull,
    StoreUnavailable,
)

if TYPE_CHECKING:
    from alembic.config import Config
    from sqlalchemy.engine.interfaces import DBAPIConnection
    from sqlalchemy.pool import ConnectionPoolEntry

_MAGIC = b"SQLite format 3\0"
_MIGRATIONS = Path(__file__).parent / "migrations"
_BUSY_SECONDS = 5.0
_WAL_KEEP_BYTES = 8 * 1024 * 1024
_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# Extended result codes after which it is not known what the disk holds.
_SYNC_CODES = frozenset({sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_DIR_FSYNC})
_NO_SPACE_BYTES = 256 * 1024


class CommitUnknown(StoreUnavailable):
    """A sync failed: the store must be opened anew before anything else is written."""


def prepare(path: Path, *, check_bytes_max: int) -> None:
    """Checks a database, or makes it, and brings its schema up to date. Blocks.

    Args:
        path: The database file; its folder must exist.
        check_bytes_max: A database up to this size is read through and checked.

    Raises:
        StoreDamaged: it is not ours to use; no byte of it was changed.
        StoreFull, StoreUnavailable: it could not be opened or migrated.
    """
    try:
        _check_file(path)
        if _check_content(path, check_bytes_max) != schema.HEAD_REVISION:
            _migrate(path)
    except OSError as error:
        raise translate_os(error, path) from error
    except (exc.SQLAlchemyError, sqlite3.Error) as error:
        raise translate(error, path) from error


def writer_engine(path: Path) -> sqlalchemy.Engine:
    """An engine whose transactions take the write lock at their beginning."""
    return _engine(path, query_only=False)


def reader_engine(path: Path) -> sqlalchemy.Engine:
    """An engine that cannot write."""
    return _engine(path, query_only=True)


def translate(error: BaseException, path: Path) -> StoreError:
    """The store's error for what SQLAlchemy or SQLite raised."""
    cause = error.orig if isinstance(error, exc.DBAPIError) else error
    if isinstance(cause, sqlite3.IntegrityError):
        return StoreConflict(str(cause))
    if not isinstance(cause, sqlite3.Error):
        return StoreUnavailable(f"{path}: {error}")
    code = getattr(cause, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    primary = code & 0xFF
    if code in _SYNC_CODES:
        return CommitUnknown(f"{path}: {cause}")
    if primary == sqlite3.SQLITE_FULL or (primary == sqlite3.SQLITE_IOERR and _no_space(path)):
        return StoreFull(f"{path}: no space")
    if code == sqlite3.SQLITE_IOERR_WRITE:  # undone as well; a disk may take it later
        return StoreFull(f"{path}: {cause}")
    if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return StoreDamaged(path, str(cause))
    return StoreUnavailable(f"{path}: {cause}")


def translate_os(error: OSError, path: Path) -> StoreError:
    """The store's error for a failed file operation."""
    if error.errno in _FULL_ERRNOS:
        return StoreFull(f"{path}: {error.strerror}")
    return StoreUnavailable(f"{path}: {error.strerror or error}")


def _no_space(path: Path) -> bool:
    """Whether an I/O error is the full disk that SQLite could not name (its shared memory)."""
    try:
        state = os.statvfs(path.parent)
    except OSError:
        return False
    return state.f_bavail * state.f_frsize < _NO_SPACE_BYTES


def _engine(path: Path, *, query_only: bool) -> sqlalchemy.Engine:
    engine = sqlalchemy.create_engine(
        sqlalchemy.URL.create("sqlite", database=str(path)),
        poolclass=pool.QueuePool,
        pool_size=4,
        max_overflow=0,
        connect_args={"timeout": _BUSY_SECONDS, "check_same_thread": False},
    )

    def configure(connection: DBAPIConnection, _entry: ConnectionPoolEntry) -> None:
        # SQLAlchemy's `begin` event below opens the transactions, not the driver: it would leave
        # schema changes outside of them.
        connection.isolation_level = None
        cursor = connection.cursor()
        for pragma in (
            "journal_mode=WAL",
            "synchronous=FULL",
            f"journal_size_limit={_WAL_KEEP_BYTES}",
            f"query_only={int(query_only)}",
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    def begin(connection: sqlalchemy.Connection) -> None:
        connection.exec_driver_sql("BEGIN" if query_only else "BEGIN IMMEDIATE")

    event.listen(engine, "connect", configure)
    event.listen(engine, "begin", begin)
    return engine


def _check_file(path: Path) -> None:
    """Looks at the file before SQLite does, which would write to some broken ones."""
    log = Path(f"{path}-wal")
    if not path.exists() or path.stat().st_size == 0:
        if log.exists() and log.stat().st_size > 0:
            raise StoreDamaged(path, "the database is empty, but its write-ahead log is not")
        # Made here, not by SQLite, for the mode; the log and the shared memory inherit it.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        return
    if not path.is_file():
        raise StoreDamaged(path, "it is not a file")
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise StoreDamaged(path, "it is not an SQLite database")


def _check_content(path: Path, check_bytes_max: int) -> str:
    """Reads the database without the power to change it. Returns its revision, empty if new."""
    # A rollback journal is there only after a death while the file was being made: SQLite must be
    # allowed to undo that, and there is nothing yet to protect.
    mode = "rw" if Path(f"{path}-journal").exists() else "ro"
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_SECONDS)) as connection:
        names = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
        if not names:
            return ""
        if "alembic_version" not in names:
            raise StoreDamaged(path, "it is some other program's database")
        if path.stat().st_size <= check_bytes_max:
            found = [str(row[0]) for row in connection.execute("PRAGMA integrity_check(3)")]
            if found != ["ok"]:
                raise StoreDamaged(path, "its integrity check fails: " + "; ".join(found))
        row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    revision = str(row[0]) if row else ""
    if revision not in ("", schema.HEAD_REVISION) and revision not in _known_revisions():
        raise StoreDamaged(path, f"its schema {revision} is of a newer version of Hutch")
    return revision


def _migration_config(connection: sqlalchemy.Connection | None = None) -> Config:
    # Alembic takes a quarter of a second to import, and most starts find the newest schema.
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _known_revisions() -> set[str]:
    from alembic.script import ScriptDirectory

    scripts = ScriptDirectory.from_config(_migration_config())
    return {script.revision for script in scripts.walk_revisions()}


def _migrate(path: Path) -> None:
    from alembic import command

    engine = _engine(path, query_only=False)
    try:
        with engine.begin() as connection:
            command.upgrade(_migration_config(connection), schema.HEAD_REVISION)
    finally:
        engine.dispose()
