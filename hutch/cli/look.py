"""`hutch ps, tree, show, logs, story, cancel`: looking at invocations and ending them.

Called by `hutch.cli.main`; calls the SDK.
"""

from __future__ import annotations

import asyncio
import codecs
import sys
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from hutch import types
from hutch.aio import AsyncClient
from hutch.cli import context, display, run, story_words, tree

Id = Annotated[str, typer.Argument(metavar="ID", help="An invocation's id.")]
_QUIET_SECONDS = 1.0


def ps(
    ctx: typer.Context,
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="Children too, and not only the newest 50.")
    ] = False,
    state_filter: Annotated[
        str, typer.Option("--in-state", help="Only those in this state, for example running.")
    ] = "",
    target: context.Target = None,
    api_key: context.ApiKey = None,
    state: context.State = None,
    as_json: context.Json = False,
) -> None:
    """Lists invocations, newest first."""
    shared = context.common(ctx, target, api_key, state, as_json)

    async def work(client: AsyncClient) -> list[types.Invocation]:
        found: list[types.Invocation] = []
        token = ""
        while True:
            page = await client.list_invocations(
                roots_only=not everything,
                state=state_filter,
                page_size=1000 if everything else 50,
                page_token=token,
            )
            found.extend(page.invocations)
            token = page.next_page_token
            if not token or not everything:
                return found

    found = context.with_client(shared, work)
    if shared.as_json:
        display.print_json({"invocations": [display.invocation_json(item) for item in found]})
        return
    _print_list(found)


def _print_list(found: list[types.Invocation]) -> None:
    """One line each. Only labels give way to a narrow terminal: a cut id is of no use."""
    console = display.output_console()
    now = datetime.now(UTC)
    rows = [
        (
            Text(item.invocation_id),
            display.outcome(item),
            Text(display.age(display.span(item.create_time, now))),
            Text(_took(item, now)),
            Text(str(item.descendant_count)),
        )
        for item in found
    ]
    names = ("ID", "STATE", "AGE", "TOOK", "BELOW")
    widths = [
        max([len(name), *map(len, column)])
        for name, column in zip(names, zip(*rows, strict=True), strict=False)
    ]
    room = max(8, console.width - sum(widths) - 2 * len(names))
    table = Table(box=None, pad_edge=False, header_style="dim")
    for position, name in enumerate(names):
        table.add_column(name, no_wrap=True, min_width=widths[position] if widths else None)
        if name == "ID":
            table.add_column("LABEL", no_wrap=True)
    for item, (first, *rest) in zip(found, rows, strict=True):
        table.add_row(first, Text(display.line(item.label, min(40, room))), *rest)
    console.print(table, crop=False)


def _took(item: types.Invocation, now: datetime) -> str:
    return display.seconds(display.span(item.start_time or item.create_time, item.end_time or now))


def show_tree(
    ctx: typer.Context,
    invocation_id: Id,
    target: context.Target = None,
    api_key: context.ApiKey = None,
    state: context.State = None,
    as_json: context.Json = False,
) -> None:
    """Shows the whole tree that an invocation belongs to."""
    shared = context.common(ctx, target, api_key, state, as_json)

    async def work(client: AsyncClient) -> tree.InvocationTree:
        root_id = (await client.get_invocation(invocation_id)).root_id
        return tree.from_list(await run.all_of_tree(client, root_id), root_id)

    found = context.with_client(shared, work)
    if shared.as_json:
        display.print_json({"sandboxes": found.sandboxes, **found.to_json()})
    else:
        display.output_console().print(found.render(everything=True))


def show(
    ctx: typer.Context,
    invocation_id: Id,
    target: context.Target = None,
    api_key: context.ApiKey = None,
    state: context.State = None,
    as_json: context.Json = False,
) -> None:
    """Shows one invocation: limits and how they are held, ending, evidence."""
    shared = context.common(ctx, target, api_key, state, as_json)
    found: types.Invocation = context.with_client(
        shared, lambda client: client.get_invocation(invocation_id)
    )
    if shared.as_json:
        document = display.invocation_json(found)
        if found.value is not None and found.value.json is not None:
            document["value_json"] = found.value.json.decode("utf-8", "backslashreplace")
        display.print_json({"invocation": document})
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _facts(found):
        table.add_row(Text(name), text if isinstance(text, Text) else Text(text))
    display.output_console().print(table)
    run.print_failure(display.output_console(), found)


def _facts(found: types.Invocation) -> list[tuple[str, str | Text]]:
    held = {item.limit: item for item in found.enforcement}
    evidence = found.ending.evidence if found.ending is not None else None
    facts: list[tuple[str, str | Text]] = [
        ("id", found.invocation_id),
        ("label", display.line(found.label)),
        ("state", display.outcome(found)),
        ("cause", found.ending.cause if found.ending is not None else ""),
        ("parent", found.parent_id),
        ("depth", f"{found.depth} of {found.spawn.max_depth}"),
        ("children", f"{found.child_count}, {found.descendant_count} below in all"),
        ("mode", found.mode if found.mode != "program" else ""),
        ("cells", f"{found.cell_count} ended" if found.mode == "interactive" else ""),
        ("accepted", str(found.create_time or "")),
        ("took", display.seconds(display.span(found.create_time, found.end_time))),
        ("attempt", f"{found.attempt} in {found.sandbox_id}" if found.sandbox_id else ""),
        ("driver", display.line(found.driver)),
        (
            "printed",
            f"{display.size(found.stdout_bytes)}, {display.size(found.stderr_bytes)} errors",
        ),
        ("artifacts", str(found.artifact_count)),
    ]
    for name, amount in _limits(found.resources):
        item = held.get(name)
        how = f"held for the {item.level} by {display.line(item.mechanism)}" if item else ""
        if item is not None and item.level == "none":
            how = "not held here"
        facts.append((f"limit {name}", f"{amount}  {how}"))
    if evidence is not None:
        facts += _evidence(evidence)
    return [(name, text) for name, text in facts if text]


def _limits(limits: types.ResourceLimits) -> list[tuple[str, str]]:
    found = []
    if limits.memory_limit_bytes is not None:
        found.append(("memory", display.size(limits.memory_limit_bytes)))
    if limits.pids_limit is not None:
        found.append(("pids", str(limits.pids_limit)))
    if limits.cpu_limit_millis is not None:
        found.append(("cpu", f"{limits.cpu_limit_millis / 1000:g} CPU"))
    if limits.tmpfs_limit_bytes is not None:
        found.append(("tmpfs", display.size(limits.tmpfs_limit_bytes)))
    if limits.open_files_limit is not None:
        found.append(("open_files", str(limits.open_files_limit)))
    return found


def _evidence(evidence: types.Evidence) -> list[tuple[str, str | Text]]:
    facts: list[tuple[str, str | Text]] = []
    for name in ("exit_code", "signal", "oom_kill_count", "pids_limit_hits", "disk_full_hits"):
        number = getattr(evidence, name)
        if number is not None:
            facts.append((name.replace("_", " "), str(number)))
    if evidence.memory_peak_bytes is not None:
        facts.append(("memory peak", display.size(evidence.memory_peak_bytes)))
    if evidence.cpu_seconds is not None:
        facts.append(("CPU time", display.seconds(evidence.cpu_seconds)))
    if evidence.detail:
        facts.append(("host says", display.line(evidence.detail, 500)))
    return facts


def logs(
    ctx: typer.Context,
    invocation_id: Id,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until it has ended.")
    ] = False,
    stderr: Annotated[bool, typer.Option("--stderr", help="What it printed to fd 2.")] = False,
    target: context.Target = None,
    api_key: context.ApiKey = None,
    state: context.State = None,
    as_json: context.Json = False,
) -> None:
    """Prints what an invocation printed: its bytes, made harmless only for a terminal."""
    shared = context.common(ctx, target, api_key, state, as_json)
    stream: types.Stream = "stderr" if stderr else "stdout"
    for_terminal = sys.stdout.isatty()

    async def work(client: AsyncClient) -> bytes:
        kept = bytearray()
        decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        async for chunk in client.read_output(invocation_id, stream, follow=follow):
            if shared.as_json:
                kept += chunk.data
            elif for_terminal:
                display.write_output(decoder.decode(chunk.data))
            else:
                sys.stdout.buffer.write(chunk.data)
                sys.stdout.buffer.flush()
        if for_terminal:
            display.write_output(decoder.decode(b"", final=True))
        return bytes(kept)

    data = context.with_client(shared, work)
    if shared.as_json:
        document: dict[str, Any] = {"invocation_id": invocation_id, "stream": stream}
        document |= {"size_bytes": len(data), "text": data.decode("utf-8", "backslashreplace")}
        display.print_json(document)


def story(
    ctx: typer.Context,
    invocation_id: Id,
    whole_tree: Annotated[bool, typer.Option("--tree", help="Of all below it too.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until it has ended.")
    ] = False,
    target: context.Target = None,
    api_key: context.ApiKey = None,
    state: context.State = None,
    as_json: context.Json = False,
) -> None:
    """Tells what happened to an invocation, in order."""
    shared = context.common(ctx, target, api_key, state, as_json)

    async def work(client: AsyncClient) -> list[types.Event]:
        found: list[types.Event] = []
        live = not (await client.get_invocation(invocation_id)).ended
        events = client.watch_invocation(invocation_id, tree=whole_tree)
        while True:
            # The stream of a live one stays open; what it has to tell so far comes at once.
            limit = _QUIET_SECONDS if live and not follow else None
            try:
                async with asyncio.timeout(limit):
                    event = await anext(events, None)
            except TimeoutError:
                break
            if event is None:
                break
            found.append(event)
            if not shared.as_json:
                told = story_words.sentence(event, with_id=whole_tree)
                display.write_output(told + "\n")
        return found

    found = context.with_client(shared, work)
    if shared.as_json:
        display.print_json({"events": [story_words.event_json(event) for event in found]})


def cancel(
    ctx: typer.Context,
    invocation_id: Id,
    target: context.Target = None,
    api_key: context.ApiKey = None,
    state: context.State = None,
    as_json: context.Json = False,
) -> None:
    """Ends an invocation and all below it, and waits until every sandbox is gone."""
    shared = context.common(ctx, target, api_key, state, as_json)
    found: types.Invocation = context.with_client(
        shared, lambda client: client.cancel_invocation(invocation_id)
    )
    if shared.as_json:
        display.print_json({"invocation": display.invocation_json(found)})
    else:
        kind = found.ending.kind if found.ending is not None else found.state
        display.write_output(f"{found.invocation_id} {display.safe(kind)}\n")
