"""The parts of the docker drivers that need no engine."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.drivers import docker_spec, make, seccomp
from sandbox.drivers.docker_channel import AttachedSocket, Hangups
from sandbox.drivers.docker_container import find_group
from sandbox.drivers.docker_runtimes import known_escapes
from sandbox.drivers.docker_settings import RUNTIMES, DockerSettings, Template
from sandbox.drivers.driver import Isolation
from sandbox.drivers.seccomp import assembler, policy, profile
from sandbox.drivers.seccomp import compile as compiler
from sandbox.drivers.seccomp.numbers import NUMBERS
from sandbox.host.config import ConfigError, load
from tests.support.sandboxes import LIMITS

PROFILE: dict[str, Any] = json.loads(profile.render())
NAMED = sorted(policy.ALLOWED | policy.FORBIDDEN | policy.ABSENT)
INTERESTING = st.one_of(
    st.integers(0, 2**32 - 1),
    st.sampled_from(
        [0, 1, 2, 8, 10, 16, 17, 40, 0x5412, 0x5413, 0x541C, 0x10000000, 0x3D0F00, 2**32 - 1]
    ),
)
DIGEST = "sha256:" + "a" * 64


def answers(name: str, arguments: tuple[int, ...]) -> list[int]:
    """What each rule of the profile that matches a call answers, as the filter's own values."""
    found = []
    for rule in PROFILE["syscalls"]:
        if name not in rule["names"]:
            continue
        matches = (
            (arguments[match["index"]] & match["value"]) == match["valueTwo"]
            for match in rule.get("args", ())
        )
        if all(matches):
            allowed = rule["action"] == "SCMP_ACT_ALLOW"
            found.append(assembler.ALLOW if allowed else assembler.errno(rule["errnoRet"]))
    return found


def filtered(name: str, arguments: tuple[int, ...]) -> int:
    """What bubblewrap's filter answers to the same call."""
    column, audit = compiler.ARCHITECTURES["x86_64"]
    number = NUMBERS[name][column]
    assert number is not None
    program = seccomp.filter_bytes("x86_64")
    return assembler.run(program, architecture=audit, number=number, arguments=arguments)


def test_both_filters_answer_every_named_call_alike() -> None:
    for name in NAMED:
        if NUMBERS[name][0] is not None:
            assert answers(name, (0,) * 6) == [filtered(name, (0,) * 6)], name


@given(name=st.sampled_from(sorted(policy.CONDITIONAL)), arguments=st.tuples(*[INTERESTING] * 3))
def test_both_filters_judge_arguments_alike(name: str, arguments: tuple[int, ...]) -> None:
    """The rules that match a call agree, so their order does not matter."""
    arguments = (*arguments, 0, 0, 0)
    assert set(answers(name, arguments)) == {filtered(name, arguments)}


@given(values=st.frozensets(INTERESTING, max_size=5), number=INTERESTING)
def test_a_cover_leaves_out_the_given_numbers_only(values: frozenset[int], number: int) -> None:
    covered = sum(number & mask == below for mask, below in profile.outside(values))
    assert covered == (0 if number in values else 1)


@pytest.mark.parametrize(
    ("version", "count"),
    [
        ("1.0.0-rc6", 4), ("1.1.5+ds1", 4), ("1.1.11", 4), ("1.1.12", 3), ("1.2.7", 3),
        ("1.2.8", 0),
        ("1.3.2", 3), ("1.3.3", 0), ("1.4.0-rc.2", 3), ("1.4.0-rc.3", 0),
        ("1.4.0", 0), ("2.0.0", 0),
    ],
)  # fmt: skip
def test_case_s1_versions_with_known_escapes_are_known(version: str, count: int) -> None:
    assert known_escapes("runc", version).count("CVE-") == count
    assert known_escapes("runsc", version) == ""


def test_a_version_that_cannot_be_read_counts_as_one_with_escapes() -> None:
    assert "does not say" in known_escapes("runc", "")


@pytest.fixture
async def attached() -> Any:
    """An attached socket and the engine's end of it."""
    ours, theirs = socket.socketpair()
    with AttachedSocket(ours.detach()) as channel, theirs:
        channel.setblocking(False)
        yield channel, theirs


def piece(stream: int, data: bytes) -> bytes:
    """A piece as the engine sends it."""
    return bytes([stream, 0, 0, 0]) + len(data).to_bytes(4, "big") + data


@given(pieces=st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=40))), data=st.data())
def test_standard_output_comes_whole_however_it_is_cut(
    pieces: list[tuple[int, bytes]], data: st.DataObject
) -> None:
    ours, theirs = socket.socketpair()
    with AttachedSocket(ours.detach()) as channel, theirs:
        channel.setblocking(False)
        wire = b"".join(piece(*item) for item in pieces)
        got = b""
        while wire:
            size = data.draw(st.integers(1, len(wire)))
            theirs.sendall(wire[:size])
            wire = wire[size:]
            while True:
                try:
                    read = channel.recv(data.draw(st.integers(1, 64)))
                except BlockingIOError:
                    break
                assert read
                got += read
        theirs.close()
        assert channel.recv(10) == b""
        assert got == b"".join(text for stream, text in pieces if stream == 1)
        errors = b"".join(text for stream, text in pieces if stream == 2)
        assert channel.diagnostics == errors[-4096:].decode("utf-8", "replace").strip()


async def test_a_hangup_is_told_once_though_nobody_reads(attached: Any) -> None:
    channel, theirs = attached
    hangups, told = Hangups(), asyncio.Event()
    calls: list[int] = []

    def call() -> None:
        calls.append(1)
        told.set()

    hangups.watch(channel, call)
    theirs.sendall(piece(1, b"unread"))
    await asyncio.sleep(0)
    assert not calls
    theirs.close()
    async with asyncio.timeout(10):
        await told.wait()
    hangups.forget(channel)
    hangups.close()
    hangups.close()
    assert calls == [1]
    assert channel.recv(100) == b"unread"


def test_a_process_that_is_not_the_containers_has_no_group() -> None:
    assert find_group(os.getpid(), secrets.token_hex(32)) is None


def test_a_container_has_every_wall() -> None:
    made = docker_spec.build(
        image=DIGEST, runtime="runc", labels={"a": "b"}, limits=LIMITS, more_processes=3,
        tmpfs_bytes=4096, command=["python3", "-c", "1"],
        mounts=[docker_spec.Mount(source=Path("/x"), target="/y")],
    )  # fmt: skip
    host = made["HostConfig"]
    assert (made["User"], made["Tty"], made["StdinOnce"]) == ("0:0", False, True)
    assert made["Healthcheck"] == {"Test": ["NONE"]}
    assert (host["NetworkMode"], host["ReadonlyRootfs"], host["Privileged"]) == (
        "none",
        True,
        False,
    )
    assert (host["CapDrop"], host["CapAdd"]) == (["ALL"], ["SETUID", "SETGID", "KILL"])
    assert host["SecurityOpt"][0] == "no-new-privileges:true"
    assert host["SecurityOpt"][1] == f"seccomp={profile.render()}"
    assert host["Memory"] == host["MemorySwap"] == LIMITS.memory_limit_bytes
    assert host["PidsLimit"] == LIMITS.pids_limit + 3
    assert host["LogConfig"] == {"Type": "none"}
    assert all(mount["ReadOnly"] for mount in host["Mounts"])
    assert sorted(host["Tmpfs"]) == ["/dev/shm", "/tmp", "/workspace"]
    assert all("size=4096" in options for options in host["Tmpfs"].values())


@pytest.mark.parametrize("name", RUNTIMES)
async def test_a_driver_without_an_engine_or_an_image_says_the_mend(
    name: str, tmp_path: Path
) -> None:
    absent = f"unix://{tmp_path / 'absent.sock'}"
    template = Template(image=DIGEST, runtime=RUNTIMES[name])
    for templates, mend in (({}, "[templates.NAME]"), ({"default": template}, "apt install")):
        settings = DockerSettings(engine=absent, templates=templates)
        driver = make(name, "owner", tmp_path / "state", settings)
        statement = await driver.prepare()
        assert not statement.usable
        assert mend in statement.problem
        assert statement.isolation is (
            Isolation.KERNEL if name == "docker-runsc" else Isolation.CONTAINER
        )
        assert await driver.list() == []
        await driver.close()


GOOD = f"""
[docker]
engine = "unix:///x.sock"
allow_known_escapes = ["runc 1.1.5"]
[templates.default]
image = "{DIGEST}"
[templates.strong]
image = "base@{DIGEST}"
runtime = "runsc"
"""


def test_templates_name_their_image_and_their_driver(tmp_path: Path) -> None:
    path = tmp_path / "hutch.toml"
    path.write_text(GOOD)
    config = load(path)
    assert config.templates == ("default", "strong")
    assert [config.driver_of(name) for name in (*config.templates, "none")] == [
        "docker", "docker-runsc", "",
    ]  # fmt: skip
    assert config.docker.images("docker") == {"default": DIGEST}
    assert config.docker.images("docker-runsc") == {"strong": f"base@{DIGEST}"}
    assert config.docker.allow_known_escapes == ("runc 1.1.5",)
    assert config.docker_settings(7).generation == 7


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[templates.a]\nimage = "python:3.12"', "digest"),
        (f'[templates.a]\nimage = "{DIGEST}"\nruntime = "crun"', "runc or runsc"),
        ('[templates.a]\nimages = ""', "unknown key 'images'"),
        (f'[templates.a]\nimage = "{DIGEST}"\nroot = "/srv"', "one too many"),
        ('[templates.a]\nroot = "srv"', "no absolute path"),
        ("[docker]\ngeneration = 1", "unknown key 'generation'"),
        ("[host]\ndocker = ['x']", "unknown key 'docker'"),
        ("templates = 1", "must be a table"),
    ],
)
def test_a_configuration_that_says_something_else_is_refused(
    tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "hutch.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words.replace("[", r"\[")):
        load(path)
