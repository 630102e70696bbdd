"""The blocking client: a front to `AsyncClient`, on an event loop in a thread of its own.

Called by users; calls `hutch.aio` and nothing else, so there is one implementation of everything.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from hutch import ambient, calls, tools, types
from hutch.aio import AsyncClient
from hutch.aio_boxes import AsyncBox
from hutch.boxes import Box
from hutch.cells import OutputView
from hutch.errors import ConnectionLostError, HutchError
from hutch.handles import AsyncHandle
from hutch.workspace import Content

Result = TypeVar("Result")

_END: Any = object()


async def _ended() -> None:
    """Waits until every task of a stopped loop has ended, and ends those that do not.

    gRPC has tasks of its own, which end a moment after their calls. One that is left when the loop
    is closed keeps its connection open, and its wake-up disturbs every other loop of the process.
    """
    for cancel in (False, True):
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:
            for task in left if cancel else ():
                task.cancel()
            await asyncio.wait(left, timeout=2)


class _LoopThread:
    """One event loop in one thread, for one client's life."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name="hutch-client", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            self.loop.run_until_complete(_ended())
        finally:
            self.loop.close()

    def wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs a coroutine there and waits; interrupted, it is cancelled and waited for."""
        if threading.current_thread() is self.thread or self.loop.is_closed():
            work.close()
            raise HutchError("a blocking call cannot run on the client's own event loop")
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            with tools.Waiting():
                return future.result()
        except BaseException:
            if not future.done():
                self._cancel(future)
            raise

    def _cancel(self, future: Any) -> None:
        """Cancels the task behind a future and waits until it has tidied up after itself."""
        ended = threading.Event()
        future.cancel()

        async def drain() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            pending = [task for task in others if task.cancelling()]
            if pending:
                await asyncio.wait(pending, timeout=20)
            ended.set()

        asyncio.run_coroutine_threadsafe(drain(), self.loop)
        ended.wait(25)

    def stop(self) -> None:
        """Ends loop and thread."""
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join(10)


class Client:
    """A client of one controller.

    ```python
    with hutch.connect() as client:
        total = client.invoke(int, program="return sum(items)", items=[1, 2, 3])
    ```

    Inside `with` it is also the client of bare `invoke`, `spawn`, `ainvoke` and `aspawn`. It may be
    used from many threads at once.
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
        """Connects; see `AsyncClient` for what the options mean.

        Raises:
            ConnectionLostError: Nobody answers at the target.
            LocalControllerError: A local controller could not be started.
            RequestRefused: The controller refused the session.
        """
        self._async = AsyncClient(
            target,
            api_key=api_key,
            state=state,
            client_name=client_name,
            connect_timeout_seconds=connect_timeout_seconds,
            retry_seconds=retry_seconds,
        )
        self._async.tools.front = self
        self._lock = threading.Lock()  # guards that the loop is stopped once
        self._closed = False
        self._runner = _LoopThread()
        try:
            self._runner.wait(self._async.connect())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        """Makes this the client of bare calls."""
        ambient.bind(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes."""
        ambient.unbind(self)
        self.close()

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    @property
    def asynchronous(self) -> AsyncClient:
        """The client behind it."""
        return self._async

    @property
    def info(self) -> types.ServerInfo:
        """What the controller said of itself."""
        return self._async.info

    def close(self) -> None:
        """Ends the session, the channel and the thread; once is enough, more does no harm."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self._runner.wait(self._async.close())
        finally:
            self._runner.stop()

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        if self._closed:
            work.close()
            raise ConnectionLostError("the client is closed")
        return self._runner.wait(work)

    def _iterate(self, source: AsyncIterator[Result]) -> Iterator[Result]:
        async def step() -> Result:
            return await anext(source, _END)

        async def finish() -> None:
            close = getattr(source, "aclose", None)
            if close is not None:
                await close()

        try:
            while (item := self._wait(step())) is not _END:
                yield item
        finally:
            if not self._closed:
                self._runner.wait(finish())

    # --- invocations ---------------------------------------------------------------------------

    def create_invocation(
        self,
        spec: types.Spec,
        *,
        request_id: str | None = None,
        cancel_on_disconnect: bool = False,
    ) -> types.Invocation:
        """As `AsyncClient.create_invocation`."""
        return self._wait(
            self._async.create_invocation(
                spec, request_id=request_id, cancel_on_disconnect=cancel_on_disconnect
            )
        )

    def get_invocation(self, invocation_id: str) -> types.Invocation:
        """As `AsyncClient.get_invocation`."""
        return self._wait(self._async.get_invocation(invocation_id))

    def list_invocations(
        self,
        *,
        tree_of: str = "",
        state: str = "",
        roots_only: bool = False,
        page_size: int = 0,
        page_token: str = "",
    ) -> types.InvocationPage:
        """As `AsyncClient.list_invocations`."""
        return self._wait(
            self._async.list_invocations(
                tree_of=tree_of,
                state=state,
                roots_only=roots_only,
                page_size=page_size,
                page_token=page_token,
            )
        )

    def list_events(self, invocation_id: str, **view: Any) -> types.EventPage:
        """As `AsyncClient.list_events`."""
        return self._wait(self._async.list_events(invocation_id, **view))

    def wait_invocation(
        self, invocation_id: str, timeout_seconds: float | None = None
    ) -> types.Invocation:
        """As `AsyncClient.wait_invocation`."""
        return self._wait(self._async.wait_invocation(invocation_id, timeout_seconds))

    def watch_invocation(
        self, invocation_id: str, *, after_sequence: int = 0, tree: bool = False
    ) -> Iterator[types.Event]:
        """As `AsyncClient.watch_invocation`."""
        return self._iterate(
            self._async.watch_invocation(invocation_id, after_sequence=after_sequence, tree=tree)
        )

    def read_output(
        self,
        invocation_id: str,
        stream: types.Stream = "stdout",
        *,
        offset: int = 0,
        max_bytes: int = 0,
        follow: bool = False,
        cell_id: str = "",
    ) -> Iterator[types.OutputChunk]:
        """As `AsyncClient.read_output`."""
        return self._iterate(
            self._async.read_output(
                invocation_id,
                stream,
                offset=offset,
                max_bytes=max_bytes,
                follow=follow,
                cell_id=cell_id,
            )
        )

    def cancel_invocation(self, invocation_id: str) -> types.Invocation:
        """As `AsyncClient.cancel_invocation`."""
        return self._wait(self._async.cancel_invocation(invocation_id))

    # --- boxes ---------------------------------------------------------------------------------

    @calls.same_method(calls.make_box)
    def sandbox(self, *policies: Any, **options: Any) -> Box:
        """A box: `with client.sandbox() as box: box.run("x = 1")`; see `make_box`."""
        call = calls.make_box(*policies, **options)
        return self._wait(self._box(call, ""))

    def attach(self, invocation_id: str, *, on_disconnect: calls.OnDisconnect = "detach") -> Box:
        """Comes back to a box that runs; see `AsyncClient.attach`."""
        call = calls.BoxCall(spec=types.Spec(), on_disconnect=on_disconnect)
        return self._wait(self._box(call, invocation_id)).open()

    async def _box(self, call: calls.BoxCall, invocation_id: str) -> Box:
        box = AsyncBox(self._async, call, invocation_id, ours=not invocation_id)
        return Box(self, box)

    def write_stdin(
        self, invocation_id: str, data: bytes, *, offset: int, close: bool = False
    ) -> int:
        """As `AsyncClient.write_stdin`."""
        return self._wait(self._async.write_stdin(invocation_id, data, offset=offset, close=close))

    def read_file(
        self, invocation_id: str, path: str, *, offset: int = 0, max_bytes: int = 0
    ) -> Iterator[bytes]:
        """As `AsyncClient.read_file`."""
        return self._iterate(
            self._async.read_file(invocation_id, path, offset=offset, max_bytes=max_bytes)
        )

    def write_file(
        self, invocation_id: str, path: str, content: Content, *, executable: bool = False
    ) -> types.WorkspaceFile:
        """As `AsyncClient.write_file`."""
        return self._wait(
            self._async.write_file(invocation_id, path, content, executable=executable)
        )

    def list_files(
        self, invocation_id: str, path: str = "", *, page_size: int = 0, page_token: str = ""
    ) -> types.WorkspacePage:
        """As `AsyncClient.list_files`."""
        return self._wait(
            self._async.list_files(invocation_id, path, page_size=page_size, page_token=page_token)
        )

    def stat_file(self, invocation_id: str, path: str) -> types.WorkspaceFile:
        """As `AsyncClient.stat_file`."""
        return self._wait(self._async.stat_file(invocation_id, path))

    def templates(self) -> tuple[types.Template, ...]:
        """As `AsyncClient.templates`."""
        return self._wait(self._async.templates())

    # --- artifacts -----------------------------------------------------------------------------

    def put_artifact(
        self, content: bytes | Path, *, name: str = "", media_type: str = ""
    ) -> types.Artifact:
        """As `AsyncClient.put_artifact`."""
        return self._wait(self._async.put_artifact(content, name=name, media_type=media_type))

    def get_artifact(self, artifact_id: str, *, offset: int = 0) -> Iterator[bytes]:
        """As `AsyncClient.get_artifact`."""
        return self._iterate(self._async.get_artifact(artifact_id, offset=offset))

    def stat_artifact(self, artifact_id: str) -> types.Artifact:
        """As `AsyncClient.stat_artifact`."""
        return self._wait(self._async.stat_artifact(artifact_id))

    def list_artifacts(
        self, invocation_id: str, *, page_size: int = 0, page_token: str = ""
    ) -> types.ArtifactPage:
        """As `AsyncClient.list_artifacts`."""
        return self._wait(
            self._async.list_artifacts(invocation_id, page_size=page_size, page_token=page_token)
        )

    # --- invoke and spawn ----------------------------------------------------------------------

    @calls.same_method(calls.make_call)
    def invoke(self, *policies: Any, **options: Any) -> Any:
        """Runs a program in a sandbox of its own and gives back its value; see `make_call`."""
        return self._wait(self._async.run(calls.make_call(*policies, **options)))

    @calls.same_method(calls.make_call)
    def spawn(self, *policies: Any, **options: Any) -> Handle:
        """Starts a program in a sandbox of its own and gives back a handle to it."""
        handle = self._wait(self._async.start(calls.make_call(*policies, **options)))
        return Handle(self, handle)


class Handle:
    """A spawned invocation."""

    def __init__(self, client: Client, handle: AsyncHandle) -> None:
        """A front to an asynchronous handle."""
        self._client = client
        self._handle = handle

    def __repr__(self) -> str:
        """Names the invocation."""
        return f"<Handle {self.id}>"

    @property
    def id(self) -> str:
        """The invocation's id."""
        return self._handle.id

    @property
    def status(self) -> str:
        """Its state: `queued`, `starting`, `running`, `waiting`, `ending` or `ended`."""
        return self._client._wait(self._handle.status())

    @property
    def artifacts(self) -> tuple[types.Artifact, ...]:
        """What it has published."""
        return self._client._wait(self._handle.artifacts())

    def invocation(self) -> types.Invocation:
        """The invocation as it stands."""
        return self._client._wait(self._handle.invocation())

    def result(self, timeout_seconds: float | None = None) -> Any:
        """Waits for the value.

        Raises:
            InvocationFailed: It ended without a value; the subclass says how.
            ResultTimeoutError: It has not ended in time; it goes on.
        """
        return self._client._wait(self._handle.result(timeout_seconds))

    def cancel(self) -> types.Invocation:
        """Ends it and all below it, and answers when every sandbox is gone."""
        return self._client._wait(self._handle.cancel())

    def output(
        self, stream: types.Stream = "stdout", offset: int = 0, max_bytes: int = 64 * 1024
    ) -> bytes:
        """What it has printed so far, from `offset`, at most `max_bytes`."""
        return self._client._wait(self._handle.output(stream, offset=offset, max_bytes=max_bytes))

    def output_view(self, stream: types.Stream = "stdout") -> OutputView:
        """The beginning and the end of what it has printed so far."""
        return self._client._wait(self._handle.output_view(stream))

    def events(self, *, tree: bool = False) -> Iterator[types.Event]:
        """Yields its events, or its tree's, until it has ended."""
        return self._client._iterate(self._handle.events(tree=tree))


def connect(
    target: str | None = None,
    *,
    api_key: str | None = None,
    state: str | Path | None = None,
    client_name: str = "hutch-sdk",
    connect_timeout_seconds: float = 10.0,
    retry_seconds: float = 30.0,
) -> Client:
    """Connects to a controller: `with hutch.connect(...):` makes it the one of bare calls.

    Args:
        target: `unix:PATH` or `HOST:PORT`. Without it `$HUTCH_TARGET`, else the local controller of
            the state directory, which is started when there is none and ends by itself.
        api_key: The key for TCP; `$HUTCH_API_KEY`, or the local controller's own, without it.
        state: The state directory of the local controller; `$HUTCH_STATE` without it.
        client_name: What the client is, for the controller's logs.
        connect_timeout_seconds: How long to wait for a named controller.
        retry_seconds: How long a call that may safely be sent again is, from its first failure on.

    Raises:
        ConnectionLostError: Nobody answers at the target.
        LocalControllerError: A local controller could not be started.
        RequestRefused: The controller refused the session.
    """
    return Client(
        target,
        api_key=api_key,
        state=state,
        client_name=client_name,
        connect_timeout_seconds=connect_timeout_seconds,
        retry_seconds=retry_seconds,
    )
