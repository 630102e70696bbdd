"""Cells of boxes against a real controller, host and sandboxes."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

import hutch
from hutch import calls
from tests.support.proxy import proxy
from tests.support.stack import Stack, stack


def test_names_live_from_cell_to_cell_and_the_box_ends_with_its_block(client: hutch.Client) -> None:
    with client.sandbox(n=20, label="mine") as box:
        first = box.run("x = n * 2\nprint('printed')\nx + 2", inputs={"extra": [1]})
        assert (first.outcome, first.stdout, first.text) == ("completed", "printed\n", "42")
        assert box.run("x, extra").text == "(40, [1])"
        failed = box.run("def f(): return 1 / 0\nf()")
        assert failed.outcome == "errored"
        with pytest.raises(hutch.CellFailed, match="ZeroDivisionError") as caught:
            failed.raise_for_failure()
        assert caught.value.failure.traceback
        assert box.run("x").text == "40"
        timed = box.run("while True: pass", timeout_seconds=0.5)
        assert (timed.outcome, timed.state_lost) == ("timed_out", False)
    ended = client.get_invocation(box.id)
    assert ended.ending is not None
    assert (ended.ending.kind, ended.ending.cause) == ("cancelled", "client")
    assert ended.cell_count == 5


def test_a_returned_value_ends_the_box_and_has_its_type(client: hutch.Client) -> None:
    with client.sandbox(list[int]) as box:
        assert box.run("return [1, 2]").raise_for_failure().value == [1, 2]
        with pytest.raises(hutch.InvocationEndedError):
            box.run("1")
    with client.sandbox(int, timeout_seconds=60) as box:
        assert box.run("return 'x'").outcome == "return_refused"
        with pytest.raises(hutch.InvocationFailed) as caught:
            box.run("1")
        assert caught.value.ending == "contract_violated"


def test_displays_are_kept_and_told(client: hutch.Client) -> None:
    seen: list[hutch.Display] = []
    with client.sandbox() as box:
        result = box.run(
            "class Page:\n    def _repr_html_(self): return '<b>page</b>'\nPage()",
            on_display=seen.append,
        )
    assert list(result.displays) == seen
    media = {item.media_type: item.data for item in result.displays[-1].data}
    assert media["text/html"] == b"<b>page</b>"


@pytest.mark.parametrize("action", ["cancel", "detach"])
def test_case_2_a_client_that_leaves_chooses_what_becomes_of_its_cell(
    shared_stack: Stack, client: hutch.Client, action: calls.OnDisconnect
) -> None:
    async def leave() -> str:
        async with hutch.AsyncClient(shared_stack.target) as other:
            box = await other.sandbox(on_disconnect=action).open()
            await box.run("kept = 5")
            cell = await box.submit("print('in it', flush=True)\nwhile True: pass")
            async for _ in cell.output():
                break
            stream = box._stream
            assert stream is not None
            assert stream._runner is not None
            stream._runner.cancel()  # as a process that dies: nothing is said
            await asyncio.wait({stream._runner})
            return box.id

    box_id = asyncio.run(leave())
    with client.attach(box_id) as box:
        if action == "cancel":
            assert box.run("kept + 1").text == "6"
        else:
            with pytest.raises(hutch.CellBusyError):
                box.run("kept + 1", queueing="refuse")
        box.close()


def test_a_cut_that_is_mended_in_time_cancels_nothing_whatever_was_chosen(tmp_path: Path) -> None:
    """Twice, for the stream that takes the place of one that was cut has the same choice; what
    printed nothing goes on as well, and what waits. The cell lasts longer than the grace."""
    with (
        stack(config="[controller]\ncell_grace_seconds = 2\n") as found,
        proxy(tmp_path, found.target) as link,
        hutch.connect(link.target) as client,
        client.sandbox(on_disconnect="cancel") as box,
    ):
        box.run("import time\nran = []")
        cell = box.submit("time.sleep(5)\nran.append(1)")
        after = box.submit("ran.append(2)")
        for _ in range(2):
            with pytest.raises(hutch.CellBusyError):
                box.run("0", queueing="refuse")
            link.cut()
        with pytest.raises(hutch.CellBusyError):
            box.run("0", queueing="refuse")
        assert [cell.result().outcome, after.result().outcome] == ["completed"] * 2
        assert box.run("ran").text == "[1, 2]"


def test_case_7_an_interrupt_takes_the_queue_with_it_where_that_is_asked_for(
    client: hutch.Client,
) -> None:
    with client.sandbox() as box:
        box.run("ran = []")
        cells = [box.submit("import time\nprint('x', flush=True)\ntime.sleep(60)")]
        cells += [box.submit(f"ran.append({n})") for n in range(2)]
        next(cells[0].output())
        cells[0].interrupt(queue=True)
        outcomes = [cell.result(30).outcome for cell in cells]
        assert outcomes == ["interrupted", "cancelled_before_start", "cancelled_before_start"]
        assert box.run("ran").text == "[]"


def test_case_10_two_boxes_never_receive_one_anothers_output(client: hutch.Client) -> None:
    outputs: dict[str, str] = {}

    def work(tag: str) -> None:
        with client.sandbox() as box:
            result = box.run(f"for n in range(10000): print('{tag}', n)")
            outputs[tag] = b"".join(result.read_stdout()).decode()

    threads = [threading.Thread(target=work, args=(tag,)) for tag in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for tag in ("a", "b"):
        assert outputs[tag] == "".join(f"{tag} {n}\n" for n in range(10000))


def test_case_13_attached_standard_input_is_delivered_line_by_line(client: hutch.Client) -> None:
    with client.sandbox(stdin=True) as box:
        cell = box.submit("input('name? ')")
        box.write_stdin("Ada\n")
        assert cell.result(30).text == "'Ada'"
        box.write_stdin("", close=True)
        failure = box.run("input()").failure
        assert failure is not None
        assert failure.type_name == "EOFError"
    with client.sandbox() as box:
        failure = box.run("input('x')").failure
        assert failure is not None
        assert "stdin" in failure.message or "standard input" in failure.message


def test_case_38_a_child_that_writes_before_it_reads_ends(client: hutch.Client) -> None:
    source = (
        "import subprocess, sys\n"
        "code = \"import sys; sys.stdout.write('o' * 2**20); sys.stdout.flush(); "
        'print(len(sys.stdin.read()), file=sys.stderr)"\n'
        "subprocess.run([sys.executable, '-c', code], check=True)\n"
    )
    with client.sandbox(stdin=True) as box:
        cell = box.submit(source)
        box.write_stdin("i" * 2**20, close=True)
        result = cell.result(60).raise_for_failure()
        assert result.stdout_view.total_bytes == 2**20
        assert result.stderr == f"{2**20}\n"


def test_case_40_a_silent_cell_is_not_idle(client: hutch.Client) -> None:
    """3 s of silence against an idle time of 1 s stand for 90 s."""
    with client.sandbox(idle_timeout_seconds=1) as box:
        assert box.run("import time\ntime.sleep(3)\n'done'").text == "'done'"
        assert client.wait_invocation(box.id, 60).ended
        with pytest.raises(hutch.DeadlineExceededError) as caught:
            box.run("1")
        assert caught.value.ending == "idle_timeout"


def test_an_interrupted_run_interrupts_its_cell(shared_stack: Stack) -> None:
    async def work() -> None:
        async with (
            hutch.AsyncClient(shared_stack.target) as client,
            client.sandbox() as box,
        ):
            printed = asyncio.Event()
            running = asyncio.create_task(
                box.run("print(1)\nwhile True: pass", on_output=lambda _: printed.set())
            )
            await printed.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert (await box.run("1 + 1")).text == "2"

    asyncio.run(work())


def test_a_callback_that_fails_or_waits_for_its_own_box_is_told_so(client: hutch.Client) -> None:
    with client.sandbox() as box:

        def nested(part: hutch.CellOutput) -> None:
            box.run("2")

        with pytest.raises(hutch.HutchError, match="same box"):
            box.run("print(1)", on_output=nested)
        with pytest.raises(KeyError):
            box.run("print(1)", on_output=lambda part: dict[str, int]()["x"])
        assert box.run("1 + 1").text == "2"
