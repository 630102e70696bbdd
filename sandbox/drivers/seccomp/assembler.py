"""A small assembler for seccomp filters: classic BPF over `struct seccomp_data`.

Called by `sandbox.drivers.seccomp.compile`; calls nothing. A program is a list of instructions, and
blocks are joined by concatenation: every jump is relative and inside its own block. The encoding is
that of `linux/filter.h`, the data that of `linux/seccomp.h`; both architectures are little-endian.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

ALLOW = 0x7FFF0000
KILL_PROCESS = 0x80000000
_ERRNO = 0x00050000
_MAX_INSTRUCTIONS = 4096

_LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_JUMP = 0x05  # BPF_JMP | BPF_JA
_JUMP_EQUAL = 0x15
_JUMP_AT_LEAST = 0x35
_JUMP_ANY_BIT = 0x45
_RETURN = 0x06

OFFSET_NUMBER = 0
OFFSET_ARCHITECTURE = 4
_OFFSET_ARGUMENTS = 16


class Instruction(NamedTuple):
    """One `struct sock_filter`."""

    code: int
    if_true: int
    if_false: int
    value: int


Block = list[Instruction]


def errno(number: int) -> int:
    """The filter's answer that makes a call fail with an error number."""
    return _ERRNO | number


def load(offset: int) -> Instruction:
    """Loads 32 bits of the data."""
    return Instruction(_LOAD, 0, 0, offset)


def load_argument(index: int) -> Instruction:
    """Loads the low half of an argument; the calls we look into take 32 bits there."""
    return load(_OFFSET_ARGUMENTS + 8 * index)


def answer(action: int) -> Instruction:
    """Ends the program."""
    return Instruction(_RETURN, 0, 0, action)


def choose_equal(values: Sequence[int], then: int, otherwise: Block) -> Block:
    """Answers `then` if the loaded value is one of `values`, else goes on to `otherwise`."""
    block: Block = []
    for value in values:
        block += [Instruction(_JUMP_EQUAL, 0, 1, value), answer(then)]
    return block + otherwise


def choose_any_bit(mask: int, then: int, otherwise: Block) -> Block:
    """Answers `then` if the loaded value has a bit of `mask`, else goes on to `otherwise`."""
    return [Instruction(_JUMP_ANY_BIT, 0, 1, mask), answer(then), *otherwise]


def search(ranges: Sequence[tuple[int, Block]]) -> Block:
    """Finds the block for the loaded number by bisection.

    Args:
        ranges: (first number, block), ascending and beginning with 0; each holds up to the next.
    """
    if len(ranges) == 1:
        return list(ranges[0][1])
    middle = len(ranges) // 2
    low, high = search(ranges[:middle]), search(ranges[middle:])
    # A conditional jump reaches 255 instructions and a plain one any number, so go through one.
    return [
        Instruction(_JUMP_AT_LEAST, 0, 1, ranges[middle][0]),
        Instruction(_JUMP, 0, 0, len(low)),
        *low,
        *high,
    ]


def encode(program: Block) -> bytes:
    """Packs a program as the kernel takes it.

    Raises:
        ValueError: It is longer than the kernel allows.
    """
    if len(program) > _MAX_INSTRUCTIONS:
        raise ValueError(f"{len(program)} instructions; the kernel takes {_MAX_INSTRUCTIONS}")
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def run(program: bytes, *, architecture: int, number: int, arguments: Sequence[int] = ()) -> int:
    """Interprets a program, for tests: the action it answers with for one system call."""
    padded = (*arguments, *[0] * (6 - len(arguments)))
    data = struct.pack("<IIQ6Q", number, architecture, 0, *padded)
    position, loaded = 0, 0
    while True:
        code, if_true, if_false, value = struct.unpack_from("<HBBI", program, position * 8)
        position += 1
        match code:
            case 0x20:
                (loaded,) = struct.unpack_from("<I", data, value)
            case 0x05:
                position += value
            case 0x15:
                position += if_true if loaded == value else if_false
            case 0x35:
                position += if_true if loaded >= value else if_false
            case 0x45:
                position += if_true if loaded & value else if_false
            case 0x06:
                return int(value)
            case _:
                raise ValueError(f"unknown instruction {code:#x}")
