"""What is reserved, borrowed, used and waited for: running sums over the live trees.

Kept by `engine.apply`, so recovery sums the same from the same records; read by `engine.scheduler`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from controller.core.errors import invariant
from controller.core.ids import HostId, InvocationId, TenantId

if TYPE_CHECKING:  # the state holds the ledger
    from controller.engine.state import Node, Tree

Group = tuple[InvocationId, int]  # the parent (a root: itself) and the level


@dataclass(slots=True, kw_only=True)
class Share:
    """What one tenant holds, and which of its roots wait for admission, oldest first."""

    reserved: int = 0
    borrowed: int = 0
    roots: dict[InvocationId, None] = field(default_factory=dict)
    trees: dict[InvocationId, None] = field(default_factory=dict)  # those in which something waits

    @property
    def held(self) -> int:
        """Slots that nobody else can have."""
        return self.reserved + self.borrowed


@dataclass(slots=True, kw_only=True)
class Ledger:
    """The sums. A slot counts until its sandbox is proved gone."""

    reserved: int = 0
    borrowed: int = 0
    shares: dict[TenantId, Share] = field(default_factory=dict)
    used: dict[HostId, int] = field(default_factory=dict)
    own: set[tuple[InvocationId, int]] = field(default_factory=set)  # (tree, level): in use
    running: dict[InvocationId, int] = field(default_factory=dict)  # by parent, see `counts`
    # What waits in admitted trees, oldest first, by tree and group.
    waiting: dict[InvocationId, dict[Group, dict[InvocationId, None]]] = field(default_factory=dict)
    # Admitted trees in which a reserved slot may be due since the scheduler looked last.
    stirred: dict[InvocationId, None] = field(default_factory=dict)
    # The root for which what frees is gathered. Not summed from records: recovery chooses again.
    gathering: InvocationId | None = None

    def share(self, tenant_id: TenantId) -> Share:
        """A tenant's share."""
        return self.shares.setdefault(tenant_id, Share())

    def stir(self) -> None:
        """Every tree is to be looked at, because the hosts changed."""
        self.stirred.update(dict.fromkeys(self.waiting))

    def queue(self, node: Node, tree: Tree) -> None:
        """It waits for a slot; a root that never had one, for admission."""
        share = self.share(node.tenant_id)
        if not tree.reserved:
            share.roots[node.invocation_id] = None
            return
        groups = self.waiting.setdefault(node.tree_id, {})
        group = groups.setdefault(group_of(node), {})
        group[node.invocation_id] = None
        share.trees[node.tree_id] = None
        self.stirred[node.tree_id] = None

    def unqueue(self, node: Node) -> None:
        """It no longer waits; nothing when it did not."""
        share = self.share(node.tenant_id)
        share.roots.pop(node.invocation_id, None)
        if self.gathering == node.invocation_id:
            self.gathering = None
        groups = self.waiting.get(node.tree_id, {})
        group = groups.get(group_of(node), {})
        if node.invocation_id in group:
            del group[node.invocation_id]
            if not group:
                del groups[group_of(node)]
            if not groups:
                del self.waiting[node.tree_id]
                del share.trees[node.tree_id]
                self.stirred.pop(node.tree_id, None)
        self._drop_empty(node.tenant_id)

    def take(self, node: Node, tree: Tree, parent: Node | None) -> None:
        """Its slot is in use."""
        slot = node.slot
        assert slot is not None
        self.unqueue(node)
        share = self.share(node.tenant_id)
        if not tree.reserved:
            self.reserved += tree.depth
            share.reserved += tree.depth
        self.used[slot.host_id] = self.used.get(slot.host_id, 0) + 1
        if slot.borrowed:
            self.borrowed += 1
            share.borrowed += 1
        else:
            key = (node.tree_id, slot.level)
            invariant(key not in self.own, f"{key} is in use already")
            self.own.add(key)
        if parent is not None and counts(node, parent):
            self.running[parent.invocation_id] = self.running.get(parent.invocation_id, 0) + 1

    def free(self, node: Node, parent: Node | None) -> None:
        """Its sandbox is gone."""
        slot = node.slot
        if slot is None:
            return
        self.used[slot.host_id] -= 1
        if not self.used[slot.host_id]:
            del self.used[slot.host_id]
        if slot.borrowed:
            self.borrowed -= 1
            self.share(node.tenant_id).borrowed -= 1
        else:
            self.own.discard((node.tree_id, slot.level))
        if not node.ended:
            self._ran(node, parent)
        self._look(node.tree_id)
        self._drop_empty(node.tenant_id)

    def ended(self, node: Node, parent: Node | None) -> None:
        """It has ended, and may still hold its slot."""
        if node.slot is not None:
            self._ran(node, parent)
        self._look(node.tree_id)

    def release(self, tree: Tree) -> None:
        """Nothing of a tree is live."""
        if tree.reserved:
            self.reserved -= tree.depth
            self.share(tree.tenant_id).reserved -= tree.depth
        self._drop_empty(tree.tenant_id)

    def _ran(self, node: Node, parent: Node | None) -> None:
        if parent is None or not counts(node, parent):
            return
        self.running[parent.invocation_id] -= 1
        if not self.running[parent.invocation_id]:
            del self.running[parent.invocation_id]

    def _look(self, tree_id: InvocationId) -> None:
        if tree_id in self.waiting:
            self.stirred[tree_id] = None

    def _drop_empty(self, tenant_id: TenantId) -> None:
        share = self.shares.get(tenant_id)
        if share is not None and not (share.held or share.roots or share.trees):
            del self.shares[tenant_id]


def group_of(node: Node) -> Group:
    """Those that wait side by side: the children of one parent at one level."""
    return (node.parent_id or node.invocation_id, node.level)


def counts(node: Node, parent: Node) -> bool:
    """Whether a child counts for its parent's `max_concurrent`. One that was made while a tool
    call of somebody deeper was open does not: whoever called waits for it, and holds the place."""
    return node.level == parent.level + 1
