"""`hutch run`: one invocation, watched until it ends.

Called by `hutch.cli.main`; calls the SDK. Standard output gets the value alone. Exit codes: 0
returned, 1 any other ending, 2 usage or set-up, 130 interrupted and durably cancelled.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from hutch import types, values
from hutch.aio import AsyncClient
from hutch.cli import context, display, download, inputs, standard_input, tree
from hutch.cli.progress import Progress, follow
from hutch.errors import HutchError

Result = TypeVar("Result")

RETURNED, OTHER_ENDING, INTERRUPTED = 0, 1, 130
_DRAIN_SECONDS = 10.0
_SETTLE_SECONDS = 10.0
_MIB = 1024 * 1024
_NOT_BUILT = "agent mode is not built yet"


def run(
    ctx: typer.Context,
    file: Annotated[
        str | None, typer.Argument(help="The program; - reads standard input.", show_default=False)
    ] = None,
    task: Annotated[str | None, typer.Option(help=f"A task for an agent; {_NOT_BUILT}.")] = None,
    model: Annotated[str | None, typer.Option(help=f"Its model; {_NOT_BUILT}.")] = None,
    input_: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="NAME=JSON|@FILE",
            help="A named input; a file is JSON if its name ends with .json, else text.",
        ),
    ] = None,
    returns: Annotated[
        str | None, typer.Option(metavar="SCHEMA|@FILE", help="The contract, a JSON Schema.")
    ] = None,
    max_depth: Annotated[
        int | None, typer.Option(min=1, help="The deepest level; the program is at 1.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0.001, metavar="SECONDS", help="Its deadline.")
    ] = None,
    memory: Annotated[int | None, typer.Option(min=1, metavar="MIB", help="Its memory.")] = None,
    driver: Annotated[str, typer.Option(help="The driver of its sandbox.")] = "",
    template: Annotated[str, typer.Option(help="What its sandbox is made from.")] = "",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where its artifacts are written.")
    ] = None,
    label: Annotated[str, typer.Option(help="A name for trees; the file's name otherwise.")] = "",
    stdin: Annotated[
        bool, typer.Option("--stdin", help="Give the program this command's standard input.")
    ] = False,
    detach: Annotated[
        bool, typer.Option(help="Print the id at once and leave it running.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
    target: context.Target = None,
    api_key: context.ApiKey = None,
    state: context.State = None,
    as_json: context.Json = False,
) -> None:
    """Runs one program in a sandbox and prints its value."""
    shared = context.common(ctx, target, api_key, state, as_json)
    if task is not None or model is not None:
        raise typer.BadParameter(_NOT_BUILT)
    if file is None:
        raise typer.BadParameter("name a program's file, or - for standard input")
    _check_detached(detach, out, stdin=stdin, from_stdin=file == "-")
    spec = types.Spec(
        program=inputs.read_program(file),
        inputs=inputs.read_inputs(input_ or []),
        contract=inputs.read_contract(returns),
        spawn=types.SpawnGrant(max_depth=max_depth),
        resources=types.ResourceLimits(
            memory_limit_bytes=None if memory is None else memory * _MIB
        ),
        timeout_seconds=timeout,
        driver=driver,
        template=template,
        label=label or ("" if file == "-" else Path(file).name[:200]),
        attach_stdin=stdin,
    )
    if out is not None:
        os.close(download.open_base(out))  # a folder that cannot be used is told before the work
    console = display.error_console()
    job = Run(shared=shared, spec=spec, out=out, console=console, quiet=quiet)
    raise typer.Exit(asyncio.run(job.detach() if detach else job.run()))


def _check_detached(detach: bool, out: Path | None, *, stdin: bool, from_stdin: bool) -> None:
    if out is not None and detach:
        raise typer.BadParameter("--out needs the ending, which --detach does not wait for")
    if stdin and (detach or from_stdin):
        raise typer.BadParameter("--stdin goes with a program's file and without --detach")


class Interrupted(Exception):
    """Somebody wants the run to end; `code` is the exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All that is known of a run after its end."""

    invocation: types.Invocation
    value_json: bytes | None
    tree: tree.InvocationTree
    artifacts: tuple[types.Artifact, ...]
    refusals: tuple[types.ArtifactRefusal, ...]
    saved: list[download.Saved]


class Run:
    """One `hutch run`."""

    def __init__(
        self,
        *,
        shared: context.Common,
        spec: types.Spec,
        out: Path | None,
        console: Console,
        quiet: bool,
    ) -> None:
        """A run that has not begun."""
        self._shared = shared
        self._spec = spec
        self._out = out
        self._console = console
        self._quiet = quiet
        self._signal: asyncio.Future[int] | None = None

    async def detach(self) -> int:
        """Starts it and prints its id."""
        async with self._shared.client() as client:
            created = await client.create_invocation(self._spec)
        if self._shared.as_json:
            display.print_json({"invocation": display.invocation_json(created)})
        else:
            display.write_output(f"{created.invocation_id}\n")
        return RETURNED

    async def run(self) -> int:
        """Runs it to its end and prints everything; the exit code."""
        loop = asyncio.get_running_loop()
        self._signal = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, number)
        client = self._shared.client()
        try:
            await self._unless_interrupted(client.connect())
            return await self._run(client)
        except Interrupted as interrupted:
            return interrupted.code
        finally:
            await client.close()

    def _on_signal(self, number: signal.Signals) -> None:
        if self._signal is None or self._signal.done():
            os._exit(128 + number)  # asked twice: the session ends with us, and so does the run
        self._signal.set_result(128 + number)

    async def _unless_interrupted(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Awaits; a signal cancels what is awaited."""
        task = asyncio.create_task(work)
        await self._first(task)
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError, HutchError):
                await task
            raise Interrupted(self._code())
        return await task

    async def _first(self, task: asyncio.Task[Any]) -> None:
        """Waits for a task's end or a signal, whichever is first."""
        if self._signal is not None:
            await asyncio.wait({task, self._signal}, return_when=asyncio.FIRST_COMPLETED)

    def _code(self) -> int:
        return self._signal.result() if self._signal is not None else INTERRUPTED

    async def _run(self, client: AsyncClient) -> int:
        created = await self._create(client)
        progress = Progress(self._console, created.invocation_id, quiet=self._quiet)
        progress.tree.add(created)
        following = asyncio.create_task(follow(client, progress))
        feed = standard_input.Feed(client, created.invocation_id)
        if self._spec.attach_stdin:
            feed.start()
        waiting = asyncio.create_task(client.wait_invocation(created.invocation_id))
        try:
            with progress.shown():
                await self._first(waiting)
                if not waiting.done():
                    await self._cancel(client, created.invocation_id, progress)
                ended = await waiting
                with suppress(TimeoutError):  # what was printed last is still on its way
                    async with asyncio.timeout(_DRAIN_SECONDS):
                        await asyncio.shield(following)
        finally:
            for task in (following, waiting):
                task.cancel()
            await asyncio.wait({following, waiting})
            await feed.stop()
        interrupted = self._signal is not None and self._signal.done()
        outcome = await self._collect(client, ended)
        self._report(outcome)
        if interrupted:
            return self._code()
        if ended.ending is None or ended.ending.kind != "returned":
            return OTHER_ENDING
        return OTHER_ENDING if any(item.problem for item in outcome.saved) else RETURNED

    async def _create(self, client: AsyncClient) -> types.Invocation:
        """Asks for it; interrupted meanwhile, what it became is cancelled."""
        task = asyncio.create_task(client.create_invocation(self._spec, cancel_on_disconnect=True))
        await self._first(task)
        if task.done():
            return await task
        with suppress(TimeoutError, HutchError):
            async with asyncio.timeout(_SETTLE_SECONDS):
                created = await task
                await client.cancel_invocation(created.invocation_id)
        raise Interrupted(self._code())

    async def _cancel(self, client: AsyncClient, invocation_id: str, progress: Progress) -> None:
        progress.say("cancelling … (once more to leave at once)")
        await client.cancel_invocation(invocation_id)

    async def _collect(self, client: AsyncClient, ended: types.Invocation) -> Outcome:
        returned = ended.ending is not None and ended.ending.kind == "returned"
        value_json = await client.value_json(ended) if returned else None
        found = tree.from_list(await all_of_tree(client, ended.invocation_id), ended.invocation_id)
        page = await client.all_artifacts(ended.invocation_id)
        saved: list[download.Saved] = []
        if self._out is not None:
            saved = await download.save_all(client, page.artifacts, self._out)
        return Outcome(
            invocation=ended,
            value_json=value_json,
            tree=found,
            artifacts=page.artifacts,
            refusals=page.refusals,
            saved=saved,
        )

    def _report(self, outcome: Outcome) -> None:
        if not self._quiet:
            if self._console.is_terminal:
                self._console.print(outcome.tree.render())
        print_failure(self._console, outcome.invocation)
        if not self._quiet:
            self._console.print(Text(summary(outcome, self._out), style="bold"))
        for refusal in outcome.refusals:
            name, reason = display.line(refusal.name), display.line(refusal.reason)
            self._console.print(Text(f"not kept: {name}: {reason}", style="yellow"))
        for item in outcome.saved:
            if item.problem:
                name, problem = display.line(item.artifact.name), display.line(item.problem)
                self._console.print(Text(f"not written: {name}: {problem}", style="red"))
        if self._shared.as_json:
            display.print_json(document(outcome))
        elif outcome.value_json is not None:
            print_value(outcome.value_json)


async def all_of_tree(client: AsyncClient, invocation_id: str) -> list[types.Invocation]:
    """Every invocation of a tree, oldest first."""
    found: list[types.Invocation] = []
    token = ""
    while True:
        page = await client.list_invocations(
            tree_of=invocation_id, page_size=1000, page_token=token
        )
        found.extend(page.invocations)
        token = page.next_page_token
        if not token:
            return found


def print_value(data: bytes) -> None:
    """Prints a value: a text as it is, anything else as its JSON."""
    text = data.decode("utf-8", "backslashreplace")
    if text.startswith('"') or text.startswith('{"$str"'):
        value = values.decode(data)
        if isinstance(value, str):
            text = value
    display.write_output(text if text.endswith("\n") else text + "\n")


def print_failure(console: Console, invocation: types.Invocation) -> None:
    """Says why it ended without a value."""
    ending = invocation.ending
    if ending is None or ending.kind == "returned":
        return
    failure = ending.failure
    if failure is not None and failure.traceback:
        console.print(Text(display.safe(failure.traceback.rstrip())))
    elif failure is not None and failure.path:
        for name in ("path", "expected", "got"):
            console.print(Text(f"{name:>8}: {display.line(getattr(failure, name), 500)}"))
    elif failure is not None and failure.type_name:
        message = display.safe(failure.message)
        console.print(Text(f"{display.line(failure.type_name)}: {message}"))
    if ending.message and not (failure is not None and (failure.traceback or failure.path)):
        console.print(Text(display.safe(ending.message), style="red"))
    evidence = ending.evidence
    if evidence is not None and evidence.limit and not evidence.limit.endswith("timeout"):
        # A time is in the message, and exactly.
        console.print(Text(f"limit: {display.line(evidence.limit)} = {evidence.limit_value}"))


def summary(outcome: Outcome, out: Path | None) -> str:
    """The last line: ending, sandboxes, time, where the artifacts are."""
    invocation = outcome.invocation
    kind = invocation.ending.kind if invocation.ending is not None else invocation.state
    took = display.span(invocation.create_time, invocation.end_time)
    sandboxes = outcome.tree.sandboxes
    parts = [
        display.safe(kind),
        f"{sandboxes} sandbox{'' if sandboxes == 1 else 'es'}",
        display.seconds(took),
    ]
    count = len(outcome.artifacts)
    if count:
        where = (
            f"in {out}" if out is not None else f"(hutch artifacts ls {invocation.invocation_id})"
        )
        parts.append(f"{count} artifact{'' if count == 1 else 's'} {where}")
    else:
        parts.append(invocation.invocation_id)
    return " · ".join(parts)


def document(outcome: Outcome) -> dict[str, Any]:
    """The one object of `--json`."""
    paths = {item.artifact.artifact_id: item for item in outcome.saved}
    artifacts = []
    for artifact in outcome.artifacts:
        entry = display.plain(artifact)
        item = paths.get(artifact.artifact_id)
        if item is not None:
            entry["path"] = str(item.path) if item.path is not None else None
            entry["problem"] = item.problem
        artifacts.append(entry)
    return {
        "invocation": display.invocation_json(outcome.invocation),
        "ending": display.plain(outcome.invocation.ending),
        "value": None if outcome.value_json is None else json.loads(outcome.value_json),
        "artifacts": artifacts,
        "refusals": display.plain(outcome.refusals),
        "tree": {"sandboxes": outcome.tree.sandboxes, **outcome.tree.to_json()},
    }
