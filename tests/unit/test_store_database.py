"""Opening the store's database: damage, migrations, full disks, loss of the process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import alembic.autogenerate
import pytest
import sqlalchemy
from alembic.migration import MigrationContext

from controller.store import database, schema
from controller.store.open import DATABASE_NAME, StoreConfig
from controller.store.ports import Batch, StoreDamaged, StoreFull, StoreUnavailable
from tests.support.stores import TENANT, opened, records, row

CHECK = StoreConfig().check_max_bytes


async def filled(state: Path, count: int = 200) -> Path:
    """A store with records; returns its database, closed."""
    async with opened(state) as stores:
        for number in range(1, count + 1):
            await stores.journal.append(records(number, payload=b"%d" % number * 100))
    return state / DATABASE_NAME


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, but for SQLite's shared memory, which holds no data."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.endswith("-shm")
    }


async def refused(state: Path) -> StoreDamaged:
    """Opens a store that must be refused and must not change."""
    before = contents(state)
    with pytest.raises(StoreDamaged) as caught:
        async with opened(state):
            pass
    assert contents(state) == {**before, **dict.fromkeys(contents(state).keys() - before, b"")}
    assert str(state / DATABASE_NAME) in str(caught.value)
    return caught.value


async def test_a_file_that_is_no_database_is_named_and_left(tmp_path: Path) -> None:
    (tmp_path / DATABASE_NAME).write_bytes(b"my diary\n" * 1000)
    assert "not an SQLite database" in str(await refused(tmp_path))


async def test_a_folder_in_its_place_is_named_and_left(tmp_path: Path) -> None:
    (tmp_path / DATABASE_NAME).mkdir()
    (tmp_path / DATABASE_NAME / "x").write_bytes(b"x")
    await refused(tmp_path)


async def test_another_programs_database_is_named_and_left(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / DATABASE_NAME)) as other:
        other.execute("CREATE TABLE diary (day TEXT)")
        other.execute("INSERT INTO diary VALUES ('monday')")
        other.commit()
    assert "other program" in str(await refused(tmp_path))


async def test_a_schema_of_a_newer_version_is_named_and_left(tmp_path: Path) -> None:
    path = await filled(tmp_path)
    with contextlib.closing(sqlite3.connect(path)) as newer:
        newer.execute("UPDATE alembic_version SET version_num = '9999'")
        newer.commit()
    assert "9999 is of a newer version" in str(await refused(tmp_path))


@pytest.mark.parametrize("damage", ["zeros", "cut", "garbage", "schema"])
async def test_a_malformed_database_is_named_and_left(tmp_path: Path, damage: str) -> None:
    path = await filled(tmp_path)
    data = bytearray(path.read_bytes())
    assert len(data) > 60_000
    match damage:
        case "zeros":
            data[20_000:40_000] = bytes(20_000)
        case "cut":
            data = data[:30_000]
        case "garbage":
            data[8_192:] = os.urandom(len(data) - 8_192)
        case "schema":
            data[100:4096] = b"\xff" * 3996
    path.write_bytes(data)
    await refused(tmp_path)


async def test_an_empty_database_with_a_log_is_named_and_left(tmp_path: Path) -> None:
    path = await filled(tmp_path)
    path.write_bytes(b"")
    Path(f"{path}-wal").write_bytes(b"frames")
    await refused(tmp_path)


async def test_an_empty_file_is_a_new_database(tmp_path: Path) -> None:
    (tmp_path / DATABASE_NAME).touch()
    async with opened(tmp_path) as stores:
        await stores.journal.append(records(1))


async def test_damage_found_by_a_read_is_named(tmp_path: Path) -> None:
    path = await filled(tmp_path)
    data = path.read_bytes()
    async with opened(tmp_path, StoreConfig(check_max_bytes=0)) as stores:
        path.write_bytes(data[:8_192] + b"\xff" * (len(data) - 8_192))
        with pytest.raises(StoreDamaged) as caught:
            await stores.journal.live_records()
    assert caught.value.path == path


async def test_a_state_directory_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable):
        async with opened(tmp_path / "none"):
            pass


async def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    async with opened(tmp_path) as stores:
        await stores.journal.append(records(1))
        await (await stores.outputs.append(TENANT, "inv_a", "stdout", 0, b"x"))
        staged = await stores.artifacts.stage()
        await staged.write(b"x")
        await staged.finish()
        await stores.artifacts.publish(TENANT, "art_1", "n", staged, "", "inv_a", 1)
        wide = [
            str(path)
            for path in tmp_path.rglob("*")
            if path.stat().st_mode & 0o077 and not path.is_symlink()
        ]
    assert wide == []


def test_the_migrations_make_the_tables_that_the_queries_expect(tmp_path: Path) -> None:
    path = tmp_path / DATABASE_NAME
    database.prepare(path, check_bytes_max=CHECK)
    engine = database.writer_engine(path)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert context.get_current_revision() == schema.HEAD_REVISION
        assert alembic.autogenerate.compare_metadata(context, schema.metadata) == []
    engine.dispose()


def test_the_tenant_is_in_every_key() -> None:
    for table in schema.metadata.sorted_tables:
        assert next(iter(table.primary_key.columns)).name == "tenant_id", table.name
        for index in table.indexes:
            first = index.expressions[0]
            assert isinstance(first, sqlalchemy.Column)
            assert first.name == "tenant_id", index.name


def test_a_migration_that_is_interrupted_leaves_nothing_half_made(tmp_path: Path) -> None:
    path = tmp_path / DATABASE_NAME
    script = (
        "import os, sys; from pathlib import Path\n"
        "import sqlalchemy; from alembic import op\n"
        "made = op.create_index\n"
        "def stop(*a, **k): made(*a, **k); os._exit(9)\n"
        "op.create_index = stop\n"
        "from controller.store import database\n"
        "database.prepare(Path(sys.argv[1]), check_bytes_max=0)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert ended.returncode == 9
    database.prepare(path, check_bytes_max=CHECK)
    database.prepare(path, check_bytes_max=CHECK)


async def test_a_full_database_is_typed_and_works_again_with_space(tmp_path: Path) -> None:
    async with opened(tmp_path) as stores:
        await stores.journal.append(records(1))
        writer = stores.journal._writer  # type: ignore[attr-defined]
        with writer._engine.connect() as connection:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()

        @sqlalchemy.event.listens_for(writer._engine, "checkout")
        def limit(connection: sqlite3.Connection, *_: object) -> None:
            connection.execute(f"PRAGMA max_page_count={limits[-1]}")

        limits = [pages + 4]
        huge = records(2, payload=b"x" * 100_000)
        first = asyncio.create_task(stores.journal.append(huge))
        await asyncio.sleep(0)  # the task hands it to the writer, before all that follows
        # What need not wait is refused, and what is small enough does not overtake.
        with pytest.raises(StoreFull):
            await stores.artifacts.add_refusals(TENANT, "inv_a", [("name", "reason")])
        second = asyncio.create_task(stores.journal.append(records(3)))
        await asyncio.sleep(0)
        with pytest.raises(StoreFull):
            await stores.artifacts.add_refusals(TENANT, "inv_a", [("name", "reason")])
        assert not first.done()
        assert not second.done()
        assert stores.space.short()
        limits.append(10_000_000)
        await first
        await second
        await stores.artifacts.add_refusals(TENANT, "inv_a", [("name", "reason")])
        assert not stores.space.stalled
        kept = await stores.journal.read_tree(TENANT, "inv_tree")
        assert [item.sequence for item in kept] == [1, 2, 3]


async def test_a_database_locked_by_somebody_else_is_unavailable_for_that_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_BUSY_SECONDS", 0.05)
    async with opened(tmp_path) as stores:
        await stores.journal.append(records(1))
        with contextlib.closing(sqlite3.connect(tmp_path / DATABASE_NAME)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreUnavailable):
                await stores.journal.append(records(2))
            other.rollback()
        await stores.journal.append(records(2))


@pytest.mark.parametrize(
    ("code", "later"),
    [(sqlite3.SQLITE_IOERR_FSYNC, StoreUnavailable), (sqlite3.SQLITE_IOERR_WRITE, None)],
)
async def test_after_a_failed_sync_nothing_is_written_any_more(
    tmp_path: Path, code: int, later: type[Exception] | None
) -> None:
    """What the disk holds is then unknown; a failed write, before the commit, is undone."""

    def fail(*_: object) -> None:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = code
        raise sqlalchemy.exc.OperationalError("COMMIT", {}, error)

    async with opened(tmp_path) as stores:
        engine = stores.journal._writer._engine  # type: ignore[attr-defined]
        sqlalchemy.event.listen(engine, "commit", fail)
        kept = asyncio.create_task(stores.journal.append(records(1)))
        with pytest.raises((StoreUnavailable, StoreFull)):
            await stores.artifacts.add_refusals(TENANT, "inv_a", [("name", "reason")])
        sqlalchemy.event.remove(engine, "commit", fail)
        if later is None:
            await kept
        else:
            with pytest.raises(later):
                await kept
            with pytest.raises(later):
                await stores.journal.append(records(2))


_FILL = """
import asyncio, os, pathlib, sys
from controller.store.open import open_stores
from controller.store.ports import StoreFull
from tests.support.stores import TENANT, records
state = pathlib.Path(sys.argv[1])
filler = state / "filler"
async def fails(call):
    try:
        await call
    except StoreFull:
        return True
    return False
async def main():
    stores = await open_stores(state)
    filler.write_bytes(b"x" * 3_000_000)
    number, data = 0, b"x" * 50_000
    waiting = None
    while waiting is None or waiting.done():
        number += 1
        waiting = asyncio.create_task(stores.journal.append(records(number, payload=data)))
        await asyncio.sleep(0)  # the task hands it to the writer, before all that follows
        # What stands behind it and need not wait says whether there was room.
        if not await fails(stores.artifacts.add_refusals(TENANT, f"inv_{number}", [("n", "r")])):
            await waiting
    output, waits = 0, False
    while not waits:
        written = await stores.outputs.append(TENANT, "inv_a", "stdout", output, data)
        output += len(data)
        waits = not (await asyncio.wait({written}, timeout=0.3))[0]
    assert await stores.outputs.size(TENANT, "inv_a", "stdout") < output
    staged = await stores.artifacts.stage()
    full = False
    while not full:
        full = await fails(staged.write(b"x" * 300_000))
    filler.unlink()
    await waiting
    await written
    assert await stores.outputs.size(TENANT, "inv_a", "stdout") == output
    await (await stores.outputs.append(TENANT, "inv_a", "stdout", output, data))
    staged = await stores.artifacts.stage()
    await staged.write(data)
    await staged.finish()
    await stores.artifacts.publish(TENANT, "art_1", "n", staged, "", "inv_a", 1)
    await stores.close()
    stores = await open_stores(state)
    assert len(await stores.journal.live_records()) == number
    assert await stores.outputs.size(TENANT, "inv_a", "stdout") == output + len(data)
    assert set(await stores.outputs.read(TENANT, "inv_a", "stdout", 0, 1 << 20)) == {ord("x")}
    assert not list((state / "artifacts" / ".staging").iterdir())
    await stores.close()
    print("well", number)
asyncio.run(main())
"""


@pytest.mark.userns
def test_a_disk_that_is_really_full_is_typed_and_nothing_is_lost(tmp_path: Path) -> None:
    """A tmpfs of 6 MiB in namespaces of its own stands for the disk."""
    unshare = shutil.which("unshare")
    probe = [unshare or "unshare", "--user", "--map-root-user", "--mount"]
    if unshare is None or subprocess.run([*probe, "true"], check=False).returncode:
        pytest.skip("no user namespaces here")
    shell = f'mount -t tmpfs -o size=6m none {tmp_path} && exec {sys.executable} -c "$0" {tmp_path}'
    ended = subprocess.run(
        [*probe, "sh", "-c", shell, _FILL], check=False, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert "well" in ended.stdout


_KILLED = """
import asyncio, pathlib, sys
from controller.store.open import open_stores
from tests.support.stores import records
async def main():
    stores = await open_stores(pathlib.Path(sys.argv[1]))
    async def append(tree):
        for number in range(1, 100000):
            await stores.journal.append(records(number, tree=tree))
            print(tree, number, flush=True)
    async with asyncio.TaskGroup() as group:
        for index in range(8):
            group.create_task(append(f"inv_t{index}"))
asyncio.run(main())
"""


async def test_what_was_acknowledged_survives_a_kill(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        acknowledged: dict[str, int] = {}
        for _ in range(300):
            tree, sequence = process.stdout.readline().split()
            acknowledged[tree] = int(sequence)
        process.kill()
    async with opened(tmp_path) as stores:
        for tree, number in acknowledged.items():
            kept = await stores.journal.read_tree(TENANT, tree, limit=100_000)
            sequences = [item.sequence for item in kept]
            assert sequences == list(range(1, len(kept) + 1))
            assert len(kept) >= number


async def test_waiting_appends_share_commits(tmp_path: Path) -> None:
    async with opened(tmp_path) as stores:
        commits = 0

        def count(_: object) -> None:
            nonlocal commits
            commits += 1

        engine = stores.journal._writer._engine  # type: ignore[attr-defined]
        sqlalchemy.event.listen(engine, "commit", count)
        async with asyncio.TaskGroup() as group:
            for number in range(200):
                batch = Batch(rows=(row(f"inv_{number}"),))
                group.create_task(stores.journal.append(batch))
        assert 1 <= commits <= 20


async def test_reads_go_on_while_a_write_waits_for_the_disk(tmp_path: Path) -> None:
    async with opened(tmp_path) as stores:
        await stores.journal.append(records(1))
        with contextlib.closing(sqlite3.connect(tmp_path / DATABASE_NAME)) as other:
            other.execute("BEGIN IMMEDIATE")
            write = asyncio.create_task(stores.journal.append(records(2)))
            for _ in range(10):
                assert len(await stores.journal.read_tree(TENANT, "inv_tree")) == 1
            assert not write.done()
            other.rollback()
        await write
