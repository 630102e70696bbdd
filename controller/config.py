"""The controller's configuration: parsed once from TOML, frozen, unknown keys refused.

Called by `controller.app`. Every limit has a default and a maximum here.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError

MIB = 1024 * 1024
GIB = 1024 * MIB


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Limit(_Frozen):
    """The default and the maximum of one limit, in its unit."""

    default: int = Field(ge=1)
    maximum: int = Field(ge=1)


class Limits(_Frozen):
    """What an invocation gets when its caller names nothing, and the most that one may name."""

    memory_limit_bytes: Limit = Limit(default=512 * MIB, maximum=8 * GIB)
    pids_limit: Limit = Limit(default=128, maximum=4096)
    cpu_limit_millis: Limit = Limit(default=1000, maximum=1_024_000)
    tmpfs_limit_bytes: Limit = Limit(default=128 * MIB, maximum=4 * GIB)
    open_files_limit: Limit = Limit(default=1024, maximum=65_536)
    timeout_seconds: Limit = Limit(default=600, maximum=86_400)
    idle_timeout_seconds: Limit = Limit(default=1800, maximum=86_400)
    tool_timeout_seconds: Limit = Limit(default=300, maximum=3600)
    max_depth: Limit = Limit(default=4, maximum=16)
    max_children: Limit = Limit(default=1000, maximum=10_000)
    max_concurrent: Limit = Limit(default=8, maximum=10_000)
    max_descendants: Limit = Limit(default=10_000, maximum=100_000)
    output_view_bytes: Limit = Limit(default=64 * 1024, maximum=MIB)
    output_limit_bytes: Limit = Limit(default=GIB, maximum=16 * GIB)
    artifact_files: int = Field(default=256, ge=1, description="Files captured at the end.")
    artifact_bytes: int = Field(default=256 * MIB, ge=1, description="Bytes captured at the end.")
    stored_bytes: int = Field(
        default=4 * GIB, ge=1, description="Bytes of large inputs and values from one sandbox."
    )


class ControllerConfig(_Frozen):
    """Everything that an operator may set."""

    limits: Limits = Limits()
    queued_roots: int = Field(default=10_000, ge=1, description="Roots that may wait at once.")
    live_invocations: int = Field(
        default=100_000, ge=1, description="Invocations that may be live at once."
    )
    calls: int = Field(
        default=50_000, ge=1, description="Calls about children that one invocation may make."
    )
    waiting_cells: int = Field(
        default=100, ge=1, description="Cells that may wait in one interactive box."
    )
    cells: int = Field(
        default=100_000, ge=1, description="Cells that one interactive box may be given."
    )
    heartbeat_seconds: float = Field(
        default=10.0, gt=0, description="The longest silence on a client's stream."
    )
    session_grace_seconds: float = Field(
        default=5.0, ge=0, description="How long a client may be gone before it counts as gone."
    )
    cell_grace_seconds: float = Field(
        default=1.0,
        ge=0,
        description="How long a box's stream may be cut before its cells are cancelled, where that"
        " was asked for.",
    )
    capture_timeout_seconds: float = Field(
        default=60.0, gt=0, description="How long capturing files may take."
    )
    host_grace_seconds: float = Field(
        default=60.0, ge=0, description="How long a host may be away before its capacity is lost."
    )
    store_reserve_bytes: int = Field(
        default=0,
        ge=0,
        description="Below so many free bytes under the state directory no new work is taken;"
        " 0 means 256 MiB, or a hundredth of a disk where that is less.",
    )
    tenant_weights: dict[str, PositiveFloat] = Field(
        default={}, description="Shares of the capacity by tenant id; 1 for one that is not named."
    )
    borrowed_share: float = Field(
        default=0.75,
        gt=0,
        le=1,
        description="The part of all slots that one tenant may hold beyond its trees' own.",
    )
    attempts: int = Field(default=2, ge=1, description="Attempts of an invocation that may retry.")
    message_limit_bytes: int = Field(
        default=40 * MIB, ge=MIB, description="The largest message a client may send."
    )
    concurrent_calls: int = Field(
        default=1000, ge=1, description="Calls in flight on one connection."
    )


class ConfigInvalid(Exception):
    """A configuration that cannot be used; the text names file, key and problem."""


def load(path: Path | None) -> ControllerConfig:
    """Reads the configuration, or the defaults when there is no path.

    Raises:
        ConfigInvalid: the file cannot be read, is not TOML, or has an unknown or bad key.
    """
    if path is None:
        return ControllerConfig()
    try:
        content = tomllib.loads(path.read_text("utf-8"))
        return ControllerConfig.model_validate(content.get("controller", {}))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, ValidationError) as problem:
        raise ConfigInvalid(f"{path}: {problem}") from problem
