"""What a cell shows besides what it prints: values in their richest forms, and figures.

Called by `repl`; reachable for the code as `hutch.display` and as the builtin `display`.
"""

from __future__ import annotations

import _thread
import sys

from . import errors
from .cells import class_name
from .channel import Place

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .channel import Channel
    from .threads import Threads

MAX_TEXT_BYTES = 64 * 1024
MAX_DISPLAYS = 256
MAX_FORMS = 8
MAX_MEDIA_TYPE = 100
FORMS = (
    ("image/svg+xml", "_repr_svg_"),
    ("image/png", "_repr_png_"),
    ("image/jpeg", "_repr_jpeg_"),
    ("text/html", "_repr_html_"),
    ("text/markdown", "_repr_markdown_"),
    ("text/latex", "_repr_latex_"),
    ("application/json", "_repr_json_"),
)
BINARY = ("image/png", "image/jpeg")


def install(channel: Channel, threads: Threads) -> Shows:
    """Gives the code its `display`."""
    shows = Shows(channel, threads)
    builtins: Any = sys.modules["builtins"]
    builtins.display = sys.modules["hutch"].display = shows.display  # type: ignore[attr-defined]
    return shows


class Shows:
    """What the running cell has shown."""

    def __init__(self, channel: Channel, threads: Threads) -> None:
        """Shows over a channel; no cell runs yet."""
        self._channel = channel
        self._threads = threads
        self._guard = _thread.allocate_lock()  # of the fields below: any thread may show something
        self._cell = ""
        self._count = 0
        self._room = 0

    def begin(self, cell: str, limit: int) -> None:
        """Begins a cell; all that it shows together has a limit in bytes, 0 for none."""
        with self._guard:
            self._cell, self._count = cell, 0
            self._room = limit or 2**63

    def end(self) -> None:
        """Ends the cell: nothing can be shown any more."""
        with self._guard:
            self._cell = ""

    def display(self, *values: Any) -> None:
        """Shows values in all forms that they have, and as text.

        Raises:
            HutchError: no cell runs, or the cell has shown as much as a cell may.
        """
        for value in values:
            text = _text(value)
            self._send([("text/plain", text), *rich_forms(value)], is_result=False)

    def result(self, value: Any) -> bytes | None:
        """Shows the value of a trailing expression in its rich forms, and returns its text."""
        if value is None:
            return None
        text = _text(value)
        forms = rich_forms(value)
        if forms:
            self._send(forms, is_result=True)
        return text

    def figures(self) -> None:
        """Shows every open figure of matplotlib, once, if the code has used it."""
        pyplot: Any = sys.modules.get("matplotlib.pyplot")
        if pyplot is None or getattr(pyplot, "get_fignums", None) is None:
            return
        import io

        for number in pyplot.get_fignums():
            figure = pyplot.figure(number)
            file = io.BytesIO()
            figure.savefig(file, format="png", bbox_inches="tight")
            pyplot.close(figure)
            text = repr(figure).encode("utf-8", "replace")
            self._send([("image/png", file.getvalue()), ("text/plain", text)], is_result=False)

    def complete(self, pyplot: Any) -> None:
        """Makes `show()` show what is open now; its backend could only warn that it cannot."""

        def show(*arguments: Any, **options: Any) -> None:
            """Shows every open figure and closes it."""
            self.figures()

        pyplot.show = show

    def _send(self, forms: list[tuple[str, bytes]], *, is_result: bool) -> None:
        forms = forms[:MAX_FORMS]
        size = sum(len(content) for _, content in forms)
        with self._guard:
            if not self._cell or not self._threads.is_of_this_cell():
                raise errors.HutchError("nothing can be shown: the cell has ended")
            if not self._channel.is_own:
                raise errors.HutchError("nothing can be shown by a forked process")
            if self._count >= MAX_DISPLAYS:
                raise errors.HutchError(f"a cell shows at most {MAX_DISPLAYS} things")
            if size > self._room:
                message = "what the cell shows is over its output limit"
                raise errors.PayloadTooLargeError(message, "PAYLOAD_TOO_LARGE", {})
            data = [
                {"media_type": name, "content": Place(number)}
                for number, (name, _) in enumerate(forms)
            ]
            header = {
                "type": "display",
                "cell": self._cell,
                "index": self._count,
                "result": is_result,
                "data": data,
            }
            self._count += 1
            self._room -= size
            self._channel.send(header, [content for _, content in forms])


def rich_forms(value: Any) -> list[tuple[str, bytes]]:
    """Returns what the value's class makes of it, by media type, without its plain text."""
    found: dict[str, bytes] = {}
    bundle = _ask(value, "_repr_mimebundle_")
    if isinstance(bundle, tuple) and bundle:
        bundle = bundle[0]
    if isinstance(bundle, dict):
        for name, content in bundle.items():
            _add(found, name, content)
    for name, method in FORMS:
        if name not in found:
            _add(found, name, _ask(value, method))
    found.pop("text/plain", None)
    return list(found.items())[: MAX_FORMS - 1]


def _ask(value: Any, method: str) -> Any:
    """Calls a method of the value's class; one that fails gives no form, and says so."""
    if getattr(type(value), method, None) is None:
        return None
    try:
        return getattr(value, method)()
    except Exception as error:
        sys.stderr.write(f"{method} of {type(value).__name__} failed: {class_name(error)}\n")
        return None


def _add(found: dict[str, bytes], name: object, content: Any) -> None:
    if content is None or not isinstance(name, str) or not 0 < len(name) <= MAX_MEDIA_TYPE:
        return
    if not all("!" <= letter <= "~" for letter in name):
        return
    if isinstance(content, tuple) and content:
        content = content[0]  # the form, and what a front end could know about it
    if isinstance(content, (bytes, bytearray, memoryview)):
        found[name] = bytes(content)
    elif isinstance(content, str) and name in BINARY:
        import binascii

        try:
            found[name] = binascii.a2b_base64(content)
        except ValueError:
            pass  # it is neither bytes nor their usual text
    elif isinstance(content, str):
        found[name] = content.encode("utf-8", "backslashreplace")
    elif name.endswith("json"):
        import json

        try:
            found[name] = json.dumps(content).encode()
        except (TypeError, ValueError):
            pass  # it is no JSON


def _text(value: Any) -> bytes:
    text = repr(value)[: MAX_TEXT_BYTES + 1].encode("utf-8", "backslashreplace")
    if len(text) > MAX_TEXT_BYTES:
        text = text[:MAX_TEXT_BYTES].decode("utf-8", "ignore").encode()
    return text
