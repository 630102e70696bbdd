"""Speaks the frame channel with a sandbox that a driver made, for tests of drivers.

Called by the tests; it knows docs/frames.md and nothing of the host.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import struct
from dataclasses import dataclass
from typing import Any

from sandbox.drivers.driver import Container, Limits, SandboxRequest

GUARD_SECONDS = 60
LIMITS = Limits(
    memory_limit_bytes=256 * 1024 * 1024,
    pids_limit=64,
    cpu_limit_millis=1000,
    tmpfs_limit_bytes=16 * 1024 * 1024,
    open_files_limit=256,
)


def request(sandbox_id: str = "", limits: Limits = LIMITS) -> SandboxRequest:
    """A request for a sandbox with a name of its own."""
    name = sandbox_id or f"sbx_{secrets.token_hex(6)}"
    return SandboxRequest(sandbox_id=name, template="default", limits=limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a cell did."""

    done: dict[str, Any]
    output: str

    @property
    def outcome(self) -> str:
        """The cell's outcome."""
        return str(self.done["outcome"])

    @property
    def last(self) -> Any:
        """The last printed line, read as JSON."""
        return json.loads(self.output.strip().splitlines()[-1])


class Speaker:
    """The host's side of one sandbox's channel."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._buffer = b""

    async def receive(self) -> tuple[dict[str, Any], bytes]:
        """Reads one frame; EOFError if the channel ended."""
        header, payload = struct.unpack(">II", await self._exactly(8))
        text = await self._exactly(header)
        return json.loads(text), await self._exactly(payload)

    async def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        """Writes one frame."""
        text = json.dumps(header).encode()
        frame = struct.pack(">II", len(text), len(payload)) + text + payload
        await asyncio.get_running_loop().sock_sendall(self._container.channel, frame)

    async def ready(self) -> dict[str, Any]:
        """Waits for the first frame."""
        async with asyncio.timeout(GUARD_SECONDS):
            try:
                header, _ = await self.receive()
            except EOFError:
                measured = await self._container.measure()
                raise AssertionError(f"the sandbox ended before ready: {measured}") from None
        assert header["type"] == "ready", header
        return header

    async def start(self, code: str) -> str:
        """Sends a cell and answers with its id once it has started."""
        cell = f"cell_{secrets.token_hex(6)}"
        source = code.encode()
        header = {
            "type": "cell",
            "cell": cell,
            "code": {"at": 0, "n": len(source)},
            "inputs": [],
            "mode": "program",
            "invocation": "inv_test",
            "depth": 1,
            "max_depth": 1,
            "timeout_ms": 0,
            "output_limit": 1 << 20,
            "tools": [],
            "stdin": False,
        }
        await self.send(header, source)
        return cell

    async def run(self, code: str) -> Ran:
        """Runs one cell to its end; a sandbox that dies in it raises EOFError."""
        await self.start(code)
        output = b""
        async with asyncio.timeout(GUARD_SECONDS):
            while True:
                header, payload = await self.receive()
                if header["type"] == "output":
                    output += payload
                elif header["type"] == "done":
                    return Ran(done=header, output=output.decode("utf-8", "replace"))

    async def _exactly(self, size: int) -> bytes:
        loop = asyncio.get_running_loop()
        while len(self._buffer) < size:
            try:
                piece = await loop.sock_recv(self._container.channel, 65536)
            except ConnectionResetError:
                piece = b""
            if not piece:
                raise EOFError("the channel ended")
            self._buffer += piece
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken
