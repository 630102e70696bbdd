"""The drivers that this host offers, each after its self-check.

Called by the daemon and by the self-check.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import structlog

from sandbox import drivers
from sandbox.drivers.docker_settings import DockerSettings
from sandbox.drivers.driver import Driver, Isolation, Statement
from sandbox.host.table import Offer

TEST_DRIVERS = frozenset({"fake"})


class DriverProblem(Exception):
    """No driver can be used; the text names the mend."""


def real_drivers() -> list[str]:
    """The drivers that are offered unasked."""
    return [name for name in drivers.NAMES if name not in TEST_DRIVERS]


def make_driver(name: str, owner: str, state: Path, docker: DockerSettings | None = None) -> Driver:
    """Makes one driver by its name.

    Raises:
        DriverProblem: there is none of that name, or this installation lacks it.
    """
    try:
        return drivers.make(name, owner, state, docker)
    except (ValueError, ImportError) as error:
        raise DriverProblem(str(error)) from error


async def prepare_offers(
    default: str,
    owner: str,
    state: Path,
    timeout_seconds: float,
    docker: DockerSettings | None = None,
) -> dict[str, Offer]:
    """Prepares the default driver and the other real ones, in this order.

    Raises:
        DriverProblem: the default driver cannot be used here.
    """
    offers: dict[str, Offer] = {}
    for name in (default, *(other for other in real_drivers() if other != default)):
        driver = make_driver(name, owner, state, docker)
        statement = await prepare(driver, timeout_seconds)
        offers[name] = Offer(driver=driver, statement=statement)
    problem = offers[default].statement.problem
    if not offers[default].statement.usable:
        raise DriverProblem(f"driver {default} cannot be used here: {problem}")
    return offers


async def prepare(driver: Driver, timeout_seconds: float) -> Statement:
    """Prepares one driver; a failure is a statement too."""
    try:
        async with asyncio.timeout(timeout_seconds):
            return await driver.prepare()
    except TimeoutError:
        problem = f"its self-check did not end within {timeout_seconds:g} s"
    except Exception as error:
        structlog.get_logger().exception("self_check_failed", driver=driver.name)
        problem = f"its self-check failed: {error}"
    return Statement(
        driver=driver.name,
        isolation=Isolation.PROCESS,
        enforcement=(),
        usable=False,
        problem=problem,
    )


def as_document(statement: Statement) -> dict[str, object]:
    """A statement as plain JSON, for people's tools."""
    return {
        "driver": statement.driver,
        "isolation": statement.isolation.value,
        "usable": statement.usable,
        "problem": statement.problem,
        "gaps": list(statement.gaps),
        "enforcement": [
            {**dataclasses.asdict(item), "level": item.level.value}
            for item in statement.enforcement
        ],
    }
