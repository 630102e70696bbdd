"""The system call filter: what is checked in is what the policy compiles to, and does what it says.

The compiled bytes are interpreted as the kernel would, for both architectures.
"""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from sandbox.drivers import seccomp
from sandbox.drivers.seccomp import assembler, policy
from sandbox.drivers.seccomp import compile as compiler
from sandbox.drivers.seccomp.numbers import NUMBERS

ARCHITECTURES = sorted(compiler.ARCHITECTURES)
ENOSYS = assembler.errno(errno.ENOSYS)
EPERM = assembler.errno(errno.EPERM)


def verdict(architecture: str, name: str, *arguments: int) -> int:
    """What the compiled filter answers to a call by name."""
    column, audit = compiler.ARCHITECTURES[architecture]
    number = NUMBERS[name][column]
    assert number is not None
    program = seccomp.filter_bytes(architecture)
    return assembler.run(program, architecture=audit, number=number, arguments=arguments)


def exists(architecture: str, name: str) -> bool:
    """Whether an architecture has a call."""
    return NUMBERS[name][compiler.ARCHITECTURES[architecture][0]] is not None


def test_what_is_checked_in_is_what_the_policy_compiles_to() -> None:
    assert Path(compiler.__file__).with_name("compiled.py").read_text() == compiler.render()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_name_of_the_policy_gets_its_answer(architecture: str) -> None:
    for name in policy.ALLOWED:
        if exists(architecture, name):
            assert verdict(architecture, name) == assembler.ALLOW, name
    for name in policy.FORBIDDEN:
        if exists(architecture, name):
            assert verdict(architecture, name) == EPERM, name
    for name in policy.ABSENT:
        assert verdict(architecture, name) == ENOSYS, name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_number_that_is_not_named_does_not_exist(architecture: str) -> None:
    column, audit = compiler.ARCHITECTURES[architecture]
    named = {numbers[column] for numbers in NUMBERS.values()}
    program = seccomp.filter_bytes(architecture)
    for number in (*range(1000), 0x3FFFFFFF, 0x40000000, 0x40000001, 0xFFFFFFFF):
        if number not in named:
            assert assembler.run(program, architecture=audit, number=number) == ENOSYS, number


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_another_architectures_calls_end_the_process(architecture: str) -> None:
    program = seccomp.filter_bytes(architecture)
    for audit in (0x40000003, 0xC00000B7, 0xC000003E, 0):
        if audit != compiler.ARCHITECTURES[architecture][1]:
            answer = assembler.run(program, architecture=audit, number=0)
            assert answer == assembler.KILL_PROCESS


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("bit", [17, 25, 26, 27, 28, 29, 30])
def test_clone_makes_threads_and_processes_but_no_namespace(architecture: str, bit: int) -> None:
    threads = 0x3D0F00  # what a threads library asks for
    assert verdict(architecture, "clone", threads) == assembler.ALLOW
    assert verdict(architecture, "clone", 17) == assembler.ALLOW
    assert verdict(architecture, "clone", 17 | 1 << bit) == EPERM


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_only_local_and_internet_sockets_are_made(architecture: str) -> None:
    refused = assembler.errno(errno.EAFNOSUPPORT)
    for family in (1, 2, 10):
        assert verdict(architecture, "socket", family, 1, 0) == assembler.ALLOW
    assert verdict(architecture, "socket", 16, 3, 0) == assembler.ALLOW  # netlink, routes
    assert verdict(architecture, "socket", 16, 3, 12) == refused  # netlink, netfilter
    for family in (0, 3, 4, 17, 29, 38, 40, 44):
        assert verdict(architecture, "socket", family, 1, 0) == refused, family


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nobody_types_into_a_terminal(architecture: str) -> None:
    assert verdict(architecture, "ioctl", 0, 0x5401) == assembler.ALLOW
    for request in policy.FORBIDDEN_IOCTLS:
        assert verdict(architecture, "ioctl", 0, request) == EPERM
        # The kernel looks at 32 bits only, so the high half must not hide it.
        assert verdict(architecture, "ioctl", 0, request | 1 << 32) == EPERM


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_address_randomisation_stays_on(architecture: str) -> None:
    assert verdict(architecture, "personality", 0xFFFFFFFF) == assembler.ALLOW
    assert verdict(architecture, "personality", 0x0040000) == EPERM


def test_a_machine_without_a_filter_is_an_error_that_names_it() -> None:
    with pytest.raises(LookupError, match="riscv64"):
        seccomp.filter_bytes("riscv64")


def test_the_search_finds_every_block_across_long_jumps() -> None:
    blocks = [(number, [assembler.answer(number)]) for number in range(0, 2000, 2)]
    program = assembler.encode([assembler.load(0), *assembler.search(blocks)])
    for number in (0, 1, 2, 3, 999, 1000, 1998, 1999, 5000):
        expected = min(number, 1999) // 2 * 2
        assert assembler.run(program, architecture=0, number=number) == expected


def test_a_program_longer_than_the_kernel_takes_is_refused() -> None:
    with pytest.raises(ValueError, match="4096"):
        assembler.encode([assembler.answer(0)] * 4097)
