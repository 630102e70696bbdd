"""Cgroups of both versions against directory trees; the conformance suite uses the real ones.

A plain folder takes any file, so what is tested is which files are written, with what, and how the
kernel's own texts are read.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sandbox.drivers import cgroups
from sandbox.drivers.driver import Level, Limits

LIMITS = Limits(
    memory_limit_bytes=512 << 20,
    pids_limit=128,
    cpu_limit_millis=1500,
    tmpfs_limit_bytes=128 << 20,
    open_files_limit=1024,
)


@pytest.fixture
def second(tmp_path: Path) -> Path:
    """A root of version 2 that offers all controllers."""
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    (tmp_path / "cgroup.subtree_control").write_text("\n")
    return tmp_path


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """A root of version 1 where cpu and cpuacct share a folder."""
    for name in ("memory", "pids", "cpu,cpuacct"):
        (tmp_path / name).mkdir()
    (tmp_path / "cpu").symlink_to("cpu,cpuacct")
    (tmp_path / "cpuacct").symlink_to("cpu,cpuacct")
    return tmp_path


def found(root: Path, owner: str = "one") -> cgroups.Hierarchy:
    """The hierarchy, which must be there."""
    hierarchy, problem = cgroups.find(owner, root)
    assert hierarchy is not None, problem
    return hierarchy


def test_version_2_writes_the_limits(second: Path) -> None:
    hierarchy = found(second)
    assert (second / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
    group = hierarchy.create("sbx_a")
    group.limit(LIMITS, beside=1)
    (folder,) = group.directories
    assert folder == second / cgroups.owner_name("one") / "sbx_a"
    written = {path.name: path.read_text() for path in folder.iterdir()}
    assert written == {
        "memory.max": str(512 << 20),
        "memory.swap.max": "0",
        "pids.max": "129",  # and bwrap itself
        "cpu.max": "150000 100000",
    }
    assert group.join_files() == [folder / "cgroup.procs"]


def test_version_2_reads_the_kernels_counters(second: Path) -> None:
    group = found(second).create("sbx_a")
    (folder,) = group.directories
    assert group.counters() == cgroups.Counters()
    (folder / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 2\noom_kill 1\n")
    (folder / "memory.peak").write_text("4096\n")
    (folder / "pids.events").write_text("max 7\n")
    (folder / "cpu.stat").write_text("usage_usec 1500000\nuser_usec 1\nsystem_usec 2\n")
    (folder / "cgroup.procs").write_text("12\n34\n")
    assert group.counters() == cgroups.Counters(
        oom_kill_count=1, memory_peak_bytes=4096, pids_limit_hits=7, cpu_seconds=1.5
    )
    assert group.pids() == {12, 34}


def test_version_2_without_memory_is_no_hierarchy_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu pids\n")
    (tmp_path / "cgroup.subtree_control").write_text("cpu pids\n")
    hierarchy, problem = cgroups.find("one", tmp_path)
    assert hierarchy is None
    assert "memory" in problem


def test_version_2_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    (tmp_path / "cgroup.subtree_control").mkdir()  # a folder: writing it fails for every user
    hierarchy, problem = cgroups.find("one", tmp_path)
    assert hierarchy is None
    assert "may not make cgroups" in problem
    assert not (tmp_path / cgroups.owner_name("one")).exists()


def test_version_1_writes_the_limits_once_per_folder(first: Path) -> None:
    group = found(first).create("sbx_a")
    group.limit(LIMITS, beside=1)
    assert len(group.directories) == 3
    shared = first / "cpu,cpuacct" / cgroups.owner_name("one") / "sbx_a"
    assert group.folders["cpu"] == group.folders["cpuacct"] == shared
    memory, pids = group.folders["memory"], group.folders["pids"]
    assert (memory / "memory.limit_in_bytes").read_text() == str(512 << 20)
    assert (memory / "memory.swappiness").read_text() == "0"
    assert (pids / "pids.max").read_text() == "129"
    assert (shared / "cpu.cfs_quota_us").read_text() == "150000"
    assert {path.name for path in group.join_files()} == {"tasks"}


def test_version_1_reads_the_kernels_counters(first: Path) -> None:
    group = found(first).create("sbx_a")
    (group.folders["memory"] / "memory.oom_control").write_text(
        "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"
    )
    (group.folders["memory"] / "memory.max_usage_in_bytes").write_text("8192\n")
    (group.folders["pids"] / "pids.events").write_text("max 2\n")
    (group.folders["cpuacct"] / "cpuacct.usage").write_text("250000000\n")
    assert group.counters() == cgroups.Counters(
        oom_kill_count=3, memory_peak_bytes=8192, pids_limit_hits=2, cpu_seconds=0.25
    )


def test_a_cgroup_that_the_kernel_refuses_leaves_no_folder(first: Path) -> None:
    hierarchy = found(first)
    target = hierarchy.of("sbx_a")
    for folder in target.directories[1:]:
        folder.mkdir()  # as if another one had it: making it again fails
    with pytest.raises(OSError, match="exists"):
        hierarchy.create("sbx_a")
    assert not target.directories[0].exists()


def test_only_the_owners_sandboxes_are_listed_and_removed(second: Path) -> None:
    mine, theirs = found(second, "one"), found(second, "two")
    mine.of("sbx_a").directories[0].mkdir()
    theirs.of("sbx_b").directories[0].mkdir()
    assert mine.names() == {"sbx_a"}
    mine.of("sbx_a").remove()
    mine.of("sbx_a").remove()  # again is no error
    assert mine.names() == set()
    shutil.rmtree(second / cgroups.owner_name("one"))
    mine.remove()
    assert theirs.names() == {"sbx_b"}


def test_every_limit_it_states_is_for_the_whole_sandbox(first: Path) -> None:
    stated = found(first).enforcement
    assert [entry.limit for entry in stated] == ["memory", "pids", "cpu"]
    assert {entry.level for entry in stated} == {Level.SANDBOX}
    assert {entry.mechanism for entry in stated} == {"cgroup v1"}


def test_nothing_mounted_is_no_hierarchy(tmp_path: Path) -> None:
    hierarchy, problem = cgroups.find("one", tmp_path / "absent")
    assert hierarchy is None
    assert "no cgroup controllers" in problem
