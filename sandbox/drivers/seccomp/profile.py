"""The policy as the profile that a container engine takes: JSON with rules by name and argument.

Called by the docker driver; calls the policy, which is also what bubblewrap's filter is made from.
An engine before version 23 has no default answer but EPERM, so there what the policy does not name
answers EPERM; what is newer than everything it names answers ENOSYS everywhere.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable
from typing import Any

from sandbox.drivers.seccomp import policy

_ARGUMENT_BITS = 32
_WHOLE = (1 << _ARGUMENT_BITS) - 1
_Rule = dict[str, Any]
_Match = dict[str, int | str]


def render() -> str:
    """The profile for every machine that the policy knows."""
    names = sorted(policy.ALLOWED)
    rules = [
        {"names": names, "action": "SCMP_ACT_ALLOW"},
        _refuse(sorted(policy.FORBIDDEN), errno.EPERM),
        _refuse(sorted(policy.ABSENT), errno.ENOSYS),
        *_clone(),
        *_ioctl(),
        *_personality(),
        *_socket(),
    ]
    profile = {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": errno.ENOSYS,
        "archMap": [
            {"architecture": "SCMP_ARCH_X86_64", "subArchitectures": []},
            {"architecture": "SCMP_ARCH_AARCH64", "subArchitectures": []},
        ],
        "syscalls": rules,
    }
    return json.dumps(profile, separators=(",", ":"))


def outside(values: Iterable[int]) -> list[tuple[int, int]]:
    """Covers every 32-bit number but the given ones: pairs of a mask and what is below it.

    An engine compares an argument once in a rule, so "none of these" is said by the bits: for each
    value, and each of its bits, the numbers that begin like it and differ there.
    """

    def cover(prefix: int, bit: int, inside: frozenset[int]) -> list[tuple[int, int]]:
        if not inside:
            return [(_WHOLE & ~((1 << (bit + 1)) - 1), prefix)]
        if bit < 0:
            return []
        one = 1 << bit
        low = frozenset(value for value in inside if not value & one)
        return [*cover(prefix, bit - 1, low), *cover(prefix | one, bit - 1, inside - low)]

    return cover(0, _ARGUMENT_BITS - 1, frozenset(values))


def _masked(index: int, mask: int, value: int) -> _Match:
    return {"index": index, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}


def _equal(index: int, value: int) -> _Match:
    return _masked(index, _WHOLE, value)


def _allow(name: str, *matches: _Match) -> _Rule:
    return {"names": [name], "action": "SCMP_ACT_ALLOW", "args": list(matches)}


def _refuse(names: list[str], number: int, *matches: _Match) -> _Rule:
    rule: _Rule = {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": number}
    return {**rule, "args": list(matches)} if matches else rule


def _clone() -> list[_Rule]:
    flags = policy.NAMESPACE_FLAGS
    bits = [1 << bit for bit in range(_ARGUMENT_BITS) if flags & 1 << bit]
    refused = [_refuse(["clone"], errno.EPERM, _masked(0, bit, bit)) for bit in bits]
    return [_allow("clone", _masked(0, flags, 0)), *refused]


def _ioctl() -> list[_Rule]:
    refused = [
        _refuse(["ioctl"], errno.EPERM, _equal(1, value)) for value in policy.FORBIDDEN_IOCTLS
    ]
    allowed = outside(policy.FORBIDDEN_IOCTLS)
    return [*refused, *(_allow("ioctl", _masked(1, *pair)) for pair in allowed)]


def _personality() -> list[_Rule]:
    allowed = [_allow("personality", _equal(0, value)) for value in policy.PERSONALITIES]
    refused = outside(policy.PERSONALITIES)
    return [
        *allowed,
        *(_refuse(["personality"], errno.EPERM, _masked(0, *pair)) for pair in refused),
    ]


def _socket() -> list[_Rule]:
    number = errno.EAFNOSUPPORT
    netlink = _equal(0, policy.NETLINK_FAMILY)
    known = (*policy.SOCKET_FAMILIES, policy.NETLINK_FAMILY)
    return [
        *(_allow("socket", _equal(0, family)) for family in policy.SOCKET_FAMILIES),
        _allow("socket", netlink, _equal(2, policy.NETLINK_ROUTE)),
        *(
            _refuse(["socket"], number, netlink, _masked(2, *pair))
            for pair in outside([policy.NETLINK_ROUTE])
        ),
        *(_refuse(["socket"], number, _masked(0, *pair)) for pair in outside(known)),
    ]
