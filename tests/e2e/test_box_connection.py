"""Boxes over connections that drop, stall and fall silent. Scale: an idle proxy of 0.5 s stands for
20 s to 5 min, and the controller's heartbeats are slower than that."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import hutch
from hutch import box_stream
from tests.support.proxy import Proxy, proxy
from tests.support.stack import Stack


@pytest.fixture
def link(shared_stack: Stack, tmp_path: Path) -> Iterator[Proxy]:
    with proxy(tmp_path, shared_stack.target) as found:
        yield found


@pytest.fixture
def box(link: Proxy) -> Iterator[hutch.Box]:
    with hutch.connect(link.target) as client, client.sandbox() as found:
        yield found


def test_case_1_cells_over_a_dropping_connection_each_give_their_own_output_once(
    link: Proxy, box: hutch.Box
) -> None:
    """100 cells (the field's 500); every tenth or so loses its connection while it runs."""
    chance = random.Random(1)
    box.run("ran = []")
    for number in range(100):
        cell = box.submit(f"ran.append({number}); print({number})")
        if chance.random() < 0.1:
            link.cut()
        assert cell.result(30).stdout == f"{number}\n"
    assert box.run("ran == list(range(100))").text == "True"
    assert link.connections > 5


def test_case_29_output_followed_over_many_cuts_equals_the_whole(
    link: Proxy, box: hutch.Box
) -> None:
    """8 MiB (the field's 50) through connections that are cut after 400 KiB each."""
    source = "import sys\nfor n in range(8192): sys.stdout.write(f'{n:08d}' * 128)\n"
    expected = hashlib.sha256()
    for number in range(8192):
        expected.update(f"{number:08d}".encode() * 128)
    link.cut_after_bytes = 400 * 1024
    seen = hashlib.sha256()
    result = box.run(source, on_output=lambda part: seen.update(part.data))
    assert seen.digest() == expected.digest()
    read = hashlib.sha256()
    for piece in result.read_stdout():
        read.update(piece)
    assert read.digest() == expected.digest()
    assert result.stdout_view.total_bytes == 8 * 1024 * 1024
    assert len(result.stdout_view.head) + len(result.stdout_view.tail) == 64 * 1024
    assert link.connections > 20


def test_case_30_a_slow_callback_delays_nobody_else_and_loses_nothing(
    client: hutch.Client, link: Proxy, box: hutch.Box
) -> None:
    """The callback stops at its first bytes until the rest of the test is over; 32 MiB wait."""
    go_on, entered = threading.Event(), threading.Event()
    sizes: list[int] = []

    def slow(part: hutch.CellOutput) -> None:
        entered.set()
        assert go_on.wait(60)
        sizes.append(len(part.data))

    cell = box.submit("for _ in range(512): print('x' * 65535)", on_output=slow)
    assert entered.wait(30)
    with client.attach(box.id) as same:
        ended = same.cell(cell.cell_id).result(60)
        assert ended.stdout_view.total_bytes == 512 * 65536
    assert link.down_bytes < 24 * 1024 * 1024  # what is not taken does not come
    go_on.set()
    assert cell.result(60).ok
    assert sum(sizes) == 512 * 65536


@pytest.mark.parametrize("seconds", [3])
def test_case_31_a_proxy_that_drops_idle_streams_costs_nothing(
    link: Proxy, box: hutch.Box, seconds: int
) -> None:
    box.run("runs = 0")
    before = link.connections
    link.idle_seconds = 0.5
    result = box.run(f"import time\nruns += 1\ntime.sleep({seconds})\nruns")
    link.idle_seconds = 0.0
    assert result.text == "1"
    assert link.connections - before >= 3
    assert box.run("runs").text == "1"


def test_case_32_silence_of_the_other_side_is_noticed_and_a_fresh_connection_is_made(
    link: Proxy, box: hutch.Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three missed heartbeats stand at 1 s here; the proxy keeps the dead connection open."""
    monkeypatch.setattr(box_stream, "SILENCE_SECONDS", 1.0)
    assert box.run("1 + 1").text == "2"
    before = link.connections
    cell = box.submit("import time\ntime.sleep(2)\n'still here'")
    link.silent = True
    while link.connections == before:
        pass
    link.silent = False
    assert cell.result(60).text == "'still here'"


def test_case_34_a_cell_whose_connection_is_lost_is_unknown_until_its_end_is_read(
    shared_stack: Stack, link: Proxy
) -> None:
    with hutch.connect(link.target, retry_seconds=3) as client:
        box = client.sandbox().open()
        cell = box.submit("import time\nprint(1, flush=True)\ntime.sleep(1)\nraise SystemExit(3)")
        next(cell.output())
        states: list[str] = [cell.state]
        link.refusing = True
        link.cut()
        with pytest.raises(hutch.ConnectionLostError):
            cell.result(60)
        states.append(cell.state)
        with hutch.connect(shared_stack.target) as other, other.attach(box.id) as same:
            seen = same.cell(cell.cell_id).result(60)
        link.refusing = False
        result = cell.result(60)
        states.append(cell.state)
        assert states == ["accepted", "unknown", "ended"]
        assert result.outcome == seen.outcome == "raised"
        assert result.failure is not None
        assert result.failure.type_name == "SystemExit"
        box.close()
