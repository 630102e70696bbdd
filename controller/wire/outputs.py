"""What was printed, from any byte, to a client that may follow.

Called by the invocation servicer; calls the output log and the read model.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

from controller import convert
from controller.convert_cells import cell_output_id
from controller.core.errors import Reason, Refused
from controller.core.ids import InvocationId
from controller.core.model import State
from controller.loop import Loop
from controller.store.ports import InvocationRow, OutputLog
from hutch.v1 import invocation_service_pb2 as isv

CHUNK_BYTES = 256 * 1024  # of one message
READ_BYTES = 1024 * 1024  # at once from the log
STREAMS = {isv.OUTPUT_STREAM_STDOUT: "stdout", isv.OUTPUT_STREAM_STDERR: "stderr"}


async def read_output(
    request: isv.ReadOutputRequest,
    loop: Loop,
    output: OutputLog,
    find: Callable[[], Awaitable[InvocationRow]],
) -> AsyncIterator[isv.ReadOutputResponse]:
    """Streams what an invocation printed: all attempts one behind the other, or one cell of a box.

    Args:
        request: What is wanted.
        loop: Whose watchers tell of changes.
        output: The log.
        find: Gives the invocation as it stands.

    Raises:
        Refused: FIELD_INVALID.
    """
    if request.stream not in STREAMS:
        raise Refused(Reason.FIELD_INVALID, "it is stdout or stderr", field="stream")
    tree_id = InvocationId((await find()).tree_id)
    changed = loop.watchers.subscribe(tree_id)
    changed.set()  # perhaps it has changed since
    try:
        async for response in _read(request, loop, output, find, changed):
            yield response
    finally:
        loop.watchers.unsubscribe(tree_id, changed)


async def _read(
    request: isv.ReadOutputRequest,
    loop: Loop,
    output: OutputLog,
    find: Callable[[], Awaitable[InvocationRow]],
    changed: asyncio.Event,
) -> AsyncIterator[isv.ReadOutputResponse]:
    name = STREAMS[request.stream]
    left = request.max_bytes or None
    offset, base, attempt = request.offset, 0, 1
    while left is None or left > 0:
        if changed.is_set():
            changed.clear()
            row = await find()
            tenant_id, last = row.tenant_id, convert.invocation_of_row(row).attempt
        kept = convert.output_id(row.invocation_id, attempt)
        if request.cell_id:
            last, kept = 1, cell_output_id(row.invocation_id, request.cell_id)
        size = await output.size(tenant_id, kept, name)
        if offset < base + size:
            limit = READ_BYTES if left is None else min(READ_BYTES, left)
            data = await output.read(tenant_id, kept, name, offset - base, limit)
            for at in range(0, len(data), CHUNK_BYTES):
                piece = data[at : at + CHUNK_BYTES]
                yield isv.ReadOutputResponse(offset=offset + at, data=piece)
            offset += len(data)
            left = None if left is None else left - len(data)
        elif attempt < last:
            base, attempt = base + size, attempt + 1
        elif not request.follow or row.state == State.ENDED or loop.draining:
            return
        else:
            await _either(output.changed(tenant_id, kept, name, size), changed.wait())


async def _either(*waits: Coroutine[Any, Any, object]) -> None:
    """Waits until one of them is over, and ends the others."""
    tasks = {asyncio.create_task(wait) for wait in waits}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
