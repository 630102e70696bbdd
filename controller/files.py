"""Names and media types of artifacts. Names may come from hostile code.

Called by the artifact servicer and by the host client.
"""

from __future__ import annotations

import mimetypes
import unicodedata

NAME_BYTES = 512


def name_problem(name: str) -> str:
    """Why a name cannot be an artifact's; empty when it can."""
    if len(name.encode("utf-8", "surrogatepass")) > NAME_BYTES:
        return f"the name is over {NAME_BYTES} bytes"
    if any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in name):
        return "the name has control characters"
    parts = name.split("/")
    if not name or any(part in ("", ".", "..") for part in parts) or "\\" in name:
        return "the name is not a relative path below the workspace"
    return ""


def media_type_of(name: str, given: str = "") -> str:
    """The media type that was given, or the one its name suggests."""
    if given and len(given) <= 128 and given.isascii() and given.isprintable():
        return given
    # As a path: a name like `data:TYPE,` would be read as a URL that says its own type.
    return mimetypes.guess_type(f"./{name}")[0] or "application/octet-stream"
