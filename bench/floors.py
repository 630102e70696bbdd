"""The floors: what this machine can do at all, without Hutch's own work.

Called by `bench.run`; calls grpc, the controller's journal, and bwrap with the driver's own
arguments.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from bench.echo import METHOD
from bench.stats import Figure, figure
from controller.store.open import open_stores
from controller.store.ports import Batch, StoredRecord
from sandbox.drivers.bubblewrap import BubblewrapDriver

_MESSAGE = b"x" * 200


async def pingpong(folder: Path, count: int) -> Figure:
    """One message each way on an open stream between two processes, over a unix socket."""
    path = folder / "echo.sock"
    server = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bench.echo",
        str(path),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        await server.stdout.readline()
        seconds = []
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            call: Any = channel.stream_stream(METHOD)()
            for number in range(count + 20):
                begin = time.perf_counter()
                await call.write(_MESSAGE)
                await call.read()
                if number >= 20:
                    seconds.append(time.perf_counter() - begin)
            await call.done_writing()
        return figure("pingpong", seconds)
    finally:
        server.stdin.close()
        await server.wait()


def _batch(tree: str, sequence: int) -> Batch:
    record = StoredRecord(
        tenant_id="local",
        tree_id=tree,
        sequence=sequence,
        invocation_id=tree,
        kind="bench",
        time_us=sequence,
        engine_version=1,
        payload=b'{"padding":"' + b"x" * 300 + b'"}',
    )
    return Batch(records=(record,))


async def commits(folder: Path, count: int, writers: int) -> Figure:
    """One durable append, with so many writers at once; the seconds are per append."""
    state = folder / f"journal{writers}"
    state.mkdir(mode=0o700)
    stores = await open_stores(state)
    try:
        seconds: list[float] = []

        async def write(name: str) -> None:
            for sequence in range(1, count + 1):
                begin = time.perf_counter()
                await stores.journal.append(_batch(name, sequence))
                seconds.append(time.perf_counter() - begin)

        begin = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(writers):
                group.create_task(write(f"inv_{number}"))
        whole = time.perf_counter() - begin
    finally:
        await stores.close()
    if writers == 1:
        return figure("commit", seconds)
    return figure(f"commit_of_{writers}_writers", [whole / len(seconds)])


@contextmanager
def bare_starts(folder: Path) -> Iterator[Callable[[], float]]:
    """Gives what times one `bwrap <the driver's own arguments> python3 -I -S -c pass`, in seconds.

    Not a coroutine: bwrap must be started by the main thread, and nothing else runs meanwhile.
    """
    (folder / "driver").mkdir(mode=0o700)
    (folder / "shared").mkdir(mode=0o755)
    driver = BubblewrapDriver("bench", folder / "driver", shared=folder / "shared")
    statement = asyncio.run(driver.prepare())
    try:
        if not statement.usable:
            raise SystemExit(statement.problem)
        yield lambda: _bare_start(driver)
    finally:
        asyncio.run(driver.close())


def _bare_start(driver: BubblewrapDriver) -> float:
    command = driver.command(["python3", "-I", "-S", "-c", "pass"])
    try:
        begin = time.perf_counter()
        subprocess.run(
            command.argv,
            stdin=subprocess.DEVNULL,
            pass_fds=command.pass_fds,
            env={},
            cwd="/",
            check=True,
        )
        return time.perf_counter() - begin
    finally:
        driver.release(command)
