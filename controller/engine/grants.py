"""What an invocation gets: a caller's request resolved within the server's limits or the parent's.

Called by `engine.spawning`. A root is bounded by the configuration, a child by its parent; asking
for more is refused with every excess named, and nothing is started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, replace

from controller.config import Limit, Limits
from controller.core.errors import Reason, Refused
from controller.core.model import (
    Granted,
    InvocationSpec,
    Mode,
    ResourceRequest,
    Resources,
    SpawnGrant,
    SpawnRequest,
    Statement,
)
from controller.engine.state import Node
from controller.engine.tools import granted_tools

DEFAULT_PATTERNS = ("artifacts/**",)
DEFAULT_TEMPLATE = "default"
MICROSECONDS = 1_000_000
TMPFS_MOUNTS = 3
_ISOLATION = ("process", "container", "kernel")  # each holds more than the one before
PROCESS_HELD = frozenset({"open_files"})
_LIMIT_NAMES = {
    "memory_limit_bytes": "memory",
    "pids_limit": "pids",
    "cpu_limit_millis": "cpu",
    "tmpfs_limit_bytes": "tmpfs",
    "open_files_limit": "open_files",
}

# Below these a sandbox cannot even start its two processes.
_LEAST = {"pids_limit": 4, "open_files_limit": 16}


def for_root(
    spec: InvocationSpec, limits: Limits, statements: Iterable[Statement], now_us: int
) -> Granted:
    """What a root gets.

    Raises:
        Refused: FIELD_INVALID for a value over the server's maximum, an unknown driver or template;
            NOT_ENFORCEABLE for a named limit that no host holds for the whole sandbox.
    """
    over: list[str] = []

    def pick(name: str, asked: int | None, limit: Limit) -> int:
        if asked is None:
            return limit.default
        least = _LEAST.get(name, 1)
        if not least <= asked <= limit.maximum:
            over.append(f"{name} must be {least} to {limit.maximum}, got {asked}")
        return asked

    spawn = SpawnGrant(
        **{
            item.name: pick(item.name, getattr(spec.spawn, item.name), getattr(limits, item.name))
            for item in fields(SpawnRequest)
        }
    )
    resources = Resources(
        **{
            item.name: pick(
                item.name, getattr(spec.resources, item.name), getattr(limits, item.name)
            )
            for item in fields(ResourceRequest)
        }
    )
    timeout = spec.timeout_seconds
    idle = spec.idle_timeout_seconds
    if idle is not None and not 0 < idle <= limits.idle_timeout_seconds.maximum:
        most = limits.idle_timeout_seconds.maximum
        over.append(f"idle_timeout must be over 0 s and at most {most} s")
    if timeout is not None and not 0 < timeout <= limits.timeout_seconds.maximum:
        over.append(f"timeout must be over 0 s and at most {limits.timeout_seconds.maximum} s")
    view = pick("output_view_bytes", spec.output_view_bytes, limits.output_view_bytes)
    output = pick("output_limit_bytes", spec.output_limit_bytes, limits.output_limit_bytes)
    if over:
        field_name = over[0].partition(" ")[0]
        raise Refused(Reason.FIELD_INVALID, "; ".join(over), field=field_name)
    stated = tuple(statements)
    template = _template(spec, stated) or DEFAULT_TEMPLATE
    statement = _statement_for(spec.driver, template, stated)
    demanded = _demanded(spec.resources)
    _check_enforceable(demanded, statement)
    interactive = spec.mode is Mode.INTERACTIVE
    if interactive and spec.spawn.max_depth is None:
        spawn = replace(spawn, max_depth=1)
    longest = limits.timeout_seconds
    usual = longest.maximum if interactive else longest.default
    seconds = usual if timeout is None else timeout
    idle_seconds = limits.idle_timeout_seconds.default if idle is None else idle
    return Granted(
        spawn=spawn,
        resources=_fit_tmpfs(resources, spec.resources),
        demanded_limits=demanded,
        deadline_us=now_us + int(seconds * MICROSECONDS),
        driver=spec.driver,
        template=template,
        artifact_patterns=spec.artifact_patterns or DEFAULT_PATTERNS,
        output_view_bytes=view,
        output_limit_bytes=output,
        idle_timeout_us=int(idle_seconds * MICROSECONDS) if interactive else 0,
        tools=granted_tools(spec.tools, None, limits.tool_timeout_seconds.maximum),
    )


def for_child(
    spec: InvocationSpec,
    node: Node,
    limits: Limits,
    statements: Iterable[Statement],
    now_us: int,
    *,
    client: bool = False,
) -> Granted:
    """What a child gets, never more than its parent has.

    Raises:
        Refused: GRANT_DENIED with every excess named; FIELD_INVALID for too small a value;
            NOT_ENFORCEABLE as for a root.
    """
    parent = node.granted
    excess: list[str] = []

    def within(name: str, asked: int | None, bound: int, default: int) -> int:
        if asked is None:
            return min(bound, default)
        least = _LEAST.get(name, 1)
        if asked < least:
            raise Refused(Reason.FIELD_INVALID, f"{name} must be at least {least}", field=name)
        if asked > bound:
            excess.append(f"{name}={asked} (the parent has {bound})")
        return asked

    spawn = _child_spawn(spec.spawn, parent.spawn, within)
    resources = _child_resources(spec.resources, parent.resources, limits, within)
    views = limits.output_view_bytes.maximum
    view = within("output_view_bytes", spec.output_view_bytes, views, parent.output_view_bytes)
    bound = parent.output_limit_bytes
    output = within("output_limit_bytes", spec.output_limit_bytes, bound, bound)
    if spec.driver and spec.driver != parent.driver:
        excess.append(f"driver={spec.driver!r} (the parent has {parent.driver or 'the default'!r})")
    if spec.timeout_seconds is not None and spec.timeout_seconds <= 0:
        raise Refused(Reason.FIELD_INVALID, "timeout must be over 0 s", field="timeout")
    if excess:
        message = "more than the parent has: " + ", ".join(excess)
        raise Refused(Reason.GRANT_DENIED, message, excess=", ".join(excess))
    tools = granted_tools(spec.tools, None if client else node, limits.tool_timeout_seconds.maximum)
    named = _demanded(spec.resources)
    stated = tuple(statements)
    template = _template(spec, stated) or parent.template
    statement = _statement_for(parent.driver, template, stated)
    _check_isolation(statement, _statement_for(parent.driver, parent.template, stated))
    _check_enforceable(named, statement)
    deadline = parent.deadline_us
    if spec.timeout_seconds is not None:
        asked = min(spec.timeout_seconds, limits.timeout_seconds.maximum)
        deadline = min(deadline, now_us + int(asked * MICROSECONDS))
    return Granted(
        spawn=spawn,
        resources=_fit_tmpfs(resources, spec.resources),
        demanded_limits=tuple(dict.fromkeys(parent.demanded_limits + named)),
        deadline_us=deadline,
        driver=parent.driver,
        template=template,
        artifact_patterns=spec.artifact_patterns or DEFAULT_PATTERNS,
        output_view_bytes=view,
        output_limit_bytes=output,
        tools=tools,
    )


Within = Callable[[str, int | None, int, int], int]


def _child_spawn(asked: SpawnRequest, parent: SpawnGrant, within: Within) -> SpawnGrant:
    names = [item.name for item in fields(SpawnRequest)]
    bounds = {name: getattr(parent, name) for name in names}
    return SpawnGrant(
        **{name: within(name, getattr(asked, name), bounds[name], bounds[name]) for name in names}
    )


def _child_resources(
    asked: ResourceRequest, parent: Resources, limits: Limits, within: Within
) -> Resources:
    names = [item.name for item in fields(ResourceRequest)]
    return Resources(
        **{
            name: within(
                name, getattr(asked, name), getattr(parent, name), getattr(limits, name).default
            )
            for name in names
        }
    )


def _template(spec: InvocationSpec, statements: tuple[Statement, ...]) -> str:
    known = dict.fromkeys(name for item in statements for name in item.templates)
    if spec.template and spec.template not in (known or (DEFAULT_TEMPLATE,)):
        message = f"unknown template {spec.template!r}; there are {', '.join(known) or 'none'}"
        raise Refused(Reason.FIELD_INVALID, message, field="template")
    return spec.template


def _demanded(request: ResourceRequest) -> tuple[str, ...]:
    return tuple(
        _LIMIT_NAMES[item.name]
        for item in fields(ResourceRequest)
        if getattr(request, item.name) is not None
    )


def _statement_for(
    wanted: str, template: str, statements: tuple[Statement, ...]
) -> Statement | None:
    """What is stated by the driver that is wanted, else by the one that makes the template."""
    if not wanted:
        makers = [item for item in statements if template in item.templates]
        return next(iter(makers or statements), None)
    for statement in statements:
        if statement.driver == wanted:
            return statement
    if statements:
        raise Refused(Reason.FIELD_INVALID, f"no host has the driver {wanted!r}", field="driver")
    return None


def _check_isolation(child: Statement | None, parent: Statement | None) -> None:
    if child is None or parent is None:
        return
    if _ISOLATION.index(child.isolation) < _ISOLATION.index(parent.isolation):
        excess = f"isolation={child.isolation} (the parent has {parent.isolation})"
        message = f"a child's template may not isolate less: {excess}"
        raise Refused(Reason.GRANT_DENIED, message, excess=excess)


def _check_enforceable(demanded: tuple[str, ...], statement: Statement | None) -> None:
    if statement is None:
        return
    levels = {level.limit: level.level for level in statement.levels}
    weak = [
        f"{name} (level {levels.get(name, 'none')})"
        for name in demanded
        if levels.get(name) != "sandbox"
        and not (name in PROCESS_HELD and levels.get(name) == "process")
    ]
    if weak:
        raise Refused(
            Reason.NOT_ENFORCEABLE,
            f"the driver {statement.driver!r} cannot hold for the whole sandbox: {', '.join(weak)};"
            " leave these limits out to take the best level this machine has",
        )


def _fit_tmpfs(resources: Resources, asked: ResourceRequest) -> Resources:
    """tmpfs is charged to memory: its sum and 64 MiB must fit, or a full disk kills PID 1."""
    room = (resources.memory_limit_bytes - 64 * 1024 * 1024) // TMPFS_MOUNTS
    if resources.tmpfs_limit_bytes <= room:
        return resources
    if asked.tmpfs_limit_bytes is not None:
        raise Refused(
            Reason.FIELD_INVALID,
            f"three tmpfs of {resources.tmpfs_limit_bytes} bytes and 64 MiB do not fit into"
            f" {resources.memory_limit_bytes} bytes of memory",
            field="tmpfs_limit_bytes",
        )
    if room < 1024 * 1024:
        raise Refused(
            Reason.FIELD_INVALID,
            "memory_limit_bytes must be at least 67 MiB: three tmpfs of 1 MiB and 64 MiB",
            field="memory_limit_bytes",
        )
    return Resources(
        memory_limit_bytes=resources.memory_limit_bytes,
        pids_limit=resources.pids_limit,
        cpu_limit_millis=resources.cpu_limit_millis,
        tmpfs_limit_bytes=room,
        open_files_limit=resources.open_files_limit,
    )
