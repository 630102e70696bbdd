"""Compiles the policy into one filter for each architecture: `python -m ...compile [--check]`.

Called by whoever changes the policy, and checked by a test; calls the policy, the numbers and the
assembler. It writes `compiled.py` beside it, which is checked in, so that a host needs no compiler
and a change of the policy is seen in review.
"""

from __future__ import annotations

import errno
import sys
import textwrap
from pathlib import Path

from sandbox.drivers.seccomp import assembler, policy
from sandbox.drivers.seccomp.numbers import NUMBERS

# Names as `platform.machine()` gives them: (column of the table, AUDIT_ARCH value).
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

_HEADER = '''"""The compiled filters. Made by `sandbox.drivers.seccomp.compile`: do not edit."""

from __future__ import annotations

FILTERS: dict[str, str] = {
'''


def _conditional(name: str) -> assembler.Block:
    """The block of a call whose arguments matter."""
    allow, forbid = assembler.answer(assembler.ALLOW), assembler.errno(errno.EPERM)
    match name:
        case "clone":
            rest = assembler.choose_any_bit(policy.NAMESPACE_FLAGS, forbid, [allow])
            return [assembler.load_argument(0), *rest]
        case "ioctl":
            rest = assembler.choose_equal(policy.FORBIDDEN_IOCTLS, forbid, [allow])
            return [assembler.load_argument(1), *rest]
        case "personality":
            other = [assembler.answer(forbid)]
            rest = assembler.choose_equal(policy.PERSONALITIES, assembler.ALLOW, other)
            return [assembler.load_argument(0), *rest]
        case "socket":
            refuse = assembler.answer(assembler.errno(errno.EAFNOSUPPORT))
            route = assembler.choose_equal((policy.NETLINK_ROUTE,), assembler.ALLOW, [refuse])
            netlink = [
                # Any other family than netlink is refused whatever its protocol.
                *_unless_equal(policy.NETLINK_FAMILY, refuse),
                assembler.load_argument(2),
                *route,
            ]
            rest = assembler.choose_equal(policy.SOCKET_FAMILIES, assembler.ALLOW, netlink)
            return [assembler.load_argument(0), *rest]
    raise ValueError(f"no rule for {name}")


def _unless_equal(value: int, otherwise: assembler.Instruction) -> assembler.Block:
    return [assembler.Instruction(0x15, 1, 0, value), otherwise]


def program(architecture: str) -> bytes:
    """Compiles the policy for one architecture.

    Raises:
        ValueError: The policy names a call twice, or one without a number.
    """
    column, audit = ARCHITECTURES[architecture]
    groups = (policy.ALLOWED, policy.FORBIDDEN, policy.ABSENT, policy.CONDITIONAL)
    if sum(map(len, groups)) != len(frozenset().union(*groups)):
        raise ValueError("the policy names a system call twice")
    default = [assembler.answer(assembler.errno(errno.ENOSYS))]
    blocks: dict[int, assembler.Block] = {}
    for name in sorted(frozenset().union(*groups)):
        number = NUMBERS[name][column]
        if number is None:
            continue
        if name in policy.CONDITIONAL:
            blocks[number] = _conditional(name)
        elif name in policy.ALLOWED:
            blocks[number] = [assembler.answer(assembler.ALLOW)]
        elif name in policy.FORBIDDEN:
            blocks[number] = [assembler.answer(assembler.errno(errno.EPERM))]
    ranges: list[tuple[int, assembler.Block]] = []
    for number in range(max(blocks) + 2):  # one beyond, so that what is higher has the default
        block = blocks.get(number, default)
        if not ranges or ranges[-1][1] != block:
            ranges.append((number, block))
    body = [assembler.load(assembler.OFFSET_NUMBER), *assembler.search(ranges)]
    return assembler.encode(
        [
            assembler.load(assembler.OFFSET_ARCHITECTURE),
            *_unless_equal(audit, assembler.answer(assembler.KILL_PROCESS)),
            *body,
        ]
    )


def render() -> str:
    """The text of `compiled.py`."""
    parts = [_HEADER]
    for architecture in ARCHITECTURES:
        lines = textwrap.wrap(program(architecture).hex(), 80)
        parts.append(f'    "{architecture}": (\n')
        parts.extend(f'        "{line}"\n' for line in lines)
        parts.append("    ),\n")
    parts.append("}\n")
    return "".join(parts)


def main(arguments: list[str]) -> int:
    """Writes `compiled.py`, or with `--check` says whether it is what would be written."""
    target = Path(__file__).with_name("compiled.py")
    text = render()
    if arguments == ["--check"]:
        if target.is_file() and target.read_text(encoding="ascii") == text:
            return 0
        sys.stderr.write(f"{target} is not what the policy compiles to: run this without --check\n")
        return 1
    if arguments:
        sys.stderr.write("usage: python -m sandbox.drivers.seccomp.compile [--check]\n")
        return 2
    target.write_text(text, encoding="ascii")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
