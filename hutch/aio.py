"""The asynchronous client: every RPC, typed, and `invoke` and `spawn` on top of them.

Called by users, by `hutch.client` (which is only a front to it) and by the CLI; calls
`hutch.transport`, `hutch.session`, `hutch.transfer`, `hutch.convert` and, without a target,
`hutch.local`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from hutch import (
    ambient,
    calls,
    channel,
    config,
    convert,
    local,
    starting,
    templates,
    tool_server,
    transfer,
    types,
    values,
    workspace,
)
from hutch.aio_boxes import AsyncBox
from hutch.errors import ConnectionLostError, FieldInvalidError, UnavailableError
from hutch.handles import AsyncHandle
from hutch.session import Session
from hutch.transport import CALL_SECONDS, Transport, backoff_seconds
from hutch.v1 import invocation_service_pb2 as pb
from hutch.wire_errors import ending_exception

Result = TypeVar("Result")

_WAIT_SECONDS = 50.0
_CROWDED_WAIT_SECONDS = 5.0
_CANCEL_SECONDS = 120.0
_LOCAL_CONNECT_SECONDS = 90.0


class AsyncClient:
    """A client of one controller, for coroutines.

    ```python
    async with hutch.AsyncClient("unix:/run/hutch/controller.sock") as client:
        total = await client.invoke(int, program="return sum(items)", items=[1, 2, 3])
    ```

    Inside `async with` it is also the client of bare `ainvoke` and `aspawn`. It belongs to the
    event loop on which it was connected; its handles may be awaited on any.
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        api_key: str | None = None,
        state: str | Path | None = None,
        client_name: str = "hutch-sdk",
        connect_timeout_seconds: float = 10.0,
        retry_seconds: float = 30.0,
    ) -> None:
        """A client that is not connected yet.

        Args:
            target: `unix:PATH` or `HOST:PORT`. Without it `$HUTCH_TARGET`, else the local
                controller of the state directory, which is started when there is none.
            api_key: The key for TCP; `$HUTCH_API_KEY`, or the local controller's own, without it.
            state: The state directory of the local controller; `$HUTCH_STATE` without it.
            client_name: What the client is, for the controller's logs.
            connect_timeout_seconds: How long to wait for a named controller.
            retry_seconds: How long a call that may safely be sent again is, from its first failure
                on.
        """
        stated = config.ClientSettings(
            target=target or "", api_key=api_key or "", state=str(state or "")
        )
        self._settings = stated.over(config.from_environment())
        self._client_name = client_name
        self._connect_timeout = connect_timeout_seconds
        self._retry_seconds = retry_seconds
        self._transport: Transport | None = None
        self._session: Session | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._info: types.ServerInfo | None = None
        self._uploads = transfer.Uploads()
        self.tools = tool_server.ClientTools(self)
        self.boxes: set[AsyncBox] = set()  # those that are open
        self.closed = False

    @property
    def is_local(self) -> bool:
        """Whether it uses the local controller of a state directory rather than a named target."""
        return not self._settings.target

    @property
    def info(self) -> types.ServerInfo:
        """What the controller said of itself when the session was opened."""
        if self._info is None:
            raise ConnectionLostError("the client is not connected")
        return self._info

    async def __aenter__(self) -> Self:
        """Connects, and makes this the client of bare calls."""
        await self.connect()
        ambient.bind(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes."""
        ambient.unbind(self)
        await self.close()

    async def connect(self) -> types.ServerInfo:
        """Opens the session; starts a local controller when no target is named and none lives.

        Raises:
            ConnectionLostError: Nobody answers at the target.
            LocalControllerError: A local controller could not be started.
            RequestRefused: The controller refused the session.
        """
        if self.closed:
            raise ConnectionLostError("the client is closed")
        self._loop = asyncio.get_running_loop()
        seconds = _LOCAL_CONNECT_SECONDS if self.is_local else self._connect_timeout
        deadline = self._loop.time() + seconds
        attempt = 0
        while True:
            try:
                return await self._connect_once(deadline - self._loop.time())
            except (ConnectionLostError, UnavailableError):
                # Nobody there yet, or the controller that was there is just ending.
                delay = backoff_seconds(attempt)
                if self._loop.time() + delay > deadline:
                    raise
                attempt += 1
                await asyncio.sleep(delay)

    async def _connect_once(self, seconds: float) -> types.ServerInfo:
        target, api_key = await self._find()
        transport = Transport(
            target,
            api_key,
            retry_seconds=self._retry_seconds,
            revive=self._revive if self.is_local else None,
        )
        session = Session(transport, self._client_name)
        try:
            self._info = await session.open(max(seconds, 0.1))
        except BaseException:
            await transport.close()
            raise
        self._transport, self._session = transport, session
        return self._info

    async def _find(self) -> tuple[str, str]:
        """Where the controller is, and the key for it."""
        if self.is_local:
            paths = await asyncio.to_thread(local.prepare, self._settings.state or None)
            live = await asyncio.to_thread(local.ensure, paths)
            return channel.check_target(f"unix:{live.socket}"), ""
        target = channel.check_target(self._settings.target)
        if self._settings.api_key or target.startswith("unix:"):
            return target, self._settings.api_key
        return target, await asyncio.to_thread(self._local_key, target)

    def _local_key(self, target: str) -> str:
        """The key of the local controller, where the target is its own listener."""
        directory = Path(self._settings.state) if self._settings.state else local.default_state()
        if not directory.is_dir():
            return ""
        return local.key_for(target, local.prepare(directory))

    async def _revive(self) -> None:
        """Between tries: starts the local controller again if it is gone."""
        paths = await asyncio.to_thread(local.prepare, self._settings.state or None)
        await asyncio.to_thread(local.ensure, paths)

    async def close(self) -> None:
        """Ends the session and closes the channel; once is enough, more does no harm."""
        self.closed = True
        for box in list(self.boxes):
            await box.detach()
        await self.tools.close()
        session, self._session = self._session, None
        transport, self._transport = self._transport, None
        if session is not None:
            await session.close()
        if transport is not None:
            await transport.close()

    async def on_loop(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Awaits a coroutine of this client from whatever loop runs."""
        if self._loop is None or self._loop is asyncio.get_running_loop():
            return await work
        if self._loop.is_closed():
            work.close()
            raise ConnectionLostError("the client's event loop has ended")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def _open(self) -> Transport:
        if self._transport is None:
            state = "closed" if self.closed else "not connected"
            raise ConnectionLostError(f"the client is {state}")
        return self._transport

    # --- invocations ---------------------------------------------------------------------------

    async def create_invocation(
        self,
        spec: types.Spec,
        *,
        request_id: str | None = None,
        cancel_on_disconnect: bool = False,
    ) -> types.Invocation:
        """Asks for a root; inputs that are too large to be sent inline are stored first.

        Args:
            spec: What is asked for.
            request_id: The caller's id for it: the same id and content give the same answer.
            cancel_on_disconnect: Whether it is cancelled when this client is gone.

        Raises:
            RequestRefused: It was refused and nothing was started.
        """
        transport = self._open()
        spec, grants = await self.tools.bind(transport, spec)
        stored = await self._uploads.store_inputs(transport, spec.inputs)
        request = pb.CreateInvocationRequest(
            request_id=request_id or secrets.token_hex(16),
            spec=convert.spec(spec, stored, grants),
            tool_call_id=self.tools.current_call(),
            session_id=self._session.session_id if self._session else "",
            cancel_on_disconnect=cancel_on_disconnect,
        )
        answer = await transport.call(transport.invocations.CreateInvocation, lambda: request)
        return convert.invocation(answer.invocation)

    async def get_invocation(self, invocation_id: str) -> types.Invocation:
        """Shows one invocation with its value.

        Raises:
            NotFoundError: There is no such invocation.
        """
        transport = self._open()
        request = pb.GetInvocationRequest(invocation_id=invocation_id)
        answer = await transport.call(transport.invocations.GetInvocation, lambda: request)
        return convert.invocation(answer.invocation)

    async def list_invocations(
        self,
        *,
        tree_of: str = "",
        state: str = "",
        roots_only: bool = False,
        page_size: int = 0,
        page_token: str = "",
    ) -> types.InvocationPage:
        """Lists invocations without their values: newest first, or one tree oldest first.

        Args:
            tree_of: Only the tree that holds this invocation.
            state: Only those in this state.
            roots_only: Only roots.
            page_size: At most so many; 0 takes the server's default.
            page_token: Where to go on, from the previous page.
        """
        transport = self._open()
        try:
            number = convert.state_number(state)
        except ValueError as error:
            raise FieldInvalidError(
                f"there is no state {state!r}", "FIELD_INVALID", {"field": "state"}
            ) from error
        request = pb.ListInvocationsRequest(
            page_size=page_size,
            page_token=page_token,
            tree_of=tree_of,
            state=number,
            roots_only=roots_only,
        )
        answer = await transport.call(transport.invocations.ListInvocations, lambda: request)
        return convert.invocation_page(answer)

    async def wait_invocation(
        self, invocation_id: str, timeout_seconds: float | None = None
    ) -> types.Invocation:
        """Waits until an invocation has ended, or the time is over, and shows it as it stands.

        Args:
            invocation_id: Its id.
            timeout_seconds: How long at most; None waits until it has ended.
        """
        transport = self._open()
        loop = asyncio.get_running_loop()
        end = None if timeout_seconds is None else loop.time() + timeout_seconds
        while True:
            span = _CROWDED_WAIT_SECONDS if transport.crowded else _WAIT_SECONDS
            if end is not None:
                span = min(span, max(0.0, end - loop.time()))
            request = pb.WaitInvocationRequest(
                invocation_id=invocation_id, timeout=convert.duration(span)
            )
            answer = await transport.call(
                transport.invocations.WaitInvocation,
                lambda request=request: request,  # type: ignore[misc]
                seconds=span + CALL_SECONDS,
                long=True,
            )
            found = convert.invocation(answer.invocation)
            if found.ended or (end is not None and loop.time() >= end):
                return found

    async def list_events(self, invocation_id: str, **view: Any) -> types.EventPage:
        """Shows the last events, shortened: `max_events` (25), `max_bytes` (1,024) of text each,
        `before_sequence`, and with `tree` those of all below it."""
        transport = self._open()
        request = pb.ListEventsRequest(invocation_id=invocation_id, **view)
        answer = await transport.call(transport.invocations.ListEvents, lambda: request)
        return convert.event_page(answer)

    async def watch_invocation(
        self, invocation_id: str, *, after_sequence: int = 0, tree: bool = False
    ) -> AsyncIterator[types.Event]:
        """Yields the events of one invocation or of its tree, until it has ended.

        Args:
            invocation_id: Its id.
            after_sequence: Only events after this one.
            tree: Also the events of all below it.
        """
        transport = self._open()
        seen = after_sequence

        def request() -> pb.WatchInvocationRequest:
            return pb.WatchInvocationRequest(
                invocation_id=invocation_id, after_sequence=seen, tree=tree
            )

        attempt = 0
        while True:
            async for answer in transport.stream(transport.invocations.WatchInvocation, request):
                found = convert.event(answer.event)
                if found.sequence <= seen:
                    continue
                seen, attempt = found.sequence, 0
                yield found
                if found.kind == "ended" and found.invocation_id == invocation_id:
                    return
            if (await self.get_invocation(invocation_id)).ended:
                return
            # A controller that is ending closes its streams; the next one goes on with them.
            await asyncio.sleep(backoff_seconds(attempt))
            attempt += 1

    async def read_output(
        self,
        invocation_id: str,
        stream: types.Stream = "stdout",
        *,
        offset: int = 0,
        max_bytes: int = 0,
        follow: bool = False,
        cell_id: str = "",
    ) -> AsyncIterator[types.OutputChunk]:
        """Yields what an invocation printed, from any byte.

        Args:
            invocation_id: Its id.
            stream: `stdout` or `stderr`.
            offset: The first byte wanted.
            max_bytes: At most so many; 0 means all.
            follow: Whether to go on as more is printed, until it has ended.
            cell_id: Only this cell of a box, with what its threads and processes print later.
        """
        transport = self._open()
        position = offset

        def request() -> pb.ReadOutputRequest:
            return pb.ReadOutputRequest(
                invocation_id=invocation_id,
                stream=convert.STREAMS[stream],
                offset=position,
                max_bytes=max(0, max_bytes - (position - offset)) if max_bytes else 0,
                follow=follow,
                cell_id=cell_id,
            )

        attempt = 0
        while True:
            # Asked before reading: what was printed before the end is then certainly read.
            complete = not follow or (await self.get_invocation(invocation_id)).ended
            async for answer in transport.stream(transport.invocations.ReadOutput, request):
                if answer.data:
                    position, attempt = answer.offset + len(answer.data), 0
                    yield types.OutputChunk(offset=answer.offset, data=answer.data)
                if max_bytes and position - offset >= max_bytes:
                    return
            if complete:
                return
            await asyncio.sleep(backoff_seconds(attempt))
            attempt += 1

    async def cancel_invocation(self, invocation_id: str) -> types.Invocation:
        """Ends an invocation and all below it; answers when every sandbox is proved gone.

        What has ended keeps the ending that stands.
        """
        transport = self._open()
        request = pb.CancelInvocationRequest(
            request_id=secrets.token_hex(16), invocation_id=invocation_id
        )
        answer = await transport.call(
            transport.invocations.CancelInvocation, lambda: request, seconds=_CANCEL_SECONDS
        )
        return convert.invocation(answer.invocation)

    # --- artifacts -----------------------------------------------------------------------------

    async def put_artifact(
        self, content: bytes | Path, *, name: str = "", media_type: str = ""
    ) -> types.Artifact:
        """Stores bytes, or a file, for use as an input."""
        return await self._uploads.put(self._open(), content, name=name, media_type=media_type)

    async def get_artifact(self, artifact_id: str, *, offset: int = 0) -> AsyncIterator[bytes]:
        """Yields an artifact's bytes; a cut transfer resumes, and whole ones are checked.

        Raises:
            InternalError: The bytes do not have the artifact's digest (checked from offset 0 only).
        """
        async for chunk in transfer.download(self._open(), artifact_id, offset):
            yield chunk

    async def stat_artifact(self, artifact_id: str) -> types.Artifact:
        """Describes one artifact."""
        return await transfer.stat(self._open(), artifact_id)

    async def list_artifacts(
        self, invocation_id: str, *, page_size: int = 0, page_token: str = ""
    ) -> types.ArtifactPage:
        """Lists what one invocation published, by name, and which files were refused."""
        return await transfer.listing(self._open(), invocation_id, page_size, page_token)

    async def all_artifacts(self, invocation_id: str) -> types.ArtifactPage:
        """Everything that one invocation published, in one page."""
        page = await self.list_artifacts(invocation_id)
        artifacts, refusals = list(page.artifacts), page.refusals
        while page.next_page_token:
            page = await self.list_artifacts(invocation_id, page_token=page.next_page_token)
            artifacts.extend(page.artifacts)
        return types.ArtifactPage(artifacts=tuple(artifacts), refusals=refusals)

    # --- invoke and spawn ----------------------------------------------------------------------

    @calls.same_method(calls.make_call)
    def invoke(self, *policies: Any, **options: Any) -> Any:
        """Runs a program in a sandbox of its own and gives back its value; awaitable."""
        return self.run(calls.make_call(*policies, **options))

    @calls.same_method(calls.make_call)
    def spawn(self, *policies: Any, **options: Any) -> Any:
        """Starts a program and gives back an `AsyncHandle`; awaitable."""
        return self.start(calls.make_call(*policies, **options))

    async def run(self, call: calls.Call) -> Any:
        """Runs a call to its end; interrupted, it cancels what it started."""
        bound = call.cancel_on_disconnect
        created = await starting.create(self, call.spec, bound=True if bound is None else bound)
        handle = AsyncHandle(self, created.invocation_id, call.hint)
        try:
            return await handle.result()
        except asyncio.CancelledError:
            await starting.abandon(self, handle.id)
            raise

    async def start(self, call: calls.Call) -> AsyncHandle:
        """Starts a call."""
        bound = call.cancel_on_disconnect
        created = await starting.create(
            self, call.spec, bound=self.is_local if bound is None else bound
        )
        return AsyncHandle(self, created.invocation_id, call.hint)

    # --- boxes ---------------------------------------------------------------------------------

    @calls.same_method(calls.make_box)
    def sandbox(self, *policies: Any, **options: Any) -> AsyncBox:
        """A box: `async with client.sandbox() as box: await box.run("x = 1")`; see `make_box`."""
        return AsyncBox(self, calls.make_box(*policies, **options), ours=True)

    async def attach(
        self, invocation_id: str, *, on_disconnect: calls.OnDisconnect = "detach"
    ) -> AsyncBox:
        """Comes back to a box that runs. Leaving its block leaves the box alone.

        Raises:
            NotFoundError: There is no such invocation.
            FieldInvalidError: It is no box.
            InvocationFailed: It has ended; `.ending` says how.
        """
        call = calls.BoxCall(spec=types.Spec(), on_disconnect=on_disconnect)
        return await AsyncBox(self, call, invocation_id, ours=False).open()

    async def write_stdin(
        self, invocation_id: str, data: bytes, *, offset: int, close: bool = False
    ) -> int:
        """Gives at most 1 MiB to the code's standard input, once the sandbox has room for it.

        Args:
            invocation_id: Its id.
            data: The bytes; those that were given before are dropped.
            offset: Where they begin, counted over the whole standard input.
            close: Whether nothing follows.

        Returns:
            Where the next bytes begin.
        """
        transport = self._open()
        request = pb.WriteStdinRequest(
            invocation_id=invocation_id, offset=offset, data=data, close=close
        )
        answer = await transport.call(
            transport.invocations.WriteStdin, lambda: request, seconds=None, long=True
        )
        return answer.offset

    async def read_file(
        self, invocation_id: str, path: str, *, offset: int = 0, max_bytes: int = 0
    ) -> AsyncIterator[bytes]:
        """Yields a file of a live sandbox; a cut transfer resumes, and its digest is checked."""
        async for piece in workspace.read(
            self._open(), invocation_id, path, offset=offset, max_bytes=max_bytes
        ):
            yield piece

    async def write_file(
        self,
        invocation_id: str,
        path: str,
        content: workspace.Content,
        *,
        executable: bool = False,
    ) -> types.WorkspaceFile:
        """Makes a file in a live sandbox, or replaces one; it appears whole or not at all."""
        return await workspace.write(
            self._open(), invocation_id, path, content, executable=executable
        )

    async def list_files(
        self, invocation_id: str, path: str = "", *, page_size: int = 0, page_token: str = ""
    ) -> types.WorkspacePage:
        """Lists a folder of a live sandbox, sorted by name."""
        return await workspace.listing(self._open(), invocation_id, path, page_size, page_token)

    async def stat_file(self, invocation_id: str, path: str) -> types.WorkspaceFile:
        """Looks at one file or folder of a live sandbox."""
        return await workspace.stat(self._open(), invocation_id, path)

    async def templates(self) -> tuple[types.Template, ...]:
        """What sandboxes may be made from, the default template first."""
        return await templates.listing(self._open())

    # --- values --------------------------------------------------------------------------------

    async def value_of(self, invocation: types.Invocation, hint: Any = calls.NoHint) -> Any:
        """Turns an ended invocation into its value, fetched where it is stored as an artifact.

        Raises:
            InvocationFailed: It ended without a value; the subclass says how.
            ReturnTypeError: Validators of the hint refuse what the schema accepts.
        """
        if invocation.ending is None or invocation.ending.kind != "returned":
            raise ending_exception(invocation)
        data = await self.value_json(invocation)
        if hint is calls.NoHint:
            return values.decode(data)
        from hutch import returns

        return returns.restore(data, hint, invocation.invocation_id)

    async def value_json(self, invocation: types.Invocation) -> bytes:
        """The JSON bytes of an invocation's value; `null` when it has none."""
        return b"null" if invocation.value is None else await self.value_bytes(invocation.value)

    async def value_bytes(self, value: types.Value) -> bytes:
        """The JSON bytes of a value, fetched where it is stored as an artifact."""
        return value.json if value.json is not None else await transfer.fetch(self._open(), value)
