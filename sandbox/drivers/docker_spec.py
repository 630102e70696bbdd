"""What the engine is told of one container: a pure function from a template and one request.

Called by the docker driver for every sandbox, and for the container that compiles the runtime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox.drivers import rlimits
from sandbox.drivers.arguments import ENVIRONMENT, WRITABLE
from sandbox.drivers.driver import Limits
from sandbox.drivers.seccomp import profile

REPL_UID = 10_001
PYTHON = "python3"  # found by the PATH in ENVIRONMENT
_PERIOD_MICROSECONDS = 100_000
# Some runtimes give a new folder the mode 0755 whatever is asked for: so it is the code's own.
_TMPFS_OPTIONS = f"rw,exec,nosuid,nodev,mode=1777,uid={REPL_UID},gid={REPL_UID}"
_HOME = ENVIRONMENT["HOME"]
_CPUS = "/sys/devices/system/cpu/online"
# What the kernel tells there is about the machine; /dev/mqueue holds files without a limit.
_MASKED = """
    /dev/mqueue
    /proc/acpi /proc/asound /proc/bus /proc/cmdline /proc/config.gz /proc/fs /proc/interrupts
    /proc/kallsyms /proc/kcore /proc/keys /proc/latency_stats /proc/modules /proc/pressure
    /proc/sched_debug /proc/scsi /proc/sysvipc /proc/timer_list /proc/timer_stats
    /sys/devices/virtual/powercap /sys/firmware /sys/fs/cgroup /sys/kernel /sys/module
""".split()
_READ_ONLY = "/proc/irq /proc/sys /proc/sysrq-trigger".split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A file of this machine that is shown read-only."""

    source: Path
    target: str


def build(
    *,
    image: str,
    runtime: str,
    labels: Mapping[str, str],
    limits: Limits,
    more_processes: int,
    tmpfs_bytes: int,
    command: Sequence[str],
    mounts: Sequence[Mount],
) -> dict[str, Any]:
    """The body of the engine's request to make a container.

    Args:
        image: Its id.
        runtime: The runtime's name, as the engine knows it.
        labels: What names the container's owner and its sandbox.
        limits: The sandbox's.
        more_processes: What the runtime itself needs beyond the limit of processes.
        tmpfs_bytes: The size of each writable file system.
        command: What runs as its first process.
        mounts: What it is shown of this machine.
    """
    return {
        "Image": image,
        "Hostname": "sandbox",
        "User": "0:0",
        "Entrypoint": list(command[:1]),
        "Cmd": list(command[1:]),
        "Env": [f"{name}={value}" for name, value in {**ENVIRONMENT, "PWD": _HOME}.items()],
        "WorkingDir": _HOME,
        "Labels": dict(labels),
        "OpenStdin": True,
        "StdinOnce": True,  # its standard input ends when this host does
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "Tty": False,
        "Healthcheck": {"Test": ["NONE"]},  # an image's own would run beside the supervisor
        "HostConfig": {
            **build_walls(runtime),
            **_limits(limits, more_processes),
            "Tmpfs": dict.fromkeys(WRITABLE, f"{_TMPFS_OPTIONS},size={tmpfs_bytes}"),
            "Mounts": [_bind(mount) for mount in mounts],
        },
    }


def cpu_mount(source: Path) -> Mount:
    """Shows how many CPUs there are to code that asks the kernel."""
    return Mount(source=source, target=_CPUS)


def build_walls(runtime: str) -> dict[str, Any]:
    """What keeps a container in, whatever it is for."""
    return {
        "Runtime": runtime,
        "NetworkMode": "none",
        "IpcMode": "none",  # its own, and of the engine no /dev/shm
        "CgroupnsMode": "private",
        "Privileged": False,
        "ReadonlyRootfs": True,
        "CapDrop": ["ALL"],
        # Only to become the REPL's uid in a child, and to kill what has that uid.
        "CapAdd": ["SETUID", "SETGID", "KILL"],
        "SecurityOpt": ["no-new-privileges:true", f"seccomp={profile.render()}"],
        "MaskedPaths": _MASKED,
        "ReadonlyPaths": _READ_ONLY,
        # The engine would write every frame to its disk.
        "LogConfig": {"Type": "none"},
        "RestartPolicy": {"Name": "no"},
        "AutoRemove": False,  # how it ended is asked after its end
        "Init": False,
    }


def _limits(limits: Limits, more_processes: int) -> dict[str, Any]:
    files = rlimits.supervisor_files(limits)
    return {
        "Memory": limits.memory_limit_bytes,
        "MemorySwap": limits.memory_limit_bytes,  # of both together: no swap
        "OomKillDisable": False,
        "PidsLimit": limits.pids_limit + more_processes,
        "CpuPeriod": _PERIOD_MICROSECONDS,
        "CpuQuota": max(1000, limits.cpu_limit_millis * _PERIOD_MICROSECONDS // 1000),
        "Ulimits": [
            {"Name": "nofile", "Soft": files, "Hard": files},
            {"Name": "core", "Soft": 0, "Hard": 0},
        ],
    }


def _bind(mount: Mount) -> dict[str, Any]:
    return {
        "Type": "bind",
        "Source": str(mount.source),
        "Target": mount.target,
        "ReadOnly": True,
        "BindOptions": {"Propagation": "rprivate"},
    }
