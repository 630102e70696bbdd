"""`HostService` as gRPC sees it: thin, with the one place where errors become statuses.

Registered by the daemon; calls the table, the fence and the lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, NoReturn, cast

import grpc
import structlog

from hutch.v1 import host_pb2, host_service_pb2_grpc
from hutch.v1 import host_service_pb2 as pb
from sandbox.host import evidence
from sandbox.host.attach import AttachedStream
from sandbox.host.errors import HostError, internal
from sandbox.host.fence import Fence
from sandbox.host.identity import check_version
from sandbox.host.lease import Lease
from sandbox.host.table import SandboxTable

Context = grpc.aio.ServicerContext[Any, Any]


class HostServicer(host_service_pb2_grpc.HostServiceServicer):
    """Serves one host."""

    def __init__(
        self,
        *,
        describe: Callable[[], host_pb2.Host],
        table: SandboxTable,
        fence: Fence,
        lease: Lease,
    ) -> None:
        """Takes the parts of the host; `describe` says what the host is at that moment."""
        self._describe = describe
        self._table = table
        self._fence = fence
        self._lease = lease
        self._log = structlog.get_logger()

    async def GetHost(self, request: pb.GetHostRequest, context: Context) -> pb.GetHostResponse:
        """Identifies the host."""
        async with self._errors(context):
            host = self._describe()
            check_version(request.controller_version, host.version)
            return pb.GetHostResponse(host=host)

    async def WatchHost(  # type: ignore[override]
        self, request: pb.WatchHostRequest, context: Context
    ) -> None:
        """Holds the lease and reports."""
        config = self._table.workshop.config
        async with self._errors(context):
            self._fence.check(request.owner_epoch, request.host_generation)
            self._lease.open()
            try:
                while not self._table.closing.is_set():
                    self._fence.check(request.owner_epoch, request.host_generation)
                    report = pb.WatchHostResponse(
                        host=self._describe(),
                        live_sandboxes=self._table.live_count(),
                        lease=evidence.duration(config.lease_seconds),
                    )
                    await context.write(report)
                    await self._pause(config.report_seconds)
            finally:
                self._lease.close()

    async def AttachSandbox(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.AttachSandboxRequest], context: Context
    ) -> None:
        """Carries one conversation about a sandbox."""
        async with self._errors(context):
            await AttachedStream(self._table, self._fence, _GrpcStream(context)).run()

    async def ListSandboxes(
        self, request: pb.ListSandboxesRequest, context: Context
    ) -> pb.ListSandboxesResponse:
        """Lists what the host holds."""
        async with self._errors(context):
            return pb.ListSandboxesResponse(sandboxes=self._table.describe())

    async def DestroySandbox(
        self, request: pb.DestroySandboxRequest, context: Context
    ) -> pb.DestroySandboxResponse:
        """Ends a sandbox."""
        async with self._errors(context):
            self._fence.check(request.owner_epoch, request.host_generation)
            return pb.DestroySandboxResponse(evidence=await self._table.destroy(request.sandbox_id))

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._table.closing.wait()

    @asynccontextmanager
    async def _errors(self, context: Context) -> AsyncIterator[None]:
        try:
            yield
        except grpc.aio.AbortError:
            raise
        except HostError as error:
            await _abort(context, error)
        except grpc.aio.InternalError:
            # What was being sent found nobody: the caller is gone, and nobody is left to be told.
            self._log.info("stream_cut")
        except Exception:
            broken = internal()
            self._log.exception("request_failed", incident=broken.metadata["incident"])
            await _abort(context, broken)


class _GrpcStream:
    """A gRPC stream as the attached stream wants it."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def read(self) -> pb.AttachSandboxRequest | None:
        """The next request, or None at the end."""
        request = await self._context.read()
        return None if request is grpc.aio.EOF else cast("pb.AttachSandboxRequest", request)

    async def write(self, event: pb.AttachSandboxResponse) -> None:
        """Sends one event."""
        await self._context.write(event)


async def _abort(context: Context, error: HostError) -> NoReturn:
    await context.abort(error.code, str(error), error.trailing_metadata())
    raise AssertionError("abort returned")
