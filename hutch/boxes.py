"""Blocking fronts to boxes, their cells and their files.

Made by `hutch.client`; calls `hutch.aio_boxes` on the client's own event loop and nothing else.
What a caller gives to take output is called in a thread of the box, one call after the other.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self, TypeVar

from hutch import types
from hutch.aio_boxes import AsyncBox, AsyncCell, AsyncCellResult, Queueing
from hutch.box_stream import CellState
from hutch.cells import CellResult
from hutch.workspace import AsyncFiles, Content

if TYPE_CHECKING:
    from hutch.client import Client

BoxResult = CellResult[Iterator[bytes]]
Taken = TypeVar("Taken")


class Files:
    """Files of one live sandbox; see `AsyncFiles`."""

    def __init__(self, client: Client, files: AsyncFiles) -> None:
        """A front to asynchronous files."""
        self._client = client
        self._files = files

    def read(self, path: str, *, offset: int = 0, max_bytes: int = 0) -> bytes:
        """As `AsyncFiles.read`."""
        return self._client._wait(self._files.read(path, offset=offset, max_bytes=max_bytes))

    def stream(self, path: str, *, offset: int = 0, max_bytes: int = 0) -> Iterator[bytes]:
        """As `AsyncFiles.stream`."""
        return self._client._iterate(self._files.stream(path, offset=offset, max_bytes=max_bytes))

    def download(self, path: str, to: Path | str | IO[bytes]) -> int:
        """As `AsyncFiles.download`."""
        return self._client._wait(self._files.download(path, to))

    def write(
        self, path: str, content: Content, *, executable: bool = False
    ) -> types.WorkspaceFile:
        """As `AsyncFiles.write`."""
        return self._client._wait(self._files.write(path, content, executable=executable))

    def list(self, path: str = "") -> list[types.WorkspaceFile]:
        """As `AsyncFiles.list`."""
        return self._client._wait(self._files.list(path))

    def stat(self, path: str) -> types.WorkspaceFile:
        """As `AsyncFiles.stat`."""
        return self._client._wait(self._files.stat(path))


class Box:
    """A sandbox that takes cells: `with client.sandbox() as box: box.run("x = 1")`.

    Leaving the block ends the box, unless it was detached or this client came back to it.
    """

    def __init__(self, client: Client, box: AsyncBox) -> None:
        """A front to an asynchronous box."""
        self._client = client
        self._box = box
        self._takers: ThreadPoolExecutor | None = None

    def __repr__(self) -> str:
        """Names the invocation."""
        return repr(self._box).replace("AsyncBox", "Box", 1)

    @property
    def id(self) -> str:
        """The invocation's id."""
        return self._box.id

    @property
    def files(self) -> Files:
        """The files of its sandbox."""
        return Files(self._client, self._box.files)

    def __enter__(self) -> Self:
        """Opens it."""
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends it, or leaves it alone where it was detached or is not ours."""
        if self._client.closed:
            return  # the client has left it alone already
        try:
            self._client._wait(self._box.__aexit__(kind, error, trace))
        finally:
            self._release()

    def open(self) -> Self:
        """As `AsyncBox.open`."""
        self._client._wait(self._box.open())
        return self

    def _release(self) -> None:
        takers, self._takers = self._takers, None
        if takers is not None:
            takers.shutdown(wait=False, cancel_futures=True)

    def _in_thread(
        self, take: Callable[[Taken], Any] | None
    ) -> Callable[[Taken], Awaitable[None]] | None:
        """Lets a caller's function run in the box's own thread, and the client go on meanwhile."""
        if take is None:
            return None
        if self._takers is None:
            self._takers = ThreadPoolExecutor(1, thread_name_prefix="hutch-box")
        takers, given = self._takers, take

        async def taking(item: Taken) -> None:
            context = contextvars.copy_context()
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(takers, context.run, given, item)

        return taking

    def run(
        self,
        code: str,
        *,
        timeout_seconds: float | None = None,
        queueing: Queueing = "wait",
        cell_id: str | None = None,
        on_output: Callable[[types.CellOutput], Any] | None = None,
        on_display: Callable[[types.Display], Any] | None = None,
        inputs: Mapping[str, Any] | None = None,
    ) -> BoxResult:
        """Runs a cell and gives back what it came to; see `AsyncBox.run`.

        `on_output` and `on_display` are called in a thread of the box.
        """
        work = self._box.run(
            code,
            timeout_seconds=timeout_seconds,
            queueing=queueing,
            cell_id=cell_id,
            on_output=self._in_thread(on_output),
            on_display=self._in_thread(on_display),
            inputs=inputs,
        )
        return self._blocking(self._client._wait(work))

    def submit(
        self,
        code: str,
        *,
        timeout_seconds: float | None = None,
        queueing: Queueing = "wait",
        cell_id: str | None = None,
        on_output: Callable[[types.CellOutput], Any] | None = None,
        on_display: Callable[[types.Display], Any] | None = None,
        inputs: Mapping[str, Any] | None = None,
    ) -> Cell:
        """Gives a cell and does not wait for it; see `run`."""
        work = self._box.submit(
            code,
            timeout_seconds=timeout_seconds,
            queueing=queueing,
            cell_id=cell_id,
            on_output=self._in_thread(on_output),
            on_display=self._in_thread(on_display),
            inputs=inputs,
        )
        return Cell(self, self._client._wait(work))

    def _blocking(self, result: AsyncCellResult) -> BoxResult:
        return CellResult(
            result.cell,
            displays=result.displays,
            displays_left_out=result.displays_left_out,
            stdout=result.stdout_view,
            stderr=result.stderr_view,
            value_json=result.value_json,
            hint=result.hint,
            read=lambda stream: self._client._iterate(self._box.pieces(result.cell_id, stream)),
        )

    def cell(self, cell_id: str) -> Cell:
        """A cell that was given before, by this client or another."""

        async def find() -> AsyncCell:
            return self._box.cell(cell_id)

        return Cell(self, self._client._wait(find()))

    def interrupt(self, cell_id: str, *, queue: bool = False) -> None:
        """As `AsyncBox.interrupt`."""
        self._client._wait(self._box.interrupt(cell_id, queue=queue))

    def status(self) -> types.BoxStatus:
        """The box, the cell that runs and those that wait, as they stand now."""
        return self._client._wait(self._box.status())

    def read_output(
        self,
        cell_id: str,
        stream: types.Stream = "stdout",
        *,
        offset: int = 0,
        max_bytes: int = 0,
        follow: bool = False,
    ) -> Iterator[types.OutputChunk]:
        """As `AsyncBox.read_output`."""
        return self._client._iterate(
            self._box.read_output(
                cell_id, stream, offset=offset, max_bytes=max_bytes, follow=follow
            )
        )

    def write_stdin(self, data: bytes | str, *, close: bool = False) -> None:
        """As `AsyncBox.write_stdin`."""
        self._client._wait(self._box.write_stdin(data, close=close))

    def invocation(self) -> types.Invocation:
        """The box as it stands."""
        return self._client._wait(self._box.invocation())

    def close(self) -> types.Invocation | None:
        """Ends the box and all below it; answers when every sandbox is gone. Once is enough."""
        try:
            return self._client._wait(self._box.close())
        finally:
            self._release()

    def detach(self) -> None:
        """Leaves the box running, with its cells; `client.attach(box.id)` comes back to it."""
        try:
            self._client._wait(self._box.detach())
        finally:
            self._release()


class Cell:
    """A cell that was given to a box."""

    def __init__(self, box: Box, cell: AsyncCell) -> None:
        """A front to an asynchronous cell."""
        self._box = box
        self._cell = cell

    def __repr__(self) -> str:
        """Names the cell."""
        return repr(self._cell).replace("AsyncCell", "Cell", 1)

    @property
    def cell_id(self) -> str:
        """The cell's id."""
        return self._cell.cell_id

    @property
    def state(self) -> CellState:
        """What is known of it here; see `AsyncCell.state`."""
        return self._cell.state

    def result(self, timeout_seconds: float | None = None) -> BoxResult:
        """Waits for its end; see `AsyncCell.result`."""
        return self._box._blocking(self._box._client._wait(self._cell.result(timeout_seconds)))

    def interrupt(self, *, queue: bool = False) -> None:
        """Interrupts it, and with `queue` the cells that wait behind it."""
        self._box._client._wait(self._cell.interrupt(queue=queue))

    def output(
        self, stream: types.Stream = "stdout", *, offset: int = 0, follow: bool = True
    ) -> Iterator[types.OutputChunk]:
        """Yields what it prints, up to its end, at the reader's own speed."""
        return self._box._client._iterate(self._cell.output(stream, offset=offset, follow=follow))
