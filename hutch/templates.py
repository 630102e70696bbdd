"""What sandboxes may be made from, as the controller tells.

Called by `hutch.aio`; calls `hutch.transport`.
"""

from __future__ import annotations

from hutch import convert, types
from hutch.transport import CALL_SECONDS, Transport
from hutch.v1 import host_pb2
from hutch.v1 import template_service_pb2 as pb


async def listing(transport: Transport) -> tuple[types.Template, ...]:
    """Every template, the default one first.

    Raises:
        UnavailableError: No sandbox host is connected, or the controller shuts down.
    """
    answer = await transport.call(
        transport.templates.ListTemplates, pb.ListTemplatesRequest, seconds=CALL_SECONDS
    )
    return tuple(_template(item) for item in answer.templates)


def _template(offer: pb.TemplateOffer) -> types.Template:
    template, driver, limits = offer.template, offer.driver, offer.limits
    return types.Template(
        name=template.name,
        driver=template.driver,
        isolation=convert.word(host_pb2.IsolationLevel, driver.isolation, "ISOLATION_LEVEL_"),
        image=template.image,
        runtime=template.runtime,
        usable=driver.usable,
        problem=driver.problem,
        limits=types.ResourceLimits(
            memory_limit_bytes=limits.memory_limit_bytes,
            pids_limit=limits.pids_limit,
            cpu_limit_millis=limits.cpu_limit_millis,
            tmpfs_limit_bytes=limits.tmpfs_limit_bytes,
            open_files_limit=limits.open_files_limit,
        ),
        enforcement=convert.enforcement(driver.enforcement),
        gaps=tuple(driver.gaps),
    )
