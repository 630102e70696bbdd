"""The host's settings: every size, depth and wait that it has, with its default.

Read once by `sandbox.host.__main__`, from the tables `[host]`, `[docker]` and `[templates.NAME]` of
a TOML file; handed down as one frozen value.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from sandbox.drivers.docker_settings import RUNTIMES, DockerSettings, Template

MIB = 1024 * 1024
DEFAULT_TEMPLATE = "default"  # of an invocation that names none; it is always there
_T = TypeVar("_T")
_KINDS = (str, int, float, tuple[str, ...])  # of what a table may hold


class ConfigError(Exception):
    """The configuration cannot be used; the text names the file, the key and the mend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostConfig:
    """All settings; units are in the names."""

    driver: str = "bubblewrap"
    """The default driver."""
    capacity: int = 0
    """How many sandboxes at once; 0 computes min(8 x cores, memory / 512 MiB)."""
    templates: tuple[str, ...] = (DEFAULT_TEMPLATE,)
    """The templates that sandboxes may be made from."""
    lease_seconds: float = 60.0
    """How long the owner's lease lasts after its last `WatchHost` stream was cut."""
    orphan_grace_seconds: float = 600.0
    """How long after the lease has lapsed the owner's sandboxes are destroyed."""
    report_seconds: float = 5.0
    """How often `WatchHost` reports."""
    start_timeout_seconds: float = 20.0
    """How long a sandbox may take until it says that it is ready."""
    prepare_timeout_seconds: float = 60.0
    """How long a driver's self-check and clean-up may take."""
    exit_drain_seconds: float = 2.0
    """How long the end of a channel and the exit of its supervisor wait for each other."""
    measure_timeout_seconds: float = 2.0
    """How long a measurement may hold back the end of a cell."""
    destroy_retry_seconds: float = 1.0
    """How soon destroying is tried again when a process survived; doubles up to 30 s."""
    shutdown_seconds: float = 30.0
    """How long the host tries to end its sandboxes when it ends itself."""
    builders: int = 0
    """How many sandboxes are made at once; 0 is the number of cores."""
    pool_size: int = 2
    """How many sandboxes of each template are kept ready for whoever asks next; 0 keeps none."""
    pool_spare_memory_bytes: int = 512 * MIB
    """The pool is not filled while less memory than this is available on the machine."""
    pool_memory_limit_bytes: int = 512 * MIB
    """The memory limit of pooled sandboxes. This and the next four are what a controller grants
    unasked: only a request for just these limits is given a pooled sandbox."""
    pool_pids_limit: int = 128
    """The limit of processes of pooled sandboxes."""
    pool_cpu_limit_millis: int = 1_000
    """The CPU limit of pooled sandboxes, in thousandths of a CPU."""
    pool_tmpfs_limit_bytes: int = 128 * MIB
    """The size of each tmpfs of pooled sandboxes."""
    pool_open_files_limit: int = 1_024
    """The limit of open files of pooled sandboxes."""
    event_memory_bytes: int = 4 * MIB
    """Events of one sandbox kept in memory; what is more goes to the disk."""
    spill_limit_bytes: int = 1024 * MIB
    """Events of one sandbox kept on the disk; at the limit the sandbox is no longer read."""
    unacknowledged_events: int = 65_536
    """Events of one sandbox kept in all; at the limit the sandbox is no longer read."""
    open_calls: int = 16_384
    """Calls of one sandbox that wait for a reply: one more breaks the protocol; and calls of its
    tools that wait for a result: one more is refused."""
    cells: int = 100_000
    """Cells of one sandbox over its life; a further one is refused."""
    waiting_file_operations: int = 32
    """File operations of one sandbox that wait for the one before; a further one fails."""
    content_limit_bytes: int = 64 * MIB
    """The largest content of one input, program or reply."""
    contents_limit_bytes: int = 256 * MIB
    """Contents that one stream may have sent and not yet used."""
    channel_queue_bytes: int = 4 * MIB
    """What may wait to be written to one sandbox before its stream is no longer read."""
    tombstones: int = 100_000
    """How many ids of sandboxes that are gone are remembered."""
    message_limit_bytes: int = MIB + 64 * 1024
    """The largest gRPC message that is taken."""
    docker: DockerSettings = field(default_factory=DockerSettings)
    """The tables `[docker]` and `[templates.NAME]`."""

    def docker_settings(self, generation: int) -> DockerSettings:
        """What the docker drivers are told by this start of the host."""
        return dataclasses.replace(self.docker, generation=generation)

    def driver_of(self, template: str) -> str:
        """The driver that makes a template's sandboxes; empty: the default one."""
        found = self.docker.templates.get(template)
        return found.driver if found is not None else ""


def load(path: Path | None, **overrides: Any) -> HostConfig:
    """Reads the settings; an override that is not None wins over the file.

    Raises:
        ConfigError: the file cannot be read, has an unknown key or a value of a wrong type.
    """
    document: dict[str, Any] = {}
    if path is not None:
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: {error}") from error
    given = {key: value for key, value in overrides.items() if value is not None}
    source = str(path) if path is not None else "command line"
    templates = {
        name: _template(f"{source}: [templates.{name}]", table)
        for name, table in _table(source, document, "templates").items()
    }
    docker = _checked(f"{source}: [docker]", DockerSettings, _table(source, document, "docker"))
    docker = dataclasses.replace(docker, templates=templates)
    values = {**_table(source, document, "host"), **given}
    if templates:
        values.setdefault("templates", list({DEFAULT_TEMPLATE: None, **templates}))
    return dataclasses.replace(_checked(f"{source}: [host]", HostConfig, values), docker=docker)


def _table(source: str, document: dict[str, Any], name: str) -> dict[str, Any]:
    found = document.get(name, {})
    if not isinstance(found, dict):
        raise ConfigError(f"{source}: [{name}] must be a table")
    return found


def _template(where: str, table: Any) -> Template:
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table")
    template = _checked(where, Template, table)
    if template.runtime not in RUNTIMES.values():
        known = " or ".join(RUNTIMES.values())
        raise ConfigError(f"{where} runtime: {template.runtime!r} is none; {known}")
    if template.image and template.root:
        raise ConfigError(f"{where}: image and root are one too many: an engine has images")
    if template.root and not Path(template.root).is_absolute():
        raise ConfigError(f"{where} root: {template.root!r} is no absolute path")
    if template.image and "sha256:" not in template.image:
        raise ConfigError(
            f"{where} image: {template.image!r} names no digest: write sha256:... or "
            "NAME@sha256:..."
        )
    return template


def _checked(where: str, made: type[_T], values: dict[str, Any]) -> _T:
    hints = {name: hint for name, hint in get_type_hints(made).items() if hint in _KINDS}
    parsed: dict[str, Any] = {}
    for key, value in values.items():
        if key not in hints:
            raise ConfigError(f"{where}: unknown key {key!r}")
        parsed[key] = _value(f"{where} {key}", hints[key], value)
    return made(**parsed)


def _value(where: str, hint: Any, value: Any) -> Any:
    if hint is str and isinstance(value, str):
        return value
    if hint is int and type(value) is int and value >= 0:
        return value
    if hint is float and type(value) in (int, float) and value >= 0:
        return float(value)
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        if hint not in (str, int, float):
            return tuple(value)
    raise ConfigError(f"{where}: {value!r} is not usable there")


def cores() -> int:
    """How many CPUs this process may use."""
    return max(1, len(os.sched_getaffinity(0)))


def default_capacity() -> int:
    """min(8 x cores, memory / 512 MiB), at least 1."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(8 * cores(), memory // (512 * MIB)))
