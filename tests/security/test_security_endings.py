"""Code that does not want to end, or wants its end to look like another: the ending is the right
one, and comes in time."""

from __future__ import annotations

import time

import pytest

import hutch
from tests.support.hostile import hostile

GUARD_SECONDS = 30.0

RAISED = {
    "a metaclass whose name raises": """
class Meta(type):
    @property
    def __name__(cls):
        raise cls("again")
class Broken(Exception, metaclass=Meta):
    pass
raise Broken("told")
""",
    "a text whose methods lie": """
class Text(str):
    def __str__(self): return self
    def encode(self, *given): raise SystemExit(3)
    def __len__(self): return 10**12
class Broken(Exception):
    def __str__(self): return Text("told")
raise Broken
""",
    "no attribute can be read": """
class Broken(Exception):
    __class__ = property(lambda self: 1 / 0)
    def __getattribute__(self, name): raise KeyboardInterrupt(name)
raise Broken
""",
    "a text that is never made": """
class Broken(Exception):
    def __str__(self): raise SystemExit(3)
    __repr__ = __str__
raise Broken
""",
    "a deep group of a deep chain": """
class Broken(ExceptionGroup):
    pass
error = ValueError("inner")
for number in range(3000):
    error = ExceptionGroup("group", [error])
    error.__cause__ = ValueError(str(number))
raise Broken("outer", [error])
""",
}


@pytest.mark.parametrize("name", RAISED)
def test_an_exception_of_any_class_is_told_as_what_it_is(client: hutch.Client, name: str) -> None:
    with pytest.raises(hutch.InvocationFailed) as caught:
        client.invoke(program=RAISED[name], timeout_seconds=GUARD_SECONDS)
    assert caught.value.ending == "raised"
    assert caught.value.failure is not None
    assert caught.value.failure.type_name == "Broken"


def test_streams_of_the_codes_own_do_not_change_what_it_returned(client: hutch.Client) -> None:
    program = """
import sys
class Stream:
    def write(self, text): raise KeyboardInterrupt
    def flush(self): raise SystemExit(9)
sys.stdout = sys.stderr = Stream()
return "kept"
"""
    assert client.invoke(program=program, timeout_seconds=GUARD_SECONDS) == "kept"


SPEAKERS = {
    "a fork goes on speaking": (
        """
if os.fork() == 0:
    number = 0
    while True:
        number += 1
        try:
            put({"type": "call", "call": f"x{number}", "op": "await_child", "invocation": "y"})
        except OSError:
            os._exit(0)
time.sleep(0.05)
os._exit(3)
""",
        "exited",
    ),
    "a blob without an end": (
        """
for number in range(20):
    put({"type": "blob", "blob": "b", "offset": number * 100_000, "last": False}, bytes(100_000))
os._exit(3)
""",
        "exited",
    ),
    "a signal that the code gives itself": ("os.kill(os.getpid(), signal.SIGSEGV)", "crashed"),
    "every descriptor closed": ("os.closerange(0, 65_536); time.sleep(30)", "crashed"),
    "an operation that does not exist": (
        'put({"type": "call", "call": "a", "op": "root"})',
        "denied",
    ),
    "more blobs than may wait": (
        """
for number in range(40):
    put({"type": "blob", "blob": f"b{number}", "offset": 0, "last": True}, bytes(1_000))
time.sleep(30)
""",
        "denied",
    ),
    "a report about the REPL's own death": ('forge_done(b"1", exit_code=0)', "denied"),
    "a report of another cell": (
        'put({"type": "done", "cell": "other"}); time.sleep(30)',
        "crashed",
    ),
    "lengths that lie": (
        'channel._socket.send(bytes(3) + b"\\x20" * 40); time.sleep(30)',
        "crashed",
    ),
    "a header without a bottom": (
        'put(b\'{"type":"call","x":\' + b"[" * 60_000 + b"]" * 2_000 + b"}"); time.sleep(30)',
        "crashed",
    ),
}


@pytest.mark.parametrize("name", SPEAKERS)
def test_whatever_it_says_to_its_supervisor_the_ending_is_typed(
    client: hutch.Client, name: str
) -> None:
    program, ending = SPEAKERS[name]
    began = time.monotonic()
    with pytest.raises(hutch.InvocationFailed) as caught:
        client.invoke(program=hostile(program), timeout_seconds=GUARD_SECONDS)
    assert caught.value.ending == ending
    assert time.monotonic() - began < GUARD_SECONDS


STUBBORN = {
    "all signals blocked": """
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
while True: pass
""",
    "all exceptions caught": """
while True:
    try:
        while True: pass
    except BaseException:
        pass
""",
    "everybody stopped": """
for _ in range(5):
    if os.fork() == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
os.kill(os.getpid(), signal.SIGSTOP)
""",
    "a finalizer without an end": """
class Endless:
    def __del__(self):
        while True: pass
endless = Endless()
del endless
""",
    "a loop that cancels its cancelling": """
import asyncio
async def stay():
    while True:
        try:
            await asyncio.sleep(10)
        except BaseException:
            pass
task = asyncio.ensure_future(stay())
await asyncio.sleep(0)
""",
}


@pytest.mark.parametrize("name", STUBBORN)
def test_code_that_resists_ends_at_its_deadline(client: hutch.Client, name: str) -> None:
    began = time.monotonic()
    with pytest.raises(hutch.InvocationFailed) as caught:
        client.invoke(program=hostile(STUBBORN[name]), timeout_seconds=0.7)
    assert caught.value.ending == "deadline_exceeded"
    assert time.monotonic() - began < GUARD_SECONDS


def test_what_the_code_leaves_running_holds_nothing_back(client: hutch.Client) -> None:
    program = """
import subprocess
for _ in range(10):
    subprocess.Popen(["sh", "-c", "trap '' TERM INT HUP; while :; do sleep 100; done"],
                     start_new_session=True)
def flood():
    while True:
        os.write(1, bytes(65_536))
threading.Thread(target=flood, daemon=True).start()
if os.fork() == 0:  # takes away what the supervisor is about to read
    taken = os.open("/proc/self/fd/1", os.O_RDONLY)
    while True:
        os.read(taken, 65_536)
return "done"
"""
    assert client.invoke(program=hostile(program), timeout_seconds=GUARD_SECONDS) == "done"
