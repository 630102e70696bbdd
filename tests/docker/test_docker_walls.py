"""What a container is told to be: each wall is seen to hold, and what it keeps out without it.

The same container is made once as the driver makes it and once with one wall taken down, so each
test would fail if that wall did nothing.
"""

from __future__ import annotations

import copy
import json
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.drivers import docker_spec
from sandbox.drivers.docker import DockerDriver
from sandbox.drivers.docker_container import remove
from sandbox.drivers.docker_engine import Engine
from tests.support import docker
from tests.support.sandboxes import LIMITS

pytestmark = pytest.mark.docker

TRY = """
import ctypes, json, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def call(*numbers):
    return ctypes.get_errno() if libc.syscall(*numbers) == -1 else 0
def attempt(action):
    try:
        action()
    except OSError as error:
        return error.errno
    return 0
os.setgroups([])
os.setgid(10001)
os.setuid(10001)
print(json.dumps({
    "unshare": call(272, 0x10000000),
    "keyctl": call(250, 0, -3, 0),
    "io_uring": call(425, 1, 0),
    "vsock": attempt(lambda: socket.socket(40, socket.SOCK_STREAM)),
    "clone3": call(435, 0, 0),
    "root": attempt(lambda: os.mkdir("/run/x")),
    "core": attempt(lambda: open("/proc/sys/kernel/core_pattern", "r+")),
    "sysrq": attempt(lambda: open("/proc/sysrq-trigger", "w")),
    "cmdline": len(open("/proc/cmdline").read()),
    "keys": len(open("/proc/keys").read()),
    "engine": [path for path in ("/var/run/docker.sock", "/run/docker.sock",
               "/run/containerd/containerd.sock") if os.path.exists(path)],
    "devices": sorted(os.listdir("/dev")),
    "swap": [line for line in open("/proc/swaps")][1:],
}))
"""


@pytest.fixture
def engine() -> Iterator[Engine]:
    """The engine itself."""
    if problem := docker.problem():
        pytest.skip(problem)
    found = Engine(docker.ADDRESS)
    yield found
    found.close()


def config(**changes: Any) -> dict[str, Any]:
    """A container that makes the attempts, as the driver would make it but for some settings."""
    made = copy.deepcopy(
        docker_spec.build(
            image=docker.settings("docker").templates["default"].image,
            runtime="runc",
            labels={"hutch.test": "walls"},
            limits=LIMITS,
            more_processes=0,
            tmpfs_bytes=1 << 20,
            command=["python3", "-I", "-S", "-c", TRY],
            mounts=(),
        )
    )
    made["HostConfig"].update(changes)
    return made


def run(engine: Engine, made: dict[str, Any]) -> dict[str, Any]:
    """What its attempts answered."""
    container = engine.create(f"hutch-test-{secrets.token_hex(6)}", made)
    try:
        with engine.attach(container) as channel:
            channel.settimeout(60)
            engine.start(container)
            text = b"".join(iter(lambda: channel.recv(65536), b""))
            assert text, channel.diagnostics
            answer: dict[str, Any] = json.loads(text)
            return answer
    finally:
        remove(engine, container)


def test_case_s5_what_the_filter_denies_is_denied_by_it(engine: Engine) -> None:
    """EPERM for what an administrator may do, ENOSYS for what is not to exist."""
    held = run(engine, config())
    assert held["unshare"] == held["keyctl"] == 1
    assert held["io_uring"] == held["clone3"] == 38
    assert held["vsock"] == 97
    without = run(engine, config(SecurityOpt=["no-new-privileges:true", "seccomp=unconfined"]))
    assert without["unshare"] == 0
    assert without["keyctl"] != 1
    assert (without["io_uring"], without["clone3"]) != (38, 38)


def test_case_s4_what_is_the_kernels_own_cannot_be_written_or_read(engine: Engine) -> None:
    held = run(engine, config())
    assert held["core"] in (13, 30)
    assert held["sysrq"] in (2, 13, 30)  # a kernel may have none
    assert held["cmdline"] == held["keys"] == 0
    without = run(engine, config(MaskedPaths=[]))
    assert without["cmdline"] > 0


def test_case_s6_no_engine_and_no_device_is_in_reach(engine: Engine) -> None:
    held = run(engine, config())
    assert held["engine"] == []
    assert set(held["devices"]) <= {
        "fd", "full", "mqueue", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin",
        "stdout", "tty", "urandom", "zero",
    }  # fmt: skip
    assert held["root"] in (13, 30)
    assert held["swap"] == []


async def test_case_s1_a_runtime_with_known_escapes_is_refused_unless_it_is_allowed_by_name(
    engine: Engine,
) -> None:
    from dataclasses import replace

    from sandbox.drivers.docker_runtimes import known_escapes

    version = engine.facts().runc_version
    if not known_escapes("runc", version):
        pytest.skip(f"runc {version} has no known escape")
    for allowed, usable in (((), False), ((f"runc {version}",), True)):
        with tempfile.TemporaryDirectory() as folder:
            settings = replace(docker.settings("docker"), allow_known_escapes=allowed)
            driver = DockerDriver("docker", secrets.token_hex(8), Path(folder), settings)
            statement = await driver.prepare()
            await driver.close()
        assert statement.usable is usable
        said = statement.problem if not usable else " ".join(statement.gaps)
        assert f"runc {version} has known escapes" in said
        assert usable or "allow_known_escapes" in said


async def test_an_image_that_is_not_there_is_named_with_the_mend(engine: Engine) -> None:
    from dataclasses import replace

    from sandbox.drivers.docker_settings import Template

    absent = {"default": Template(image="sha256:" + "0" * 64)}
    with tempfile.TemporaryDirectory() as folder:
        settings = replace(docker.settings("docker"), templates=absent)
        driver = DockerDriver("docker", secrets.token_hex(8), Path(folder), settings)
        statement = await driver.prepare()
        await driver.close()
    assert not statement.usable
    assert "make images" in statement.problem
