"""`hutch shell`: a person, or a script, at a REPL in a sandbox.

Called by `hutch.cli.main`; calls the SDK. What cells print and show comes from hostile code: on a
terminal it is made harmless, and displays are written as files under names of our own.
"""

from __future__ import annotations

import codeop
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from hutch import types
from hutch.boxes import Box, BoxResult, Cell
from hutch.cli import context, display, download
from hutch.client import Client
from hutch.errors import ConnectionLostError, HutchError, InvocationFailed

_LEAVE_SECONDS = 2.0
_COMPLETIONS = 200
_COMPLETION_SECONDS = 3.0
_MIB = 1024 * 1024
_SUFFIXES = {
    "image/png": ".png",
    "image/jpeg": ".jpg",
    "image/svg+xml": ".svg",
    "text/html": ".html",
    "text/markdown": ".md",
    "text/latex": ".tex",
    "application/json": ".json",
}
# Runs in the sandbox and leaves no trace: no name is bound, `_` stays, and the history forgets it.
_COMPLETE = """\
(lambda h, c: (h._entries.pop().forget(), print(__import__('json').dumps(
[m for m in (c.complete({text!r}, n) for n in range({most})) if m]))))(
__history__, __import__('rlcompleter').Completer(globals())) and None
"""


def shell(
    ctx: typer.Context,
    attach: Annotated[
        str, typer.Option("--attach", metavar="ID", help="Come back to a box that runs.")
    ] = "",
    keep: Annotated[bool, typer.Option("--keep", help="Leave the box running at the end.")] = False,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where displays are written.")
    ] = Path("hutch-displays"),
    idle: Annotated[
        float | None, typer.Option(min=1, metavar="SECONDS", help="How long nothing may happen.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0.001, metavar="SECONDS", help="How long it may live.")
    ] = None,
    memory: Annotated[int | None, typer.Option(min=1, metavar="MIB", help="Its memory.")] = None,
    max_depth: Annotated[
        int | None, typer.Option(min=1, help="The deepest level that its cells may spawn to.")
    ] = None,
    driver: Annotated[str, typer.Option(help="The driver of its sandbox.")] = "",
    template: Annotated[str, typer.Option(help="What its sandbox is made from.")] = "",
    label: Annotated[str, typer.Option(help="A name for trees.")] = "shell",
    target: context.Target = None,
    api_key: context.ApiKey = None,
    state: context.State = None,
) -> None:
    """Opens a REPL in a sandbox; without a terminal it reads a script, cell by cell."""
    shared = context.common(ctx, target, api_key, state, as_json=False)
    found = shared.settings()
    client = Client(
        found.target or None,
        api_key=found.api_key or None,
        state=found.state or None,
        client_name="hutch-shell",
    )
    try:
        if attach:
            box = client.attach(attach)
        else:
            box = client.sandbox(
                idle_timeout_seconds=idle,
                timeout_seconds=timeout,
                memory_limit_bytes=None if memory is None else memory * _MIB,
                max_depth=max_depth,
                driver=driver,
                template=template,
                label=label,
                cancel_on_disconnect=not keep,
            ).open()
        code = Shell(box, out, interactive=sys.stdin.isatty()).run()
        if keep or attach:
            box.detach()
            display.error_console().print(Text(f"it goes on: hutch shell --attach {box.id}"))
        else:
            with suppress(InvocationFailed):
                box.close()
    finally:
        client.close()
    raise typer.Exit(code)


class Shell:
    """One session at one box."""

    def __init__(self, box: Box, out: Path, *, interactive: bool) -> None:
        """A session that has not begun."""
        self._box = box
        self._out = out
        self._interactive = interactive
        self._console: Console = display.error_console()
        self._compile = codeop.CommandCompiler()
        self._shown = 0

    def run(self) -> int:
        """Reads and runs cells until there are no more; the exit code."""
        if not self._interactive:
            return self._run_all()
        self._say(f"{self._box.id}: Ctrl-C interrupts, Ctrl-D leaves")
        with _line_editing(self._complete):
            return self._run_all()

    def _run_all(self) -> int:
        for source in self._cells():
            try:
                result = self._run(source)
            except _Leave:
                return 130
            if result is None:
                return 1
            if result.outcome == "returned":
                value = json.loads(result.value_json or b"null")
                display.write_output(json.dumps(value, ensure_ascii=sys.stdout.isatty()) + "\n")
                return 0
            if not result.ok and not self._interactive:
                return 1
        return 0

    # --- reading -------------------------------------------------------------------------------

    def _cells(self) -> Iterator[str]:
        """Blocks of source that are complete."""
        lines: list[str] = []
        while True:
            try:
                line = self._line(">>> " if not lines else "... ")
            except KeyboardInterrupt:
                lines = []
                display.write_output("\n")
                continue
            if line is None:
                if lines:
                    yield "\n".join(lines)
                return
            lines.append(line)
            if self._is_complete(lines):
                source, lines = "\n".join(lines), []
                if source.strip():
                    yield source

    def _line(self, prompt: str) -> str | None:
        if not self._interactive:
            text = sys.stdin.readline()
            return text.rstrip("\n") if text else None
        try:
            return input(prompt)
        except EOFError:
            display.write_output("\n")
            return None

    def _is_complete(self, lines: list[str]) -> bool:
        source = "\n".join(lines)
        if not self._interactive:
            # A script has no prompt at which an empty line could end a block: the next line does
            # that which begins at the margin, and it is read with the block.
            source += "\n"
            if lines[-1][:1] in (" ", "\t", "") and len(lines) > 1:
                return False
        try:
            if self._compile(source, "<shell>", "exec" if len(lines) > 1 else "single") is None:
                return False
        except (SyntaxError, ValueError, OverflowError):
            # A top-level return or await is none to Python here; the sandbox says what is wrong.
            return not lines[-1].startswith((" ", "\t"))
        return len(lines) == 1 or not lines[-1].strip() or not self._interactive

    # --- running -------------------------------------------------------------------------------

    def _run(self, source: str) -> BoxResult | None:
        """Runs one cell; None when the box has ended."""
        try:
            result = self._wait(
                lambda: self._box.submit(source, on_output=self._print, on_display=self._show)
            )
        except (InvocationFailed, ConnectionLostError) as error:
            self._say(str(error), "red")
            return None
        if result.text:
            display.write_output(result.text + "\n")
        failure = result.failure
        if failure is not None and (failure.traceback or failure.type_name):
            text = failure.traceback.rstrip() or f"{failure.type_name}: {failure.message}"
            self._say(text, "red")
        elif not result.ok:
            self._say(result.outcome.replace("_", " "), "red")
        if result.state_lost:
            self._say("the REPL died: its names are lost", "yellow")
        return result

    def _wait(self, submit: Callable[[], Cell]) -> BoxResult:
        """Gives a cell and waits for it; Ctrl-C interrupts it, even while it is being given, and
        twice leaves."""
        pressed = 0.0
        waiting = early = False

        def interrupt(number: int, frame: FrameType | None) -> None:
            nonlocal early
            early = True
            if waiting:
                raise KeyboardInterrupt

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            cell = submit()
            while True:
                try:
                    waiting = True
                    if early:
                        raise KeyboardInterrupt
                    return cell.result()
                except KeyboardInterrupt:
                    waiting = early = False
                    now = time.monotonic()
                    if pressed and now - pressed < _LEAVE_SECONDS and self._may_leave():
                        raise _Leave from None
                    pressed = now
                    self._say("interrupting … (once more to leave)")
                    cell.interrupt()
        finally:
            signal.signal(signal.SIGINT, before)

    def _may_leave(self) -> bool:
        if not self._interactive:
            return True
        with suppress(EOFError, KeyboardInterrupt):
            return input("leave the shell? [y/N] ").strip().lower() in ("y", "yes")
        return True

    def _print(self, part: types.CellOutput) -> None:
        text = part.data.decode("utf-8", "backslashreplace")
        if part.stream == "stderr":
            self._console.print(Text(display.safe(text)), end="")
        elif sys.stdout.isatty():
            display.write_output(text)
        else:
            sys.stdout.buffer.write(part.data)
            sys.stdout.buffer.flush()

    def _show(self, shown: types.Display) -> None:
        """Writes a display's best form as a file; plain text is printed."""
        for item in shown.data:
            suffix = _SUFFIXES.get(item.media_type)
            if suffix is None:
                continue
            path = self._save(item, suffix)
            self._say(f"[{display.line(item.media_type)}] {path}")
            return
        for item in () if shown.is_result else shown.data:
            if item.media_type == "text/plain" and item.data is not None:
                display.write_output(item.data.decode("utf-8", "backslashreplace") + "\n")
                return

    def _save(self, item: types.DisplayData, suffix: str) -> Path:
        base = download.open_base(self._out)
        try:
            while True:
                self._shown += 1
                name = f"display-{self._shown:03d}{suffix}"
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                with suppress(FileExistsError):
                    handle = os.open(name, flags, 0o644, dir_fd=base)
                    break
        finally:
            os.close(base)
        with open(handle, "wb") as file:
            if item.data is not None:
                file.write(item.data)
            else:
                client = self._box._client
                for piece in client.get_artifact(item.artifact_id):
                    file.write(piece)
        return self._out / name

    def _say(self, sentence: str, style: str = "dim") -> None:
        self._console.print(Text(display.safe(sentence), style=style))

    # --- completion ----------------------------------------------------------------------------

    def _complete(self, text: str) -> list[str]:
        """What a name may go on to, as the sandbox itself sees it."""
        if not text.strip():
            return ["    "]
        source = _COMPLETE.format(text=text[:200], most=_COMPLETIONS)
        try:
            result = self._box.run(source, timeout_seconds=_COMPLETION_SECONDS, queueing="refuse")
            found = json.loads(result.stdout)
        except (HutchError, ValueError):
            return []
        if not isinstance(found, list):
            return []
        return [name for name in found if isinstance(name, str) and name.isprintable()]


class _Leave(Exception):
    """Ctrl-C twice: the person wants to leave."""


@contextmanager
def _line_editing(complete: Callable[[str], list[str]]) -> Iterator[None]:
    """History and completion of the terminal's line, where Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    history = Path(base, "hutch", "shell_history")
    found: list[str] = []

    def step(text: str, number: int) -> Any:
        if number == 0:
            found[:] = complete(text)
        return found[number] if number < len(found) else None

    with suppress(OSError):
        history.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        history.touch(0o600)
        readline.read_history_file(history)
    readline.set_history_length(2000)
    readline.set_completer(step)
    readline.parse_and_bind("tab: complete")
    try:
        yield
    finally:
        readline.set_completer(None)
        with suppress(OSError):
            readline.write_history_file(history)
