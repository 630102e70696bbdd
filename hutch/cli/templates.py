"""`hutch templates`: what sandboxes may be made from.

Called by `hutch.cli.main`; calls the SDK.
"""

from __future__ import annotations

import typer
from rich.table import Table
from rich.text import Text

from hutch import types
from hutch.cli import context, display


def templates(
    ctx: typer.Context,
    target: context.Target = None,
    api_key: context.ApiKey = None,
    state: context.State = None,
    as_json: context.Json = False,
) -> None:
    """Lists what sandboxes may be made from, and the limits of one that names none."""
    shared = context.common(ctx, target, api_key, state, as_json)
    found: tuple[types.Template, ...] = context.with_client(
        shared, lambda client: client.templates()
    )
    if shared.as_json:
        display.print_json({"templates": found})
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("NAME", "DRIVER", "ISOLATION", "MEMORY", "PIDS", "IMAGE"):
        table.add_column(name, no_wrap=name == "NAME", overflow="fold")
    for item in found:
        table.add_row(
            Text(display.line(item.name, 100)),
            Text(display.line(item.driver, 100)),
            Text(item.isolation),
            display.size(item.limits.memory_limit_bytes or 0),
            str(item.limits.pids_limit or 0),
            Text(display.line(item.image, 300) or "the machine's own files"),
        )
    display.output_console().print(table)
    for item in found:
        if not item.usable:
            words = f"{display.line(item.name, 100)}: {display.line(item.problem)}"
            display.error_console().print(Text(words, style="yellow"))
