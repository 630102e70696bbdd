"""A grpc.aio server that sends every message back: the other end of the ping-pong floor.

Started by `bench.floors` as a process of its own: `python -m bench.echo SOCKET`. It prints one line
when it listens, and ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc

METHOD = "/hutch.bench.Echo/Echo"


async def echo(requests: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
    """Answers each message with itself."""
    async for request in requests:
        yield request


async def serve(path: str) -> None:
    """Listens until standard input ends."""
    server = grpc.aio.server()
    handler: Any = grpc.stream_stream_rpc_method_handler(echo)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("hutch.bench.Echo", {"Echo": handler}),)
    )
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    print("listening", flush=True)
    await asyncio.to_thread(sys.stdin.buffer.read)
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
