"""A proxy between a client and the controller that treats connections as badly as real ones do.

Used by the end-to-end tests of boxes. It passes bytes between two unix sockets, in a thread of its
own, and can drop connections that are idle, cut all of them, cut each after so many bytes, or stop
passing anything while it keeps them open.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_CHUNK_BYTES = 64 * 1024


class Proxy:
    """Connections through it; attributes may be set at any time.

    Attributes:
        idle_seconds: A connection without a byte for so long is dropped; 0 means never.
        cut_after_bytes: Each connection is cut after so many bytes down; 0 means never.
        silent: Whether nothing is passed on.
        refusing: Whether new connections are closed at once.
        connections: How many there have been.
        down_bytes: How many bytes went down.
    """

    def __init__(self, folder: Path, upstream: str) -> None:
        self.path = folder / "p.sock"
        self.target = f"unix:{self.path}"
        self._upstream = upstream.removeprefix("unix:")
        self.idle_seconds = 0.0
        self.cut_after_bytes = 0
        self.silent = False
        self.refusing = False
        self.connections = 0
        self.down_bytes = 0
        self._open: set[asyncio.Task[None]] = set()
        self._ends: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, name="proxy")

    def cut(self) -> None:
        """Cuts every connection that is open."""
        self._loop.call_soon_threadsafe(self._cut_all)

    def _cut_all(self) -> None:
        for task in self._open:
            task.cancel()

    def _main(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_unix_server(self._connected, self.path)
        self._ready.set()
        await self._stop.wait()
        server.close()
        while self._open:
            self._cut_all()
            await asyncio.wait(self._open)
        while self._ends:
            await _closed(self._ends.pop())

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._ends.add(writer)
        if self.refusing:
            writer.close()
            return
        self.connections += 1
        task = self._loop.create_task(self._pass(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_unix_connection(self._upstream)
        except BaseException:
            writer.transport.abort()
            raise
        self._ends.add(up_writer)
        moved = asyncio.Event()
        ways = [
            self._loop.create_task(self._one_way(reader, up_writer, moved, down=False)),
            self._loop.create_task(self._one_way(up_reader, writer, moved, down=True)),
            self._loop.create_task(self._watch_idle(moved)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            pass
        finally:
            for way in ways:
                way.cancel()
            await asyncio.wait(ways)
            for end in (writer, up_writer):
                await _closed(end)
                self._ends.discard(end)

    async def _one_way(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        moved: asyncio.Event,
        *,
        down: bool,
    ) -> None:
        passed = 0
        with suppress(ConnectionError):
            while data := await source.read(_CHUNK_BYTES):
                moved.set()
                if self.silent:
                    continue
                passed += len(data)
                if down:
                    self.down_bytes += len(data)
                    if self.cut_after_bytes and passed >= self.cut_after_bytes:
                        return
                sink.write(data)
                await sink.drain()

    async def _watch_idle(self, moved: asyncio.Event) -> None:
        while True:
            moved.clear()
            try:
                async with asyncio.timeout(self.idle_seconds or None):
                    await moved.wait()
            except TimeoutError:
                return

    def start(self) -> None:
        """Listens."""
        self._thread.start()
        self._ready.wait()

    def close(self) -> None:
        """Ends everything."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


async def _closed(end: asyncio.StreamWriter) -> None:
    end.transport.abort()
    with suppress(OSError):
        # All wait for one future: whoever is cancelled must not cancel it for the others.
        await asyncio.shield(end.wait_closed())


@contextmanager
def proxy(folder: Path, upstream: str) -> Iterator[Proxy]:
    """A proxy to a controller, until the block ends."""
    found = Proxy(folder, upstream)
    found.start()
    try:
        yield found
    finally:
        found.close()
