"""All sandboxes of this host, and the ids of those that are gone.

Called by the servicer and the daemon. An id is used once: one that was destroyed, even before it
was started, is never started again.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hutch.v1 import ending_pb2, host_pb2
from hutch.v1 import host_service_pb2 as pb
from sandbox.drivers.driver import Driver, Level, Limits, Statement
from sandbox.host.errors import (
    field_invalid,
    host_unavailable,
    not_enforceable,
    sandbox_not_found,
)
from sandbox.host.hosted import DEFAULT_OUTPUT_LIMIT_BYTES, HostedSandbox
from sandbox.host.pool import Pool, Shape
from sandbox.host.workshop import Order, Workshop

MAX_GONE = 1_024
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_RESOURCES = (
    "memory_limit_bytes",
    "pids_limit",
    "cpu_limit_millis",
    "tmpfs_limit_bytes",
    "open_files_limit",
)
_LIMITS = ("memory", "pids", "cpu", "tmpfs", "open_files")
# The kernel counts open files for each process only, so that level is all one can ask for.
_PER_PROCESS = frozenset({"open_files"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One driver with what it stated."""

    driver: Driver
    statement: Statement


@dataclass(slots=True, kw_only=True)
class SandboxTable:
    """Live sandboxes, gone ones whose owner does not know it yet, and tombstones."""

    workshop: Workshop
    offers: Mapping[str, Offer]  # the default driver first
    capacity: int
    pool: Pool
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    _sandboxes: dict[str, HostedSandbox] = field(default_factory=dict)
    _tombstones: OrderedDict[str, bytes] = field(default_factory=OrderedDict)

    def attach(self, request: pb.SandboxAttach) -> tuple[HostedSandbox, bool]:
        """Finds a sandbox, or starts it; says which.

        Raises:
            HostError: SANDBOX_NOT_FOUND, FIELD_INVALID, NOT_ENFORCEABLE, HOST_UNAVAILABLE.
        """
        sandbox_id = checked_id(request.sandbox_id)
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is not None:
            return sandbox, False
        known_before = sandbox_id in self._tombstones or request.after_sequence > 0
        if known_before or not request.HasField("spec"):
            raise sandbox_not_found(sandbox_id)
        order = self._order(request)
        if self.closing.is_set():
            raise host_unavailable("the host is shutting down")
        if self.live_count() >= self.capacity:
            raise host_unavailable(f"all {self.capacity} places of the host are taken")
        shape = Shape(driver=order.driver.name, template=order.template, limits=order.limits)
        warm = self.pool.claim(shape)
        sandbox = HostedSandbox(order, self.workshop, self._retire, warm)
        self._sandboxes[sandbox_id] = sandbox
        sandbox.start()
        self._limit_gone()
        return sandbox, True

    async def destroy(self, sandbox_id: str) -> ending_pb2.Evidence:
        """Ends a sandbox and returns once it is proved gone; also if it never was.

        Raises:
            HostError: FIELD_INVALID.
        """
        checked_id(sandbox_id)
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is None:
            known = self._tombstones.get(sandbox_id, b"")
            self._bury(sandbox_id, known)
            return ending_pb2.Evidence.FromString(known)
        if sandbox.gone.is_set():
            # Its owner asks for nothing more of it, so its last event needs no acknowledgement.
            self._retire(sandbox)
            return sandbox.evidence
        sandbox.end(pb.GONE_CAUSE_DESTROYED, "its owner destroyed it")
        await sandbox.gone.wait()
        return sandbox.evidence

    async def destroy_all(self, message: str) -> None:
        """Ends all sandboxes, warm ones too, and returns once they are proved gone."""
        living = self._living()
        for sandbox in living:
            sandbox.end(pb.GONE_CAUSE_LOST, message)
        await self.pool.drain()
        for sandbox in living:
            await sandbox.gone.wait()

    async def shut_down(self, limit_seconds: float) -> list[str]:
        """Takes no more and ends all; returns the ids that could not be proved gone in time."""
        self.closing.set()
        try:
            async with asyncio.timeout(limit_seconds):
                await self.destroy_all("the host shut down")
        except TimeoutError:
            pass
        for sandbox in self._sandboxes.values():
            sandbox.log.wake()
        left = [sandbox.order.sandbox_id for sandbox in self._living()]
        return [*left, *(["warm sandboxes"] if self.pool.existing_count else [])]

    def close(self) -> None:
        """Gives up all events: the host ends."""
        for sandbox in self._sandboxes.values():
            sandbox.log.close()

    def live_count(self) -> int:
        """How many sandboxes are not proved gone."""
        return len(self._living())

    def describe(self) -> list[host_pb2.Sandbox]:
        """All sandboxes whose owner does not know yet that they are gone, and the live ones."""
        return [sandbox.describe() for sandbox in self._sandboxes.values()]

    def _living(self) -> Sequence[HostedSandbox]:
        return [item for item in self._sandboxes.values() if not item.gone.is_set()]

    def _order(self, request: pb.SandboxAttach) -> Order:
        spec = request.spec
        config = self.workshop.config
        template = spec.template or config.templates[0]
        if template not in config.templates:
            raise field_invalid("spec.template", f"there is no template {template!r}")
        name = spec.driver or config.driver_of(template) or next(iter(self.offers))
        if config.driver_of(template) not in ("", name):
            made = f"template {template!r} is made by {config.driver_of(template)}, not {name!r}"
            raise field_invalid("spec.driver", made)
        offer = self.offers.get(name)
        if offer is None:
            offered = ", ".join(self.offers)
            raise field_invalid("spec.driver", f"this host offers {offered}, not {name!r}")
        if not offer.statement.usable:
            raise field_invalid("spec.driver", f"{name}: {offer.statement.problem}")
        for key in _RESOURCES:
            if getattr(spec.resources, key) == 0:
                raise field_invalid(f"spec.resources.{key}", "must be set and above 0")
        check_demands(spec.demanded_limits, offer.statement)
        return Order(
            sandbox_id=request.sandbox_id,
            owner_epoch=request.owner_epoch,
            invocation_id=spec.invocation_id,
            template=template,
            limits=Limits(**{key: getattr(spec.resources, key) for key in _RESOURCES}),
            output_limit_bytes=spec.output_limit_bytes or DEFAULT_OUTPUT_LIMIT_BYTES,
            driver=offer.driver,
            statement=offer.statement,
        )

    def _retire(self, sandbox: HostedSandbox) -> None:
        sandbox_id = sandbox.order.sandbox_id
        if self._sandboxes.get(sandbox_id) is sandbox:
            del self._sandboxes[sandbox_id]
            sandbox.log.close()
            sandbox.log.wake()
            self._bury(sandbox_id, sandbox.evidence.SerializeToString())

    def _bury(self, sandbox_id: str, evidence: bytes) -> None:
        self._tombstones[sandbox_id] = evidence
        self._tombstones.move_to_end(sandbox_id)
        if len(self._tombstones) > self.workshop.config.tombstones:
            self._tombstones.popitem(last=False)

    def _limit_gone(self) -> None:
        # An owner that destroys and never attaches again acknowledges nothing.
        gone = [item for item in self._sandboxes.values() if item.gone.is_set()]
        for sandbox in gone[: max(0, len(gone) - MAX_GONE)]:
            self._retire(sandbox)


def checked_id(sandbox_id: str) -> str:
    """Returns an id that is safe in names of files and logs.

    Raises:
        HostError: FIELD_INVALID.
    """
    if _ID.fullmatch(sandbox_id) is None:
        raise field_invalid("sandbox_id", "must be 1 to 64 letters, digits, '_' or '-'")
    return sandbox_id


def check_demands(demanded: Sequence[str], statement: Statement) -> None:
    """Checks that each limit the caller named is held for the whole sandbox.

    Raises:
        HostError: NOT_ENFORCEABLE naming each that is not; FIELD_INVALID for an unknown one.
    """
    levels = {item.limit: item.level for item in statement.enforcement}
    missing: list[str] = []
    for name in demanded:
        if name not in _LIMITS:
            raise field_invalid("spec.demanded_limits", f"there is no limit {name!r}")
        level = levels.get(name, Level.NONE)
        enough = (Level.SANDBOX, Level.PROCESS) if name in _PER_PROCESS else (Level.SANDBOX,)
        if level not in enough:
            missing.append(name)
    if missing:
        raise not_enforceable(missing, statement.driver)
