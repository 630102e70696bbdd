"""What all commands share: the global options, the client they make, and how a command is run.

Called by every command; calls the SDK.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from hutch import config
from hutch.aio import AsyncClient

Target = Annotated[
    str | None,
    typer.Option(help="The controller: unix:PATH or HOST:PORT.", show_default=False),
]
ApiKey = Annotated[
    str | None, typer.Option(help="The key for a controller at HOST:PORT.", show_default=False)
]
State = Annotated[
    Path | None,
    typer.Option(help="The state directory of the local controller.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """The options that every command has, wherever on the line they stood."""

    target: str | None = None
    api_key: str | None = None
    state: Path | None = None
    as_json: bool = False

    def over(self, weaker: Common) -> Common:
        """These, and the weaker ones where these are unset."""
        return Common(
            target=self.target or weaker.target,
            api_key=self.api_key or weaker.api_key,
            state=self.state or weaker.state,
            as_json=self.as_json or weaker.as_json,
        )

    def settings(self) -> config.ClientSettings:
        """With the environment's and those of a `hutch.toml` in the working directory."""
        stated = config.ClientSettings(
            target=self.target or "", api_key=self.api_key or "", state=str(self.state or "")
        )
        weaker = config.from_environment().over(config.from_file(Path.cwd() / "hutch.toml"))
        return stated.over(weaker)

    def client(self) -> AsyncClient:
        """A client that is not connected yet."""
        found = self.settings()
        return AsyncClient(
            found.target or None,
            api_key=found.api_key or None,
            state=found.state or None,
            client_name="hutch-cli",
        )


def common(
    context: typer.Context,
    target: str | None,
    api_key: str | None,
    state: Path | None,
    as_json: bool,
) -> Common:
    """A command's own options over those before the command's name."""
    own = Common(target=target, api_key=api_key, state=state, as_json=as_json)
    found = context.find_root().obj
    merged = own.over(found) if isinstance(found, Common) else own
    if as_json:
        context.find_root().obj = merged  # errors are printed as it says
    return merged


def with_client(shared: Common, work: Callable[[AsyncClient], Awaitable[Any]]) -> Any:
    """Connects, runs one piece of work and closes."""

    async def run() -> Any:
        async with shared.client() as client:
            return await work(client)

    return asyncio.run(run())
