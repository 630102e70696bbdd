"""Many cells in one REPL: what is kept, shown, printed late, and remembered of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.runtime import frames
from tests.support.frame_client import FrameClient, Report, supervisor


@pytest.fixture
def client(tmp_path: Path) -> Iterator[FrameClient]:
    with supervisor(tmp_path, "--grace-milliseconds", "150") as (client, _):
        client.expect("ready")
        yield client


def run(client: FrameClient, code: str, **options: object) -> Report:
    return client.run(code, mode="interactive", **options)


def wait_for(client: FrameClient, cell: str, text: bytes) -> None:
    """Waits until a cell, which may have ended, has printed exactly this."""
    client.wait_output(cell, text)


# What a value shows


def test_a_trailing_value_is_told_as_text_and_kept(client: FrameClient) -> None:
    assert run(client, "x = {'a': 1}\nx").text == "{'a': 1}"
    assert run(client, "_['a']").text == "1"
    assert run(client, "None").text is None
    assert run(client, "_").text == "1"
    assert run(client, "x = 2").text is None
    assert run(client, "if False:\n    return 1\n'é' * 2").text == "'éé'"
    assert client.run("5", mode="agent").text is None
    assert client.run("5").text is None
    report = run(client, "return 5")
    assert (report.outcome, report.text, report.value) == ("returned", None, b"5")


def test_a_long_text_is_cut_between_characters(client: FrameClient) -> None:
    text = run(client, "'é' * 100_000").text
    assert text == "'" + "é" * 32_767
    assert run(client, "'a' + chr(0xd800)").text == "'a\\ud800'"


def test_a_repr_that_fails_is_the_cells_error(client: FrameClient) -> None:
    report = run(client, "class A:\n    def __repr__(self):\n        1 / 0  # here\nA()")
    assert (report.outcome, report.failure["type_name"]) == ("errored", "ZeroDivisionError")
    assert "1 / 0  # here" in report.failure["traceback"]
    assert "<hutch>" not in report.failure["traceback"]


RICH = """
class Rich:
    def __repr__(self): return "plain"
    def _repr_html_(self): return "<b>é</b>"
    def _repr_png_(self): return b"\\x89PNG"
    def _repr_jpeg_(self): return "anBn"
    def _repr_json_(self): return {"a": [1]}
    def _repr_svg_(self): return None
    def _repr_latex_(self): raise KeyError("x")
    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"text/plain": "no", "application/x-own": "own"}, {}
"""


def test_a_value_is_shown_in_the_forms_of_its_class(client: FrameClient) -> None:
    client.run(RICH)
    report = run(client, "Rich()")
    assert report.text == "plain"
    [(cell, index, is_result, data)] = client.displays
    assert (cell, index, is_result) == (report.header["cell"], 0, True)
    assert json.loads(data.pop("application/json")) == {"a": [1]}
    assert data == {
        "application/x-own": b"own",
        "image/png": b"\x89PNG",
        "image/jpeg": b"jpg",
        "text/html": "<b>é</b>".encode(),
    }
    assert b"_repr_latex_ of Rich failed: KeyError" in report.stderr
    assert run(client, "Rich").text == "<class '__main__.Rich'>"
    assert len(client.displays) == 1


def test_code_shows_values_itself(client: FrameClient) -> None:
    report = client.run(RICH + "import hutch\ndisplay(Rich(), 5)\nhutch.display([1])\nreturn 1")
    assert report.outcome == "returned"
    assert [shown[1:3] for shown in client.displays] == [(0, False), (1, False), (2, False)]
    texts = [shown[3]["text/plain"] for shown in client.displays]
    assert texts == [b"plain", b"5", b"[1]"]
    assert "text/html" in client.displays[0][3]
    client.run("display('again')")
    assert client.displays[-1][1] == 0


def test_what_a_cell_shows_is_bounded(client: FrameClient) -> None:
    report = client.run("for i in range(300): display(i)")
    assert (report.outcome, len(client.displays)) == ("errored", 256)
    assert "at most 256" in report.failure["message"]
    report = client.run("display('x' * 2000)", output_limit=1000)
    assert report.failure["type_name"] == "PayloadTooLargeError"
    assert len(client.displays) == 256


def test_a_large_picture_arrives_whole(client: FrameClient) -> None:
    run(client, "class P:\n    def _repr_png_(self): return b'p' * 3_000_000\nP()")
    assert client.displays[0][3] == {"image/png": b"p" * 3_000_000}


def test_a_thread_of_an_ended_cell_can_show_nothing(client: FrameClient) -> None:
    code = (
        "import threading, sys\ngo = threading.Event()\ndef late():\n    go.wait()\n"
        "    try:\n        display(1)\n    except Exception as e:\n        print(e)\n"
        "t = threading.Thread(target=late); t.start()"
    )
    first = client.run(code).header["cell"]
    client.run("go.set(); t.join()")
    wait_for(client, first, b"nothing can be shown: the cell has ended\n")
    assert client.displays == []


def test_case_16_every_open_figure_is_shown_once(client: FrameClient) -> None:
    pytest.importorskip("matplotlib")
    code = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.savefig('f.png')\nplt.figure()"
    report = run(client, code)
    assert report.stderr == b""
    assert [set(shown[3]) for shown in client.displays] == [{"image/png", "text/plain"}] * 2
    assert client.displays[0][3]["image/png"].startswith(b"\x89PNG")
    report = run(client, "plt.plot([1]); plt.show()\nprint(plt.get_fignums())")
    assert (report.stdout, report.stderr, len(client.displays)) == (b"[]\n", b"", 3)
    assert run(client, "plt.plot([1])\n1 / 0").outcome == "errored"
    run(client, "pass")
    assert len(client.displays) == 4
    assert client.run("print(plt.get_backend().lower())").stdout == b"agg\n"


def test_matplotlib_is_not_imported_for_code_that_does_not(client: FrameClient) -> None:
    report = run(client, "import os, sys\n'matplotlib' in sys.modules, os.environ['MPLBACKEND']")
    assert report.text == "(False, 'Agg')"


# Output that comes late


def test_case_9_a_thread_prints_into_the_cell_that_started_it(client: FrameClient) -> None:
    first = client.run(
        "import sys, threading\nstep = threading.Semaphore(0)\nseen = threading.Semaphore(0)\n"
        "def inner():\n    print('inner')\n    seen.release()\n"
        "def late():\n    for i in range(3):\n        step.acquire()\n"
        "        print('late', i)\n        sys.stderr.write('e')\n"
        "        sys.stdout.buffer.write(b'raw\\n'); sys.stdout.flush()\n"
        "        seen.release()\n"
        "    threading.Thread(target=inner).start()\n"
        "t = threading.Thread(target=late); t.start()\nprint('first')"
    ).header["cell"]
    code = "for i in range(3):\n    print('own', i)\n    step.release(); seen.acquire()\n"
    report = client.run(code + "    print('after', i)\nseen.acquire()\nt.join()\nprint('end')")
    wait_for(
        client, first, b"first\n" + b"".join(b"late %d\nraw\n" % i for i in range(3)) + b"inner\n"
    )
    assert report.stdout == b"".join(b"own %d\nafter %d\n" % (i, i) for i in range(3)) + b"end\n"
    while bytes(client.output[first, "stderr"]) != b"eee":
        client.receive_output()
    assert report.stderr == b""


def test_a_background_process_prints_on_into_its_cell(client: FrameClient) -> None:
    first = client.run(
        "import subprocess\nchild = subprocess.Popen(['sh', '-c', 'read x; echo got $x; read y'],"
        " stdin=subprocess.PIPE, bufsize=0)\nprint('started')"
    )
    assert first.header["background"] == 1
    report = client.run("child.stdin.write(b'it\\n'); print('second')")
    wait_for(client, first.header["cell"], b"started\ngot it\n")
    assert report.stdout == b"second\n"


def test_late_output_needs_credit_and_ends_at_the_cells_limit(client: FrameClient) -> None:
    client.gives_credit = False
    code = "import subprocess\nchild = subprocess.Popen(['head', '-c', '20000000', '/dev/zero'])"
    cell = client.run(code).header["cell"]
    received = client.output.setdefault((cell, "stdout"), bytearray())
    window = frames.CREDIT_WINDOW_BYTES
    while len(received) < window - frames.OUTPUT_CHUNK_BYTES:
        client.receive_output()
    assert len(client.run("1").stdout) == 0
    assert len(received) <= window + frames.OUTPUT_CHUNK_BYTES
    client.gives_credit = True
    client.credit(cell, "stdout")
    while len(received) < 20_000_000:
        client.receive_output()
    code = "child = subprocess.Popen('read x; head -c 900000 /dev/zero', shell=True, stdin=-1)"
    cell = client.run(code, output_limit=1000).header["cell"]
    report = client.run("child.communicate(b'go\\n')\nchild.returncode", mode="interactive")
    assert report.text == "0"  # what is over the limit is read all the same
    while len(client.output.get((cell, "stdout"), b"")) < 1000:
        client.receive_output()
    assert len(client.output[cell, "stdout"]) == 1000


def test_pipes_of_ended_cells_are_bounded(client: FrameClient) -> None:
    code = "import os\nkept = [] if 'kept' not in globals() else kept\nkept.append(os.dup(1))"
    first = client.run(code).header["cell"]
    for _ in range(140):
        assert client.run(code).outcome == "completed"
    assert client.run("os.write(kept[0], b'x')").header["errno"] == 32
    assert (first, "stdout") not in client.output
    cell = client.run("os.write(kept[-1], b'x')").header["cell"]
    assert (cell, "stdout") not in client.output


def test_the_codes_streams_are_the_same_objects_in_every_cell(client: FrameClient) -> None:
    client.run("import sys, logging\nout = sys.stdout\nlogging.basicConfig()\nsys.stdout.close()")
    report = client.run("logging.warning('late'); print('on', sys.stderr is sys.__stderr__)")
    assert (report.stdout, report.stderr) == (b"on True\n", b"WARNING:root:late\n")


# Tasks


def test_case_15_asyncio_run_and_top_level_await_in_one_cell(client: FrameClient) -> None:
    code = "import asyncio\nasync def f(x): return x\n(asyncio.run(f(1)), await f(2))"
    assert run(client, code).text == "(1, 2)"
    report = run(client, "t = asyncio.create_task(f(3), name='left')\nawait asyncio.sleep(0)")
    assert report.stderr == b""
    code = (
        "async def g():\n    try:\n        await asyncio.sleep(60)\n"
        "    finally:\n        print('cancelled')\n"
        "t = asyncio.create_task(g(), name='left')\nawait asyncio.sleep(0)"
    )
    report = run(client, code)
    assert report.stderr == b"still pending, waiting for the next cell that awaits: left\n"
    assert run(client, "await asyncio.sleep(0)\nt.done()").text == "False"
    report = run(client, "await asyncio.sleep(0)\nreturn 1")
    assert (report.outcome, report.stdout) == ("returned", b"cancelled\n")
    report = client.run(code + "\nawait asyncio.sleep(0)")
    assert report.stdout == b"cancelled\n"
    assert report.stderr == b"still pending, cancelled: left\n"


def test_a_task_of_one_cell_is_awaited_in_another(client: FrameClient) -> None:
    code = "import asyncio\ne = asyncio.Event()\nt = asyncio.create_task(e.wait())\nawait f()"
    run(client, "async def f(): pass")
    run(client, code)
    assert run(client, "e.set()\nawait t").text == "True"


# History


def test_the_history_has_code_output_and_error(client: FrameClient) -> None:
    run(client, "print('one')\nimport os; os.system('echo two; echo three >&2')")
    run(client, "1 / 0")
    report = run(client, "[(h.code[:8], sorted(h.output.split()), h.error) for h in __history__]")
    assert report.text is not None
    entries = eval(report.text)
    assert entries[0] == ("print('o", ["one", "three", "two"], None)
    assert entries[1][:2] == ("1 / 0", [])
    assert "ZeroDivisionError" in entries[1][2]
    assert len(entries) == 3
    assert run(client, "__history__[0].output_cut, len(__history__)").text == "(False, 4)"
    run(client, "print('x' * 5_000_000)")
    text = run(client, "h = __history__[-2]\nlen(h.output), h.output_cut").text
    assert text == f"({4 * 1024 * 1024}, True)"


# Errors


def test_a_raise_beside_a_handler_that_raises_again_counts_as_raised(client: FrameClient) -> None:
    tail = "except (KeyError, json.JSONDecodeError):\n    raise"
    report = client.run(f"import json\ntry:\n    raise ValueError('x')\n{tail}")
    assert report.outcome == "raised"
    report = client.run(f"try:\n    raise KeyError('x')\n{tail}")
    assert report.outcome == "errored"
    report = client.run(f"try:\n    1 / 0\n{tail}\nfinally:\n    raise ValueError('x')")
    assert report.outcome == "raised"


def test_chained_and_grouped_exceptions_show_the_codes_own_lines(client: FrameClient) -> None:
    client.run("def deep():\n    raise KeyError('first')  # here")
    report = client.run("try:\n    deep()\nexcept KeyError as e:\n    raise OSError(7, 'x') from e")
    trace = report.failure["traceback"]
    assert "raise KeyError('first')  # here" in trace
    assert "direct cause" in trace
    assert "raise OSError(7, 'x') from e" in trace
    assert report.header["errno"] == 7
    assert "<hutch>" not in trace
    code = "import asyncio\nasync def f():\n    deep()\n"
    code += "async with asyncio.TaskGroup() as group:\n    group.create_task(f())"
    trace = client.run(code).failure["traceback"]
    assert "raise KeyError('first')  # here" in trace
    assert "<hutch>" not in trace


# Processes


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_case_14_spawned_processes_find_what_cells_define(client: FrameClient, method: str) -> None:
    client.run("import math\nFACTOR = 3\nbox = list()\ndef f(x): return math.floor(x * FACTOR)")
    client.run("def g(x): return box")
    client.run("print('once')\nlost = eval('lambda x: x')\nlost.__qualname__ = 'lost'")
    report = run(
        client,
        "import multiprocessing, tempfile\ntempfile.tempdir = '.'\n"
        f"with multiprocessing.get_context({method!r}).Pool(2) as pool:\n"
        "    found = [pool.map(f, [1, 2])]\n"
        "    for function in (g, lost):\n"
        "        try:\n            pool.map(function, [1])\n"
        "        except Exception as e:\n            found.append(str(e)[:40])\n"
        "found",
        timeout_ms=20_000,
    )
    assert report.stdout == b""
    assert report.text == (
        "[[3, 6], \"name 'box' is not defined\", \"a spawned process has no 'lost': of cell\"]"
    )
