"""Code that takes all it can get of one thing: its own sandbox ends, its neighbours go on."""

from __future__ import annotations

import pytest

import hutch
from hutch import ReturnType
from tests.support.hostile import hostile

GUARD_SECONDS = 30.0

FORKS = """
def fork_for_ever():
    while True:
        try:
            os.fork()
        except OSError:
            pass
fork_for_ever()
"""
FILL = """
seen = {}
for folder in ("/tmp", "/dev/shm", "/workspace"):
    try:
        with open(folder + "/all", "wb") as file:
            while True:
                file.write(bytes(1 << 20))
    except OSError as error:
        seen[folder] = error.errno
return seen
"""
BOMBS = {
    "processes": (FORKS, ("deadline_exceeded",)),
    "memory": (
        "kept = []\nwhile True: kept.append(bytearray(10**7))",
        ("memory_exceeded", "raised"),
    ),
    "memory of the kernel": (
        """
import socket
kept = []
while True:
    pair = socket.socketpair()
    kept.append(pair)
    pair[0].setblocking(False)
    pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    try:
        while True:
            pair[0].send(bytes(65_536))
    except BlockingIOError:
        pass
""",
        ("memory_exceeded", "raised"),
    ),
    "output": (
        """
def flood(descriptor):
    while True:
        os.write(descriptor, bytes(65_536))
threading.Thread(target=flood, args=(2,)).start()
flood(1)
""",
        ("output_exceeded",),
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_case_s19_a_bomb_ends_its_own_sandbox_and_a_sibling_goes_on(
    client: hutch.Client, name: str
) -> None:
    program, endings = BOMBS[name]
    handle = client.spawn(
        program=hostile(program),
        timeout_seconds=2,
        output_limit_bytes=8 << 20,
        memory_limit_bytes=256 << 20,
    )
    assert client.invoke(program="return 1 + 1", timeout_seconds=GUARD_SECONDS) == 2
    with pytest.raises(hutch.InvocationFailed) as caught:
        handle.result(timeout_seconds=GUARD_SECONDS)
    assert caught.value.ending in endings


def test_case_s19_full_disks_and_no_descriptors_are_ordinary_errors(client: hutch.Client) -> None:
    filled = client.invoke(program=FILL, tmpfs_limit_bytes=16 << 20, timeout_seconds=GUARD_SECONDS)
    assert filled == {"/tmp": 28, "/dev/shm": 28, "/workspace": 28}
    opened = client.invoke(
        ReturnType(int),
        program="""
import os
count = 0
try:
    while True:
        count += bool(os.open("/dev/null", os.O_RDONLY))
except OSError:
    return count
""",
        open_files_limit=256,
        timeout_seconds=GUARD_SECONDS,
    )
    assert opened <= 256
