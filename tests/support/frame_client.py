"""A small blocking client of the frame channel, and a supervisor as a plain process.

Called by tests of the runtime and of what drives it. It plays the host: it gives credit, joins
blobs, and keeps what it was sent.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sandbox.packing import build_archive, start_arguments
from sandbox.runtime import frames
from sandbox.runtime.frames import Frame

WAIT_SECONDS = 20.0  # a guard against hanging, not an expectation


class FrameClient:
    """The host's end of a channel."""

    def __init__(self, channel: socket.socket) -> None:
        """Takes a connected stream socket."""
        channel.settimeout(WAIT_SECONDS)
        self._socket = channel
        self._decoder = frames.Decoder()
        self._ready: list[Frame] = []
        self._blobs: dict[str, bytearray] = {}
        self._next_id = 0
        self.gives_credit = True
        self.displays: list[tuple[str, int, bool, dict[str, bytes]]] = []
        self.output: dict[tuple[str, str], bytearray] = {}

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        """Sends one frame."""
        self._socket.sendall(frames.encode(header, payload))

    def part(self, content: bytes) -> dict[str, Any]:
        """Sends content as a blob and returns the part that names it."""
        self._next_id += 1
        name = f"h{self._next_id}"
        size = frames.CHUNK_BYTES
        for offset in range(0, max(len(content), 1), size):
            chunk = content[offset : offset + size]
            last = offset + size >= len(content)
            self.send({"type": "blob", "blob": name, "offset": offset, "last": last}, chunk)
        return {"blob": name, "n": len(content)}

    def content(self, part: dict[str, Any], payload: bytes) -> bytes:
        """Returns the bytes that a received part names."""
        if "blob" in part:
            data = bytes(self._blobs.pop(part["blob"]))
        else:
            data = payload[part["at"] : part["at"] + part["n"]]
        assert len(data) == part["n"]
        return data

    def receive(self) -> Frame:
        """Waits for the next frame that is not output or part of a blob; those are kept aside."""
        while True:
            frame = self._next()
            if frame.type == "blob":
                blob = self._blobs.setdefault(frame.header["blob"], bytearray())
                assert len(blob) == frame.header["offset"]
                blob += frame.payload
            elif frame.type == "output":
                self._take_output(frame)
            elif frame.type == "display":
                self._take_display(frame)
            else:
                return frame

    def _take_display(self, frame: Frame) -> None:
        header = frame.header
        data = {
            item["media_type"]: self.content(item["content"], frame.payload)
            for item in header["data"]
        }
        self.displays.append((header["cell"], header["index"], header["result"], data))

    def receive_output(self) -> None:
        """Waits for one frame of output; others stay for later."""
        later = []
        while (frame := self._next()).type != "output":
            later.append(frame)
        self._ready[:0] = later
        self._take_output(frame)

    def wait_output(self, cell: str, text: bytes) -> None:
        """Waits until a cell has printed exactly this on its standard output."""
        while bytes(self.output.get((cell, "stdout"), b"")) != text:
            self.receive_output()

    def _next(self) -> Frame:
        while not self._ready:
            data = self._socket.recv(1 << 20)
            if not data:
                self._decoder.close()
                raise EOFError("the supervisor closed the channel")
            self._ready += self._decoder.feed(data)
        return self._ready.pop(0)

    def expect(self, kind: str) -> Frame:
        """Waits for a frame that must be of this type."""
        frame = self.receive()
        assert frame.type == kind, frame
        return frame

    def _take_output(self, frame: Frame) -> None:
        header = frame.header
        kept = self.output.setdefault((header["cell"], header["stream"]), bytearray())
        assert header["offset"] == len(kept), header
        assert 0 < len(frame.payload) <= frames.OUTPUT_CHUNK_BYTES
        kept += frame.payload
        if self.gives_credit:
            self.credit(header["cell"], header["stream"])

    def credit(self, cell: str, stream: str) -> None:
        """Takes all that came of a stream."""
        offset = len(self.output.get((cell, stream), b""))
        self.send({"type": "credit", "cell": cell, "stream": stream, "offset": offset})

    def start(
        self,
        code: str | bytes,
        *,
        inputs: dict[str, bytes] | None = None,
        cell: str = "",
        timeout_ms: int = 0,
        output_limit: int = 0,
        mode: str = "program",
        depth: int = 1,
        max_depth: int = 4,
        tools: Sequence[dict[str, Any]] = (),
        stdin: bool = False,
    ) -> str:
        """Sends a cell and returns its id."""
        self._next_id += 1
        cell = cell or f"cell_{self._next_id}"
        source = code if isinstance(code, bytes) else code.encode()
        self.send(
            {
                "type": "cell",
                "cell": cell,
                "code": self.part(source),
                "inputs": [
                    {"name": name, "value": self.part(value)}
                    for name, value in (inputs or {}).items()
                ],
                "mode": mode,
                "invocation": "inv_test",
                "depth": depth,
                "max_depth": max_depth,
                "timeout_ms": timeout_ms,
                "output_limit": output_limit,
                "tools": list(tools),
                "stdin": stdin,
            }
        )
        return cell

    def run(self, code: str | bytes, **options: Any) -> Report:
        """Runs a cell to its end; it must make no call."""
        return self.finish(self.start(code, **options))

    def finish(self, cell: str, answer: Callable[[Frame], None] | None = None) -> Report:
        """Waits for the end of a cell; `answer` is given the calls that it makes."""
        while True:
            frame = self.receive()
            if frame.type == "started":
                assert frame.header["cell"] == cell
            elif frame.type == "call" and answer is not None:
                answer(frame)
            else:
                assert frame.type == "done", frame
                assert frame.header["cell"] == cell
                return Report(self, frame)

    def reply(self, call: Frame, value: bytes) -> None:
        """Answers a call with a value."""
        header = {"type": "reply", "call": call.header["call"]}
        self.send({**header, "value": self.part(value)})

    def reply_failure(self, call: Frame, **failure: str) -> None:
        """Answers a call with a failure."""
        names = "type_name message traceback invocation_id ending reason path expected got".split()
        whole = {name: failure.get(name, "") for name in names}
        self.send({"type": "reply", "call": call.header["call"], "failure": whole})

    def close(self) -> None:
        """Closes the channel, which ends the supervisor."""
        self._socket.close()


class Report:
    """How a cell ended, with what it printed."""

    def __init__(self, client: FrameClient, frame: Frame) -> None:
        """Takes the `done` frame."""
        header = self.header = frame.header
        self.outcome: str = header["outcome"]
        self.failure: dict[str, str] = header["failure"] or {}
        self.value = client.content(header["value"], frame.payload) if header["value"] else None
        text = client.content(header["text"], frame.payload) if header["text"] else None
        self.text = text.decode() if text is not None else None
        self.stdout = bytes(client.output.get((header["cell"], "stdout"), b""))
        self.stderr = bytes(client.output.get((header["cell"], "stderr"), b""))
        assert header["stdout_bytes"] == len(self.stdout)
        assert header["stderr_bytes"] == len(self.stderr)

    def __repr__(self) -> str:
        """Shows all of it."""
        return f"Report({self.header}, {self.value!r}, {self.stdout!r}, {self.stderr!r})"


@contextmanager
def supervisor(
    folder: Path, *options: str, python: str = sys.executable
) -> Iterator[tuple[FrameClient, subprocess.Popen[bytes]]]:
    """Starts a supervisor as a plain process; the workspace and the archive are in the folder.

    At the end the channel is closed and the process must exit by itself, with nothing left.
    """
    workspace = folder / "workspace"
    workspace.mkdir(exist_ok=True)
    archive = build_archive(python, folder / "runtime.zip")
    ours, theirs = socket.socketpair()
    command = [python, *start_arguments(str(archive)), "--workspace", str(workspace), *options]
    with ours, open(folder / "supervisor.log", "wb") as log:
        process = subprocess.Popen(
            command,
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=log,
            cwd="/",
            start_new_session=True,
        )
        theirs.close()
        try:
            yield FrameClient(ours), process
        finally:
            ours.close()
            try:
                process.wait(WAIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise
    said = (folder / "supervisor.log").read_text()
    assert said == "", said
