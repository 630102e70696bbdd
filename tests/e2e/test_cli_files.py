"""The command line with standard files that are closed, full or narrow."""

from __future__ import annotations

import contextlib
import os
import pty
import shlex
import subprocess
from collections.abc import Iterator

import pytest

from tests.support.cli import SECONDS, Cli, command_line
from tests.support.stack import Stack


@pytest.fixture
def cli(shared_stack: Stack) -> Iterator[Cli]:
    with command_line(shared_stack.target) as found:
        yield found


def redirected(cli: Cli, files: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = f"{shlex.join(cli.command(*words))} {files}"
    return subprocess.run(
        ["sh", "-c", command],
        capture_output=True,
        text=True,
        env=cli.environment,
        cwd=cli.folder,
        timeout=SECONDS,
    )


@pytest.mark.parametrize(
    ("files", "problem"),
    [(">&-", "Bad file descriptor"), (">/dev/full", "No space left on device")],
)
def test_a_value_that_cannot_be_written_is_one_sentence(cli: Cli, files: str, problem: str) -> None:
    done = redirected(cli, files, "run", "--quiet", cli.program("return 1"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.rstrip().endswith(problem)
    assert "\n" not in done.stderr.rstrip()


@pytest.mark.parametrize("files", ["2>&-", "2>/dev/full", "<&- 2>&-"])
def test_the_loss_of_standard_error_costs_no_result(cli: Cli, files: str) -> None:
    program = cli.program("from hutch import invoke\nprint(1)\nreturn invoke(program='return 4')")
    done = redirected(cli, files, "run", program)
    assert (done.returncode, done.stdout) == (0, "4\n")


def test_a_closed_standard_input_has_no_program(cli: Cli) -> None:
    done = redirected(cli, "<&-", "run", "-")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_narrow_terminal_cuts_labels_and_no_id(cli: Cli) -> None:
    cli.program("return 1", name="a-name-that-is-long-enough-to-be-cut.py")
    done = cli.run("run", "--json", str(cli.folder / "a-name-that-is-long-enough-to-be-cut.py"))
    assert done.returncode == 0
    terminal, end = pty.openpty()
    cli.environment |= {"TERM": "xterm", "COLUMNS": "60"}
    process = subprocess.Popen(
        cli.command("ps"), stdin=subprocess.DEVNULL, stdout=end, stderr=end, env=cli.environment
    )
    os.close(end)
    seen = b""
    with contextlib.suppress(OSError):  # a terminal whose other end is closed answers EIO
        while data := os.read(terminal, 65536):
            seen += data
    os.close(terminal)
    assert process.wait(SECONDS) == 0
    newest = seen.decode().splitlines()[1]
    assert newest.split()[0] in done.stdout
    assert len(newest.split()[0]) == len("inv_") + 32
    assert newest.split()[1].endswith("…")
