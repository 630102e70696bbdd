"""Invocations on containers, through a real controller and a real host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import hutch
from hutch import ReturnType
from sandbox.drivers.docker_settings import RUNTIMES
from tests.support import docker
from tests.support.stack import Stack, stack

pytestmark = pytest.mark.docker

CONFIG = """
[host]
pool_size = 1
[docker]
engine = "{engine}"
allow_known_escapes = {allowed}
[templates.default]
image = "{image}"
runtime = "{runtime}"
"""


@pytest.fixture(scope="module", params=RUNTIMES)
def containers(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """A controller and a host whose sandboxes are containers of one runtime."""
    runtime = RUNTIMES[request.param]
    if problem := docker.problem():
        pytest.skip(problem)
    if runtime == "runsc" and not docker.has_gvisor():
        pytest.skip("the engine has no runsc")
    settings = docker.settings(request.param)
    config = CONFIG.format(
        engine=settings.engine,
        allowed=list(settings.allow_known_escapes),
        image=settings.templates["default"].image,
        runtime=runtime,
    )
    with stack(request.param, config) as found:
        yield found


@pytest.fixture
def client(containers: Stack) -> Iterator[hutch.Client]:
    """A client of that controller."""
    with hutch.connect(containers.target) as found:
        yield found


def test_a_tree_of_invocations_runs_in_containers(client: hutch.Client) -> None:
    program = """
from hutch import ReturnType, invoke
import os
below = [invoke(ReturnType(int), program="return n * n", n=n) for n in (1, 2, 3)]
return [sum(below), os.getuid()]
"""
    assert client.invoke(ReturnType(list[int]), program=program) == [14, 10_001]


def test_a_box_in_a_container_keeps_its_state_and_its_files(client: hutch.Client) -> None:
    with client.sandbox() as box:
        box.run("x = 20 + 1; open('kept.txt', 'w').write('here')")
        assert box.run("x * 2").text == "42"
        assert box.files.read("kept.txt") == b"here"


def test_memory_death_in_a_container_is_named(client: hutch.Client, containers: Stack) -> None:
    """The kernel's counter names it; in gVisor it ends the whole sandbox, which is typed too."""
    limit = 192 << 20
    code = "held = [bytearray(8 << 20) for _ in range(64)]"
    if containers.driver == "docker-runsc":
        with pytest.raises(hutch.ResourceExceededError, match="memory_exceeded"):
            with client.sandbox(memory_limit_bytes=limit) as box:
                box.run(code)
        return
    with client.sandbox(memory_limit_bytes=limit) as box:
        died = box.run(code)
        assert died.outcome == "repl_died"
        assert died.evidence is not None
        assert died.evidence.oom_kill_count
        assert (died.evidence.limit, died.evidence.limit_value) == ("memory", limit)


def test_the_kernel_that_code_sees_is_this_machines_or_its_own(
    client: hutch.Client, containers: Stack
) -> None:
    with client.sandbox() as box:
        seen = box.run("open('/proc/version').read()").text
    with open("/proc/version") as file:
        assert (repr(file.read()) == seen) is (containers.driver == "docker")
