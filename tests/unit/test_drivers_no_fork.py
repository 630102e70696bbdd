"""The host starts processes without running a library's fork handlers in them.

Guards against sandboxes that failed now and then: gRPC starts threads in its handler, and a child
that was forked (which Python does when it is asked to change the uid) died of it before its program
began.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# A fork handler that ends the child at once.
_DEADLY = """
import ctypes
libc = ctypes.CDLL(None)
abort = ctypes.cast(libc.abort, ctypes.c_void_p)
assert libc.__register_atfork(None, None, abort, None) == 0
"""
_FORK = """
import os
child = os.fork()
if child == 0:
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
_NAMESPACE = """
import os
from sandbox.drivers import users
uid = users.FIRST_UID + 2 * (users.BLOCKS * users.PAIRS - 1)
os.close(users.make_user_namespace(uid, f"0 {uid} 1\\n"))
print("made")
"""
_SPAWN = """
import asyncio
from sandbox.drivers.process import spawn
async def main():
    process = spawn(["/bin/true"], env={})
    print(await process.wait())
    process.close()
asyncio.run(main())
"""


def _after_deadly(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _DEADLY + program], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_the_handler_of_this_test_does_end_a_forked_child() -> None:
    assert _after_deadly(_FORK) == "-6"


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only a root host makes these namespaces")
def test_a_user_namespace_is_made_without_fork_handlers() -> None:
    assert _after_deadly(_NAMESPACE) == "made"


def test_a_sandbox_process_is_started_without_fork_handlers() -> None:
    assert _after_deadly(_SPAWN) == "0"
