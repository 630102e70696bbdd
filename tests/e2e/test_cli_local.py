"""The local controller's life: started by itself, shared, adopted, ended by itself."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import hutch
from hutch import local
from tests.support.cli import Cli, command_line, finish, interrupt, read_line, wait_until

GATED = "import time\nprint('up', flush=True)\ntime.sleep(120)"


@pytest.fixture
def cli() -> Iterator[Cli]:
    with command_line() as found:
        yield found


def test_a_run_starts_a_controller_that_ends_by_itself_and_leaves_its_results(cli: Cli) -> None:
    done = cli.run("run", cli.program("return 6 * 7"))
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr
    cli.wait_until_everything_has_ended()
    (left,) = cli.json("ps")["invocations"]
    assert left["ending"]["kind"] == "returned"
    assert oct(cli.state.stat().st_mode & 0o777) == "0o700"


def test_two_runs_at_once_share_a_controller_and_the_first_end_does_not_end_the_second(
    cli: Cli,
) -> None:
    slow = cli.program("import time\nprint('up', flush=True)\ntime.sleep(3)\nreturn 2", "slow.py")
    quick = cli.program("return 1", "quick.py")
    runs = [cli.start("run", slow), cli.start("run", quick)]
    code, stdout, stderr = finish(runs[1])
    assert (code, stdout) == (0, "1\n"), stderr
    first = cli.controller()
    code, stdout, stderr = finish(runs[0])
    assert (code, stdout) == (0, "2\n"), stderr
    assert first == cli.controller()
    assert len(cli.json("ps")["invocations"]) == 2


def test_runs_one_after_another_meet_every_moment_of_a_controllers_end(cli: Cli) -> None:
    """The idle time is 2 s: pauses around it hit a controller that is there, ending, or gone."""
    program = cli.program("return 1")
    for pause in (0.0, 1.95, 2.15):
        threading.Event().wait(pause)
        done = cli.run("run", program, "-q")
        assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_a_killed_run_leaves_nothing_running(cli: Cli) -> None:
    process = cli.start("run", cli.program(GATED))
    assert process.stderr is not None
    while "up" not in (line := process.stderr.readline()):
        assert line
    process.kill()
    finish(process)
    cli.wait_until_everything_has_ended()
    (left,) = cli.json("ps")["invocations"]
    assert (left["ending"]["kind"], left["ending"]["cause"]) == ("cancelled", "disconnected")


def test_a_run_survives_the_death_of_its_controller(cli: Cli) -> None:
    """`kill -9` of the controller: its supervisor starts another, and the run goes on with it."""
    process = cli.start("run", cli.program("import time\nprint('up')\ntime.sleep(2)\nreturn 3"))
    assert process.stderr is not None
    while "up" not in (line := process.stderr.readline()):
        assert line
    first = cli.controller()
    assert first is not None
    os.kill(first.pid, signal.SIGKILL)
    code, stdout, stderr = finish(process)
    assert (code, stdout) == (0, "3\n"), stderr


def test_connect_without_a_target_uses_the_same_controller(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HUTCH_STATE", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, cli.environment[name])
    with hutch.connect() as client:
        assert hutch.invoke(int, program="return n + 1", n=1) == 2
        assert client.info.drivers
        assert len(cli.json("ps")["invocations"]) == 1
        handle = client.spawn(program="import time; time.sleep(120)")
    # The client has gone, and with it what it had spawned at a controller that nobody else keeps.
    cli.wait_until_everything_has_ended()
    found = cli.json("show", handle.id)["invocation"]
    assert found["ending"]["cause"] == "disconnected"


def test_up_prints_one_line_serves_and_ends_both_on_an_interrupt(cli: Cli) -> None:
    up = cli.start("up")
    line = read_line(up)
    controller, host = cli.controller(), cli.host()
    assert controller is not None
    assert host is not None
    assert f"unix:{controller.socket}" in line
    assert cli.run("run", cli.program("return 5")).stdout == "5\n"
    assert cli.controller() == controller
    second = cli.run("up")
    assert (second.returncode, second.stdout) == (2, "")
    assert f"process {up.pid}" in second.stderr
    code, rest, errors = interrupt(up)
    assert (code, rest, errors) == (0, "", "")
    assert cli.everything_has_ended()
    assert not Path(controller.socket).parent.exists()


def test_an_up_that_was_killed_is_followed_by_one_that_adopts(cli: Cli) -> None:
    first = cli.start("up")
    read_line(first)
    controller, host = cli.controller(), cli.host()
    first.kill()
    finish(first)
    assert (cli.controller(), cli.host()) == (controller, host)
    second = cli.start("up")
    assert "(adopted)" in read_line(second)
    assert (cli.controller(), cli.host()) == (controller, host)
    assert cli.run("run", cli.program("return 5")).stdout == "5\n"
    assert interrupt(second)[0] == 0
    assert cli.everything_has_ended()


def test_a_host_that_died_with_its_supervisor_is_started_again_by_the_next_client(cli: Cli) -> None:
    process = cli.start("run", cli.program(GATED))
    assert process.stderr is not None
    while "up" not in (line := process.stderr.readline()):
        assert line
    host = cli.host()
    assert host is not None
    os.kill(int((cli.state / "up.lock").read_text()), signal.SIGKILL)
    os.kill(host.pid, signal.SIGKILL)
    assert cli.run("ps").returncode == 0
    assert cli.host() is not None
    code, _, stderr = finish(process)
    assert code == 1
    assert "host_lost" in stderr
    done = cli.run("run", cli.program("return 5", "next.py"))
    assert (done.returncode, done.stdout) == (0, "5\n"), done.stderr
    cli.wait_until_everything_has_ended()


def test_a_log_that_cannot_be_written_ends_nothing(cli: Cli) -> None:
    """A full disk takes the log first; what it said is lost and nothing else."""
    (cli.state / "logs").mkdir(mode=0o700, parents=True)
    cli.state.chmod(0o700)
    for name in ("controller", "host"):
        (cli.state / "logs" / f"{name}.log").symlink_to("/dev/full")
    program = cli.program("from hutch import invoke\nreturn invoke(program='return 8')", "b.py")
    process = cli.start("run", cli.program("import time\nprint('up')\ntime.sleep(2)\nreturn 3"))
    assert process.stderr is not None
    while "up" not in (line := process.stderr.readline()):
        assert line
    host = cli.host()
    assert host is not None
    os.kill(host.pid, signal.SIGKILL)  # both tell of it
    assert finish(process)[0] == 1
    done = cli.run("run", program)
    assert (done.returncode, done.stdout) == (0, "8\n"), done.stderr
    cli.wait_until_everything_has_ended()


def test_up_starts_again_what_dies(cli: Cli) -> None:
    up = cli.start("up", "--json")
    facts = json.JSONDecoder().raw_decode(read_document(up))[0]
    os.kill(facts["host_pid"], signal.SIGKILL)
    os.kill(facts["controller_pid"], signal.SIGKILL)
    wait_until(lambda: cli.controller() is not None and cli.host() is not None)
    done = cli.run("run", cli.program("return 5"))
    assert done.stdout == "5\n", done.stderr
    code, _, errors = interrupt(up)
    assert code == 0
    assert errors.count("died; starting another") == 2


def read_document(process: object) -> str:
    text = ""
    while not text.rstrip().endswith("}"):
        text += read_line(process)  # type: ignore[arg-type]
    return text


def test_tcp_takes_the_key_of_the_state_directory_and_no_other(cli: Cli) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    up = cli.start("up", "--listen", address)
    assert address in read_line(up)
    program = cli.program("return 5")
    done = cli.run("run", program, "--target", address)
    assert done.stdout == "5\n", done.stderr
    key = cli.state / "client.key"
    assert oct(key.stat().st_mode & 0o777) == "0o600"
    refused = cli.run("run", program, "--target", address, "--api-key", "0" * 64)
    assert refused.returncode == 2
    assert (
        json.loads(cli.run("ps", "--target", address, "--api-key", "x", "--json").stdout)["error"][
            "reason"
        ]
        == "CREDENTIAL_INVALID"
    )
    with hutch.connect(address, api_key=key.read_text().strip()) as client:
        assert client.invoke(int, program="return 1") == 1
    assert interrupt(up)[0] == 0


def test_a_port_in_use_is_named_and_nothing_is_left(cli: Cli) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = cli.run("up", "--listen", address)
    assert (done.returncode, done.stdout) == (2, "")
    assert address in done.stderr
    assert cli.everything_has_ended()


def test_a_damaged_state_is_named_and_not_overwritten(cli: Cli) -> None:
    cli.state.mkdir(mode=0o700)
    journal = cli.state / "journal.sqlite3"
    journal.write_bytes(b"this is no database at all" * 100)
    before = journal.read_bytes()
    for words in (("up",), ("run", cli.program("return 1"))):
        done = cli.run(*words)
        assert (done.returncode, done.stdout) == (2, "")
        assert "journal.sqlite3" in done.stderr
    assert journal.read_bytes() == before
    assert cli.everything_has_ended()


def test_a_state_directory_that_is_open_to_others_is_refused(cli: Cli) -> None:
    cli.state.mkdir(mode=0o755)
    cli.state.chmod(0o755)
    done = cli.run("run", cli.program("return 1"))
    assert done.returncode == 2
    assert "chmod 700" in done.stderr


def test_folders_named_like_our_processes_are_never_executed(cli: Cli) -> None:
    work = cli.folder / "work"
    for name in ("controller", "sandbox", "hutch"):
        (work / name).mkdir(parents=True)
        for file in ("__init__.py", "__main__.py", "host.py"):
            (work / name / file).write_text(f"open({str(work / 'executed')!r}, 'w')")
    done = cli.run("run", cli.program("return 1"), cwd=work)
    assert done.stdout == "1\n", done.stderr
    assert not (work / "executed").exists()


def test_doctor_says_what_can_be_held_and_starts_nothing(cli: Cli) -> None:
    found = cli.json("doctor")
    assert found["usable"]
    assert found["state"]["controller"] is None
    driver = next(item for item in found["host"]["drivers"] if item["usable"])
    test = driver["self_test"]
    assert test["passed"]
    assert all(item["holds"] for item in test["findings"] if item["needed"])
    assert test["pss_bytes"] > 0
    assert found["machine"]["bwrap"][0]["version"]
    shown = cli.run("doctor").stdout
    assert "driver bubblewrap: usable" in shown
    assert "memory: held for" in shown or "memory: not held here" in shown
    assert "its root file system is read-only" in shown
    assert not cli.state.exists()


def test_case_48_an_unprivileged_host_is_told_what_it_can_hold() -> None:
    """Here: the self-check under an ordinary user; what it may not do is said, not failed on."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become an ordinary user")
    words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all", "--"]
    # This interpreter may be where no other user can go; the system's must be of its version then.
    python = f"/usr/bin/python3.{sys.version_info.minor}"
    folders = [str(Path(hutch.__file__).parents[1]), *(path for path in sys.path if path)]
    environment = {"PYTHONPATH": os.pathsep.join(folders), "TMPDIR": "/tmp"}
    tried = [*words, python, "-c", "import sandbox.host.check, grpc"]
    if subprocess.run(tried, capture_output=True, env=environment, cwd="/", check=False).returncode:
        pytest.skip("no other user can run this installation")
    done = subprocess.run(
        [*words, python, "-m", "sandbox.host", "--check", "--json"],
        capture_output=True,
        env=environment,
        cwd="/",
        check=False,
    )
    driver = json.loads(done.stdout)["drivers"][0]
    assert driver["usable"] or driver["problem"]
    if not driver["usable"]:
        pytest.skip(driver["problem"])
    levels = {item["limit"]: item["level"] for item in driver["enforcement"]}
    assert levels["tmpfs"] == "sandbox"
    assert any("ordinary user" in gap for gap in driver["gaps"])
    by_name = {item["name"]: item for item in driver["self_test"]["findings"]}
    assert not by_name["own_uid"]["holds"]
    assert "root" in by_name["own_uid"]["mend"]


def test_a_stale_file_of_a_dead_controller_misleads_nobody(cli: Cli) -> None:
    """The process id may long belong to somebody else: here, to this very test."""
    cli.state.mkdir(mode=0o700)
    about = cli.state / "controller.json"
    stale = {
        "pid": os.getpid(),
        "start_time": "1",
        "socket": "/nowhere",
        "listen": "",
        "version": "",
    }
    about.write_text(json.dumps(stale))
    found = local.read_process(about)
    assert found is not None
    assert not found.alive()
    assert cli.run("run", cli.program("return 1")).stdout == "1\n"
