"""`hutch run` and the commands that look at what it left, against one real controller and host."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
from collections.abc import Iterator

import pytest

import hutch
from tests.support.cli import Cli, command_line, finish, interrupt, wait_until
from tests.support.stack import Stack


@pytest.fixture
def cli(shared_stack: Stack) -> Iterator[Cli]:
    with command_line(shared_stack.target) as found:
        yield found


def test_case_d20_the_value_alone_is_on_standard_output(cli: Cli) -> None:
    program = cli.program("print('noise')\nreturn {'n': n, 'rows': rows}")
    rows = cli.folder / "rows.json"
    rows.write_text("[1, 2]")
    done = cli.run("run", program, "--input", "n=5", "--input", f"rows=@{rows}")
    assert (done.returncode, done.stdout) == (0, '{"n":5,"rows":[1,2]}\n')
    assert "noise" in done.stderr
    assert "returned · 1 sandbox" in done.stderr


def test_a_text_is_printed_raw_and_a_program_may_come_from_standard_input(cli: Cli) -> None:
    done = cli.run("run", "-", stdin="return 'héllo\\n\\x1b[31m'".encode())
    assert (done.returncode, done.stdout) == (0, "héllo\n\x1b[31m\n")


def test_case_d20_another_ending_is_exit_code_1(cli: Cli) -> None:
    done = cli.run("run", cli.program("d = {}\nd['\\x1b[2J[bold]missing']"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("KeyError") == 1
    assert "\x1b" not in done.stderr
    assert "[bold]missing" in done.stderr


def test_case_d20_a_timeout_is_an_ending(cli: Cli) -> None:
    done = cli.run("run", cli.program("while True: pass"), "--timeout", "0.5")
    assert done.returncode == 1
    assert "deadline_exceeded" in done.stderr
    assert "0.5 s" in done.stderr
    assert "limit:" not in done.stderr  # which has whole seconds: it would say 1


@pytest.mark.parametrize(
    "words", [("--max-depth", "99"), ("--driver", "nothing"), ("--memory", "99999999")]
)
def test_case_d20_a_refused_request_is_exit_code_2_and_starts_nothing(
    cli: Cli, client: hutch.Client, words: tuple[str, ...]
) -> None:
    before = client.list_invocations(page_size=1).invocations
    done = cli.run("run", cli.program("return 1"), *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert "hutch:" in done.stderr
    assert client.list_invocations(page_size=1).invocations == before


def test_a_folder_that_cannot_be_used_is_told_before_the_work(
    cli: Cli, client: hutch.Client
) -> None:
    before = client.list_invocations(page_size=1).invocations
    file = cli.program("return 1")
    for folder in (file, f"{file}/below", "/proc/hutch-out"):
        done = cli.run("run", file, "--out", folder)
        assert (done.returncode, done.stdout) == (2, "")
        assert "cannot be used" in done.stderr
    assert cli.run("run", file, "--out", "out", "--detach").returncode == 2
    assert client.list_invocations(page_size=1).invocations == before


def test_case_d20_an_interrupt_cancels_durably(cli: Cli, client: hutch.Client) -> None:
    label = "interrupted-run"
    program = cli.program(
        "from hutch import spawn\n"
        "child = spawn(program='while True: pass')\nprint('up')\nchild.result()"
    )
    process = cli.start("run", program, "--label", label)
    assert process.stderr is not None
    while "up" not in (line := process.stderr.readline()):
        assert line
    code, stdout, _ = interrupt(process)
    assert (code, stdout) == (130, "")
    root = next(i for i in client.list_invocations(roots_only=True).invocations if i.label == label)
    tree = client.list_invocations(tree_of=root.invocation_id).invocations
    assert [(i.ending.kind, i.ended) for i in tree if i.ending] == [("cancelled", True)] * 2


def test_one_object_with_json(cli: Cli) -> None:
    program = cli.program(
        "from hutch import artifacts, invoke\n"
        "artifacts.save(b'abc', name='a.bin')\n"
        "return (invoke(program='return 1', label='below'), {2})"
    )
    out = cli.folder / "out"
    done = cli.run("run", program, "--json", "--out", str(out))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) >= {"invocation", "ending", "value", "artifacts", "tree"}
    assert found["ending"]["kind"] == "returned"
    assert found["value"] == {"$tuple": [1, {"$set": [2]}]}
    assert found["invocation"]["state"] == "ended"
    assert found["tree"]["sandboxes"] == 2
    assert [child["label"] for child in found["tree"]["children"]] == ["below"]
    (artifact,) = found["artifacts"]
    assert (artifact["name"], artifact["size_bytes"]) == ("a.bin", 3)
    assert artifact["path"] == str(out / "a.bin")
    assert (out / "a.bin").read_bytes() == b"abc"


def test_json_of_a_failure_has_the_failure(cli: Cli) -> None:
    done = cli.run("run", cli.program("raise ValueError('no')"), "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert found["ending"]["kind"] == "raised"
    assert found["ending"]["failure"]["type_name"] == "ValueError"
    assert found["value"] is None


def test_a_misfit_shows_path_expected_and_got(cli: Cli) -> None:
    schema = cli.folder / "schema.json"
    schema.write_text('{"type": "array", "items": {"type": "integer"}}')
    done = cli.run("run", cli.program("return [1, 'a']"), "--returns", f"@{schema}")
    assert done.returncode == 1
    for word in ("contract_violated", "result[1]", "expected", "got"):
        assert word in done.stderr


def test_a_value_of_many_megabytes_is_printed(cli: Cli) -> None:
    done = cli.run("run", cli.program("return ['x' * 1000] * 3000"), "--quiet")
    assert done.returncode == 0
    assert len(json.loads(done.stdout)) == 3000
    assert done.stderr == ""


def test_a_terminal_gets_a_live_tree_and_still_only_the_value_on_standard_output(cli: Cli) -> None:
    program = cli.program(
        "from hutch import invoke\nprint('\\x1b]0;title\\x07noise')\n"
        "return invoke(program='return 8', label='\\x1b[2Jbelow')"
    )
    terminal, end = pty.openpty()
    cli.environment["TERM"] = "xterm"
    process = subprocess.Popen(
        cli.command("run", program),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=end,
        env=cli.environment,
    )
    os.close(end)
    seen = b""
    with contextlib.suppress(OSError):  # a terminal whose other end is closed answers EIO
        while data := os.read(terminal, 65536):
            seen += data
    os.close(terminal)
    assert process.communicate()[0] == b"8\n"
    shown = seen.decode()
    assert "\\x1b]0;title\\x07noise" in shown
    assert "└── " in shown
    assert "\\x1b[2Jbelow" in shown
    assert "\x1b]0;" not in shown
    assert "\x1b[2J" not in shown
    assert "returned · 2 sandboxes" in shown


def test_looking_at_what_a_run_left(cli: Cli) -> None:
    program = cli.program(
        "import sys\nfrom hutch import artifacts, invoke\n"
        "print('out', '\\x1b[1m')\nprint('err', file=sys.stderr)\n"
        "artifacts.save(b'abc', name='d/a.bin')\n"
        "return invoke(program='return 1', label='\\x1b]0;title\\x07child')"
    )
    found = cli.json("run", program, "--label", "looked-at")
    id_ = found["invocation"]["invocation_id"]

    assert id_ in cli.run("ps").stdout
    tree = cli.run("tree", found["tree"]["children"][0]["invocation_id"]).stdout
    assert "looked-at" in tree
    assert "\\x1b]0;title\\x07child" in tree
    shown = cli.run("show", id_).stdout
    assert "limit memory" in shown
    assert "held for the sandbox" in shown or "held for the process" in shown
    assert cli.json("show", id_)["invocation"]["invocation_id"] == id_
    assert cli.run("logs", id_).stdout == "out \x1b[1m\n"
    assert cli.run("logs", id_, "--stderr", "-f").stdout == "err\n"
    assert cli.json("logs", id_)["text"] == "out \x1b[1m\n"
    story = cli.run("story", id_, "--tree").stdout
    assert "was accepted “looked-at” at depth 1" in story
    assert "child of" in story
    assert story.rstrip().endswith("ended returned")
    kinds = [event["kind"] for event in cli.json("story", id_)["events"]]
    assert kinds[0] == "accepted"
    assert kinds[-1] == "ended"
    assert "d/a.bin" in cli.run("artifacts", "ls", id_).stdout
    got = cli.run("artifacts", "get", id_, "--out", "got")
    assert got.stdout == "got/d/a.bin\n"
    assert (cli.folder / "got" / "d" / "a.bin").read_bytes() == b"abc"
    artifact = cli.json("artifacts", "ls", id_)["artifacts"][0]["artifact_id"]
    assert cli.run("artifacts", "get", artifact, "--stdout").stdout == "abc"
    assert cli.run("cancel", id_).stdout == f"{id_} returned\n"


@pytest.mark.parametrize("command", ["show", "cancel", "artifacts ls"])
def test_an_unknown_id_is_exit_code_1(cli: Cli, command: str) -> None:
    done = cli.run(*command.split(), "inv_" + "0" * 32)
    assert (done.returncode, done.stdout) == (1, "")
    assert "hutch:" in done.stderr


def test_a_detached_run_prints_its_id_and_goes_on(cli: Cli) -> None:
    id_ = cli.run("run", cli.program("return 7"), "--detach").stdout.strip()
    wait_until(lambda: cli.json("show", id_)["invocation"]["state"] == "ended")
    assert cli.json("show", id_)["invocation"]["ending"]["kind"] == "returned"


def test_the_story_of_a_live_invocation_comes_to_an_end(cli: Cli) -> None:
    id_ = cli.run("run", cli.program("import time; time.sleep(60)"), "--detach").stdout.strip()
    assert "was accepted" in cli.run("story", id_).stdout
    following = cli.start("logs", id_, "-f")
    assert cli.run("cancel", id_).stdout == f"{id_} cancelled\n"
    assert finish(following)[0] == 0


def test_a_hostile_program_cannot_write_outside_the_folder(cli: Cli) -> None:
    """The controller refuses such names; the folder has links in its way besides."""
    out = cli.folder / "out"
    out.mkdir()
    elsewhere = cli.folder / "elsewhere"
    elsewhere.mkdir()
    (out / "link").symlink_to(elsewhere)
    (out / "file").symlink_to(elsewhere / "kept")
    program = cli.program(
        "from hutch import artifacts\n"
        "artifacts.save(b'1', name='link/inside')\nartifacts.save(b'2', name='file')\n"
        "artifacts.save(b'3', name='good')"
    )
    done = cli.run("run", program, "--out", str(out))
    assert done.returncode == 1
    assert "not written: link/inside" in done.stderr
    assert list(elsewhere.iterdir()) == []
    assert (out / "file").read_bytes() == b"2"
    assert not (out / "file").is_symlink()
    assert (out / "good").read_bytes() == b"3"
