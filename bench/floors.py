"""The floors: what this machine can do at all, without Hutch's own work.

Called by `bench.run`; calls grpc, the controller's journal, and bwrap with the driver's own
arguments.
"""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from bench.echo import METHOD
from bench.stats import Figure, figure
from controller.store.open import open_stores
from controller.store.ports import Batch, StoredRecord
from sandbox.drivers.bubblewrap import BubblewrapDriver
from sandbox.drivers.trial import Command

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


class Bare:
    """Starts `bwrap <the driver's own arguments> python3 -I -S -c pass`, with nothing of Hutch.

    It is in no control group of its own. Not coroutines: bwrap must be started by the main thread,
    and nothing else runs meanwhile.
    """

    def __init__(self, driver: BubblewrapDriver) -> None:
        self._driver = driver

    def once(self) -> float:
        """The seconds of one."""
        begin = time.perf_counter()
        process, command = self._start()
        process.wait()
        seconds = time.perf_counter() - begin
        self._end(process, command)
        return seconds

    def rate(self, count: int, at_once: int) -> float:
        """How many a second end, with so many running at any moment."""
        running: dict[int, tuple[subprocess.Popen[bytes], Command]] = {}
        poll = select.poll()
        begin = time.perf_counter()
        for number in range(count + at_once):
            while len(running) >= at_once or (number >= count and running):
                for descriptor, _ in poll.poll():
                    poll.unregister(descriptor)
                    os.close(descriptor)
                    self._end(*running.pop(descriptor))
            if number < count:
                process, command = self._start()
                descriptor = os.pidfd_open(process.pid)
                poll.register(descriptor, select.POLLIN)
                running[descriptor] = (process, command)
        return count / (time.perf_counter() - begin)

    def _start(self) -> tuple[subprocess.Popen[bytes], Command]:
        command = self._driver.command(["python3", "-I", "-S", "-c", "pass"])
        process = subprocess.Popen(
            command.argv,
            stdin=subprocess.DEVNULL,
            pass_fds=command.pass_fds,
            env={},
            cwd="/",
        )
        return process, command

    def _end(self, process: subprocess.Popen[bytes], command: Command) -> None:
        code = process.wait()
        self._driver.release(command)
        if code != 0:
            raise SystemExit(f"a bare start ended with {code}")


@contextmanager
def bare_starts(folder: Path) -> Iterator[Bare]:
    """Gives what makes bare starts."""
    (folder / "driver").mkdir(mode=0o700)
    (folder / "shared").mkdir(mode=0o755)
    driver = BubblewrapDriver(
        "bench", folder / "driver", shared=folder / "shared", uses_zygote=False
    )
    statement = asyncio.run(driver.prepare())
    try:
        if not statement.usable:
            raise SystemExit(statement.problem)
        yield Bare(driver)
    finally:
        asyncio.run(driver.close())
