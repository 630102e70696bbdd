"""The fake journal: what is in it survives every controller."""

from __future__ import annotations

from controller.core.ids import InvocationId, SandboxId, TenantId, sandbox_id_of
from controller.engine import records as rec
from controller.loop import by_age
from controller.store.ports import StoredRecord


class Journal:
    """Durable records, and what outside parties may therefore know."""

    def __init__(self) -> None:
        self._codec = rec.Codec()
        self.stored: list[StoredRecord] = []
        self.tenants: dict[InvocationId, TenantId] = {}
        self.requests: dict[tuple[TenantId, str], InvocationId] = {}
        self.lineage: dict[InvocationId, tuple[InvocationId, ...]] = {}
        self.slots: set[SandboxId] = set()
        self.decided: dict[InvocationId, rec.EndingDecided] = {}
        self.ended: dict[InvocationId, None] = {}
        self.over: set[InvocationId] = set()

    def append(self, records: list[tuple[InvocationId, rec.Record]], time_us: int) -> None:
        """Makes records durable that were decided at a time."""
        for tree_id, record in records:
            match record:
                case rec.Admitted():
                    assert record.invocation_id not in self.lineage, "it is admitted twice"
                    self.lineage[record.invocation_id] = record.lineage
                    self.tenants[tree_id] = record.tenant_id
                    if record.request_id:
                        key = (record.tenant_id, record.request_id)
                        self.requests[key] = record.invocation_id
                case rec.SlotGranted():
                    self.slots.add(sandbox_id_of(record.invocation_id, record.attempt))
                case rec.EndingDecided():
                    assert record.invocation_id not in self.decided, "it has two endings"
                    self.decided[record.invocation_id] = record
                case rec.Ended():
                    assert record.invocation_id not in self.ended, "it ends twice"
                    self.ended[record.invocation_id] = None
                case rec.TreeEnded():
                    self.over.add(tree_id)
            self.stored.append(
                StoredRecord(
                    tenant_id=self.tenants[tree_id],
                    tree_id=tree_id,
                    sequence=len(self.stored),
                    kind=record.kind,
                    invocation_id=record.invocation_id,
                    time_us=time_us,
                    engine_version=rec.ENGINE_VERSION,
                    payload=self._codec.dump(record),
                )
            )

    def live(self) -> list[rec.Record]:
        """The live trees' records alone, in the order in which the loop folds them."""
        found = [item for item in self.stored if item.tree_id not in self.over]
        found.sort(key=lambda item: (item.tenant_id, item.tree_id, item.sequence))
        return [self._codec.load(item.payload) for item in by_age(found)]
