"""Cells run in sandboxes made from the images, by a real engine.

Needs the images and an engine: `images/engine make test-images`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import pytest

from images.archive import write_layer
from images.build import HERE, NAMES, OUT, Built, build, from_dockerfile, recipe
from sandbox.drivers.docker import DockerDriver
from sandbox.drivers.docker_settings import Template, absence
from tests.support import docker
from tests.support.sandboxes import Speaker, request

pytestmark = [pytest.mark.images, pytest.mark.docker, pytest.mark.timeout(1800)]
CELLS = {
    "base": ("import json, sys; print(json.dumps(sys.version_info[0]))", 3),
    "data": ("import numpy, pandas\nprint(int(pandas.Series(numpy.arange(4)).sum()))", 6),
}


def loaded(name: str) -> Built:
    """Builds an image, or takes it as it was built, and gives it to the engine."""
    if problem := absence(docker.ADDRESS):
        pytest.skip(problem)
    built = build(recipe(name), OUT)
    subprocess.run(
        ["docker", "load", "--quiet", "--input", str(built.folder / "image.tar")],
        env={**os.environ, "DOCKER_HOST": docker.ADDRESS},
        check=True,
        capture_output=True,
    )
    return built


def test_a_dockerfile_makes_of_a_root_of_ours_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it makes of an official image needs a registry; that it adds nothing is seen here."""
    built = loaded("base")
    monkeypatch.setenv("DOCKER_HOST", docker.ADDRESS)
    from_dockerfile(recipe("base"), built.image_id, tmp_path / "root.tar", network="none")
    epoch = json.loads((HERE / "debian.json").read_text("utf-8"))["source_date_epoch"]
    digest, _, _ = write_layer(tmp_path / "root.tar", tmp_path / "layer.tar", epoch)
    assert digest == built.layer_sha256


@pytest.mark.parametrize("name", NAMES)
async def test_a_cell_runs_in_a_sandbox_made_from_the_image(name: str, tmp_path: Path) -> None:
    built = loaded(name)
    settings = docker.settings("docker")
    template = Template(image=built.image_id)
    settings = dataclasses.replace(settings, templates={"default": template})
    driver = DockerDriver("docker", "hst_images", tmp_path / "state", settings)
    try:
        statement = await driver.prepare()
        assert statement.usable, statement.problem
        container = await driver.create(request())
        try:
            speaker = Speaker(container)
            await speaker.ready()
            code, expected = CELLS[name]
            ran = await speaker.run(code)
            assert (ran.outcome, ran.last) == ("completed", expected), ran.output
        finally:
            await container.destroy()
    finally:
        await driver.close()
