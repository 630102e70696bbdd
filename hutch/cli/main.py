"""The command line's commands, and how it ends.

Called by the installed script `hutch` and by `python -m hutch.cli`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated, Any

import typer
import typer.main
from rich.text import Text

from hutch.cli import artifacts, context, display, doctor, look, run, shell, templates, up
from hutch.errors import HutchError, NotFoundError

# Typer's own base of usage errors, by whichever package it takes it from.
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
_EXIT_ERROR: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="hutch",
    help="Runs untrusted code in a tree of sandboxes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        display.write_output(f"hutch {metadata.version('hutch')}\n")
        raise typer.Exit


@app.callback()
def _global_options(
    ctx: typer.Context,
    target: context.Target = None,
    api_key: context.ApiKey = None,
    state: context.State = None,
    as_json: context.Json = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Runs untrusted code in a tree of sandboxes."""
    ctx.obj = context.Common(target=target, api_key=api_key, state=state, as_json=as_json)


app.command("up")(up.up)
app.command("run")(run.run)
app.command("shell")(shell.shell)
app.command("ps")(look.ps)
app.command("tree")(look.show_tree)
app.command("show")(look.show)
app.command("logs")(look.logs)
app.command("story")(look.story)
app.command("cancel")(look.cancel)
app.add_typer(artifacts.app, name="artifacts")
app.command("templates")(templates.templates)
app.command("doctor")(doctor.doctor)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line.

    Returns:
        The exit code: 0 done; 1 another ending, or nothing of that name; 2 usage or set-up; 130
        interrupted.
    """
    display.complete_standard_files()
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = typer.main.get_command(app)
    try:
        code = command.main(args=words, prog_name="hutch", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except typer.Exit as ending:
        return int(ending.exit_code)
    except _EXIT_ERROR as error:
        return _usage(error, words)
    except HutchError as error:
        return _problem(error, words)
    except BrokenPipeError:
        display.give_up(sys.stdout)  # whoever read us is gone; nothing is left to say
        return 1
    except OSError as error:
        display.give_up(sys.stdout)
        display.error_console().print(Text(display.safe(f"hutch: {error}"), style="red"))
        return 1


def _usage(error: Any, words: Sequence[str]) -> int:
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    if type(error).__name__ == "NoArgsIsHelpError":
        display.error_console().print(Text(message))
        return 2
    console = display.error_console()
    where = getattr(getattr(error, "ctx", None), "command_path", "hutch")
    console.print(Text(display.safe(f"{where}: {message}"), style="red"))
    if isinstance(error, _USAGE_ERROR):
        console.print(Text(f"Try '{where} --help'.", style="dim"))
    if "--json" in words:
        display.print_json({"error": {"type": "UsageError", "message": message}})
    return 2


def _problem(error: HutchError, words: Sequence[str]) -> int:
    display.error_console().print(Text(display.safe(f"hutch: {error}"), style="red"))
    if "--json" in words:
        display.print_json(display.error_json(error))
    return 1 if isinstance(error, NotFoundError) else 2
