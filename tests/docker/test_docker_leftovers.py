"""Nothing is left of a sandbox in a container, wherever its host or the engine's connection ends.

A host is killed at each point of making, running and destroying a container: its engine is told to
stop the whole process there, so the point is exact. The next host of that owner must find a clean
engine, and nobody else's containers are touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from sandbox.drivers.docker import DockerDriver
from sandbox.drivers.docker_engine import OWNER_LABEL, Engine, EngineProblem
from sandbox.drivers.docker_settings import RUNTIMES
from tests.support import docker
from tests.support.proxy import proxy
from tests.support.sandboxes import GUARD_SECONDS, Speaker, request

pytestmark = pytest.mark.docker

POINTS = ("create", "attach", "start", "ready", "remove")
HOST = """
import asyncio, os, signal, sys
from pathlib import Path
from sandbox.drivers.docker import DockerDriver
from sandbox.drivers.docker_engine import Engine
from tests.support import docker
from tests.support.sandboxes import Speaker, request

name, owner, folder, point = sys.argv[1:]

def stop_after(method):
    def stopping(self, *arguments):
        method(self, *arguments)
        print("here", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    return stopping

async def main():
    driver = DockerDriver(name, owner, Path(folder), docker.settings(name))
    statement = await driver.prepare()
    assert statement.usable, statement
    if point in ("create", "attach", "start", "remove"):
        setattr(Engine, point, stop_after(getattr(Engine, point)))
    container = await driver.create(request("sbx_left"))
    speaker = Speaker(container)
    await speaker.ready()
    await speaker.run("import subprocess; subprocess.Popen(['sleep', '1000'])")
    if point == "ready":
        print("here", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    await container.destroy()

asyncio.run(main())
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short folder."""
    with tempfile.TemporaryDirectory(prefix="dkr-") as name:
        yield Path(name)


@pytest.fixture
def engine() -> Iterator[Engine]:
    """The engine itself, to be asked what there is."""
    if problem := docker.problem():
        pytest.skip(problem)
    found = Engine(docker.ADDRESS)
    yield found
    found.close()


@contextlib.asynccontextmanager
async def prepared(owner: str, folder: Path, address: str = "") -> AsyncIterator[DockerDriver]:
    """A driver of an owner, ready for sandboxes."""
    settings = docker.settings("docker")
    settings = dataclasses.replace(settings, engine=address or settings.engine)
    driver = DockerDriver("docker", owner, folder, settings)
    try:
        statement = await driver.prepare()
        assert statement.usable, statement.problem
        yield driver
    finally:
        await driver.close()


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("name", RUNTIMES)
async def test_case_50_a_container_of_a_killed_host_is_removed_by_the_next(
    engine: Engine, folder: Path, point: str, name: str
) -> None:
    if RUNTIMES[name] not in engine.facts().runtimes:
        pytest.skip(f"the engine has no {RUNTIMES[name]}")
    owner, other = secrets.token_hex(8), secrets.token_hex(8)
    async with prepared(other, folder / "other") as theirs:
        neighbour = await theirs.create(request())
        speaker = Speaker(neighbour)
        await speaker.ready()
        host = await asyncio.create_subprocess_exec(
            sys.executable, "-c", HOST, name, owner, str(folder / "state"), point,
            cwd=Path(__file__).parents[2], stdout=subprocess.PIPE,
        )  # fmt: skip
        assert host.stdout is not None
        async with asyncio.timeout(GUARD_SECONDS):
            assert await host.stdout.readline() == b"here\n"
        left = engine.owned({OWNER_LABEL: owner})
        assert len(left) == (0 if point == "remove" else 1)
        host.kill()
        await host.wait()
        following = DockerDriver(name, owner, folder / "state", docker.settings(name))
        try:
            begin = time.monotonic()
            statement = await following.prepare()
            assert time.monotonic() - begin < 10
            assert statement.usable, statement.problem
            assert engine.owned({OWNER_LABEL: owner}) == {}
            assert await following.list() == []
        finally:
            await following.close()
        assert (await speaker.run("print(3)")).last == 3
        assert await theirs.list() == [neighbour.sandbox_id]


async def test_a_create_that_is_given_up_leaves_nothing(engine: Engine, folder: Path) -> None:
    owner = secrets.token_hex(8)
    async with prepared(owner, folder) as driver:
        for steps in (1, 3, 50):
            making = asyncio.create_task(driver.create(request()))
            for _ in range(steps):
                await asyncio.sleep(0)
            making.cancel()
            with pytest.raises(asyncio.CancelledError):
                await making
    assert engine.owned({OWNER_LABEL: owner}) == {}


# The docker package leaves a socket that could not connect to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_connection_that_is_lost_ends_the_sandbox_and_its_end_is_made_up_for(
    engine: Engine, folder: Path
) -> None:
    """While the engine cannot be reached a sandbox cannot be proved gone, and destroy says so."""
    owner = secrets.token_hex(8)
    async with prepared(owner, folder):
        pass  # what is built once is built without the proxy
    with proxy(folder, docker.ADDRESS.removeprefix("unix://")) as between:
        async with prepared(owner, folder, f"unix://{between.path}") as driver:
            container = await driver.create(request())
            speaker = Speaker(container)
            await speaker.ready()
            await speaker.run("kept = 1")
            between.refusing = True
            between.cut()
            with pytest.raises(EOFError):
                await speaker.receive()
            with pytest.raises(RuntimeError, match="was not removed"):
                await container.destroy()
            between.refusing = False
            async with asyncio.timeout(GUARD_SECONDS):
                await container.destroy()
            assert await driver.list() == []
    assert engine.owned({OWNER_LABEL: owner}) == {}


# The docker package leaves a socket that could not connect to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_an_engine_that_is_killed_costs_its_sandboxes_and_leaves_none_of_them(
    engine: Engine, folder: Path
) -> None:
    """What it ran lives on without it for a while, and is removed once it is back."""
    pid_file = os.environ.get("ENGINE_PID_FILE")
    if pid_file is None:
        pytest.skip("the engine is not one that these tests may kill: see images/engine")
    owner = secrets.token_hex(8)
    async with prepared(owner, folder) as driver:
        containers = [await driver.create(request()) for _ in range(2)]
        speaker = Speaker(containers[0])
        await speaker.ready()
        killed = int(Path(pid_file).read_text())
        os.kill(killed, signal.SIGKILL)
        async with asyncio.timeout(GUARD_SECONDS):
            with pytest.raises(EOFError):
                await speaker.receive()
            with pytest.raises(RuntimeError, match="was not removed"):
                await containers[0].destroy()
            while not _answers(engine):
                await asyncio.sleep(0.1)
            assert len(engine.owned({OWNER_LABEL: owner})) == 2
            for container in containers:
                await container.destroy()
        assert await driver.list() == []
        following = await driver.create(request())
        speaker = Speaker(following)
        await speaker.ready()
        assert (await speaker.run("print(5)")).last == 5
    assert engine.owned({OWNER_LABEL: owner}) == {}


def _answers(engine: Engine) -> bool:
    try:
        engine.facts()
    except EngineProblem:
        return False
    return True


async def test_a_container_that_somebody_removes_has_ended(engine: Engine, folder: Path) -> None:
    async with prepared(secrets.token_hex(8), folder) as driver:
        container = await driver.create(request())
        await Speaker(container).ready()
        engine.remove(container.engine_id)
        async with asyncio.timeout(GUARD_SECONDS):
            await container.wait()
        await container.destroy()
        assert await driver.list() == []
