"""Large outputs and large values through the whole system."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

import hutch
from tests.support.proxy import proxy
from tests.support.stack import Stack

MIB = 1024 * 1024
PRINT = "block = 'x' * 1_048_575\nfor number in range(count):\n    print(block)\nreturn 'done'"
GROWTH_BYTES = 32 * MIB


def peak_bytes(pid: int) -> int:
    """The most resident memory that a process has had since the last reset."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no such process")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("blocks", [256, pytest.param(5 * 1024, marks=pytest.mark.soak)])
def test_case_22_much_output_and_a_reader_that_stops_cost_no_memory(
    own_stack: Stack, blocks: int
) -> None:
    """256 MiB for 5 GiB, with the same bound; the full size in `make soak`."""
    assert own_stack.controller is not None
    assert own_stack.host is not None
    pids = (own_stack.controller.pid, own_stack.host.pid)
    with hutch.connect(own_stack.target) as client:
        client.invoke(program=PRINT, count=1)  # what grows at the first use only
        before = []
        for pid in pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")
            before.append(peak_bytes(pid))
        limit = 2 * blocks * MIB
        handle = client.spawn(program=PRINT, count=blocks, output_limit_bytes=limit)
        slow = client.read_output(handle.id, follow=True)
        next(slow)  # and reads no further
        assert handle.result() == "done"
        assert client.get_invocation(handle.id).stdout_bytes == blocks * MIB
        growth = [peak_bytes(pid) - old for pid, old in zip(pids, before, strict=True)]
        assert max(growth) <= GROWTH_BYTES, growth


def test_case_23_a_view_is_head_and_tail_with_the_exact_count_left_out(
    client: hutch.Client,
) -> None:
    """16 MiB for 700 MB; the whole is there by offset."""
    program = (
        "import hashlib, sys\nline = b''.join(b'%07d\\n' % number for number in range(2_000_000))\n"
        "sys.stdout.buffer.write(line)\nreturn hashlib.sha256(line).hexdigest()"
    )
    handle = client.spawn(program=program)
    digest = handle.result()
    view = handle.output_view()
    assert view.total_bytes == 16_000_000
    assert (len(view.head), len(view.tail)) == (32 * 1024, 32 * 1024)
    assert view.left_out_bytes == 16_000_000 - 64 * 1024
    assert view.head.startswith(b"0000000\n0000001\n")
    assert view.tail.endswith(b"1999999\n")
    whole = hashlib.sha256()
    for chunk in client.read_output(handle.id):
        whole.update(chunk.data)
    assert whole.hexdigest() == digest
    small = client.spawn(program="print('all')")
    small.result()
    assert (small.output_view().text, small.output_view("stderr").text) == ("all\n", "")


@pytest.mark.parametrize("size", [3_900_000, 4_100_000, 64 * MIB - 2])
def test_case_25_values_larger_than_a_message_arrive_whole(client: hutch.Client, size: int) -> None:
    text = client.invoke(program="return 'x' * size", size=size)
    assert (len(text), set(text)) == (size, {"x"})


def test_case_25_a_value_over_the_limit_is_refused_and_names_it(client: hutch.Client) -> None:
    with pytest.raises(hutch.InvocationFailed) as caught:
        client.invoke(program="return 'x' * (64 * 1024 * 1024)")
    assert "64 MiB" in str(caught.value) or str(64 * MIB) in str(caught.value)


def test_case_26_forty_mebibytes_pass_a_proxy_intact(own_stack: Stack, tmp_path: Path) -> None:
    program = (
        "import hashlib, sys\ndigest = hashlib.sha256()\n"
        "for number in range(40):\n"
        "    block = bytes([number]) * (1024 * 1024)\n"
        "    digest.update(block)\n    sys.stdout.buffer.write(block)\n"
        "return digest.hexdigest()"
    )
    with proxy(tmp_path, own_stack.target) as between, hutch.connect(between.target) as client:
        handle = client.spawn(program=program)
        digest, size = hashlib.sha256(), 0
        for chunk in client.read_output(handle.id, follow=True):
            digest.update(chunk.data)
            size += len(chunk.data)
        assert (digest.hexdigest(), size) == (handle.result(), 40 * MIB)
