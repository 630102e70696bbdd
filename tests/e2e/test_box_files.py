"""Files of a live sandbox, in and out."""

from __future__ import annotations

import hashlib
import io
import os
import threading
import tracemalloc
from pathlib import Path

import grpc
import pytest

import hutch
from hutch.v1 import workspace_service_pb2 as ws
from hutch.v1.workspace_service_pb2_grpc import WorkspaceServiceStub
from tests.support.proxy import proxy
from tests.support.stack import Stack


def test_files_go_in_and_out_and_are_listed(client: hutch.Client, tmp_path: Path) -> None:
    with client.sandbox() as box:
        made = box.files.write("data/a.txt", "héllo", executable=True)
        assert (made.kind, made.size_bytes, bool(made.mode & 0o100)) == ("file", 6, True)
        assert box.run("open('data/a.txt', encoding='utf-8').read()").text == "'héllo'"
        box.run("open('data/b.bin', 'wb').write(bytes(range(256)) * 4096)")
        assert [item.path for item in box.files.list("data")] == ["data/a.txt", "data/b.bin"]
        assert box.files.stat("data/b.bin").size_bytes == 2**20
        assert box.files.read("data/b.bin", offset=255, max_bytes=2) == b"\xff\x00"
        assert box.files.download("data/b.bin", tmp_path / "b.bin") == 2**20
        assert (tmp_path / "b.bin").read_bytes() == bytes(range(256)) * 4096
        into = io.BytesIO()
        box.files.download("data/a.txt", into)
        assert into.getvalue().decode() == "héllo"
        with pytest.raises(hutch.NotFoundError) as caught:
            box.files.read("none")
        assert caught.value.reason == "FILE_NOT_FOUND"
        with pytest.raises(hutch.NotFoundError):
            box.files.download("none", tmp_path / "none")
        assert os.listdir(tmp_path) == ["b.bin"]


def test_a_pipe_is_written_like_a_file(client: hutch.Client) -> None:
    reader, writer = os.pipe()

    def fill() -> None:
        with os.fdopen(writer, "wb") as file:
            file.write(b"p" * 1_000_000)

    with client.sandbox() as box:
        filling = threading.Thread(target=fill)
        filling.start()
        with os.fdopen(reader, "rb") as source:
            assert box.files.write("piped", source).size_bytes == 1_000_000
        filling.join()


def test_case_60_large_files_go_both_ways_over_a_cut_in_bounded_memory(
    shared_stack: Stack, tmp_path: Path
) -> None:
    """64 MiB (the field's 4 GiB) with one cut each way; the client's own memory is measured."""
    block = os.urandom(2**20)
    source = tmp_path / "source"
    with source.open("wb") as file:
        for _ in range(64):
            file.write(block)
    expected = hashlib.sha256(source.read_bytes()).hexdigest()
    with (
        proxy(tmp_path, shared_stack.target) as link,
        hutch.connect(link.target) as client,
        client.sandbox() as box,
    ):
        tracemalloc.start()
        try:
            threading.Timer(0.3, link.cut).start()
            box.files.write("big", source)
            check = "import hashlib\nhashlib.sha256(open('big', 'rb').read()).hexdigest()"
            assert box.run(check).text == repr(expected)
            digest = hashlib.sha256()
            link.cut_after_bytes = 40 * 2**20
            for piece in box.files.stream("big"):
                digest.update(piece)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert digest.hexdigest() == expected
        assert peak < 16 * 2**20


def test_a_request_that_no_sandbox_can_be_asked_is_refused_and_costs_none(
    shared_stack: Stack, client: hutch.Client
) -> None:
    with client.sandbox() as box, grpc.insecure_channel(shared_stack.target) as channel:
        box.files.write("a", "1")
        files = WorkspaceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(files.ReadFile(ws.ReadFileRequest(invocation_id=box.id, path="a", offset=2**63)))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as caught:
            files.ListFiles(ws.ListFilesRequest(invocation_id=box.id, page_token="z" * 70_000))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert box.files.read("a") == b"1"
        assert box.run("1 + 1").text == "2"
