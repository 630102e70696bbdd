"""What the runtime does only where it is PID 1 and its code has a uid and limits of its own."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from sandbox.drivers import gaps
from sandbox.drivers.driver import Level
from tests.support.sandboxes import Speaker
from tests.support.subjects import Subject


async def ask(speaker: Speaker, op: str, path: str, **keys: Any) -> dict[str, Any]:
    """Asks for an operation on files."""
    await speaker.send({"type": "file_op", "id": "f", "op": op, "path": path, **keys})
    while True:
        header, _ = await speaker.receive()
        if header["type"] == "file_outcome":
            return header


async def test_the_code_cannot_reach_into_the_process_that_works_on_files(
    subject: Subject,
) -> None:
    subject.needs_container()
    container, speaker = await subject.start()
    assert (await ask(speaker, "stat", "."))["problem"] == ""
    ran = await speaker.run(
        textwrap.dedent("""
        import os
        for pid in map(int, filter(str.isdigit, os.listdir('/proc'))):
            if pid in (1, os.getpid()): continue
            try:
                open(f'/proc/{pid}/mem', 'rb')
            except OSError as error:
                print(error.errno)
        """)
    )
    assert (ran.outcome, ran.last) == ("completed", 13)
    await container.destroy()


async def test_code_that_used_up_all_processes_costs_cells_and_not_the_sandbox(
    subject: Subject,
) -> None:
    if subject.level("pids") is not Level.SANDBOX:
        pytest.skip(f"{subject.driver.name} does not hold the number of processes here")
    if subject.has_gap(gaps.ENDS_WHOLE):
        pytest.skip(gaps.ENDS_WHOLE)
    container, speaker = await subject.start(pids_limit=24)
    bomb = """
        import os, signal
        if os.fork() == 0:
            while True:
                try:
                    if os.fork() == 0: signal.pause()
                except OSError:
                    os.write(w, b'x') if not full else None
                    full = True
    """
    ran = await speaker.run("import os\nr, w = os.pipe()\nfull = False\n" + textwrap.dedent(bomb))
    assert ran.outcome == "completed"
    ran = await speaker.run("os.read(r, 1)\nos._exit(3)")
    assert ran.outcome == "repl_died"
    assert (await ask(speaker, "stat", "."))["problem"] in ("", "failed")
    ran = await speaker.run("print(5)")
    assert ran.outcome in ("completed", "repl_died")
    await container.destroy()
