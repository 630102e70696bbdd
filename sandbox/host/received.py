"""What one frame of a sandbox means, and small things that all readers of frames need.

Used by `inbound` and by the readers that it calls: `cells` and `exchanges`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from hutch.v1 import host_service_pb2 as pb
from sandbox.host.events import OutputMark
from sandbox.host.fields import Fields, ProtocolBreach


@dataclass(slots=True, kw_only=True)
class Received:
    """What one frame means: events in their order."""

    events: list[pb.AttachSandboxResponse]
    mark: OutputMark | None = None


class RecentIds:
    """The newest ids of a kind; older ones are forgotten."""

    def __init__(self, limit: int) -> None:
        """Keeps at most `limit` ids."""
        self._limit = limit
        self._ids: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        """Whether an id is among them."""
        return name in self._ids

    def add(self, name: str) -> None:
        """Takes one more."""
        self._ids[name] = None
        if len(self._ids) > self._limit:
            self._ids.popitem(last=False)


def one(event: pb.AttachSandboxResponse) -> Received:
    """A frame that means one event."""
    return Received(events=[event])


def end(fields: Fields, payload: bytes) -> None:
    """Says that all of a frame was read that has no payload.

    Raises:
        ProtocolBreach: something is left.
    """
    fields.end()
    if payload:
        raise ProtocolBreach("payload: of a frame that has none")
