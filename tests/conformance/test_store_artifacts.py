"""What every artifact store does."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controller.store.ports import (
    CHUNK_BYTES,
    REFUSALS_MAX,
    AlreadyPublished,
    ArtifactNotFound,
    ArtifactRow,
    ArtifactStore,
    ArtifactTooLarge,
    NameInvalid,
    StoreConflict,
    StoreError,
)
from tests.support.stores import TENANT, opened


@pytest.fixture
async def artifacts(tmp_path: Path) -> AsyncIterator[ArtifactStore]:
    async with opened(tmp_path) as stores:
        yield stores.artifacts


async def publish(
    artifacts: ArtifactStore,
    artifact_id: str,
    name: str = "report.csv",
    content: bytes = b"content",
    invocation_id: str = "inv_a",
    tenant_id: str = TENANT,
) -> ArtifactRow | AlreadyPublished:
    staged = await artifacts.stage()
    await staged.write(content)
    await staged.finish()
    return await artifacts.publish(
        tenant_id, artifact_id, name, staged, "text/csv", invocation_id, 7
    )


async def content_of(artifacts: ArtifactStore, artifact_id: str, offset: int = 0) -> bytes:
    chunks = [chunk async for chunk in artifacts.open_read(TENANT, artifact_id, offset)]
    assert all(0 < len(chunk) <= CHUNK_BYTES for chunk in chunks)
    return b"".join(chunks)


async def test_bytes_are_published_and_read_from_any_offset(artifacts: ArtifactStore) -> None:
    content = bytes(range(256)) * 3000
    staged = await artifacts.stage()
    for start in range(0, len(content), 70_001):
        await staged.write(content[start : start + 70_001])
    assert staged.size == len(content)
    digest = hashlib.sha256(content).hexdigest()
    assert await staged.finish() == (digest, len(content))
    row = await artifacts.publish(TENANT, "art_1", "a/b", staged, "x/y", "inv_a", 7)
    assert row == ArtifactRow(
        tenant_id=TENANT,
        artifact_id="art_1",
        name="a/b",
        sha256=digest,
        size_bytes=len(content),
        media_type="x/y",
        invocation_id="inv_a",
        create_time_us=7,
    )
    assert await artifacts.get(TENANT, "art_1") == row
    assert await artifacts.stat(TENANT, "art_1") == row
    assert artifacts.path_of(row).read_bytes() == content
    for offset in (0, 1, CHUNK_BYTES, len(content) - 1, len(content), len(content) + 5):
        assert await content_of(artifacts, "art_1", offset) == content[offset:]


async def test_an_empty_artifact_is_one(artifacts: ArtifactStore) -> None:
    row = await publish(artifacts, "art_1", content=b"")
    assert isinstance(row, ArtifactRow)
    assert row.size_bytes == 0
    assert await content_of(artifacts, "art_1") == b""


async def test_the_first_publication_of_a_name_stays(artifacts: ArtifactStore) -> None:
    first = await publish(artifacts, "art_1", content=b"first")
    second = await publish(artifacts, "art_2", content=b"second")
    assert isinstance(second, AlreadyPublished)
    assert second.row == first
    assert await artifacts.get(TENANT, "art_2") is None
    assert await content_of(artifacts, "art_1") == b"first"


async def test_publications_at_once_leave_one(artifacts: ArtifactStore) -> None:
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(publish(artifacts, f"art_{n}", content=b"%d" % n)) for n in range(10)
        ]
    rows = [task.result() for task in tasks]
    assert sum(isinstance(row, ArtifactRow) for row in rows) == 1
    assert len(await artifacts.list(TENANT, "inv_a")) == 1


async def test_publishing_again_under_the_same_id_is_idempotent(artifacts: ArtifactStore) -> None:
    first = await publish(artifacts, "art_1")
    assert await publish(artifacts, "art_1") == first
    with pytest.raises(StoreConflict):
        await publish(artifacts, "art_1", content=b"other")


async def test_what_clients_put_may_share_a_name_and_bytes(artifacts: ArtifactStore) -> None:
    first = await publish(artifacts, "art_1", invocation_id="")
    second = await publish(artifacts, "art_2", invocation_id="")
    assert isinstance(first, ArtifactRow)
    assert isinstance(second, ArtifactRow)
    assert artifacts.path_of(first) == artifacts.path_of(second)
    assert await artifacts.list(TENANT, "") == []


async def test_tenants_do_not_see_each_other(artifacts: ArtifactStore) -> None:
    mine = await publish(artifacts, "art_1")
    assert await artifacts.get("other", "art_1") is None
    with pytest.raises(ArtifactNotFound):
        await artifacts.stat("other", "art_1")
    with pytest.raises(ArtifactNotFound):
        await anext(artifacts.open_read("other", "art_1"))
    theirs = await publish(artifacts, "art_1", tenant_id="other")
    assert isinstance(mine, ArtifactRow)
    assert isinstance(theirs, ArtifactRow)
    assert artifacts.path_of(mine) != artifacts.path_of(theirs)


async def test_the_same_bytes_are_kept_once(artifacts: ArtifactStore, tmp_path: Path) -> None:
    for number in range(3):
        await publish(artifacts, f"art_{number}", name=f"n{number}")
    files = [path for path in (tmp_path / "artifacts").rglob("*") if path.is_file()]
    assert len(files) == 1


async def test_names_are_data_and_never_paths(artifacts: ArtifactStore, tmp_path: Path) -> None:
    names = sorted(["../../../escape", "/etc/passwd", "a\nb", "é" * 200, ".staging", "x' OR 1=1"])
    for number, name in enumerate(names):
        await publish(artifacts, f"art_{number}", name=name)
    assert [row.name for row in await artifacts.list(TENANT, "inv_a")] == names
    assert not list(tmp_path.parent.glob("escape*"))


@pytest.mark.parametrize("tenant_id", ["..", ".staging", "", "a/b", "A", "x" * 200])
async def test_a_tenant_that_may_be_no_folder_is_refused(
    artifacts: ArtifactStore, tenant_id: str, tmp_path: Path
) -> None:
    with pytest.raises(NameInvalid):
        await publish(artifacts, "art_1", tenant_id=tenant_id)


async def test_artifacts_are_listed_by_name_in_pages(artifacts: ArtifactStore) -> None:
    for number, name in enumerate(["c", "a", "b", "d"]):
        await publish(artifacts, f"art_{number}", name=name)
    await publish(artifacts, "art_9", invocation_id="inv_other")
    page = await artifacts.list(TENANT, "inv_a", limit=3)
    assert [row.name for row in page] == ["a", "b", "c"]
    page = await artifacts.list(TENANT, "inv_a", after_name="c")
    assert [row.name for row in page] == ["d"]


async def test_a_stage_that_grows_over_its_limit_is_gone(
    artifacts: ArtifactStore, tmp_path: Path
) -> None:
    staged = await artifacts.stage(max_bytes=CHUNK_BYTES)
    await staged.write(b"x" * CHUNK_BYTES)
    with pytest.raises(ArtifactTooLarge) as caught:
        await staged.write(b"x")
    assert caught.value.max_bytes == CHUNK_BYTES
    with pytest.raises(StoreError):
        await staged.finish()
    assert list((tmp_path / "artifacts" / ".staging").iterdir()) == []


async def test_an_aborted_stage_leaves_nothing_and_cannot_be_published(
    artifacts: ArtifactStore, tmp_path: Path
) -> None:
    staged = await artifacts.stage()
    await staged.write(b"x" * CHUNK_BYTES)
    await staged.abort()
    await staged.abort()
    assert list((tmp_path / "artifacts" / ".staging").iterdir()) == []
    with pytest.raises(StoreError):
        await artifacts.publish(TENANT, "art_1", "n", staged, "", "inv_a", 1)


async def test_only_a_finished_stage_can_be_published(artifacts: ArtifactStore) -> None:
    staged = await artifacts.stage()
    await staged.write(b"x")
    with pytest.raises(StoreError):
        await artifacts.publish(TENANT, "art_1", "n", staged, "", "inv_a", 1)
    await staged.abort()
    assert await artifacts.get(TENANT, "art_1") is None


async def test_cancelling_a_write_leaves_a_stage_that_can_be_aborted(
    artifacts: ArtifactStore, tmp_path: Path
) -> None:
    staged = await artifacts.stage()
    for _ in range(20):
        task = asyncio.create_task(staged.write(b"x" * CHUNK_BYTES))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    await staged.abort()
    assert list((tmp_path / "artifacts" / ".staging").iterdir()) == []


async def test_refusals_keep_the_first_reason_of_a_bounded_number_of_names(
    artifacts: ArtifactStore,
) -> None:
    await artifacts.add_refusals(TENANT, "inv_a", [("b", "fifo"), ("a", "symbolic link")])
    await artifacts.add_refusals(TENANT, "inv_a", [("a", "again")])
    expected = [("a", "symbolic link"), ("b", "fifo")]
    assert await artifacts.list_refusals(TENANT, "inv_a") == expected
    assert await artifacts.list_refusals("other", "inv_a") == []
    await artifacts.add_refusals(TENANT, "inv_a", [(f"n{n}", "x") for n in range(1000)])
    assert len(await artifacts.list_refusals(TENANT, "inv_a")) == REFUSALS_MAX


async def test_what_was_staged_by_a_controller_that_died_is_removed(tmp_path: Path) -> None:
    async with opened(tmp_path) as stores:
        await publish(stores.artifacts, "art_1")
    left = tmp_path / "artifacts" / ".staging" / "0"
    left.write_bytes(b"half")
    async with opened(tmp_path) as stores:
        assert not left.exists()
        assert await content_of(stores.artifacts, "art_1") == b"content"
