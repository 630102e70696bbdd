"""Handles that code in a sandbox holds: children and artifacts.

Called by `guest` and by the code itself; calls `channel`. A handle is an id and nothing more: what
may be done with it is decided by the controller.
"""

from __future__ import annotations

import posix
import sys

from . import errors, frames, values
from .channel import Place

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .channel import Channel, Pending

READ_BYTES = 1024 * 1024
MAX_OUTPUT_BYTES = 65_536


def wait(pending: Pending, timeout_seconds: float | None = None) -> bool:
    """Waits for an answer; a tool that waits takes no other tool's place meanwhile."""
    if f"{__package__}.serving" not in sys.modules:
        return pending.wait(timeout_seconds)  # no tools are served
    from . import tools

    with tools.Waiting():
        return pending.wait(timeout_seconds)


class Child:
    """A spawned invocation, valid in every later cell.

    Attributes:
        id: the invocation's id.
    """

    __slots__ = ("_channel", "_finish", "_pending", "id")

    def __init__(self, channel: Channel, child_id: str, finish: Callable[[bytes], Any]) -> None:
        """Names a child; `finish` makes the declared type of its value."""
        self.id = child_id
        self._channel = channel
        self._finish = finish
        self._pending: Pending | None = None

    def result(self, timeout_seconds: float | None = None) -> Any:
        """Waits for the child's value.

        Raises:
            ResultTimeoutError: the time was over first; the child goes on.
            InvocationFailed: it ended without a value.
        """
        pending = self._await()
        if not wait(pending, timeout_seconds):
            message = f"{self.id} has not ended after {timeout_seconds} s"
            raise errors.ResultTimeoutError(message)
        return self._finish(pending.result())

    @property
    def status(self) -> str:
        """The child's state, for example `running`."""
        return str(self._look("status")["state"])

    def cancel(self) -> None:
        """Ends the child and all below it; returns once they have ended."""
        header = {"op": "cancel_child", "invocation": self.id}
        _ask(self._channel, header)

    def output(
        self, stream: str = "stdout", offset: int = 0, max_bytes: int = MAX_OUTPUT_BYTES
    ) -> bytes:
        """Returns what the child printed, from a byte on, at most 64 KiB at a time."""
        view = self._look("output", stream, offset, min(max_bytes, MAX_OUTPUT_BYTES))
        data: bytes = view["data"]
        return data

    def events(
        self, max_events: int = 25, max_bytes: int = 1024, before_sequence: int = 0
    ) -> dict[str, Any]:
        """Returns the child's last events, each as a text of at most so many bytes.

        Returns:
            `events`, oldest first, each with `sequence`, `time`, `kind`, `text`, `truncated` and
            `total_bytes`; `truncated`, whether there are earlier ones; `before_sequence`, to see
            those.
        """
        view: dict[str, Any] = self._look(
            "events", "stdout", before_sequence, max_bytes, max_events
        )
        return view

    @property
    def artifacts(self) -> list[Artifact]:
        """What the child has published."""
        found = self._look("artifacts")["artifacts"]
        return [Artifact.from_mapping(self._channel, item) for item in found]

    def _await(self) -> Pending:
        if self._pending is None:
            header = {"op": "await_child", "invocation": self.id}
            self._pending = self._channel.call(header, [])
        return self._pending

    def _look(
        self,
        view: str,
        stream: str = "stdout",
        offset: int = 0,
        max_bytes: int = 0,
        max_events: int = 0,
    ) -> Any:
        if stream not in ("stdout", "stderr"):
            raise ValueError(f"the streams are stdout and stderr, not {stream!r}")
        header = {
            "op": "inspect_child",
            "invocation": self.id,
            "view": view,
            "stream": stream,
            "offset": offset,
            "max_bytes": max_bytes,
            **({"max_events": max_events} if max_events else {}),
        }
        return values.decode(_ask(self._channel, header))

    def __repr__(self) -> str:
        """Names the id."""
        return f"Child({self.id!r})"


class AsyncChild:
    """A spawned invocation whose methods are awaitable.

    Attributes:
        id: the invocation's id.
    """

    __slots__ = ("_child", "id")

    def __init__(self, child: Child) -> None:
        """Wraps a child."""
        self._child = child
        self.id = child.id

    async def result(self, timeout_seconds: float | None = None) -> Any:
        """Waits for the child's value; raises as `Child.result` does."""
        import asyncio

        from .guest import wait_async

        waiting = wait_async(self._child._await())
        if timeout_seconds is None:
            return self._child._finish(await waiting)
        try:
            data = await asyncio.wait_for(waiting, timeout_seconds)  # noqa: TID251 - Python 3.9
        except asyncio.TimeoutError:
            message = f"{self.id} has not ended after {timeout_seconds} s"
            raise errors.ResultTimeoutError(message) from None
        return self._child._finish(data)

    async def status(self) -> str:
        """Returns the child's state."""
        state: str = await _in_thread(lambda: self._child.status)
        return state

    async def cancel(self) -> None:
        """Ends the child and all below it."""
        await _in_thread(self._child.cancel)

    async def output(
        self, stream: str = "stdout", offset: int = 0, max_bytes: int = MAX_OUTPUT_BYTES
    ) -> bytes:
        """Returns what the child printed, from a byte on."""
        data: bytes = await _in_thread(lambda: self._child.output(stream, offset, max_bytes))
        return data

    async def events(
        self, max_events: int = 25, max_bytes: int = 1024, before_sequence: int = 0
    ) -> dict[str, Any]:
        """Returns the child's last events, shortened."""
        view: dict[str, Any] = await _in_thread(
            lambda: self._child.events(max_events, max_bytes, before_sequence)
        )
        return view

    async def artifacts(self) -> list[Artifact]:
        """Returns what the child has published."""
        found: list[Artifact] = await _in_thread(lambda: self._child.artifacts)
        return found

    def __repr__(self) -> str:
        """Names the id."""
        return f"AsyncChild({self.id!r})"


class Artifact:
    """Immutable bytes of the tenant. As a value it crosses as its id.

    Attributes:
        id: the artifact's id.
        name: the name it was published under, empty where unknown.
        sha256: the digest of its bytes, empty where unknown.
        size_bytes: the number of its bytes; -1 where unknown.
        media_type: its media type, empty where unknown.
    """

    __slots__ = ("_channel", "id", "media_type", "name", "sha256", "size_bytes")

    def __init__(self, channel: Channel, artifact_id: str) -> None:
        """Names an artifact of which only the id is known."""
        self._channel = channel
        self.id = artifact_id
        self.name = ""
        self.sha256 = ""
        self.size_bytes = -1
        self.media_type = ""

    @classmethod
    def from_mapping(cls, channel: Channel, found: Any) -> Artifact:
        """Makes a handle of an artifact's description."""
        artifact = cls(channel, found["artifact_id"])
        artifact.name = found.get("name", "")
        artifact.sha256 = found.get("sha256", "")
        artifact.size_bytes = found.get("size_bytes", -1)
        artifact.media_type = found.get("media_type", "")
        return artifact

    @property
    def __hutch_artifact__(self) -> str:
        """The id, by which `values` knows it."""
        return self.id

    def read(self) -> bytes:
        """Returns all of its bytes."""
        pieces = []
        offset = 0
        while True:
            header = {
                "op": "read_artifact",
                "artifact": self.id,
                "offset": offset,
                "max_bytes": READ_BYTES,
            }
            view = values.decode(_ask(self._channel, header))
            pieces.append(view["data"])
            offset += len(view["data"])
            if not view["data"] or offset >= view["total_bytes"]:
                return b"".join(pieces)

    def __eq__(self, other: object) -> bool:
        """Handles are equal when they name the same artifact."""
        return isinstance(other, Artifact) and self.id == other.id

    def __hash__(self) -> int:
        """Hashes the id."""
        return hash(self.id)

    def __repr__(self) -> str:
        """Names the id and the name."""
        return f"Artifact({self.id!r}, name={self.name!r})"


class Artifacts:
    """What `hutch.artifacts` is."""

    __slots__ = ("_channel",)

    def __init__(self, channel: Channel) -> None:
        """Publishes over a channel."""
        self._channel = channel

    def save(self, content: Any, name: str | None = None, media_type: str = "") -> Artifact:
        """Publishes bytes or a file under a name.

        Args:
            content: bytes, or the path of a file.
            name: the name, slash-separated; by default the file's own.
            media_type: guessed from the name when empty.

        Raises:
            PayloadTooLargeError: it has more than 64 MiB; larger files are captured by pattern.
        """
        if isinstance(content, (bytes, bytearray, memoryview)):
            if name is None:
                raise TypeError("bytes are saved under a name: give name=")
            data = bytes(content)
        else:
            path = posix.fspath(content)
            name = name if name is not None else str(path).rpartition("/")[2]
            with open(path, "rb") as file:
                data = file.read(frames.MAX_BLOB_BYTES + 1)
        if len(data) > frames.MAX_BLOB_BYTES:
            limit = {"limit": str(frames.MAX_BLOB_BYTES)}
            message = f"{name} is over {frames.MAX_BLOB_BYTES} bytes; put it below artifacts/"
            raise errors.PayloadTooLargeError(message, "PAYLOAD_TOO_LARGE", limit)
        header = {
            "op": "save_artifact",
            "name": name,
            "media_type": media_type,
            "content": Place(0),
        }
        found = values.decode(_ask(self._channel, header, [data]))
        return Artifact.from_mapping(self._channel, found)


def _ask(channel: Channel, header: dict[str, Any], contents: list[bytes] | None = None) -> bytes:
    pending = channel.call(header, contents or [])
    wait(pending)
    return pending.result()


async def _in_thread(action: Callable[[], Any]) -> Any:
    import asyncio

    return await asyncio.get_running_loop().run_in_executor(None, action)
