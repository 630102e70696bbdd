"""Files that a sandbox gives at the end, published one by one.

Called by `hosts.attachment`. Names are hostile data: the controller checks them again, whatever the
sandbox's own side refused.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from controller.convert import artifact_in
from controller.core.ids import ArtifactId, InvocationId, TenantId
from controller.core.model import Artifact
from controller.files import NAME_BYTES, media_type_of, name_problem
from controller.hosts.services import Services
from controller.store.ports import (
    AlreadyPublished,
    ArtifactTooLarge,
    StagedFile,
    StoreFull,
)
from hutch.v1 import host_service_pb2 as hs

REFUSALS = 256


def derived_id(invocation_id: InvocationId, what: str) -> ArtifactId:
    """The artifact id of a captured file or a saving call: told twice, it is published once.

    It is unguessable because the invocation's id, 128 random bits, goes in.
    """
    digest = hashlib.sha256(f"{invocation_id}\0{what}".encode()).hexdigest()
    return ArtifactId(f"art_{digest[:32]}")


@dataclass(slots=True)
class _File:
    name: str
    staged: StagedFile | None
    size: int = 0


class FileCapture:
    """The files of one capture."""

    def __init__(
        self, services: Services, tenant_id: TenantId, invocation_id: InvocationId
    ) -> None:
        self._services = services
        self._tenant_id = tenant_id
        self._invocation_id = invocation_id
        self._file: _File | None = None
        self._bytes = 0
        self._files = 0
        self.artifacts: list[Artifact] = []
        self.refusals: list[tuple[str, str]] = []

    async def add(self, chunk: hs.FileChunk) -> None:
        """Takes one chunk; files come one after the other."""
        name = chunk.name.decode("utf-8", "surrogateescape")
        if self._file is None or self._file.name != name or chunk.offset == 0:
            await self._drop("it was cut")
            self._file = await self._open(name)
        file = self._file
        if file.staged is not None:
            if chunk.offset != file.size:
                await self._drop("its chunks are out of order")
                return
            await self._write(file, chunk.data)
        if chunk.last:
            self._file = None
            if file.staged is not None:
                await self._publish(file)

    async def _open(self, name: str) -> _File:
        problem = name_problem(name)
        limits = self._services.config.limits
        if not problem and self._files >= limits.artifact_files:
            problem = f"more than {limits.artifact_files} files"
        if problem:
            self._refuse(name, problem)
            return _File(name, None)
        self._files += 1
        room = max(0, limits.artifact_bytes - self._bytes)
        return _File(name, await self._services.artifacts.stage(room))

    async def _write(self, file: _File, data: bytes) -> None:
        assert file.staged is not None
        try:
            await file.staged.write(data)
        except ArtifactTooLarge:
            limit = self._services.config.limits.artifact_bytes
            self._refuse(file.name, f"more than {limit} bytes in all")
            file.staged = None
        except StoreFull:
            self._refuse(file.name, "the store is full")
            file.staged = None
        else:
            file.size += len(data)
            self._bytes += len(data)

    async def _publish(self, file: _File) -> None:
        assert file.staged is not None
        await file.staged.finish()
        row = await self._services.artifacts.publish(
            self._tenant_id,
            derived_id(self._invocation_id, f"file/{file.name}"),
            file.name,
            file.staged,
            media_type_of(file.name),
            self._invocation_id,
            self._services.now_us(),
        )
        if isinstance(row, AlreadyPublished):
            self._refuse(file.name, "an artifact of this name was saved before")
        else:
            self.artifacts.append(artifact_in(row))

    async def _drop(self, reason: str) -> None:
        file, self._file = self._file, None
        if file is not None and file.staged is not None:
            await file.staged.abort()
            self._refuse(file.name, reason)

    def _refuse(self, name: str, reason: str) -> None:
        if len(self.refusals) < REFUSALS:
            shown = name.encode("utf-8", "backslashreplace").decode("utf-8", "replace")
            text = "".join(
                character if character.isprintable() else f"\\x{ord(character):02x}"
                for character in shown
            )
            self.refusals.append((text[:NAME_BYTES], reason[:200]))

    async def finish(self, completed: hs.FileCaptureCompleted | None) -> None:
        """Ends the capture and keeps the refusals, the sandbox's own ones too."""
        await self._drop("it was cut")
        for refused in completed.refused if completed is not None else ():
            self._refuse(refused.name.decode("utf-8", "surrogateescape"), refused.reason)
        if self.refusals:
            await self._services.artifacts.add_refusals(
                self._tenant_id, self._invocation_id, self.refusals
            )
