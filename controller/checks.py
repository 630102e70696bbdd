"""Checks of a tenant's schemas and values, before and after the engine.

Called by the invocation servicer, by the host client for spawns, and by the executor for returned
values. The parsing happens in the worker processes of `controller.contracts`.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterable
from pathlib import Path

from controller.contract_worker import values
from controller.contracts import ContractChecker, ContractInvalid, Outcome, Verdict
from controller.core.errors import Reason, Refused
from controller.core.ids import ArtifactId, InvocationId, TenantId, is_id
from controller.core.model import Mismatch, NamedValue, ToolGrant, Value
from controller.engine import commands as cmd
from controller.engine import events as ev
from controller.store.ports import ArtifactStore

KNOWN_SCHEMAS = 1000
SMALL_BYTES = 4 * 1024


class Checker:
    """What may enter, and whether a returned value fits."""

    def __init__(self, contracts: ContractChecker, artifacts: ArtifactStore) -> None:
        self._contracts = contracts
        self._artifacts = artifacts
        self._schemas: OrderedDict[bytes, None] = OrderedDict()

    async def check_schema(self, schema_json: bytes) -> None:
        """Accepts a contract's schema; one that was accepted is not checked again.

        Raises:
            Refused: FIELD_INVALID with what is wrong.
        """
        digest = hashlib.sha256(schema_json).digest()
        if digest in self._schemas:
            self._schemas.move_to_end(digest)
            return
        try:
            await self._contracts.validate_schema(schema_json, owner=digest)
        except ContractInvalid as problem:
            raise Refused(Reason.FIELD_INVALID, f"contract: {problem}", field="contract") from None
        self._schemas[digest] = None
        if len(self._schemas) > KNOWN_SCHEMAS:
            self._schemas.popitem(last=False)

    async def check_inputs(
        self,
        tenant_id: TenantId,
        inputs: Iterable[NamedValue],
        tools: Iterable[ToolGrant] = (),
    ) -> tuple[ArtifactId, ...]:
        """Checks a client's inputs as values; the artifacts that they name.

        Raises:
            Refused: FIELD_INVALID, also for a tool that is not among `tools`; ARTIFACT_NOT_FOUND.
        """
        found: dict[ArtifactId, None] = {}
        known = {item.tool_id for item in tools}
        for item in inputs:
            if item.value.artifact is not None:
                await self._exists(tenant_id, item.value.artifact.artifact_id)
            for artifact_id in await self._names(tenant_id, item, known):
                await self._exists(tenant_id, artifact_id)
                found[artifact_id] = None
        return tuple(found)

    async def artifacts_named(
        self,
        tenant_id: TenantId,
        inputs: Iterable[NamedValue],
        tools: Iterable[ToolGrant] = (),
    ) -> tuple[ArtifactId, ...]:
        """The artifacts that a spawn's inputs name. Inputs that can name none are not parsed: what
        is no value fails in the child that decodes it, and costs its parent only.

        Raises:
            Refused: FIELD_INVALID, also for a tool that is not among `tools`.
        """
        found: dict[ArtifactId, None] = {}
        known = {item.tool_id for item in tools}
        for item in inputs:
            if item.value.json is None or _may_name(item.value.json):
                found.update(dict.fromkeys(await self._names(tenant_id, item, known)))
        return tuple(found)

    async def _names(
        self, tenant_id: TenantId, item: NamedValue, tools: Collection[str]
    ) -> tuple[ArtifactId, ...]:
        source = await self._source(tenant_id, item.value)
        verdict = await self._contracts.check_value(source, owner=tenant_id)
        if any(tool_id not in tools for tool_id in verdict.tool_ids):
            raise Refused(
                Reason.FIELD_INVALID,
                f"inputs: {item.name!r} holds a tool that is not among those named beside it",
                field="inputs",
            )
        if not verdict.accepted:
            reason = Reason.PAYLOAD_TOO_LARGE if verdict.limit else Reason.FIELD_INVALID
            raise Refused(
                reason, f"inputs: {item.name!r} is not a value: {verdict.problem}", field="inputs"
            )
        if not all(is_id(name, "art") for name in verdict.artifact_ids):
            raise Refused(Reason.ARTIFACT_NOT_FOUND, f"inputs: {item.name!r} names no artifact")
        return tuple(ArtifactId(name) for name in verdict.artifact_ids)

    async def _exists(self, tenant_id: TenantId, artifact_id: ArtifactId) -> None:
        if await self._artifacts.get(tenant_id, artifact_id) is None:
            raise Refused(Reason.ARTIFACT_NOT_FOUND, f"no such artifact: {artifact_id}")

    async def _source(self, tenant_id: TenantId, value: Value) -> bytes | Path:
        if value.artifact is None:
            return value.json or b"null"
        row = await self._artifacts.stat(tenant_id, value.artifact.artifact_id)
        return self._artifacts.path_of(row)

    def check_small(self, invocation_id: InvocationId, value: Value) -> ev.ContractChecked | None:
        """The verdict on a small value without a contract, at once; None for any other value.

        A few KiB cost less to check than to hand to another process.
        """
        if value.json is None or len(value.json) > SMALL_BYTES:
            return None
        try:
            decoded = values.decode(value.json)
        except values.ValueInvalid as problem:
            return ev.ContractChecked(
                invocation_id=invocation_id, accepted=False, problem=str(problem)
            )
        return ev.ContractChecked(
            invocation_id=invocation_id,
            accepted=not decoded.tool_ids,
            problem="a tool cannot be returned" if decoded.tool_ids else "",
            artifact_ids=tuple(decoded.artifact_ids),
        )

    async def check_value(self, command: cmd.CheckContract) -> ev.ContractChecked:
        """The verdict on a returned value."""
        source = await self._source(command.tenant_id, command.value)
        if command.schema_json is None:
            verdict = await self._contracts.check_value(source, owner=command.tree_id)
        else:
            verdict = await self._contracts.check(
                command.schema_json, source, owner=command.tree_id
            )
        return _event(command, verdict)


def _may_name(encoded: bytes) -> bool:
    """Whether the JSON can hold an artifact or a tool, also with escaped letters in the key."""
    return any(mark in encoded for mark in (b'"$artifact"', b'"$tool"', b"\\u"))


def _event(command: cmd.CheckContract, verdict: Verdict) -> ev.ContractChecked:
    mismatch = None
    if verdict.mismatch is not None:
        found = verdict.mismatch
        mismatch = Mismatch(path=found.path, expected=found.expected, got=found.got)
    problem = verdict.problem
    if verdict.outcome in (Outcome.TIMED_OUT, Outcome.EXHAUSTED):
        problem = f"check_timed_out: {problem}"
    return ev.ContractChecked(
        invocation_id=command.invocation_id,
        accepted=verdict.accepted and not verdict.tool_ids,
        mismatch=mismatch,
        problem="a tool cannot be returned" if verdict.tool_ids else problem,
        artifact_ids=verdict.artifact_ids,
    )
