"""What a call of `invoke` asks for, and the bare `invoke`, `ainvoke`, `spawn`, `aspawn`, `scope`.

Called by users through `hutch` and by the clients; calls `hutch.values`, `hutch.returns` and the
ambient client. The same names with the same signatures exist inside a sandbox.
"""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar

from hutch import ambient, types, values
from hutch.errors import FieldInvalidError, PayloadTooLargeError
from hutch.policies import RecursionLimit, declared, inherited
from hutch.tool_server import Given

if TYPE_CHECKING:
    from hutch.client import Handle
    from hutch.handles import AsyncHandle

PROGRAM_LIMIT_BYTES = 1024 * 1024
_scope: ContextVar[Mapping[str, Any]] = ContextVar("hutch_scope", default={})  # noqa: B039 - read only

P = ParamSpec("P")
R = TypeVar("R")


class NoHint:
    """The hint of a call that declares no return type: any value passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call, checked and encoded.

    Attributes:
        spec: What the controller is asked for.
        hint: What the value comes back as; `NoHint` where the caller declared nothing.
        cancel_on_disconnect: Whether it ends with the client; None means the client's default.
    """

    spec: types.Spec
    hint: Any = NoHint
    cancel_on_disconnect: bool | None = None


OnDisconnect = Literal["detach", "cancel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxCall:
    """A box that is asked for, checked and encoded; see `make_box`."""

    spec: types.Spec
    hint: Any = NoHint
    cancel_on_disconnect: bool | None = None
    on_disconnect: OnDisconnect = "detach"


def make_call(
    *policies: Any,
    program: str | None = None,
    task: str | None = None,
    inputs: Mapping[str, Any] | None = None,
    label: str = "",
    timeout_seconds: float | None = None,
    memory_limit_bytes: int | None = None,
    pids_limit: int | None = None,
    cpu_limit_millis: int | None = None,
    tmpfs_limit_bytes: int | None = None,
    open_files_limit: int | None = None,
    max_depth: int | None = None,
    max_children: int | None = None,
    max_concurrent: int | None = None,
    max_descendants: int | None = None,
    output_view_bytes: int | None = None,
    output_limit_bytes: int | None = None,
    artifact_patterns: Sequence[str] = (),
    template: str = "",
    driver: str = "",
    retry_on_loss: bool = False,
    cancel_on_disconnect: bool | None = None,
    **named_inputs: Any,
) -> Call:
    """Checks and encodes one call.

    Args:
        policies: `ReturnType(T)` or just `T`, `RecursionLimit(...)`.
        program: Python source, run as one cell; exactly one of this and `task` is given.
        task: What an agent is asked to do. Agent mode is not built yet.
        inputs: Named values; for names that are options here, such as `label`.
        label: A short name shown in trees.
        timeout_seconds: How long it may take from its acceptance.
        memory_limit_bytes: Memory of the sandbox; it must be enforceable when it is named.
        pids_limit: Processes and threads of the sandbox.
        cpu_limit_millis: CPU in thousandths.
        tmpfs_limit_bytes: Size of each of the sandbox's writable directories.
        open_files_limit: Open files of a process.
        max_depth: The deepest level of its tree, counted from the root = 1.
        max_children: How many children it may have in all.
        max_concurrent: How many of them run at once.
        max_descendants: How many invocations may be below it in all.
        output_view_bytes: Output shown inline.
        output_limit_bytes: Output after which it is ended.
        artifact_patterns: Files captured at the end; `artifacts/**` when empty.
        template: What its sandbox is made from.
        driver: The driver of its sandbox.
        retry_on_loss: Whether its work may run again when a sandbox is lost.
        cancel_on_disconnect: Whether it ends when this client is gone. By default a blocking call
            does, a spawned one only at a local controller that was found by itself.
        named_inputs: More named values.

    Raises:
        FieldInvalidError: Something is missing, doubled or not understood.
        HintError: No contract can express the hint.
        PayloadTooLargeError: The program is over its limit.
        ValueEncodeError: An input cannot cross.
        ValueTooLargeError: An input is over a limit.
    """
    hint, contract, depth = _bind(policies, _number("spawn.max_depth", max_depth))
    given = Given()
    encoded = encode_inputs({**_scope.get(), **_mapping(inputs)}, named_inputs, given)
    spec = types.Spec(
        program=_check_program(program, task),
        task=task,
        inputs=encoded,
        tools=given.all(),
        contract=contract,
        spawn=_spawn(depth, max_children, max_concurrent, max_descendants),
        resources=_resources(
            memory_limit_bytes, pids_limit, cpu_limit_millis, tmpfs_limit_bytes, open_files_limit
        ),
        output=_output(output_view_bytes, output_limit_bytes),
        timeout_seconds=seconds(timeout_seconds),
        template=_text("template", template),
        driver=_text("driver", driver),
        artifact_patterns=_patterns(artifact_patterns),
        label=_text("label", label),
        retry_on_loss=bool(retry_on_loss),
    )
    return Call(spec=spec, hint=hint, cancel_on_disconnect=cancel_on_disconnect)


def make_box(
    *policies: Any,
    idle_timeout_seconds: float | None = None,
    timeout_seconds: float | None = None,
    on_disconnect: OnDisconnect = "detach",
    stdin: bool = False,
    inputs: Mapping[str, Any] | None = None,
    label: str = "",
    memory_limit_bytes: int | None = None,
    pids_limit: int | None = None,
    cpu_limit_millis: int | None = None,
    tmpfs_limit_bytes: int | None = None,
    open_files_limit: int | None = None,
    max_depth: int | None = None,
    max_children: int | None = None,
    max_concurrent: int | None = None,
    max_descendants: int | None = None,
    output_view_bytes: int | None = None,
    output_limit_bytes: int | None = None,
    artifact_patterns: Sequence[str] = (),
    template: str = "",
    driver: str = "",
    cancel_on_disconnect: bool | None = None,
    **named_inputs: Any,
) -> BoxCall:
    """Checks and encodes what a box is to be.

    Args:
        policies: `ReturnType(T)` or just `T` for what a cell may `return`; `RecursionLimit(...)`.
        idle_timeout_seconds: How long nothing may happen in it before it ends; a cell that runs is
            never counted.
        timeout_seconds: How long it may live in all.
        on_disconnect: What becomes of this client's cells when its connection is cut: `detach`
            (they go on) or `cancel` (the running one is interrupted, the waiting ones never run).
        stdin: Whether its code reads standard input from `write_stdin`.
        inputs: Named values; for names that are options here.
        label: A short name shown in trees.
        memory_limit_bytes: As in `make_call`, and so are all limits below.
        pids_limit: Processes and threads.
        cpu_limit_millis: CPU in thousandths.
        tmpfs_limit_bytes: Size of each writable directory.
        open_files_limit: Open files of a process.
        max_depth: The deepest level of its tree; 1 unless it is named: its cells spawn nothing.
        max_children: How many children it may have in all.
        max_concurrent: How many of them run at once.
        max_descendants: How many invocations may be below it in all.
        output_view_bytes: Output of a cell that its result shows, head and tail together.
        output_limit_bytes: Output of a cell after which the box is ended.
        artifact_patterns: Files captured at its end.
        template: What its sandbox is made from.
        driver: The driver of its sandbox.
        cancel_on_disconnect: Whether it ends when this client is gone. By default only at a local
            controller that was found by itself.
        named_inputs: More named values.

    Raises:
        FieldInvalidError: Something is missing, doubled or not understood.
        HintError: No contract can express the hint.
        ValueEncodeError: An input cannot cross.
        ValueTooLargeError: An input is over a limit.
    """
    if on_disconnect not in ("detach", "cancel"):
        raise invalid("on_disconnect", f"on_disconnect is {on_disconnect!r}: detach or cancel")
    hint, contract, depth = _bind(policies, _number("spawn.max_depth", max_depth))
    given = Given()
    encoded = encode_inputs({**_scope.get(), **_mapping(inputs)}, named_inputs, given)
    idle = seconds(idle_timeout_seconds, "idle_timeout")
    spec = types.Spec(
        interactive=types.Interactive(idle_timeout_seconds=idle),
        attach_stdin=bool(stdin),
        inputs=encoded,
        tools=given.all(),
        contract=contract,
        spawn=_spawn(depth, max_children, max_concurrent, max_descendants),
        resources=_resources(
            memory_limit_bytes, pids_limit, cpu_limit_millis, tmpfs_limit_bytes, open_files_limit
        ),
        output=_output(output_view_bytes, output_limit_bytes),
        timeout_seconds=seconds(timeout_seconds),
        template=_text("template", template),
        driver=_text("driver", driver),
        artifact_patterns=_patterns(artifact_patterns),
        label=_text("label", label),
    )
    return BoxCall(
        spec=spec,
        hint=hint,
        cancel_on_disconnect=cancel_on_disconnect,
        on_disconnect=on_disconnect,
    )


def _spawn(
    depth: int | None, children: int | None, concurrent: int | None, descendants: int | None
) -> types.SpawnGrant:
    return types.SpawnGrant(
        max_depth=depth,
        max_children=_number("spawn.max_children", children),
        max_concurrent=_number("spawn.max_concurrent", concurrent),
        max_descendants=_number("spawn.max_descendants", descendants),
    )


def _resources(
    memory: int | None, pids: int | None, cpu: int | None, tmpfs: int | None, files: int | None
) -> types.ResourceLimits:
    return types.ResourceLimits(
        memory_limit_bytes=_number("resources.memory_limit_bytes", memory),
        pids_limit=_number("resources.pids_limit", pids),
        cpu_limit_millis=_number("resources.cpu_limit_millis", cpu),
        tmpfs_limit_bytes=_number("resources.tmpfs_limit_bytes", tmpfs),
        open_files_limit=_number("resources.open_files_limit", files),
    )


def _output(view: int | None, limit: int | None) -> types.OutputLimits:
    return types.OutputLimits(
        output_view_bytes=_number("output.output_view_bytes", view),
        output_limit_bytes=_number("output.output_limit_bytes", limit),
    )


def invalid(field: str, message: str) -> FieldInvalidError:
    """The error of a field that is no good."""
    return FieldInvalidError(message, "FIELD_INVALID", {"field": field})


def _number(field: str, value: int | None) -> int | None:
    if value is not None and (type(value) is not int or not 0 <= value < 2**63):
        raise invalid(field, f"{field} is {value!r}; a whole number from 0 is needed")
    return value


def seconds(value: float | None, field: str = "timeout") -> float | None:
    """A span as it was given, checked.

    Raises:
        FieldInvalidError: It is no number above 0.
    """
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 10**9
    ):
        raise invalid(field, f"{field}_seconds is {value!r}; it must be above 0")
    return value


def _text(field: str, value: str) -> str:
    if not isinstance(value, str):
        raise invalid(field, f"{field} is a {type(value).__name__}, not a text")
    return value


def _patterns(value: Sequence[str]) -> tuple[str, ...]:
    if isinstance(value, str):
        raise invalid("artifact_patterns", "artifact_patterns is one text; give a list of them")
    return tuple(_text("artifact_patterns", item) for item in value)


def _dedent(source: str) -> str:
    """Takes the indentation away that all lines of a program share, as a sandbox does."""
    lines = source.split("\n")
    margins = [line[: len(line) - len(line.lstrip())] for line in lines if line.strip()]
    margin = min(margins, key=len, default="")
    if not margin or not all(other.startswith(margin) for other in margins):
        return source
    return "\n".join(line[len(margin) :] if line.strip() else line for line in lines)


def _check_program(program: str | None, task: str | None) -> str | None:
    if (program is None) == (task is None):
        raise invalid("work", "give exactly one of program= and task=")
    for name, text in (("program", program), ("task", task)):
        if text is not None and not isinstance(text, str):
            raise invalid(name, f"{name} is a {type(text).__name__}, not a text")
    return None if program is None else check_source(program, "program")


def check_source(source: str, field: str) -> str:
    """Source without the indentation that all its lines share.

    Raises:
        FieldInvalidError: It is no text.
        PayloadTooLargeError: It is over its limit.
    """
    source = _dedent(_text(field, source))
    try:
        size = len(source.encode())
    except UnicodeEncodeError as error:
        raise invalid(field, f"the {field} is no valid text: {error}") from error
    if size > PROGRAM_LIMIT_BYTES:
        raise PayloadTooLargeError(
            f"the {field} has {size} bytes; the limit is {PROGRAM_LIMIT_BYTES}",
            "PAYLOAD_TOO_LARGE",
            {"limit": str(PROGRAM_LIMIT_BYTES)},
        )
    return source


def _bind(
    policies: Sequence[Any], max_depth: int | None
) -> tuple[Any, types.Contract | None, int | None]:
    """The hint, its contract, and the tightest depth."""
    hint: Any = NoHint
    contract: types.Contract | None = None
    depths = [max_depth] if max_depth is not None else []
    for policy in (*inherited(), *policies):
        if isinstance(policy, RecursionLimit):
            depths.append(policy.max_depth)
            continue
        wanted = declared(policy)
        if contract is not None:
            raise invalid("contract", "two return types are given; one call has one")
        from hutch import returns

        hint = wanted.hint
        contract = types.Contract(
            schema_json=returns.schema_json(hint), max_failures=wanted.max_failures
        )
    return hint, contract, min(depths) if depths else None


def _mapping(inputs: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if inputs is not None and not isinstance(inputs, Mapping):
        raise invalid("inputs", f"inputs is a {type(inputs).__name__}, not a dict of named values")
    return inputs or {}


def encode_inputs(
    inputs: Mapping[str, Any], named: Mapping[str, Any], tool: Given | None = None
) -> tuple[types.NamedInput, ...]:
    """Checks the names of inputs and encodes their values.

    Raises:
        FieldInvalidError: A name is no Python identifier.
        ValueEncodeError: A value cannot cross.
        ValueTooLargeError: A value is over a limit.
    """
    encoded = []
    for name, value in {**inputs, **named}.items():
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            raise invalid("inputs", f"the input name {name!r} is not a Python identifier")
        encoded.append(types.NamedInput(name=name, json=values.encode(value, root=name, tool=tool)))
    return tuple(encoded)


def same_options(model: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Gives a function the options of `model`, for type checkers and `inspect.signature` alike."""

    def decorate(function: Callable[..., R]) -> Callable[P, R]:
        options = inspect.signature(model)
        result = inspect.signature(function).return_annotation
        function.__signature__ = options.replace(  # type: ignore[attr-defined]
            return_annotation=result
        )
        return function

    return decorate


def same_method(
    model: Callable[P, Any],
) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    """`same_options` for methods, whose first argument is the object."""

    def decorate(function: Callable[..., R]) -> Callable[Concatenate[Any, P], R]:
        own = inspect.signature(function)
        first = next(iter(own.parameters.values()))
        options = inspect.signature(model).parameters.values()
        function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [first, *options], return_annotation=own.return_annotation
        )
        return function

    return decorate


@contextmanager
def scope(**named_values: Any) -> Iterator[None]:
    """Gives every call made inside these named values, beside its own, which win.

    ```python
    with hutch.scope(currency="EUR"):
        price = hutch.invoke(str, program="return f'{amount} {currency}'", amount=3)
    ```
    """
    token = _scope.set({**_scope.get(), **named_values})
    try:
        yield
    finally:
        _scope.reset(token)


@same_options(make_call)
def invoke(*policies: Any, **options: Any) -> Any:
    """Runs a program in a sandbox of its own and gives back its value; see `make_call`.

    It goes to the client of the surrounding `with hutch.connect(...)`, else to `$HUTCH_TARGET`,
    else to a local controller.

    Raises:
        InvocationFailed: It ended without a value; the subclass says how.
        RequestRefused: It was refused and nothing was started.
    """
    return ambient.sync_client().invoke(*policies, **options)


@same_options(make_call)
def ainvoke(*policies: Any, **options: Any) -> Awaitable[Any]:
    """`invoke` for coroutines: `await hutch.ainvoke(...)`."""
    return ambient.ainvoke(make_call(*policies, **options))


@same_options(make_call)
def spawn(*policies: Any, **options: Any) -> Handle:
    """Starts a program in a sandbox of its own and gives back a handle to it at once."""
    return ambient.sync_client().spawn(*policies, **options)


@same_options(make_call)
def aspawn(*policies: Any, **options: Any) -> Awaitable[AsyncHandle]:
    """`spawn` for coroutines: `handle = await hutch.aspawn(...)`."""
    return ambient.aspawn(make_call(*policies, **options))
