"""Rows and stores for the tests of the store.

Called by the store's unit and conformance tests.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from controller.store.open import StoreConfig, Stores, open_stores
from controller.store.ports import Batch, InvocationRow, RequestRow, StoredRecord

TENANT = "local"


@contextlib.asynccontextmanager
async def opened(state: Path, config: StoreConfig | None = None) -> AsyncIterator[Stores]:
    """The stores of a state directory, closed at the end."""
    stores = await open_stores(state, config)
    try:
        yield stores
    finally:
        await stores.close()


def record(
    sequence: int, *, tree: str = "inv_tree", tenant: str = TENANT, payload: bytes = b"{}"
) -> StoredRecord:
    """One record."""
    return StoredRecord(
        tenant_id=tenant,
        tree_id=tree,
        sequence=sequence,
        kind="Admitted",
        invocation_id=tree,
        time_us=1_000_000 + sequence,
        engine_version=1,
        payload=payload,
    )


def row(
    invocation_id: str,
    *,
    tree: str = "inv_tree",
    tenant: str = TENANT,
    parent: str = "",
    ordinal: int = 0,
    time_us: int = 0,
    state: str = "running",
    snapshot: bytes = b"snapshot",
    value: bytes = b"",
) -> InvocationRow:
    """One invocation as it stands."""
    return InvocationRow(
        tenant_id=tenant,
        invocation_id=invocation_id,
        tree_id=tree,
        parent_id=parent,
        depth=2 if parent else 1,
        state=state,
        label="",
        create_time_us=time_us,
        end_time_us=0,
        ordinal=ordinal,
        snapshot=snapshot,
        value=value,
    )


def request(request_id: str, *, tenant: str = TENANT, digest: str = "d") -> RequestRow:
    """One answered request."""
    return RequestRow(
        tenant_id=tenant, request_id=request_id, content_digest=digest, answer_id="inv_tree"
    )


def records(*sequences: int, tree: str = "inv_tree", payload: bytes = b"{}") -> Batch:
    """A batch of records of one tree."""
    return Batch(records=tuple(record(n, tree=tree, payload=payload) for n in sequences))
