"""The container engine and the image that tests use, if there are any: see `images/engine`.

Called by the tests of drivers; calls the engine that DOCKER_HOST names, or the machine's own.
"""

from __future__ import annotations

import functools
import os

from sandbox.drivers.docker_engine import Engine, EngineProblem, Facts
from sandbox.drivers.docker_settings import (
    DEFAULT_ENGINE,
    RUNTIMES,
    DockerSettings,
    Template,
    absence,
)

IMAGE = "hutch-test/base:latest"
ADDRESS = os.environ.get("DOCKER_HOST", DEFAULT_ENGINE)


def settings(driver: str, template: str = "default") -> DockerSettings:
    """The settings with one template, made from the image of tests where it is there."""
    image, facts = _found()
    named = Template(image=image, runtime=RUNTIMES[driver])
    # Whatever version this machine has: its escapes are not what these tests are about.
    allowed = (f"runc {facts.runc_version}",) if facts is not None else ()
    return DockerSettings(
        engine=ADDRESS, allow_known_escapes=allowed, templates={template: named}, generation=1
    )


@functools.cache
def _found() -> tuple[str, Facts | None]:
    if absence(ADDRESS):
        return "", None
    try:
        engine = Engine(ADDRESS)
        try:
            return str(engine.image(IMAGE)["Id"]), engine.facts()
        finally:
            engine.close()
    except EngineProblem:
        return "", None


def problem() -> str:
    """Why nothing can be tested on an engine here; empty when it can."""
    image, facts = _found()
    if facts is None:
        return absence(ADDRESS) or f"the engine at {ADDRESS} has no image {IMAGE}: images/engine"
    return "" if image else f"the engine at {ADDRESS} has no image {IMAGE}"


def has_gvisor() -> bool:
    """Whether the engine knows runsc."""
    facts = _found()[1]
    return facts is not None and "runsc" in facts.runtimes
