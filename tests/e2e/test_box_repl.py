"""What a cell means, seen by a client: interrupts, and output that comes after a cell's end."""

from __future__ import annotations

import hutch


def test_case_5_a_client_interrupts_a_loop_of_children(client: hutch.Client) -> None:
    with client.sandbox() as box:
        cell = box.submit(
            "x = 5\nimport subprocess\nprint('go', flush=True)\n"
            "for i in range(60): subprocess.run(['sleep', '1'])"
        )
        next(cell.output())
        cell.interrupt()
        result = cell.result(30)
        assert (result.outcome, result.state_lost) == ("interrupted", False)
        assert result.failure is not None
        assert result.failure.type_name == "KeyboardInterrupt"
        assert box.run("x").text == "5"


def test_case_6_a_client_interrupts_a_child_that_ignores_it(client: hutch.Client) -> None:
    with client.sandbox() as box:
        cell = box.submit(
            "x = 5\nimport subprocess, sys\n"
            "subprocess.run([sys.executable, '-c', 'import signal, time\\n"
            "for s in (2, 15): signal.signal(s, signal.SIG_IGN)\\nprint(0, flush=True)\\n"
            "time.sleep(60)'])"
        )
        next(cell.output())
        cell.interrupt()
        result = cell.result(30)
        assert (result.outcome, result.state_lost) == ("interrupted", False)
        # What `run` gave up on is the code's own child; the code may still have to wait for it.
        left = (
            "import os\ntry:\n    while os.waitpid(-1, 0)[0]: pass\n"
            "except ChildProcessError: pass\n"
            "x, {int(p) for p in os.listdir('/proc') if p.isdigit()} - {1, os.getpid()}"
        )
        assert box.run(left).text == "(5, set())"


def test_case_9_late_output_reaches_a_client_as_that_of_its_own_cell(client: hutch.Client) -> None:
    with client.sandbox() as box:
        first = box.run(
            "import threading\ngo = threading.Event()\ndef late():\n    go.wait()\n"
            "    print('late')\nt = threading.Thread(target=late); t.start()\nprint('first')"
        )
        assert first.stdout == "first\n"
        assert box.run("print('second')\ngo.set(); t.join()").stdout == "second\n"
        box.run("pass")
        seen = b""
        for chunk in box.read_output(first.cell_id, follow=True):
            seen += chunk.data
            if seen.endswith(b"late\n"):
                break
        assert seen == b"first\nlate\n"
