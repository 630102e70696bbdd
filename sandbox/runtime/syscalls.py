"""The system call filter of everything that runs user code, as a BPF program.

Called by `linux`. It is a second wall beside the driver's own filter: it keeps code of the same uid
off the supervisor and away from calls that a sandbox has no use for. Everything it does not name
is allowed.
"""

from __future__ import annotations

EPERM = 1
ENOSYS = 38

# Instruction codes of classic BPF.
LOAD = 0x20  # the word at an offset of struct seccomp_data
EQUAL = 0x15
GREATER_EQUAL = 0x35
ANY_BIT = 0x45
RETURN = 0x06

ALLOW = 0x7FFF0000
ERRNO = 0x00050000

NUMBER_OFFSET = 0
ARCH_OFFSET = 4
X32_BIT = 0x40000000
NAMESPACE_FLAGS = 0x7E020080  # every CLONE_NEW* of clone(2) and unshare(2)

PRIO_USER = 2
IOPRIO_WHO_USER = 3

# Name, number on x86-64, number on aarch64 (-1: not there).
DENIED = (
    ("ptrace", 101, 117),
    ("process_vm_readv", 310, 270),
    ("process_vm_writev", 311, 271),
    ("pidfd_getfd", 438, 438),
    ("pidfd_send_signal", 424, 424),
    ("kcmp", 312, 272),
    ("process_madvise", 440, 440),
    ("process_mrelease", 448, 448),
    ("move_pages", 279, 239),
    ("migrate_pages", 256, 238),
    ("setns", 308, 268),
    ("mount", 165, 40),
    ("umount2", 166, 39),
    ("pivot_root", 155, 41),
    ("chroot", 161, 51),
    ("open_tree", 428, 428),
    ("move_mount", 429, 429),
    ("fsopen", 430, 430),
    ("fsconfig", 431, 431),
    ("fsmount", 432, 432),
    ("fspick", 433, 433),
    ("mount_setattr", 442, 442),
    ("open_by_handle_at", 304, 265),
    ("add_key", 248, 217),
    ("request_key", 249, 218),
    ("keyctl", 250, 219),
    ("bpf", 321, 280),
    ("perf_event_open", 298, 241),
    ("userfaultfd", 323, 282),
    ("io_uring_setup", 425, 425),
    ("io_uring_enter", 426, 426),
    ("io_uring_register", 427, 427),
)

# Name, number on x86-64, on aarch64, and which arguments must not be the supervisor's pid.
AIMED: tuple[tuple[str, int, int, tuple[int, ...]], ...] = (
    ("kill", 62, 129, (0,)),
    ("tkill", 200, 130, (0,)),
    ("tgkill", 234, 131, (0, 1)),
    ("rt_sigqueueinfo", 129, 138, (0,)),
    ("rt_tgsigqueueinfo", 297, 240, (0, 1)),
    ("pidfd_open", 434, 434, (0,)),
    ("prlimit64", 302, 261, (0,)),
    ("sched_setparam", 142, 118, (0,)),
    ("sched_setscheduler", 144, 119, (0,)),
    ("sched_setaffinity", 203, 122, (0,)),
    ("sched_setattr", 314, 274, (0,)),
    ("setpriority", 141, 140, (1,)),
    ("ioprio_set", 251, 30, (1,)),
)

# Calls that reach every process of the uid when their first argument has this value.
UID_WIDE = (("setpriority", 141, 140, PRIO_USER), ("ioprio_set", 251, 30, IOPRIO_WHO_USER))
FLAGGED = (("clone", 56, 220), ("unshare", 272, 97))
CLONE3 = 435  # its flags are behind a pointer; without it, libraries fall back to clone


def numbers(machine: str) -> int:
    """Returns the audit architecture of a machine, or 0 where there is no filter for it."""
    return {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}.get(machine, 0)


def build_filter(machine: str, supervisor_pid: int) -> bytes:
    """Builds the program for one machine; empty where there is none for it.

    Args:
        machine: as uname(2) names it, `x86_64` or `aarch64`.
        supervisor_pid: the process that calls must not be aimed at.
    """
    architecture = numbers(machine)
    if not architecture:
        return b""
    arm = machine == "aarch64"
    program = [
        _step(LOAD, ARCH_OFFSET),
        _step(EQUAL, architecture, 1, 0),
        _step(RETURN, ERRNO | ENOSYS),
        _step(LOAD, NUMBER_OFFSET),
        _step(GREATER_EQUAL, X32_BIT, 0, 1),
        _step(RETURN, ERRNO | ENOSYS),
        *_refuse(CLONE3, ENOSYS),
    ]
    for _, intel_number, arm_number in DENIED:
        program += _refuse(arm_number if arm else intel_number, EPERM)
    for _, intel_number, arm_number in FLAGGED:
        check = [_step(ANY_BIT, NAMESPACE_FLAGS, 0, 1)]
        program += _refuse_if(arm_number if arm else intel_number, check, 0)
    for _, intel_number, arm_number, value in UID_WIDE:
        check = [_step(EQUAL, value, 0, 1)]
        program += _refuse_if(arm_number if arm else intel_number, check, 0)
    for _, intel_number, arm_number, arguments in AIMED:
        check = [_step(EQUAL, supervisor_pid, 0, 1)]
        for argument in arguments:
            program += _refuse_if(arm_number if arm else intel_number, check, argument)
    return b"".join([*program, _step(RETURN, ALLOW)])


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Writes one instruction: struct sock_filter, little-endian on both machines."""
    return code.to_bytes(2, "little") + bytes((if_true, if_false)) + value.to_bytes(4, "little")


def _refuse(number: int, error: int) -> list[bytes]:
    return [_step(EQUAL, number, 0, 1), _step(RETURN, ERRNO | error)]


def _refuse_if(number: int, check: list[bytes], argument: int) -> list[bytes]:
    """Refuses a call when a check of an argument's low word holds; then the number is loaded again.

    The kernel takes pids and flags as 32-bit values here, so the high word means nothing.
    """
    offset = 16 + 8 * argument
    refusal = [_step(LOAD, offset), *check, _step(RETURN, ERRNO | EPERM)]
    return [
        _step(EQUAL, number, 0, len(refusal) + 1),
        *refusal,
        _step(LOAD, NUMBER_OFFSET),
    ]
