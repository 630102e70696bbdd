"""`hutch artifacts ls|get`: what invocations left.

Called by `hutch.cli.main`; calls the SDK and `hutch.cli.download`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from hutch import types
from hutch.aio import AsyncClient
from hutch.cli import context, display, download
from hutch.errors import FieldInvalidError

app = typer.Typer(no_args_is_help=True, help="Lists and fetches what invocations left.")


@app.command("ls")
def ls(
    ctx: typer.Context,
    invocation_id: Annotated[str, typer.Argument(metavar="ID", help="An invocation's id.")],
    target: context.Target = None,
    api_key: context.ApiKey = None,
    state: context.State = None,
    as_json: context.Json = False,
) -> None:
    """Lists an invocation's artifacts, and files that were not kept."""
    shared = context.common(ctx, target, api_key, state, as_json)
    page: types.ArtifactPage = context.with_client(
        shared, lambda client: client.all_artifacts(invocation_id)
    )
    if shared.as_json:
        display.print_json({"artifacts": page.artifacts, "refusals": page.refusals})
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("ID", "SIZE", "TYPE", "NAME"):
        table.add_column(name, no_wrap=name == "ID", overflow="fold")
    for item in page.artifacts:
        table.add_row(
            Text(item.artifact_id),
            display.size(item.size_bytes),
            Text(display.line(item.media_type, 60)),
            Text(display.line(item.name, 600)),
        )
    display.output_console().print(table)
    for refusal in page.refusals:
        words = f"not kept: {display.line(refusal.name, 600)}: {display.line(refusal.reason)}"
        display.error_console().print(Text(words, style="yellow"))


@app.command("get")
def get(
    ctx: typer.Context,
    id_: Annotated[
        str, typer.Argument(metavar="ID", help="An invocation's id, or one artifact's.")
    ],
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Only these; all otherwise.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The folder; the working directory otherwise."),
    ] = None,
    to_stdout: Annotated[
        bool, typer.Option("--stdout", help="Write one artifact's bytes to standard output.")
    ] = False,
    target: context.Target = None,
    api_key: context.ApiKey = None,
    state: context.State = None,
    as_json: context.Json = False,
) -> None:
    """Fetches artifacts into a folder; each is checked against its digest."""
    shared = context.common(ctx, target, api_key, state, as_json)
    if to_stdout and (out is not None or shared.as_json):
        raise typer.BadParameter("--stdout goes with neither --out nor --json")

    async def work(client: AsyncClient) -> list[download.Saved]:
        wanted = await _choose(client, id_, names or [])
        if not to_stdout:
            return await download.save_all(client, wanted, out or Path.cwd())
        if len(wanted) != 1:
            raise FieldInvalidError(f"--stdout takes one artifact, and {len(wanted)} are named")
        async for chunk in client.get_artifact(wanted[0].artifact_id):
            sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
        return []

    saved: list[download.Saved] = context.with_client(shared, work)
    if shared.as_json:
        display.print_json(
            {
                "artifacts": [
                    {
                        **display.plain(item.artifact),
                        "path": str(item.path) if item.path is not None else None,
                        "problem": item.problem,
                    }
                    for item in saved
                ]
            }
        )
    for item in saved:
        if item.problem:
            words = f"not written: {display.line(item.artifact.name, 600)}: {item.problem}"
            display.error_console().print(Text(display.safe(words), style="red"))
        elif not shared.as_json:
            display.write_output(display.line(str(item.path), 5000) + "\n")
    if any(item.problem for item in saved):
        raise typer.Exit(1)


async def _choose(client: AsyncClient, id_: str, names: list[str]) -> list[types.Artifact]:
    if id_.startswith("art_"):
        return [await client.stat_artifact(id_)]
    found = (await client.all_artifacts(id_)).artifacts
    missing = set(names) - {item.name for item in found}
    if missing:
        raise FieldInvalidError(f"{id_} has no artifact named {sorted(missing)[0]!r}")
    return [item for item in found if not names or item.name in names]
