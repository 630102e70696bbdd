"""The journal and the read model in SQLite.

Called by the loop (append, recovery) and the wire (get, list). Calls `controller.store.writer`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy
from sqlalchemy.dialects import sqlite

from controller.store import schema
from controller.store.ports import (
    Batch,
    InvocationRow,
    RequestRow,
    StoredRecord,
    parse_cursor,
)
from controller.store.writer import Readers, Writer

_RECORD_FIELDS = tuple(field.name for field in dataclasses.fields(StoredRecord))
_ROW_FIELDS = tuple(field.name for field in dataclasses.fields(InvocationRow))
_REQUEST_FIELDS = tuple(field.name for field in dataclasses.fields(RequestRow))

_invocations = schema.invocations
_insert_row = sqlite.insert(_invocations)
# In the statement's text, not a parameter of it.
_ZERO: sqlalchemy.ColumnElement[int] = sqlalchemy.literal_column("0")
_UPSERT_ROW = _insert_row.on_conflict_do_update(
    index_elements=["tenant_id", "invocation_id"],
    set_={
        name: _insert_row.excluded[name]
        for name in _ROW_FIELDS
        if name not in ("tenant_id", "invocation_id", "value")
    }
    # A row without its value leaves the one that stands: nobody must keep it in memory.
    | {
        "value": sqlalchemy.case(
            (sqlalchemy.func.length(_insert_row.excluded.value) == _ZERO, _invocations.c.value),
            else_=_insert_row.excluded.value,
        )
    },
)
_INSERT_RECORD = schema.records.insert()
_INSERT_REQUEST = schema.requests.insert()
_INSERT_TREE = sqlite.insert(schema.trees).on_conflict_do_nothing()
_insert_ended = sqlite.insert(schema.trees)
_END_TREE = _insert_ended.on_conflict_do_update(
    index_elements=["tenant_id", "tree_id"], set_={"ended": _insert_ended.excluded.ended}
)
_insert_counter = sqlite.insert(schema.counters)
_NEXT_COUNTER = _insert_counter.on_conflict_do_update(
    index_elements=["tenant_id", "name"], set_={"value": schema.counters.c.value + 1}
).returning(schema.counters.c.value)


def _get(table: sqlalchemy.Table, fields: Sequence[str], *key: str) -> sqlalchemy.Select[Any]:
    """The query for one row by its key, made once: building a query costs more than running it."""
    wanted = [table.c[name] == sqlalchemy.bindparam(name) for name in key]
    return sqlalchemy.select(*(table.c[name] for name in fields)).where(*wanted)


_GET_INVOCATION = _get(_invocations, _ROW_FIELDS, "tenant_id", "invocation_id")
_GET_REQUEST = _get(schema.requests, _REQUEST_FIELDS, "tenant_id", "request_id")


def _text(statement: sqlalchemy.Insert) -> str:
    """A statement as the driver takes it. What every commit needs is given to the driver itself: to
    go through SQLAlchemy each time costs several times what SQLite does."""
    dialect = sqlite.dialect(paramstyle="named")
    return str(statement.compile(dialect=dialect))


_TREE_SQL = _text(_INSERT_TREE)
_RECORD_SQL = _text(_INSERT_RECORD)
_ROW_SQL = _text(_UPSERT_ROW)
_REQUEST_SQL = _text(_INSERT_REQUEST)
_END_SQL = _text(_END_TREE)

# Counters of the controller itself belong to no tenant.
_NO_TENANT = ""


class SqliteJournal:
    """Implements `controller.store.ports.Journal`."""

    def __init__(self, writer: Writer, readers: Readers) -> None:
        self._writer = writer
        self._readers = readers

    async def append(self, batch: Batch) -> None:
        """Makes a batch durable (see the port)."""
        await self.begin(batch)

    def begin(self, batch: Batch) -> asyncio.Future[None]:
        """Begins to make a batch durable (see the port)."""
        return self._writer.submit(_apply_batches, batch, patient=True)

    async def counter_next(self, name: str) -> int:
        """The next number of a durable counter (see the port)."""
        return await self._writer.submit(_apply_counters, name)

    async def read_tree(
        self, tenant_id: str, tree_id: str, after_sequence: int = 0, limit: int = 1000
    ) -> list[StoredRecord]:
        """Records of one tree after a sequence, in order."""
        table = schema.records
        query = (
            _select(table, _RECORD_FIELDS)
            .where(table.c.tenant_id == tenant_id, table.c.tree_id == tree_id)
            .where(table.c.sequence > after_sequence)
            .order_by(table.c.sequence)
            .limit(limit)
        )
        return await self._readers.run(
            lambda connection: [_record(row) for row in connection.execute(query)]
        )

    async def live_records(self) -> list[StoredRecord]:
        """All records of all trees that have not ended."""
        table, trees = schema.records, schema.trees
        query = (
            _select(table, _RECORD_FIELDS)
            .join(
                trees,
                (trees.c.tenant_id == table.c.tenant_id) & (trees.c.tree_id == table.c.tree_id),
            )
            .where(trees.c.ended.is_(False))
            .order_by(table.c.tenant_id, table.c.tree_id, table.c.sequence)
        )
        return await self._readers.run(
            lambda connection: [_record(row) for row in connection.execute(query)]
        )

    async def get_invocation(self, tenant_id: str, invocation_id: str) -> InvocationRow | None:
        """One invocation with its value, or None."""
        key = {"tenant_id": tenant_id, "invocation_id": invocation_id}
        row = await self._readers.run(
            lambda connection: connection.execute(_GET_INVOCATION, key).first()
        )
        return None if row is None else InvocationRow(**row._mapping)

    async def list_invocations(
        self,
        tenant_id: str,
        *,
        tree_id: str = "",
        state: str = "",
        roots_only: bool = False,
        after: str = "",
        limit: int = 100,
    ) -> list[InvocationRow]:
        """Invocations without their `value`, by pages (see the port)."""
        table = _invocations
        query = _select(table, tuple(name for name in _ROW_FIELDS if name != "value")).where(
            table.c.tenant_id == tenant_id
        )
        if state:
            query = query.where(table.c.state == state)
        if roots_only:
            query = query.where(table.c.parent_id == "")
        place = parse_cursor(after, tree_id=tree_id) if after else None
        if tree_id:
            key = sqlalchemy.tuple_(table.c.ordinal, table.c.invocation_id)
            query = query.where(table.c.tree_id == tree_id)
            query = query.order_by(table.c.ordinal, table.c.invocation_id)
            query = query if place is None else query.where(key > place)
        else:
            key = sqlalchemy.tuple_(table.c.create_time_us, table.c.invocation_id)
            query = query.order_by(table.c.create_time_us.desc(), table.c.invocation_id.desc())
            query = query if place is None else query.where(key < place)
        page = query.limit(limit)
        return await self._readers.run(
            lambda connection: [InvocationRow(**row._mapping) for row in connection.execute(page)]
        )

    async def get_request(self, tenant_id: str, request_id: str) -> RequestRow | None:
        """What a request was answered with, or None."""
        key = {"tenant_id": tenant_id, "request_id": request_id}
        row = await self._readers.run(
            lambda connection: connection.execute(_GET_REQUEST, key).first()
        )
        return None if row is None else RequestRow(**row._mapping)

    async def close(self) -> None:
        """Finishes what waits and closes the database. Idempotent."""
        await self._writer.close()
        await self._readers.close()


def _select(table: sqlalchemy.Table, fields: Sequence[str]) -> sqlalchemy.Select[Any]:
    return sqlalchemy.select(*(table.c[name] for name in fields))


def _record(row: sqlalchemy.Row[Any]) -> StoredRecord:
    return StoredRecord(**row._mapping)


def _values(item: Any, fields: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(item, name) for name in fields}


def _apply_batches(connection: sqlalchemy.Connection, batches: Sequence[Batch]) -> list[None]:
    """Writes all batches with one statement a table. Of several rows of an invocation the last
    one stands, and so only that one is written."""
    records = [_values(item, _RECORD_FIELDS) for batch in batches for item in batch.records]
    newest = _newest_rows(row for batch in batches for row in batch.rows)
    requests = [_values(item, _REQUEST_FIELDS) for batch in batches for item in batch.requests]
    trees = {(item["tenant_id"], item["tree_id"]): False for item in records}
    ended = {key: True for batch in batches for key in batch.ended_trees}
    cursor = connection.connection.cursor()
    try:
        for statement, rows in (
            (_TREE_SQL, _tree_rows(trees)),
            (_RECORD_SQL, records),
            (_ROW_SQL, list(newest.values())),
            (_REQUEST_SQL, requests),
            (_END_SQL, _tree_rows(ended)),
        ):
            if rows:
                cursor.executemany(statement, rows)
    finally:
        cursor.close()
    return [None] * len(batches)


def _newest_rows(rows: Iterable[InvocationRow]) -> dict[tuple[str, str], dict[str, Any]]:
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        key = (row.tenant_id, row.invocation_id)
        values = _values(row, _ROW_FIELDS)
        if not row.value and key in newest:
            values["value"] = newest[key]["value"]
        newest[key] = values
    return newest


def _tree_rows(trees: dict[tuple[str, str], bool]) -> list[dict[str, Any]]:
    return [
        {"tenant_id": tenant_id, "tree_id": tree_id, "ended": ended}
        for (tenant_id, tree_id), ended in trees.items()
    ]


def _apply_counters(connection: sqlalchemy.Connection, names: Sequence[str]) -> list[int]:
    return [
        int(
            connection.execute(
                _NEXT_COUNTER, {"tenant_id": _NO_TENANT, "name": name, "value": 1}
            ).scalar_one()
        )
        for name in names
    ]
