"""What a cell of a box came to, as a user sees it.

Made by `hutch.aio_boxes` and `hutch.boxes`; calls `hutch.values` when a value is asked for. Texts
in here come from hostile code: they are data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from hutch import calls, types, values
from hutch.errors import CellFailed, Failure

Reading = TypeVar("Reading")

DISPLAYS_LIMIT_BYTES = 16 * 1024 * 1024
_GOOD = ("completed", "returned")
_UNSET: Any = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputView:
    """The beginning and the end of what a cell printed on one stream.

    Attributes:
        head: The first bytes.
        tail: The last bytes; empty when `head` is all there is.
        total_bytes: How many bytes there are in all.
    """

    head: bytes = b""
    tail: bytes = b""
    total_bytes: int = 0

    @property
    def left_out_bytes(self) -> int:
        """How many bytes between the two are left out here."""
        return max(0, self.total_bytes - len(self.head) - len(self.tail))

    @property
    def text(self) -> str:
        """As text; what is left out is counted in its place."""
        if not self.left_out_bytes:
            return (self.head + self.tail).decode("utf-8", "backslashreplace")
        head, tail = (part.decode("utf-8", "backslashreplace") for part in (self.head, self.tail))
        return f"{head}\n… {self.left_out_bytes} bytes left out …\n{tail}"


class OutputKeeper:
    """Keeps the beginning and the end of a stream of bytes, in bounded memory."""

    __slots__ = ("_head", "_most", "_tail", "total_bytes")

    def __init__(self, view_bytes: int) -> None:
        """Keeps at most `view_bytes`, half of them from the beginning."""
        self._most = max(1, view_bytes // 2)
        self._head = bytearray()
        self._tail = bytearray()
        self.total_bytes = 0

    def take(self, offset: int, data: bytes) -> bytes:
        """Takes bytes that begin at an offset; gives back those that are new."""
        fresh = data[max(0, self.total_bytes - offset) :]
        if not fresh:
            return b""
        self.total_bytes = offset + len(data)
        room = self._most - len(self._head)
        self._head += fresh[:room]
        self._tail += fresh[max(0, room) :][-self._most :]
        if len(self._tail) > 4 * self._most:
            del self._tail[: -self._most]
        return fresh

    def view(self) -> OutputView:
        """What is kept."""
        return OutputView(
            head=bytes(self._head),
            tail=bytes(self._tail[-self._most :]),
            total_bytes=self.total_bytes,
        )


class CellResult(Generic[Reading]):
    """How a cell ended, what it printed and showed.

    Attributes:
        cell: Everything that the controller said of its end.
        displays: What it showed, in order.
        displays_left_out: How many further displays are not kept here, for their size.
        stdout_view: The beginning and the end of its standard output.
        stderr_view: The same of its standard error.
        value_json: What a top-level `return` gave, encoded.
        hint: The type that it becomes.
    """

    __slots__ = (
        "_read",
        "_value",
        "cell",
        "displays",
        "displays_left_out",
        "hint",
        "stderr_view",
        "stdout_view",
        "value_json",
    )

    def __init__(
        self,
        cell: types.Cell,
        *,
        displays: tuple[types.Display, ...],
        displays_left_out: int,
        stdout: OutputView,
        stderr: OutputView,
        value_json: bytes | None,
        hint: Any,
        read: Callable[[types.Stream], Reading],
    ) -> None:
        """Holds the parts as they are."""
        self.cell = cell
        self.displays = displays
        self.displays_left_out = displays_left_out
        self.stdout_view = stdout
        self.stderr_view = stderr
        self.value_json = value_json
        self.hint = hint
        self._read = read
        self._value = _UNSET

    def __repr__(self) -> str:
        """Names cell and outcome."""
        return f"<CellResult {self.cell_id} {self.outcome}>"

    @property
    def cell_id(self) -> str:
        """The cell."""
        return self.cell.cell_id

    @property
    def outcome(self) -> str:
        """`completed`, `returned`, `raised`, `errored`, `interrupted`, `timed_out`, `repl_died`,
        `return_refused` or `cancelled_before_start`."""
        return self.cell.outcome

    @property
    def ok(self) -> bool:
        """Whether it ran to its end or returned."""
        return self.outcome in _GOOD

    @property
    def text(self) -> str:
        """The `repr` of the value of a trailing expression; empty where there was none."""
        return self.cell.text

    @property
    def stdout(self) -> str:
        """What it printed, shortened in the middle; `read_stdout` has all of it."""
        return self.stdout_view.text

    @property
    def stderr(self) -> str:
        """The same of its standard error."""
        return self.stderr_view.text

    @property
    def value(self) -> Any:
        """What a top-level `return` gave, as its declared type; None without one."""
        if self._value is _UNSET:
            self._value = self._decode()
        return self._value

    def _decode(self) -> Any:
        if self.value_json is None:
            return None
        if self.hint is calls.NoHint:
            return values.decode(self.value_json)
        from hutch import returns

        return returns.restore(self.value_json, self.hint, self.cell_id)

    @property
    def failure(self) -> Failure | None:
        """What it raised, or how its value missed the contract."""
        return self.cell.failure

    @property
    def state_lost(self) -> bool:
        """Whether the namespace was lost, in this cell or since the one before."""
        return self.cell.state_lost

    @property
    def killed_processes(self) -> int:
        """How many of its processes were killed."""
        return self.cell.killed_processes

    @property
    def background_processes(self) -> int:
        """How many processes it left running."""
        return self.cell.background_processes

    @property
    def evidence(self) -> types.Evidence | None:
        """What the host measured at its end."""
        return self.cell.evidence

    def read_stdout(self) -> Reading:
        """All of its standard output, as pieces of bytes."""
        return self._read("stdout")

    def read_stderr(self) -> Reading:
        """All of its standard error, as pieces of bytes."""
        return self._read("stderr")

    def raise_for_failure(self) -> Self:
        """Itself, if the cell ran to its end or returned.

        Raises:
            CellFailed: It did not.
        """
        if self.ok:
            return self
        failure = self.failure or Failure()
        why = ""
        if failure.path:
            why = f" at {failure.path}: expected {failure.expected}, got {failure.got}"
        elif failure.type_name:
            why = f": {failure.type_name}: {failure.message}"
        elif self.evidence is not None and self.evidence.detail:
            why = f": {self.evidence.detail}"
        raise CellFailed(
            f"the cell {self.cell_id} ended {self.outcome}{why}",
            outcome=self.outcome,
            cell_id=self.cell_id,
            failure=failure,
        )
