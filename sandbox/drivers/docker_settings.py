"""What the docker drivers are told: where the engine is, and what each template is made from.

Made by `sandbox.host.config` from its tables `[docker]` and `[templates.NAME]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

RUNTIMES = {"docker": "runc", "docker-runsc": "runsc"}  # the runtime of each driver
DEFAULT_ENGINE = "unix:///var/run/docker.sock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """What sandboxes of one template are made from."""

    image: str = ""
    """The image, by its digest (`sha256:...` or `NAME@sha256:...`); empty: not by an engine."""
    runtime: str = "runc"
    """What runs its containers: `runc`, or `runsc` for a kernel of their own (gVisor)."""
    root: str = ""
    """A folder with the root file system that its sandboxes have under bubblewrap, of which they
    see `/usr` with `/bin` and `/lib`, read-only; empty: this machine's own. `make images` writes a
    layer to unpack there."""
    preload: tuple[str, ...] = ()
    """Modules that its sandboxes find imported. Under bubblewrap they are imported once, by the
    interpreter that sandboxes are forked from, and one that cannot be is a `start_failed`; in a
    container they are imported while it has nothing to do."""

    @property
    def driver(self) -> str:
        """The driver that makes its sandboxes; empty: the host's default one."""
        names = {runtime: name for name, runtime in RUNTIMES.items()}
        if self.root:
            return "bubblewrap"
        return names[self.runtime] if self.image else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerSettings:
    """All settings of the docker drivers."""

    engine: str = DEFAULT_ENGINE
    """The engine's address. Only a unix socket, or another one that this process alone can use."""
    allow_known_escapes: tuple[str, ...] = ()
    """Runtimes with known escapes that may be used all the same, each by its name and version, as
    `hutch doctor` shows it: `runc 1.1.5+ds1`."""
    generation: int | None = None
    """Which start of the host this is, a label of its containers; no setting."""
    templates: Mapping[str, Template] = field(default_factory=dict)
    """The templates, by name."""

    @property
    def preload(self) -> dict[str, tuple[str, ...]]:
        """The modules to import ahead, by template."""
        return {name: template.preload for name, template in self.templates.items()}

    @property
    def roots(self) -> dict[str, Path]:
        """The root file systems of the templates that name one, by template."""
        return {name: Path(found.root) for name, found in self.templates.items() if found.root}

    def images(self, driver: str) -> dict[str, str]:
        """The images of the templates that a driver makes, by template."""
        return {
            name: template.image
            for name, template in self.templates.items()
            if template.image and template.driver == driver
        }


def absence(address: str) -> str:
    """Says why no engine can be there, without asking one; empty when there may be one."""
    path = address.removeprefix("unix://")
    if path != address and not Path(path).is_socket():
        return (
            f"no container engine answers at {address}: install and start one (Debian: apt install "
            "docker.io), or name its address as `engine` in [docker]"
        )
    return ""
