"""The self-check: what this machine is, what each driver can enforce, and a sandbox to prove it.

Called by `python -m sandbox.host --check`, and so by `hutch doctor`; calls the drivers.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from sandbox.drivers import docker_look, machine
from sandbox.host import selftest
from sandbox.host.config import HostConfig
from sandbox.host.offers import as_document, make_driver, prepare, real_drivers

EXIT_PROBLEM = 2
_PREPARE_SECONDS = 60.0


async def run(*, as_json: bool, config: HostConfig) -> int:
    """Checks every real driver and prints what was found; returns the exit code."""
    documents: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="hutch-check-") as folder:
        for name in real_drivers():
            # An owner of its own: a live host's sandboxes are none of a check's business.
            driver = make_driver(name, f"check-{os.getpid()}", Path(folder), config.docker)
            try:
                statement = await prepare(driver, _PREPARE_SECONDS)
                document: dict[str, Any] = {**as_document(statement), "self_test": None}
                if statement.usable:
                    document["self_test"] = await selftest.run(
                        driver, statement.isolation, _template(config, name)
                    )
                    document["usable"] = document["self_test"]["passed"]
                    document["problem"] = document["self_test"]["problem"]
            finally:
                await driver.close()
            documents.append(document)
    engine = await asyncio.to_thread(docker_look.look, config.docker.engine)
    found = {"machine": {**machine.facts(), "engine": engine}, "drivers": documents}
    if as_json:
        print(json.dumps(found))  # noqa: T201
    else:
        for document in documents:
            _print(document)
    return 0 if any(item["usable"] for item in documents) else EXIT_PROBLEM


def _template(config: HostConfig, driver: str) -> str:
    """A template that a driver makes."""
    return next(iter(config.docker.images(driver)), config.templates[0])


def _print(document: dict[str, Any]) -> None:
    usable = "usable" if document["usable"] else document["problem"]
    print(f"{document['driver']}: {usable}")  # noqa: T201
    for held in document["enforcement"]:
        print(f"  {held['limit']}: {held['level']} ({held['mechanism']})")  # noqa: T201
    for gap in document["gaps"]:
        print(f"  not held: {gap}")  # noqa: T201
    for finding in (document["self_test"] or {}).get("findings", ()):
        print(f"  {'holds' if finding['holds'] else 'MISSING'}: {finding['words']}")  # noqa: T201
