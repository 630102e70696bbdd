"""Files of a live sandbox, in and out."""

from __future__ import annotations

import hashlib
import io
import os
import queue
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
        box.files.download("data/a.txt", str(tmp_path / "named"))
        assert (tmp_path / "named").read_text(encoding="utf-8") == "héllo"
        (tmp_path / "named").unlink()
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


def as_completed(calls: list[Any], count: int) -> Iterator[Any]:
    """The first so many calls that end."""
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for call in calls:
        call.add_done_callback(done.put)
    for _ in range(count):
        yield done.get()


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


def test_a_write_through_a_dangling_link_describes_the_file_that_was_made(
    client: hutch.Client,
) -> None:
    with client.sandbox() as box:
        box.run("import os\nos.symlink('folder/target', 'dangling')")
        made = box.files.write("dangling", b"12345")
        assert (made.path, made.kind, made.size_bytes) == ("dangling", "file", 5)
        assert box.files.read("folder/target") == b"12345"


def test_a_file_that_does_not_fit_is_refused_and_not_tried_again(client: hutch.Client) -> None:
    with client.sandbox(tmpfs_limit_bytes=2**20) as box:
        with pytest.raises(hutch.PayloadTooLargeError, match="No space left"):
            box.files.write("big", bytes(2**21))
        assert box.files.list() == []


STOP_HELPERS = """
import os, signal, time
def helpers():
    for pid in map(int, filter(str.isdigit, os.listdir('/proc'))):
        try:
            stat = open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()
        except OSError:
            continue
        if int(stat[1]) == os.getppid() and pid != os.getpid() and stat[0] != 'Z':
            yield pid
def signal_all(number):
    for pid in helpers():
        try:
            os.kill(pid, number)
        except OSError:  # gone, or not of this uid yet
            pass
"""


MANY_FILES = """
os.mkdir('many')
for number in range(30_000):
    os.close(os.open(f'many/{number}', os.O_CREAT | os.O_WRONLY))
"""


def test_what_may_work_later_is_refused_as_that(shared_stack: Stack, client: hutch.Client) -> None:
    """Code that stops the process which works on its files: who asks then is told to come again,
    never that the request was wrong."""
    with client.sandbox() as box, grpc.insecure_channel(shared_stack.target) as channel:
        box.files.write("a", "1")
        box.run(STOP_HELPERS + "signal_all(signal.SIGSTOP)").raise_for_failure()
        stub = WorkspaceServiceStub(channel)
        request = ws.StatFileRequest(invocation_id=box.id, path="a")
        asked = [stub.StatFile.future(request) for _ in range(300)]
        refused = [call.code() for call in as_completed(asked, 260)]
        assert set(refused) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        box.run("signal_all(signal.SIGKILL)").raise_for_failure()
        assert {call.code() for call in asked} <= {
            grpc.StatusCode.OK,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        }
        assert box.files.read("a") == b"1"


def test_a_file_operation_whose_helpers_are_killed_is_unavailable(
    shared_stack: Stack, client: hutch.Client
) -> None:
    with client.sandbox() as box, grpc.insecure_channel(shared_stack.target) as channel:
        box.run(STOP_HELPERS + MANY_FILES).raise_for_failure()
        killing = box.submit("while True: signal_all(signal.SIGKILL)")
        stub = WorkspaceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.ListFiles(ws.ListFilesRequest(invocation_id=box.id, path="many"), timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        killing.interrupt()
        assert killing.result().outcome == "interrupted"
        box.files.write("a", "1")
        assert box.files.read("a") == b"1"
