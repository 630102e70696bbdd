"""What container engine this machine has, for people: read, never changed.

Called by the host's self-check.
"""

from __future__ import annotations

from typing import Any

from sandbox.drivers import docker_runtimes
from sandbox.drivers.docker_engine import Engine, EngineProblem
from sandbox.drivers.docker_settings import RUNTIMES, absence


def look(address: str) -> dict[str, Any]:
    """Asks the engine at an address what it is.

    Returns:
        `address`, `version`, `problem` (why there is none), and `runtimes`: those that a template
        may name, each with `name`, `version` (empty where the engine does not say it) and
        `known_escapes`.
    """
    found: dict[str, Any] = {"address": address, "version": "", "problem": "", "runtimes": []}
    if absent := absence(address):
        return {**found, "problem": absent}
    try:
        engine = Engine(address)
        try:
            facts = engine.facts()
        finally:
            engine.close()
    except EngineProblem as problem:
        return {**found, "problem": str(problem)}
    runtimes = [
        {
            "name": name,
            "version": (version := facts.version_of(name)),
            "known_escapes": docker_runtimes.known_escapes(name, version),
        }
        for name in RUNTIMES.values()
        if name in facts.runtimes
    ]
    return {**found, "version": facts.version, "runtimes": runtimes}
