"""`hutch shell` and `hutch run --stdin` as processes, one of them at a terminal."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests.support.cli import SECONDS, Cli, command_line
from tests.support.stack import Stack


@pytest.fixture
def cli(shared_stack: Stack) -> Iterator[Cli]:
    with command_line(shared_stack.target) as found:
        yield found


class Terminal:
    """A person at a terminal that runs a command."""

    def __init__(self, cli: Cli, *words: str) -> None:
        self.descriptor, inner = pty.openpty()
        environment = {**cli.environment, "TERM": "dumb", "XDG_STATE_HOME": str(cli.folder)}
        self.process = subprocess.Popen(
            cli.command(*words),
            stdin=inner,
            stdout=inner,
            stderr=inner,
            cwd=cli.folder,
            env=environment,
            start_new_session=True,
        )
        os.close(inner)
        self.seen = ""

    def type(self, text: str) -> None:
        """Types."""
        os.write(self.descriptor, text.encode())

    def wait_for(self, text: str) -> str:
        """Reads until something is shown that was not shown before; what came up to it."""
        while text not in self.seen:
            data = os.read(self.descriptor, 4096)
            self.seen += data.decode("utf-8", "replace")
        before, _, self.seen = self.seen.partition(text)
        return before

    def close(self) -> int:
        """Waits for the command's end."""
        code = self.process.wait(SECONDS)
        os.close(self.descriptor)
        return code


def test_a_script_is_read_cell_by_cell(cli: Cli) -> None:
    script = (
        "def f(n):\n"
        "    return n * 2\n"
        "\n"
        "print(f(2))\n"
        "class Page:\n"
        "    def _repr_html_(self): return '<b>page</b>'\n"
        "\n"
        "Page()\n"
        "f(21)\n"
    )
    done = cli.run("shell", "--out", "shown", stdin=script.encode())
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "4"
    assert lines[-1] == "42"
    assert "shown/display-001.html" in done.stderr
    assert (cli.folder / "shown" / "display-001.html").read_text() == "<b>page</b>"
    (listed,) = [
        item for item in cli.json("ps")["invocations"] if item["invocation_id"] in done.stderr
    ] or cli.json("ps")["invocations"][:1]
    assert listed["mode"] == "interactive"
    assert listed["ending"]["kind"] == "cancelled"
    assert cli.run("logs", listed["invocation_id"]).stdout.startswith("4\n")
    story = cli.run("story", listed["invocation_id"]).stdout
    assert "was given the cell" in story
    assert "text/html" in story


def test_a_script_that_fails_ends_there_with_exit_code_1(cli: Cli) -> None:
    done = cli.run("shell", stdin=b"print(1)\n1 / 0\nprint(2)\n")
    assert done.returncode == 1
    assert done.stdout == "1\n"
    assert "ZeroDivisionError" in done.stderr


def test_a_kept_box_is_come_back_to(cli: Cli) -> None:
    done = cli.run("shell", "--keep", stdin=b"kept = 7\n")
    assert done.returncode == 0, done.stderr
    box_id = done.stderr.split("--attach ")[1].split()[0]
    again = cli.run("shell", "--attach", box_id, stdin=b"kept + 1\n")
    assert again.stdout == "8\n", again.stderr
    assert cli.run("cancel", box_id).returncode == 0
    gone = cli.run("shell", "--attach", box_id, stdin=b"1\n")
    assert gone.returncode != 0


def test_case_d20_at_a_terminal_ctrl_c_interrupts_and_ctrl_d_leaves(cli: Cli) -> None:
    terminal = Terminal(cli, "shell")
    terminal.wait_for(">>> ")
    terminal.type("marker = 41\n")
    terminal.wait_for(">>> ")
    terminal.type("for n in [0]:\n")
    terminal.wait_for("... ")
    terminal.type("    print('g' + 'o', flush=True)\n")
    terminal.wait_for("... ")
    terminal.type("    while True: pass\n")
    terminal.wait_for("... ")
    terminal.type("\n")
    terminal.wait_for("go\r\n")
    os.kill(terminal.process.pid, signal.SIGINT)
    terminal.wait_for("KeyboardInterrupt")
    terminal.wait_for(">>> ")
    terminal.type("mark\t")
    terminal.wait_for("marker")
    terminal.type(" + 1, len(__history__)\n")
    terminal.wait_for("(42, 3)")
    # Only the prompt takes this key for what it is: before it the terminal keeps it as another.
    terminal.wait_for(">>> ")
    terminal.type("\x04")
    assert terminal.close() == 0


def test_case_13_a_program_reads_the_commands_standard_input(cli: Cli) -> None:
    program = cli.program("import sys\nreturn [input(), len(sys.stdin.read())]")
    done = cli.run("run", program, "--stdin", stdin=b"first\n" + b"x" * 600_000)
    assert done.returncode == 0, done.stderr
    assert done.stdout == '["first",600000]\n'
