"""What a driver states and measures, as messages.

Called by the servicer and by each hosted sandbox.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from google.protobuf.duration_pb2 import Duration

from hutch.v1 import ending_pb2, host_pb2, template_pb2
from sandbox.drivers.docker_settings import Template
from sandbox.drivers.driver import Enforcement, Isolation, Level, Limits, Measurement, Statement
from sandbox.host.config import HostConfig

MAX_DETAIL = 2_000

_LEVELS = {
    Level.SANDBOX: ending_pb2.LIMIT_LEVEL_SANDBOX,
    Level.PROCESS: ending_pb2.LIMIT_LEVEL_PROCESS,
    Level.NONE: ending_pb2.LIMIT_LEVEL_NONE,
}
ISOLATIONS = {
    Isolation.PROCESS: host_pb2.ISOLATION_LEVEL_PROCESS,
    Isolation.CONTAINER: host_pb2.ISOLATION_LEVEL_CONTAINER,
    Isolation.KERNEL: host_pb2.ISOLATION_LEVEL_KERNEL,
}


def duration(seconds: float) -> Duration:
    """A duration from seconds."""
    result = Duration()
    result.FromNanoseconds(round(seconds * 1e9))
    return result


def enforcement(items: Iterable[Enforcement]) -> list[ending_pb2.LimitEnforcement]:
    """The level at which each limit is held."""
    return [
        ending_pb2.LimitEnforcement(
            limit=item.limit, level=_LEVELS[item.level], mechanism=item.mechanism
        )
        for item in items
    ]


def statement(stated: Statement) -> host_pb2.DriverStatement:
    """What one driver can enforce here."""
    return host_pb2.DriverStatement(
        driver=stated.driver,
        isolation=ISOLATIONS[stated.isolation],
        enforcement=enforcement(stated.enforcement),
        gaps=stated.gaps,
        usable=stated.usable,
        problem=stated.problem,
    )


def templates(config: HostConfig, default: str) -> list[template_pb2.Template]:
    """What sandboxes may be made from; `default` is the driver of those that name no image."""
    made = []
    for name in config.templates:
        found = config.docker.templates.get(name, Template())
        made.append(
            template_pb2.Template(
                name=name,
                driver=found.driver or default,
                image=found.image,
                runtime=found.runtime if found.image else "",
            )
        )
    return made


def since(measurement: Measurement, before: Measurement) -> Measurement:
    """What happened between two measurements: the kernel counts over a sandbox's whole life."""

    def more(now: int | None, then: int | None) -> int | None:
        return None if now is None else max(0, now - (then or 0))

    return dataclasses.replace(
        measurement,
        oom_kill_count=more(measurement.oom_kill_count, before.oom_kill_count),
        pids_limit_hits=more(measurement.pids_limit_hits, before.pids_limit_hits),
    )


def measured(
    measurement: Measurement,
    *,
    limits: Limits,
    held: Iterable[ending_pb2.LimitEnforcement],
    wall_seconds: float,
) -> ending_pb2.Evidence:
    """What was measured of a sandbox, with the limit that its counters say was broken; `held` is
    what `enforcement` made."""
    result = ending_pb2.Evidence(
        exit_code=measurement.exit_code,
        signal=measurement.signal,
        oom_kill_count=measurement.oom_kill_count,
        memory_peak_bytes=measurement.memory_peak_bytes,
        pids_limit_hits=measurement.pids_limit_hits,
        disk_full_hits=measurement.disk_full_hits,
        wall_time=duration(wall_seconds),
        enforcement=held,
        detail=measurement.detail[:MAX_DETAIL],
    )
    if measurement.cpu_seconds is not None:
        result.cpu_time.CopyFrom(duration(measurement.cpu_seconds))
    if measurement.oom_kill_count:
        result.limit, result.limit_value = "memory", limits.memory_limit_bytes
    elif measurement.pids_limit_hits:
        result.limit, result.limit_value = "pids", limits.pids_limit
    elif measurement.disk_full_hits:
        result.limit, result.limit_value = "tmpfs", limits.tmpfs_limit_bytes
    return result
