"""Templates: what is configured is listed, granted by name, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Iterator

import grpc
import pytest

import hutch
from hutch.v1 import template_service_pb2 as pb
from hutch.v1.template_service_pb2_grpc import TemplateServiceStub
from tests.support.cli import command_line
from tests.support.stack import Stack, stack

IMAGE = f"sha256:{'0' * 64}"  # no engine has it
CONFIG = f'[docker]\nengine = "unix:///nowhere/docker.sock"\n[templates.data]\nimage = "{IMAGE}"\n'


@pytest.fixture(scope="module")
def configured() -> Iterator[Stack]:
    with stack(config=CONFIG) as found:
        yield found


def test_every_template_is_listed_with_what_its_driver_states(configured: Stack) -> None:
    with hutch.connect(configured.target) as client:
        own, data = client.templates()
    assert (own.name, own.driver, own.isolation) == ("default", "bubblewrap", "container")
    assert own.usable
    assert own.image == ""
    assert own.limits.memory_limit_bytes == 512 * 1024**2
    assert {item.limit for item in own.enforcement} >= {"memory", "pids", "tmpfs", "open_files"}
    assert (data.name, data.driver, data.image, data.runtime) == ("data", "docker", IMAGE, "runc")
    assert not data.usable
    assert data.problem


def test_the_wire_says_the_same(configured: Stack) -> None:
    with grpc.insecure_channel(configured.target) as channel:
        answer = TemplateServiceStub(channel).ListTemplates(pb.ListTemplatesRequest())
    assert [item.template.name for item in answer.templates] == ["default", "data"]
    assert [item.driver.driver for item in answer.templates] == ["bubblewrap", "docker"]
    assert answer.templates[0].limits.pids_limit == 128


def test_a_named_template_is_used_and_an_unknown_one_is_a_bad_field(configured: Stack) -> None:
    with hutch.connect(configured.target) as client:
        assert client.invoke(program="return 1", template="default") == 1
        with pytest.raises(hutch.FieldInvalidError, match="there are default, data"):
            client.invoke(program="return 1", template="other")


def test_a_template_whose_driver_cannot_be_used_starts_nothing_else(configured: Stack) -> None:
    with (
        hutch.connect(configured.target) as client,
        pytest.raises(hutch.InvocationFailed) as failed,
    ):
        client.invoke(program="return 1", template="data")
    assert failed.value.ending == "start_failed"


def test_a_template_with_an_image_is_not_made_by_another_driver(configured: Stack) -> None:
    with (
        hutch.connect(configured.target) as client,
        pytest.raises(hutch.InvocationFailed, match="made by docker") as failed,
    ):
        client.invoke(program="return 1", template="data", driver="bubblewrap")
    assert failed.value.ending == "start_failed"


def test_the_command_line_lists_them(configured: Stack) -> None:
    with command_line(configured.target) as cli:
        done = cli.run("templates", "--json")
        table = cli.run("templates")
    listed = json.loads(done.stdout)["templates"]
    assert [item["name"] for item in listed] == ["default", "data"]
    assert listed[1]["image"] == IMAGE
    assert "the machine's own files" in table.stdout
    assert "data: " in table.stderr


def test_a_templates_modules_are_there_when_its_code_begins() -> None:
    config = (
        '[templates.sounds]\npreload = ["wave"]\n[templates.broken]\npreload = ["no_such_thing"]\n'
    )
    program = "import sys\nreturn 'wave' in sys.modules"
    with stack(config=config) as found, hutch.connect(found.target) as client:
        assert client.invoke(program=program, template="sounds") is True
        assert client.invoke(program=program) is False
        with pytest.raises(hutch.InvocationFailed, match="no_such_thing") as failed:
            client.invoke(program=program, template="broken")
        assert failed.value.ending == "start_failed"
