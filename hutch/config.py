"""Settings of the SDK and the CLI: what `hutch.toml` and the environment say.

Called by `hutch.aio` (the environment only) and by the CLI (both). A `hutch.toml` is data: it is
parsed, never executed, unknown keys are refused, and it holds nothing but the table `[client]`.

    [client]
    target = "unix:/run/hutch/controller.sock"   # or HOST:PORT
    api_key_file = "/home/me/.hutch.key"          # a file, so that the key is not in the project
    state = "/home/me/.local/state/hutch"         # of the local controller
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hutch.errors import FieldInvalidError

_FILE_LIMIT_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """Where the controller is; empty texts mean unset.

    Attributes:
        target: `unix:PATH` or `HOST:PORT`; empty means the local controller.
        api_key: The key for TCP.
        state: The state directory of the local controller.
    """

    target: str = ""
    api_key: str = ""
    state: str = ""

    def over(self, weaker: ClientSettings) -> ClientSettings:
        """These settings, and the weaker ones where these say nothing.

        A state directory names a controller as a target does, so one of the two hides both of the
        weaker ones. A key is not sent to a target that only a weaker source names.
        """
        if self.target or self.state:
            key = self.api_key or (weaker.api_key if self.target else "")
            state = self.state or weaker.state
            return ClientSettings(target=self.target, api_key=key, state=state)
        key = weaker.api_key if weaker.target else self.api_key
        return ClientSettings(target=weaker.target, api_key=key, state=weaker.state)


def from_environment(environment: Mapping[str, str] | None = None) -> ClientSettings:
    """What `HUTCH_TARGET`, `HUTCH_API_KEY` and `HUTCH_STATE` say."""
    found = os.environ if environment is None else environment
    return ClientSettings(
        target=found.get("HUTCH_TARGET", ""),
        api_key=found.get("HUTCH_API_KEY", ""),
        state=found.get("HUTCH_STATE", ""),
    )


def from_file(path: Path) -> ClientSettings:
    """What a `hutch.toml` says; nothing when there is no such file.

    Raises:
        FieldInvalidError: It is no TOML, too large, or has a key that is not known.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return ClientSettings()
    except OSError as error:
        raise _invalid(path, str(error)) from error
    if len(raw) > _FILE_LIMIT_BYTES:
        raise _invalid(path, f"it is over {_FILE_LIMIT_BYTES} bytes")
    try:
        data = tomllib.loads(raw.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _invalid(path, str(error)) from error
    table = data.pop("client", {})
    for name in data.keys() - {"controller", "host"}:  # those are read by these processes
        raise _invalid(path, f"{name!r} is not known: [client], [controller] and [host] are")
    if not isinstance(table, dict):
        raise _invalid(path, "client is not a table")
    return _client(path, table)


def _client(path: Path, table: dict[str, object]) -> ClientSettings:
    texts: dict[str, str] = {}
    for name, value in table.items():
        if name not in ("target", "api_key_file", "state"):
            raise _invalid(path, f"client.{name} is not known: target, api_key_file, state are")
        if not isinstance(value, str):
            raise _invalid(path, f"client.{name} is not a text")
        texts[name] = value
    key = ""
    if "api_key_file" in texts:
        key_path = path.parent / texts["api_key_file"]
        try:
            key = key_path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise _invalid(path, f"client.api_key_file: {error}") from error
    state = str(path.parent / texts["state"]) if "state" in texts else ""
    return ClientSettings(target=texts.get("target", ""), api_key=key, state=state)


def _invalid(path: Path, why: str) -> FieldInvalidError:
    return FieldInvalidError(f"{str(path)!r}: {why}", "FIELD_INVALID", {"field": "config"})
