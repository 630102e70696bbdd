"""Cells in a real supervisor and REPL: outcomes, compilation, output, processes, protection."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.runtime import frames, values
from tests.support.frame_client import FrameClient, Report, supervisor

GRACE = ("--grace-milliseconds", "150")


@pytest.fixture
def client(tmp_path: Path) -> Iterator[FrameClient]:
    with supervisor(tmp_path, *GRACE) as (client, _):
        client.expect("ready")
        yield client


def returned(report: Report) -> object:
    assert report.outcome == "returned", report
    assert report.value is not None
    return values.decode(report.value)


def test_ready_says_what_holds(tmp_path: Path) -> None:
    with supervisor(tmp_path) as (client, _):
        header = client.expect("ready").header
    assert header["version"] == frames.FRAME_VERSION
    assert header["protections"] == {"dumpable": True, "separate_uid": False, "filter": True}


OUTCOMES = [
    ("x = 1", "completed", ""),
    ("", "completed", ""),
    ("# nothing", "completed", ""),
    ("return 5", "returned", ""),
    ("return", "returned", ""),
    ("raise ValueError('x')", "raised", "ValueError"),
    ("if True:\n    raise ValueError('x')", "raised", "ValueError"),
    ("try:\n    raise ValueError('x')\nfinally:\n    y = 1", "raised", "ValueError"),
    (
        "from contextlib import suppress\nwith suppress(KeyError):\n    raise OSError(5, 'x')",
        "raised",
        "OSError",
    ),
    ("raise (\n    ValueError(\n        'x'))", "raised", "ValueError"),
    ("return 1\nraise ValueError('x')", "returned", ""),
    ("if False:\n    return 1\nraise ValueError('x')", "raised", "ValueError"),
    ("import asyncio\nawait asyncio.sleep(0)\nraise ValueError('x')", "raised", "ValueError"),
    ("raise ValueError", "errored", "ValueError"),
    ("raise ValueError(1 / 0)", "errored", "ZeroDivisionError"),
    ("e = ValueError()\nraise e", "errored", "ValueError"),
    ("try:\n    raise ValueError('x')\nexcept ValueError:\n    raise", "errored", "ValueError"),
    (
        "try:\n    raise ValueError('x')\nexcept ValueError as e:\n    raise e",
        "errored",
        "ValueError",
    ),
    ("assert False", "errored", "AssertionError"),
    ("def f():\n    raise ValueError('x')\nf()", "errored", "ValueError"),
    ("1 / 0", "errored", "ZeroDivisionError"),
    ("import sys; sys.exit(3)", "errored", "SystemExit"),
    ("if", "errored", "SyntaxError"),
    ("x = 1\0", "errored", "SyntaxError"),
    ("yield 1", "errored", "SyntaxError"),
    ("yield 1\nreturn 2", "errored", "SyntaxError"),
    ("return (yield)", "errored", "SyntaxError"),
    ("return open", "errored", "ValueEncodeError"),
    ("class Odd(Exception):\n    def __str__(self): raise KeyError\nraise Odd()", "raised", "Odd"),
    ("raise KeyboardInterrupt()", "raised", "KeyboardInterrupt"),
]


@pytest.mark.parametrize(("code", "outcome", "name"), OUTCOMES, ids=[row[0] for row in OUTCOMES])
def test_outcomes_are_those_of_the_table(
    client: FrameClient, code: str, outcome: str, name: str
) -> None:
    report = client.run(code)
    assert (report.outcome, report.failure.get("type_name", "")) == (outcome, name), report
    assert not report.header["state_lost"]


# Compilation

COMPILED = [
    ("for i in range(9):\n    if i == 4:\n        return i", 4),
    ("try:\n    return 1\nfinally:\n    x = 2", 1),
    ("from contextlib import suppress\nwith suppress(BaseException):\n    return 'out'", "out"),
    ("while True:\n    try:\n        return 1\n    except BaseException:\n        pass", 1),
    ("x: int = 5\nreturn x, __annotations__['x'] is int", (5, True)),
    ("from math import *\nreturn floor(pi)", 3),
    ("if True:\n    from math import *\nreturn floor(pi)", 3),
    (
        "from __future__ import annotations\ndef f(a: nothing): pass\nreturn f.__annotations__",
        {"a": "nothing"},
    ),
    ("'doc'\nreturn 1", 1),
    ("global y\ny = 3\ndef f(): return y\nreturn f()", 3),
    ("import os.path as p, json\nreturn p.basename('/a/b'), json.dumps(1)", ("b", "1")),
    ("xs = [i * 2 for i in range(3)]\nreturn xs, 'i' in globals()", ([0, 2, 4], False)),
    ("i = 7\nxs = [i for i in range(3)]\nreturn i", 7),
    ("return [y := 1, y, globals()['y']]", [1, 1, 1]),
    ("n = 2\nreturn [[n * a for a in range(b)] for b in range(3)]", [[], [0], [0, 2]]),
    ("if any((last := n) == 2 for n in range(5)):\n    return last", 2),
    (
        "class A:\n    def f(self): return super().__repr__()[:1]\nreturn A().f(), A.__qualname__",
        ("<", "A"),
    ),
    ("def fact(n): return 1 if n < 2 else n * fact(n - 1)\nreturn fact(5)", 120),
    ("x = 1\nexec('x = 2')\nreturn x, locals() is globals()", (2, True)),
    (
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    text = str(e)\nreturn text",
        "division by zero",
    ),
    ("x = 1\ndel x\nreturn 'x' in globals()", False),
    ("import asyncio\nasync def f(): return 3\nreturn await f() + asyncio.run(f())", 6),
    ("import asyncio\nasync def f(): return 3\nreturn asyncio.run(f())", 3),
    ("async def g():\n    for i in range(3): yield i\nreturn [i async for i in g()]", [0, 1, 2]),
    ("async def g():\n    for i in range(3): yield i\nasync for i in g():\n    if i: return i", 1),
    ("import asyncio\nx = [await asyncio.sleep(0, n) for n in (1, 2)]\nreturn x", [1, 2]),
    ("f = lambda a=1: a\nreturn f()", 1),
    ("import hutch\nreturn type(hutch.current()).__name__", "Current"),
]


@pytest.mark.parametrize(("code", "value"), COMPILED, ids=[row[0] for row in COMPILED])
def test_a_top_level_return_is_the_languages_own(
    client: FrameClient, code: str, value: object
) -> None:
    assert returned(client.run(code)) == value


def test_a_cell_keeps_what_it_had_assigned(client: FrameClient) -> None:
    assert client.run("a = 1\nb = 2\n1 / 0\nc = 3").outcome == "errored"
    assert returned(client.run("d = 4\nreturn a + b + d, 'c' in globals()")) == (7, False)
    assert client.run("async def f(): return 9\nawait f()").outcome == "completed"
    assert returned(client.run("return _")) == 9


def test_a_trailing_expression_is_bound_and_not_printed_in_a_program(client: FrameClient) -> None:
    report = client.run("2 + 3")
    assert (report.outcome, report.stdout) == ("completed", b"")
    assert returned(client.run("return _")) == 5
    report = client.run("if False:\n    return 1\n_ * 2")
    assert report.outcome == "completed"
    assert returned(client.run("return _")) == 10


def test_a_traceback_has_the_codes_own_lines_only(client: FrameClient) -> None:
    client.run("def f():\n    raise ValueError('deep')  # here")
    report = client.run("import asyncio\nasync def g():\n    f()\nawait g()")
    text = report.failure["traceback"]
    assert text.startswith("Traceback (most recent call last):\n")
    assert 'File "<cell 2>", line 4, in <module>\n    await g()' in text
    assert "File \"<cell 1>\", line 2, in f\n    raise ValueError('deep')  # here" in text
    assert "<hutch>" not in text
    report = client.run("\n\nx = = 1")
    assert 'File "<cell 3>", line 3\n    x = = 1\n' in report.failure["traceback"]


def test_the_codes_own_traceback_has_lines_also_before_anything_was_loaded(
    client: FrameClient,
) -> None:
    report = client.run(
        "import traceback\ntry:\n    1 / 0\nexcept Exception:\n    traceback.print_exc()"
    )
    assert b"    1 / 0\n" in report.stderr


def test_an_oserror_tells_its_number(client: FrameClient) -> None:
    assert client.run("open('/nowhere')").header["errno"] == 2
    assert client.run("raise OSError()").header["errno"] is None


# Inputs and values


def test_inputs_are_bound_by_name(client: FrameClient) -> None:
    big = list(range(100_000))
    inputs = {"a": values.encode((1, {2})), "big": values.encode(big)}
    report = client.run("return a, big", inputs=inputs)
    assert returned(report) == ((1, {2}), big)


def test_program_mode_has_the_bare_name_invoke(client: FrameClient) -> None:
    assert returned(client.run("import hutch\nreturn invoke == hutch.invoke")) is True
    report = client.run("import hutch\nc = hutch.current()\nreturn c.depth, c.max_depth", depth=3)
    assert returned(report) == (3, 4)


def test_a_value_over_a_frame_arrives_whole(client: FrameClient) -> None:
    assert returned(client.run("return b'x' * 5_000_000")) == b"x" * 5_000_000


# Output


def test_case_12_both_streams_are_drained_at_once(client: FrameClient) -> None:
    report = client.run(
        "import os\nfor fd in (2, 1):\n    left = 10 * 1024 * 1024\n"
        "    while left:\n        left -= os.write(fd, b'x' * min(left, 1 << 20))"
    )
    assert len(report.stdout) == len(report.stderr) == 10 * 1024 * 1024
    assert report.outcome == "completed"


def test_output_of_subprocesses_and_print_stays_in_order(client: FrameClient) -> None:
    report = client.run(
        "import os, subprocess\nprint('a')\nos.write(1, b'b\\n')\n"
        "subprocess.run(['echo', 'c'])\nprint('d', end='')"
    )
    assert report.stdout == b"a\nb\nc\nd"


def test_bytes_are_passed_on_as_they_are(client: FrameClient) -> None:
    report = client.run("import sys\nsys.stdout.buffer.write(bytes(range(256)))\nprint('é')")
    assert report.stdout == bytes(range(256)) + "é\n".encode()


def test_each_cell_has_offsets_of_its_own(client: FrameClient) -> None:
    assert client.run("print('one')").stdout == b"one\n"
    assert client.run("print('two')").stdout == b"two\n"


def test_without_credit_no_more_than_the_window_comes(client: FrameClient) -> None:
    client.gives_credit = False
    cell = client.start("import sys\nsys.stdout.write('x' * 6_000_000)\nsys.stdout.flush()")
    client.expect("started")
    window = frames.CREDIT_WINDOW_BYTES
    received = client.output.setdefault((cell, "stdout"), bytearray())
    client.send({"type": "interrupt", "cell": "another"})
    while len(received) < window - frames.OUTPUT_CHUNK_BYTES:
        client.receive_output()
    assert len(received) <= window + frames.OUTPUT_CHUNK_BYTES
    client.gives_credit = True
    client.credit(cell, "stdout")
    assert len(client.finish(cell).stdout) == 6_000_000


def test_case_28_output_over_its_limit_is_cut_cleanly(client: FrameClient) -> None:
    report = client.run("while True:\n    print('0123456789')", output_limit=100_000)
    assert report.outcome == "interrupted"
    assert report.header["output_cut"] is True
    assert report.stdout == (b"0123456789\n" * 10_000)[:100_000]
    assert returned(client.run("return 1")) == 1


def test_case_13_input_says_that_there_is_no_stdin(client: FrameClient) -> None:
    report = client.run("input('name? ')")
    assert (report.outcome, report.failure["type_name"]) == ("errored", "EOFError")
    assert "no stdin" in report.failure["message"]
    assert returned(client.run("import sys\nreturn sys.stdin.read()")) == ""


def test_case_46_text_is_utf_8(client: FrameClient) -> None:
    assert client.run("print('é')").stdout == "é\n".encode()


def test_case_1_many_cells_back_to_back_end_each_once(client: FrameClient) -> None:
    for number in range(50):
        assert client.run(f"print({number})").stdout == f"{number}\n".encode()


# Stopping


def test_an_interrupt_is_a_keyboard_interrupt_and_keeps_the_namespace(client: FrameClient) -> None:
    cell = client.start("x = 5\nprint('go')\nwhile True: pass")
    client.wait_output(cell, b"go\n")
    client.send({"type": "interrupt", "cell": cell})
    report = client.finish(cell)
    assert (report.outcome, report.failure["type_name"]) == ("interrupted", "KeyboardInterrupt")
    assert not report.header["state_lost"]
    assert returned(client.run("return x")) == 5


def test_a_cell_over_its_time_is_timed_out(client: FrameClient) -> None:
    report = client.run("import time\ntime.sleep(60)", timeout_ms=200)
    assert report.outcome == "timed_out"
    assert not report.header["state_lost"]


def test_code_that_swallows_interrupts_loses_its_repl(client: FrameClient) -> None:
    report = client.run(
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass",
        timeout_ms=100,
    )
    assert (report.outcome, report.header["state_lost"]) == ("timed_out", True)
    report = client.run("return 'fresh'")
    assert returned(report) == "fresh"
    assert not report.header["state_lost"]


def test_case_6_a_child_that_ignores_signals_is_killed_and_the_namespace_survives(
    client: FrameClient,
) -> None:
    cell = client.start(
        "import subprocess, sys\nx = 1\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal, time\\n"
        "for s in (2, 15): signal.signal(s, signal.SIG_IGN)\\nprint(0, flush=True)\\n"
        "time.sleep(60)'])\n"
        "while True:\n    try:\n        child.wait()\n        break\n"
        "    except KeyboardInterrupt:\n        pass"
    )
    client.wait_output(cell, b"0\n")
    client.send({"type": "interrupt", "cell": cell})
    report = client.finish(cell)
    assert not report.header["state_lost"], report
    assert returned(client.run("return x, child.returncode")) == (1, -9)


def test_case_35_a_timeout_ends_the_whole_tree(client: FrameClient) -> None:
    cell = client.start(
        "import subprocess\n"
        "subprocess.run(['sh', '-c', 'sleep 999 & setsid sleep 998 & echo up; wait'])",
        timeout_ms=400,
    )
    report = client.finish(cell)
    assert report.outcome == "timed_out"
    assert report.stdout == b"up\n"
    assert processes_named(client, "sleep") == []


def test_case_36_daemons_of_a_killed_cell_are_gone(client: FrameClient) -> None:
    cell = client.start(
        "import subprocess\nsubprocess.run(['sh', '-c', "
        '\'trap "" TERM INT; (setsid sh -c "trap \\\\"\\\\" TERM; sleep 997" &) ; echo up\'])\n'
        "while True: pass"
    )
    client.wait_output(cell, b"up\n")
    client.send({"type": "interrupt", "cell": cell})
    report = client.finish(cell)
    assert report.outcome == "interrupted"
    assert report.header["killed"] >= 1
    assert processes_named(client, "sleep") == []


def test_a_background_process_is_counted_and_does_not_hold_the_reply(client: FrameClient) -> None:
    report = client.run("import subprocess\nchild = subprocess.Popen(['sleep', '996'])")
    assert (report.outcome, report.header["background"]) == ("completed", 1)
    assert processes_named(client, "sleep") == ["sleep"]


def test_a_fork_and_exit_bomb_is_ended(client: FrameClient) -> None:
    cell = client.start(
        "import os, signal, time\nif os.fork() == 0:\n"
        "    for number in (2, 15): signal.signal(number, signal.SIG_IGN)\n"
        "    print('on', flush=True)\n    end = time.time() + 20\n"
        "    while time.time() < end:\n        time.sleep(0.001)\n"
        "        if os.fork(): os._exit(0)\n    os._exit(0)\ntime.sleep(60)"
    )
    client.wait_output(cell, b"on\n")
    client.send({"type": "interrupt", "cell": cell})
    assert client.finish(cell).header["killed"] >= 1
    assert client.run("pass").header["background"] == 0


def processes_named(client: FrameClient, name: str) -> object:
    """Lists, from inside, the live processes below this REPL's supervisor with a name."""
    return returned(
        client.run(
            "import os\n"
            "def parent(pid):\n"
            "    return int(open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[1])\n"
            "def state(pid):\n"
            "    return open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[0]\n"
            "found = []\n"
            "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
            "    try:\n"
            "        name = open(f'/proc/{pid}/comm').read().strip()\n"
            f"        if name != {name!r} or state(pid) == 'Z': continue\n"
            "        at = int(pid)\n"
            "        while at > 1 and at != os.getppid(): at = parent(at)\n"
            "        if at == os.getppid(): found.append(name)\n"
            "    except OSError: pass\n"
            "return found"
        )
    )


# Death of the REPL


@pytest.mark.parametrize(
    ("code", "exit_code", "signal"),
    [
        ("import os; os._exit(3)", 3, None),
        ("import os; os.kill(os.getpid(), 9)", None, 9),
        ("import ctypes; ctypes.string_at(0)", None, 11),
        ("import os; os.abort()", None, 6),
        ("import os; os.closerange(3, 1000)", None, 9),
    ],
)
def test_the_death_of_the_repl_is_reported_with_evidence(
    client: FrameClient, code: str, exit_code: int | None, signal: int | None
) -> None:
    report = client.run(f"print('before')\n{code}\nimport time\ntime.sleep(60)")
    assert report.outcome == "repl_died"
    assert (report.header["exit_code"], report.header["signal"]) == (exit_code, signal)
    assert report.header["state_lost"] is True
    assert report.stdout.startswith(b"before\n")
    assert returned(client.run("return 1")) == 1


def test_processes_of_a_repl_that_died_are_ended(client: FrameClient) -> None:
    report = client.run("import os, subprocess\nsubprocess.Popen(['sleep', '995'])\nos._exit(1)")
    assert (report.outcome, report.header["killed"]) == ("repl_died", 1)


# Forks


def test_a_forked_child_never_speaks_for_the_repl(client: FrameClient) -> None:
    report = client.run(
        "import os\npid = os.fork()\nif pid == 0:\n    print('child', flush=True)\n"
        "else:\n    os.waitpid(pid, 0)\n    print('parent')\nreturn pid > 0"
    )
    assert returned(report) is True
    assert report.stdout == b"child\nparent\n"


def test_a_forked_child_cannot_call(client: FrameClient) -> None:
    report = client.run(
        "import os\nif os.fork() == 0:\n    try:\n        invoke(program='1')\n"
        "    except Exception as e:\n        print(type(e).__name__, flush=True)\n"
        "    os._exit(0)\nos.wait()"
    )
    assert report.stdout == b"HutchError\n"


def test_case_14_a_pool_of_forked_processes_finds_functions_of_cells(client: FrameClient) -> None:
    report = client.run(
        "import multiprocessing\ndef f(x): return x * 2\n"
        "context = multiprocessing.get_context('fork')\n"
        "with context.Pool(2) as pool:\n    result = pool.map(f, [1, 2])\nreturn result"
    )
    assert returned(report) == [2, 4]


# Protection


def test_case_s16_the_supervisors_proc_files_are_closed(client: FrameClient) -> None:
    report = client.run(
        "import os\nresult = {}\n"
        "for name in ('mem', 'fd/1', 'environ', 'maps', 'exe'):\n"
        "    try:\n        with open(f'/proc/{os.getppid()}/{name}', 'rb') as f: f.read(1)\n"
        "        result[name] = 'open'\n"
        "    except OSError as e:\n        result[name] = e.errno\n"
        "return result, os.getuid()"
    )
    result = returned(report)
    assert isinstance(result, tuple)
    if result[1] == 0:
        pytest.skip("root may open everything; the drivers' tests check this with other uids")
    assert set(result[0].values()) == {13}


@pytest.mark.parametrize(
    "call",
    [
        "os.kill(os.getppid(), 0)",
        "resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE)",
        "os.sched_setaffinity(os.getppid(), {0})",
        "os.setpriority(os.PRIO_PROCESS, os.getppid(), 5)",
        "os.setpriority(os.PRIO_USER, 0, 5)",
        "os.pidfd_open(os.getppid())",
        "libc('ptrace', 16, os.getppid(), 0, 0)",
        "libc('unshare', 0x10000000)",
        "libc('process_vm_readv', os.getppid(), 0, 0, 0, 0, 0)",
        "libc('syscall', 312 if machine == 'x86_64' else 272, 1, 1, 0, 0, 0)",
        "libc('syscall', 425, 1, 0)",
        "libc('mount', 0, 0, 0, 0, 0)",
    ],
)
def test_the_filter_denies_what_is_aimed_at_the_supervisor(client: FrameClient, call: str) -> None:
    report = client.run(
        "import ctypes, os, resource\nmachine = os.uname().machine\n"
        "def libc(name, *args):\n"
        "    library = ctypes.CDLL(None, use_errno=True)\n"
        "    if getattr(library, name)(*args) < 0:\n"
        "        raise OSError(ctypes.get_errno(), name)\n"
        f"{call}"
    )
    assert (report.outcome, report.header["errno"]) == ("errored", 1), report


def test_the_filter_leaves_the_codes_own_processes_alone(client: FrameClient) -> None:
    report = client.run(
        "import os, subprocess, threading, signal\n"
        "child = subprocess.Popen(['sleep', '60'])\nos.kill(child.pid, signal.SIGTERM)\n"
        "t = threading.Thread(target=print, args=('thread',)); t.start(); t.join()\n"
        "return child.wait()"
    )
    assert returned(report) == -15
    assert report.stdout == b"thread\n"


def test_the_repl_has_no_descriptor_but_its_own(client: FrameClient) -> None:
    report = client.run(
        "import os\nreturn sorted(os.readlink(f'/proc/self/fd/{fd}').split(':')[0]"
        " for fd in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{fd}'))"
    )
    found = returned(report)
    assert isinstance(found, list)
    assert found.count("socket") <= 1
    assert found[0] == "/dev/null"


def test_standard_output_can_be_opened_by_its_name(client: FrameClient) -> None:
    report = client.run("with open('/dev/stdout', 'w') as f: f.write('named')")
    assert report.stdout == b"named", report


@pytest.mark.parametrize(
    "frame",
    [
        b"garbage",
        frames.encode({"type": "ready"}),
        frames.encode({"type": "output", "cell": "x"}, b"x"),
        frames.encode({"type": "done", "cell": "another", "outcome": "completed"}),
        frames.encode({"type": "done", "cell": "CELL", "outcome": "timed_out"}),
        frames.encode({"type": "done", "cell": "CELL"}),
        frames.encode({"type": "done", "cell": "CELL", "outcome": "errored", "failure": 5}),
        frames.encode({"type": "call", "call": "x" * 100, "op": "spawn"}),
        frames.encode({"type": "call", "call": 5, "op": "spawn"}),
    ],
)
def test_a_repl_that_breaks_its_protocol_is_ended(client: FrameClient, frame: bytes) -> None:
    report = client.run(
        "import os, socket, stat, time\n"
        "for fd in range(3, 100):\n"
        "    try:\n        s = socket.socket(fileno=fd)\n    except OSError: continue\n"
        f"    s.send({frame!r})\ntime.sleep(60)",
        cell="CELL",
    )
    assert (report.outcome, report.header["signal"]) == ("repl_died", 9)
    assert returned(client.run("return 1")) == 1


def test_a_cell_with_a_malformed_input_is_an_error_of_the_cell(client: FrameClient) -> None:
    report = client.run("pass", inputs={"x": b'{"$nothing": 1}'})
    assert (report.outcome, report.failure["type_name"]) == ("errored", "ValueDecodeError")


# The end


def test_shutdown_ends_everything_and_exits_0(tmp_path: Path) -> None:
    with supervisor(tmp_path) as (client, process):
        client.expect("ready")
        client.run("import subprocess\nsubprocess.Popen(['sleep', '994'])")
        client.send({"type": "shutdown"})
        assert process.wait(20) == 0


def test_a_host_that_breaks_the_protocol_ends_the_supervisor(tmp_path: Path) -> None:
    def break_it() -> None:
        with supervisor(tmp_path) as (client, process):
            client.expect("ready")
            client.send({"type": "nonsense"})
            assert process.wait(20) == 70

    with pytest.raises(AssertionError, match="supervisor: FrameError"):
        break_it()


def test_a_report_is_json_of_known_keys(client: FrameClient) -> None:
    header = client.run("pass").header
    names = (
        "type cell outcome value failure stdout_bytes stderr_bytes killed background state_lost "
        "output_cut errno exit_code signal text"
    )
    assert sorted(header) == sorted(names.split())
    json.dumps(header)


def test_an_interrupt_ends_a_cell_that_awaits(client: FrameClient) -> None:
    cell = client.start("import asyncio\nx = 1\nprint('go')\nawait asyncio.sleep(60)")
    client.wait_output(cell, b"go\n")
    client.send({"type": "interrupt", "cell": cell})
    report = client.finish(cell)
    assert (report.outcome, report.failure["type_name"]) == ("interrupted", "KeyboardInterrupt")
    assert returned(client.run("return x")) == 1


def test_packages_and_sources_are_found_after_an_idle_start_too(client: FrameClient) -> None:
    # The REPL imports while it idles; what code sees must not depend on how long that was.
    cell = client.start(
        "import sys\nimport inspect\ndef f():\n    return 1\n"
        "return inspect.getsource(f), 'site' in sys.modules or len(sys.meta_path)"
    )
    text, _ = typing.cast("tuple[str, object]", returned(client.finish(cell)))
    assert text == "def f():\n    return 1\n"
