"""What a person sees while `run` waits: the tree and the root's output, on standard error.

Called by `hutch.cli.run`; calls the SDK and Rich. On a terminal the tree is drawn in place and
collapses when it grows; elsewhere each ending is a line, and many of them are counted.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from hutch import types
from hutch.aio import AsyncClient
from hutch.cli import display
from hutch.cli.tree import InvocationTree, Node
from hutch.errors import HutchError

_PLAIN_LINES = 100
_PLAIN_STEP = 100
_LINE_LIMIT = 8 * 1024


class Progress:
    """Follows one run. Nothing that fails in here ends the run."""

    def __init__(self, console: Console, root_id: str, *, quiet: bool) -> None:
        """A progress that shows nothing yet."""
        self.tree = InvocationTree(root_id)
        self._console = console
        self._quiet = quiet
        self._ended = 0

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Draws the tree in place while the block runs, where there is a terminal."""
        if self._quiet or not self._console.is_terminal:
            yield
            return
        with Live(
            console=self._console,
            get_renderable=self._render,
            refresh_per_second=6,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        ):
            yield

    def _render(self) -> RenderableType:
        return self.tree.render(rows=max(4, self._console.height - 6))

    async def follow_tree(self, client: AsyncClient) -> None:
        """Takes the events of the tree until its root has ended."""
        try:
            async for event in client.watch_invocation(self.tree.root_id, tree=True):
                node = self.tree.fold(event)
                if node is not None and node.ending is not None:
                    self._say_ended(node)
        except HutchError as error:
            self.say(f"the tree cannot be followed: {error}")

    def _say_ended(self, node: Node) -> None:
        self._ended += 1
        if self._quiet or self._console.is_terminal or node.invocation_id == self.tree.root_id:
            return
        if self._ended <= _PLAIN_LINES:
            took = display.span(node.start_time or node.create_time, node.end_time)
            indent = "  " * (node.depth - 1)
            word = display.safe(node.word)
            who = f"{node.name} {node.invocation_id}" if node.label else node.invocation_id
            self.say(f"{indent}{who}  {word}  {display.seconds(took)}")
        elif self._ended % _PLAIN_STEP == 0:
            self.say(f"… {self._ended} invocations have ended")

    async def follow_output(self, client: AsyncClient, stream: types.Stream) -> None:
        """Prints what the root prints, line by line, until it has ended."""
        decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        open_line = ""
        try:
            async for chunk in client.read_output(self.tree.root_id, stream, follow=True):
                *lines, open_line = (open_line + decoder.decode(chunk.data)).split("\n")
                self._print_lines(lines)
                if len(open_line) > _LINE_LIMIT:
                    self._print_lines([open_line])
                    open_line = ""
        except HutchError as error:
            self.say(f"the output cannot be followed: {error}")
        open_line += decoder.decode(b"", final=True)
        if open_line:
            self._print_lines([open_line])

    def _print_lines(self, lines: list[str]) -> None:
        if lines and not self._quiet:
            self._console.print(Text("\n".join(display.safe(line) for line in lines)))

    def say(self, sentence: str) -> None:
        """Prints one sentence of our own."""
        if not self._quiet:
            self._console.print(Text(display.safe(sentence), style="dim"))


async def follow(client: AsyncClient, progress: Progress) -> None:
    """Follows tree and output until the root has ended."""
    async with asyncio.TaskGroup() as group:
        group.create_task(progress.follow_tree(client))
        group.create_task(progress.follow_output(client, "stdout"))
        group.create_task(progress.follow_output(client, "stderr"))
