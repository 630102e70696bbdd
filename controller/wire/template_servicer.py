"""`TemplateService`: what sandboxes may be made from.

Made by `controller.app`; reads what the host said of itself when it joined.
"""

from __future__ import annotations

from typing import Any, Protocol

import grpc.aio

from controller.config import ControllerConfig
from controller.core.errors import Reason, Refused
from controller.loop import Loop
from controller.wire.errors import unary
from hutch.v1 import host_pb2, invocation_pb2
from hutch.v1 import template_service_pb2 as ts
from hutch.v1.template_service_pb2_grpc import TemplateServiceServicer

Context = grpc.aio.ServicerContext[Any, Any]


class Described(Protocol):
    """Knows the host."""

    host: host_pb2.Host | None


class TemplateServicer(TemplateServiceServicer):
    """One method per RPC; see `proto/hutch/v1/template_service.proto`."""

    def __init__(self, config: ControllerConfig, loop: Loop, link: Described) -> None:
        self._config = config
        self._loop = loop
        self._link = link

    @unary
    async def ListTemplates(
        self, request: ts.ListTemplatesRequest, context: Context
    ) -> ts.ListTemplatesResponse:
        """Lists every template."""
        if self._loop.draining:
            raise Refused(Reason.CONTROLLER_DRAINING, "the controller is shutting down")
        host = self._link.host
        if host is None:
            raise Refused(Reason.HOST_UNAVAILABLE, "no sandbox host is connected")
        drivers = {item.driver: item for item in host.drivers}
        limits = self._config.limits
        usual = invocation_pb2.ResourceLimits(
            **{
                field.name: getattr(limits, field.name).default
                for field in invocation_pb2.ResourceLimits.DESCRIPTOR.fields
            }
        )
        return ts.ListTemplatesResponse(
            templates=[
                ts.TemplateOffer(template=item, driver=drivers.get(item.driver), limits=usual)
                for item in host.templates
            ]
        )
