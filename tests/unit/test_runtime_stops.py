"""Stopping a cell: whatever it does, it ends, leaves nothing running and harms no other cell."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from sandbox.runtime import frames
from sandbox.runtime.supervisor import Supervisor
from tests.support.frame_client import FrameClient, Report, supervisor


@pytest.fixture
def client(tmp_path: Path) -> Iterator[FrameClient]:
    with supervisor(tmp_path, "--grace-milliseconds", "100") as (client, _):
        client.expect("ready")
        yield client


def interrupt(client: FrameClient, cell: str) -> None:
    client.send({"type": "interrupt", "cell": cell})


def stop(client: FrameClient, code: str) -> Report:
    """Runs a cell that prints `go` and interrupts it then."""
    cell = client.start(code)
    client.wait_output(cell, b"go\n")
    interrupt(client, cell)
    return client.finish(cell)


SAY = "print('go', flush=True)\n"
KEEPS = {
    "a spin": SAY + "while True: pass",
    "a spin that catches everything inside": (
        SAY + "while True:\n    try:\n        while True: pass\n    except Exception: pass"
    ),
    "a regular expression": SAY + "import re\nre.match('(a+)+$', 'a' * 60 + 'b')",
    "a thread's spin": (
        "import threading\ndef f():\n    print('go', flush=True)\n    while True: pass\n"
        "t = threading.Thread(target=f); t.start(); t.join()"
    ),
    "a thread that catches everything": (
        "import threading\ndef f():\n    print('go', flush=True)\n    while True:\n"
        "        try:\n            while True: pass\n        except BaseException: pass\n"
        "        break\n"
        "t = threading.Thread(target=f); t.start()\nwhile True: pass"
    ),
    "a thread beside a cell that catches everything once": (
        "import threading, time\ndef f():\n    while True: time.sleep(0.001)\n"
        "t = threading.Thread(target=f); t.start()\ntry:\n    print('go', flush=True)\n"
        "    time.sleep(60)\nexcept BaseException: pass"
    ),
    "a coroutine": SAY + "import asyncio\nasync def f():\n    while True: pass\nawait f()",
    "standard input of a child": SAY + "import subprocess\nsubprocess.run(['sleep', '61'])",
    "a stopped child": (
        SAY + "import subprocess, signal\nc = subprocess.Popen(['sleep', '61'])\n"
        "c.send_signal(signal.SIGSTOP)\nc.wait()"
    ),
}


@pytest.mark.parametrize("code", KEEPS.values(), ids=KEEPS)
def test_a_stopped_cell_ends_and_the_namespace_survives(client: FrameClient, code: str) -> None:
    client.run("x = 5")
    report = stop(client, code)
    assert not report.header["state_lost"], report
    report = client.run(
        "import threading\n(x, threading.active_count(), 't' in globals() and t.is_alive())",
        mode="interactive",
    )
    assert report.text == "(5, 1, False)"
    assert report.header["background"] == 0


LOSES = {
    "a loop in C": SAY + "sum(range(10**13))",
    "a loop that catches everything": (
        SAY + "import time\nwhile True:\n    try:\n        time.sleep(60)\n"
        "    except BaseException: pass"
    ),
    "a thread that is never done": (
        "import threading, time\ndef f():\n    while True:\n        try:\n"
        "            time.sleep(0.001)\n        except BaseException: pass\n"
        "threading.Thread(target=f).start()\nprint('go', flush=True)\nwhile True: pass"
    ),
}


@pytest.mark.parametrize("code", LOSES.values(), ids=LOSES)
def test_what_cannot_be_ended_costs_the_namespace_and_says_so(
    client: FrameClient, code: str
) -> None:
    client.run("x = 5")
    report = stop(client, code)
    assert (report.outcome, report.header["state_lost"]) == ("interrupted", True)
    report = client.run("'x' in globals()", mode="interactive")
    assert (report.text, report.header["state_lost"]) == ("False", False)


def test_case_5_an_interrupt_stops_a_loop_of_children(client: FrameClient) -> None:
    code = "x = 5\nimport subprocess\nprint('go', flush=True)\n"
    began = time.monotonic()
    report = stop(client, code + "for i in range(60): subprocess.run(['sleep', '1'])")
    assert time.monotonic() - began < 20
    assert (report.outcome, report.failure["type_name"]) == ("interrupted", "KeyboardInterrupt")
    assert client.run("x", mode="interactive").text == "5"


def test_workers_of_a_pool_are_there_for_the_next_cell(client: FrameClient) -> None:
    code = "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(2)\n"
    code += "pool.submit(int).result()\nprint('go', flush=True)\nwhile True: pass"
    assert stop(client, code).outcome == "interrupted"
    report = client.run("pool.submit(lambda: 7).result(20)", mode="interactive")
    assert report.text == "7"


def test_an_interrupt_before_the_code_began_stops_it(client: FrameClient) -> None:
    cell = client.start("import time\ntime.sleep(60)")
    interrupt(client, cell)
    assert client.finish(cell).outcome == "interrupted"
    assert client.run("5", mode="interactive").text == "5"


def test_interrupts_at_any_moment_harm_no_other_cell(client: FrameClient) -> None:
    client.run("x = 0")
    for number in range(40):
        cell = client.start(f"x += 1\nfor i in range({number * 200}): pass")
        interrupt(client, cell)
        interrupt(client, cell)
        client.finish(cell)
        interrupt(client, cell)
        report = client.run("y = 'whole'\ny", mode="interactive")
        assert (report.outcome, report.text) == ("completed", "'whole'")
        assert not report.header["state_lost"]


def test_a_deadline_before_the_code_began_ends_it(client: FrameClient) -> None:
    assert client.run("import time\ntime.sleep(60)", timeout_ms=1).outcome == "timed_out"
    assert client.run("5", mode="interactive").text == "5"


def test_thousands_of_orphans_leave_no_zombie_and_hold_nobody_up(client: FrameClient) -> None:
    report = client.run(
        "import os\nfor _ in range(50):\n    if os.fork() == 0:\n"
        "        for _ in range(100):\n            if os.fork() == 0: os._exit(0)\n"
        "        os._exit(0)\n    os.wait()\nprint('all')"
    )
    assert report.stdout == b"all\n"
    client.run("display(1)")
    report = client.run(
        "import os, time\ndef zombies():\n    found = 0\n"
        "    for pid in filter(str.isdigit, os.listdir('/proc')):\n        try:\n"
        "            stat = open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()\n"
        "            found += stat[0] == 'Z' and int(stat[1]) == os.getppid()\n"
        "        except OSError: pass\n    return found\n"
        "end = time.time() + 20\nwhile zombies() and time.time() < end: time.sleep(0.01)\n"
        "zombies()",
        mode="interactive",
    )
    assert report.text == "0"


def test_a_repl_that_sends_garbage_is_told_as_such(client: FrameClient) -> None:
    find = (
        "import os, socket, time\nfor fd in range(3, 100):\n    try:\n"
        "        s = socket.socket(fileno=fd)\n    except OSError: continue\n    break\n"
    )
    report = client.run(find + "s.send(b'garbage')\ntime.sleep(60)")
    assert (report.outcome, report.header["signal"]) == ("repl_died", 9)
    assert "sent what it may not send and was ended: a packet" in report.failure["message"]
    report = client.run(find + "os.closerange(3, 1000)\ntime.sleep(60)")
    assert "closed its channel" in report.failure["message"]
    garbage = frames.encode({"type": "display", "cell": "other", "index": 0})
    report = client.run(find + f"s.send({garbage!r})\ntime.sleep(60)")
    assert "no running cell" in report.failure["message"]


def test_a_cell_that_a_dead_repl_was_sent_half_of_is_not_run(client: FrameClient) -> None:
    client.run("import os, threading\ngo = threading.Event()\nr, w = os.pipe()")
    client.run("threading.Thread(target=lambda: (os.read(r, 1), os._exit(1))).start()")
    code = client.part(b"print('ran')")
    cell = client.run("os.write(w, b'x'); import time; time.sleep(60)")
    assert cell.outcome == "repl_died"
    header: dict[str, object] = {
        "type": "cell",
        "cell": "half",
        "code": code,
        "inputs": [],
        "mode": "program",
    }
    header |= {"invocation": "inv_test", "depth": 1, "max_depth": 1, "timeout_ms": 0}
    client.send({**header, "output_limit": 0, "tools": [], "stdin": False})
    report = client.finish("half")
    assert (report.outcome, report.stdout, report.header["state_lost"]) == ("repl_died", b"", True)
    assert "before the cell began" in report.failure["message"]
    assert client.run("print('on')").stdout == b"on\n"


def test_code_that_keeps_every_descriptor_open_is_told_so(client: FrameClient) -> None:
    report = client.run(
        "import os, resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\nkept = []\n"
        "while True: kept.append(os.dup(0))"
    )
    assert report.header["errno"] == 24
    report = client.run("print(1)")
    assert (report.outcome, report.header["errno"]) == ("errored", 24)
    assert report.header["state_lost"] is True
    assert "the REPL is replaced" in report.failure["message"]
    assert client.run("print(1)").stdout == b"1\n"


def test_the_codes_processes_go_first_when_memory_is_short(client: FrameClient) -> None:
    report = client.run("open('/proc/self/oom_score_adj').read()", mode="interactive")
    assert report.text == "'500\\n'"


def test_a_pause_that_is_over_by_now_still_bounds_the_wait_for_what_it_left_unwatched() -> None:
    """Else output that came in the pause is never read, and its cell never ends."""
    waiting = Supervisor.__new__(Supervisor)
    idle = SimpleNamespace(is_sweeping=False, draining=False, next_time=lambda: None)
    vars(waiting).update(
        _reaps_on=False,
        _capture_sweep=None,
        _files=idle,
        _cell=idle,
        _link=SimpleNamespace(held_until=0.0),
        _pause_until=time.monotonic() - 1,
    )
    assert waiting._timeout(is_pausing=True) is not None
    assert waiting._timeout(is_pausing=False) is None
