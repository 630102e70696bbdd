"""Code that speaks for its REPL: put before the programs of the security tests.

It reaches through the guest's own objects to the message socket, as any code in a sandbox can.
"""

from __future__ import annotations

HOSTILE = """
import gc, json, os, signal, sys, threading, time
import hutch
channel = hutch.invoke.__self__._channel
Place = sys.modules[type(channel).__module__].Place

def frame(header, payload=b""):
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(data).to_bytes(4, "big") + len(payload).to_bytes(4, "big") + data + payload

def put(header, payload=b""):
    channel._socket.send(frame(header, payload))

def ask(op, contents=(), **keys):
    pending = channel.call({"op": op, **keys}, list(contents))
    pending.wait(20)
    return pending

def save(data, name="kept.bin"):
    return ask("save_artifact", [data], name=name, media_type="", content=Place(0))

def own_cell():
    orders = [item for item in gc.get_objects() if type(item).__name__ == "Order"]
    return orders[0].header["cell"]

def forge_done(value, **keys):
    header = {"type": "done", "cell": own_cell(), "outcome": "returned", "failure": None}
    header |= {"value": {"at": 0, "n": len(value)}, "errno": None}
    put(header | keys, value)
    time.sleep(30)
"""


def hostile(program: str) -> str:
    """A program with the helpers before it."""
    return HOSTILE + program
