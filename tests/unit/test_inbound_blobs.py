"""Contents that come in from a sandbox in pieces, whatever a hostile one or its host sends."""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from controller.config import ControllerConfig, Limits
from controller.convert import VALUE_BYTES
from controller.core.errors import Reason, Refused
from controller.core.ids import TenantId
from controller.hosts.blobs import OPEN_BLOBS, BlobRefused, InboundBlobs
from controller.hosts.services import Services
from hutch.v1 import host_service_pb2 as hs
from tests.support.stores import TENANT, opened

MIB = 1024 * 1024
LIMIT = 2 * MIB


@asynccontextmanager
async def inbound(state: Path) -> AsyncIterator[InboundBlobs]:
    """The blobs of one sandbox over a real store; files of at most 2 MiB are kept."""
    async with opened(state) as stores:
        limits = Limits(artifact_bytes=LIMIT)
        services = SimpleNamespace(
            config=ControllerConfig(limits=limits), artifacts=stores.artifacts, now_us=lambda: 1
        )
        found = InboundBlobs(cast("Services", services), TenantId(TENANT))
        try:
            yield found
        finally:
            await found.close()
            assert not staged_files(state)


def staged_files(state: Path) -> list[Path]:
    return [path for path in state.rglob(".staging/*") if path.is_file()]


def chunk(blob_id: str, offset: int, data: bytes, *, last: bool = False) -> hs.BlobChunk:
    return hs.BlobChunk(blob_id=blob_id, offset=offset, data=data, last=last)


def content(blob_id: str, size: int) -> hs.Content:
    return hs.Content(blob_id=blob_id, size_bytes=size)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await test()

    asyncio.run(main())


REFUSED: dict[str, list[hs.BlobChunk]] = {
    "overlapping": [chunk("b", 0, b"12345"), chunk("b", 3, b"45678")],
    "the same again": [chunk("b", 0, b"12345"), chunk("b", 0, b"12345")],
    "a gap": [chunk("b", 0, b"12345"), chunk("b", 6, b"7")],
    "begun in the middle": [chunk("b", 1, b"2")],
    "a huge offset": [chunk("b", 2**64 - 1, b"x", last=True)],
    "after the last": [chunk("b", 0, b"1", last=True), chunk("b", 1, b"2")],
    "last twice": [chunk("b", 0, b"", last=True), chunk("b", 0, b"", last=True)],
    "empty without an end": [chunk("b", 0, b"")],
    "too many at once": [chunk(f"b{number}", 0, b"x") for number in range(17)],
    "too many whole ones": [chunk(f"b{number}", 0, b"x", last=True) for number in range(17)],
}


@pytest.mark.parametrize("name", REFUSED)
def test_chunks_that_no_sound_sandbox_sends_are_refused(tmp_path: Path, name: str) -> None:
    async def test() -> None:
        async with inbound(tmp_path) as blobs:
            *sound, wrong = REFUSED[name]
            for item in sound:
                await blobs.add(item)
            with pytest.raises(BlobRefused):
                await blobs.add(wrong)

    run(test)


@pytest.mark.parametrize(
    "named", [content("none", 3), content("open", 3), content("whole", 2), content("whole", 2**60)]
)
def test_a_content_that_is_not_there_as_it_is_named_is_refused(
    tmp_path: Path, named: hs.Content
) -> None:
    async def test() -> None:
        async with inbound(tmp_path) as blobs:
            await blobs.add(chunk("open", 0, b"123"))
            await blobs.add(chunk("whole", 0, b"123", last=True))
            for use in (blobs.value(named), blobs.small(named, 9), blobs.staged(named, 9)):
                with pytest.raises(BlobRefused):
                    await use
            assert await blobs.small(content("whole", 3), 9) == b"123"
            with pytest.raises(BlobRefused):  # once only
                await blobs.small(content("whole", 3), 9)

    run(test)


def test_a_blob_without_an_end_is_refused_in_bounded_memory(tmp_path: Path) -> None:
    async def test() -> None:
        async with inbound(tmp_path) as blobs:
            piece = bytes(2 * MIB)
            tracemalloc.start()
            try:
                for offset in range(0, VALUE_BYTES, len(piece)):
                    await blobs.add(chunk("b", offset, piece))
                with pytest.raises(BlobRefused):
                    await blobs.add(chunk("b", VALUE_BYTES, b"x"))
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert peak < 16 * MIB

    run(test)


class _Model:
    """What is right, said again in the simplest way."""

    def __init__(self) -> None:
        self.blobs: dict[str, tuple[bytes, bool]] = {}

    def add(self, item: hs.BlobChunk) -> bool:
        """Takes a chunk; whether it may come."""
        data, whole = self.blobs.get(item.blob_id, (b"", False))
        is_new = item.blob_id not in self.blobs
        if (is_new and len(self.blobs) >= OPEN_BLOBS) or whole or item.offset != len(data):
            return False
        if not item.data and not item.last:
            return False
        self.blobs[item.blob_id] = (data + item.data, item.last)
        return True


def _random_chunk(rng: random.Random, model: _Model) -> hs.BlobChunk:
    """Mostly sound: a stream that breaks at once would show nothing."""
    blob_id = f"b{rng.randrange(20)}"
    at = len(model.blobs.get(blob_id, (b"", False))[0])
    if rng.random() < 0.02:
        at = rng.choice([0, at + 1, max(0, at - 1), 2**63, 2**64 - 1])
    size = rng.choice([0, 1, 100, 200_000, 700_000])
    return chunk(blob_id, at, rng.randbytes(size), last=rng.random() < 0.3)


async def _use(rng: random.Random, blobs: InboundBlobs, model: _Model) -> None:
    blob_id = rng.choice([*model.blobs, "none"])
    data, whole = model.blobs.get(blob_id, (b"", False))
    size = len(data) if rng.random() < 0.95 else rng.choice([0, 2**40, len(data) + 1])
    named = content(blob_id, size)
    way = rng.choice(["value", "small", "staged", "discard"])
    if way == "discard":
        await blobs.discard([named])
        model.blobs.pop(blob_id, None)
        return
    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "value": lambda: blobs.value(named),
        "small": lambda: blobs.small(named, MIB),
        "staged": lambda: blobs.staged(named, LIMIT),
    }
    if not whole or size != len(data):
        with pytest.raises(BlobRefused):
            await calls[way]()
        return
    del model.blobs[blob_id]
    if len(data) > {"value": VALUE_BYTES, "small": MIB, "staged": LIMIT}[way]:
        with pytest.raises(Refused) as caught:
            await calls[way]()
        assert caught.value.reason is Reason.PAYLOAD_TOO_LARGE
        return
    found = await calls[way]()
    if way == "small":
        assert found == data
    elif way == "staged":
        assert found.size == len(data)
        await found.abort()
    elif len(data) > MIB:
        assert found.artifact.size_bytes == len(data)
    else:
        assert found.json == data


@pytest.mark.parametrize("seed", range(20))
def test_whatever_chunks_come_each_is_taken_or_refused_as_it_must(
    tmp_path: Path, seed: int
) -> None:
    async def test() -> None:
        rng = random.Random(seed)
        async with inbound(tmp_path) as blobs:
            model = _Model()
            for _ in range(300):
                if rng.random() < 0.3:
                    await _use(rng, blobs, model)
                    continue
                item = _random_chunk(rng, model)
                if model.add(item):
                    await blobs.add(item)
                else:
                    with pytest.raises(BlobRefused):
                        await blobs.add(item)

    run(test)
