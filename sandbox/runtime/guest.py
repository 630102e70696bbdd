"""What `import hutch` gives inside a sandbox: the SDK's names, over the frame channel.

Installed by `repl` before any code runs; calls `channel`. Every check here is a courtesy to the
caller: the controller decides.
"""

from __future__ import annotations

import posix
import sys

from . import errors, policies, records, values
from .channel import Place, start_new_thread
from .handles import Artifact, Artifacts, AsyncChild, Child, wait

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextvars import Token
    from typing import Any

    from . import tools
    from .channel import Channel, Pending

MAX_TIMEOUT_SECONDS = 10**9
TOOLS_A_PROCESS = 100_000
MAX_PIDS = 90_000  # a tool's number has ten digits


class NoHint:
    """The hint of a call that declares no return type: any value passes."""


class Current:
    """The invocation that this code is.

    Attributes:
        invocation_id: its id.
        depth: its level, counted from the root = 1.
        max_depth: the deepest level that may be below it.
    """

    __slots__ = ("depth", "invocation_id", "max_depth")

    def __init__(self, invocation_id: str, depth: int, max_depth: int) -> None:
        """Holds what the supervisor was told."""
        self.invocation_id = invocation_id
        self.depth = depth
        self.max_depth = max_depth

    def __repr__(self) -> str:
        """Names all three."""
        return f"Current({self.invocation_id!r}, depth={self.depth}, max_depth={self.max_depth})"


class Guest:
    """The functions of the module; its methods are bound to their channel."""

    def __init__(self, channel: Channel) -> None:
        """Begins without a cell."""
        from contextvars import ContextVar

        self._channel = channel
        self._current = Current("", 1, 1)
        self._scope: ContextVar[dict[str, Any]] = ContextVar("hutch_scope")
        self._granted: dict[str, tools.Tool | tools.ToolObject] = {}
        self._owner: tools.Owner | None = None
        self.artifacts = Artifacts(channel)

    def describe(
        self, invocation_id: str, depth: int, max_depth: int, granted: Sequence[dict[str, Any]] = ()
    ) -> None:
        """Notes which invocation this is, as `current()` tells, and which tools it may call."""
        self._current = Current(invocation_id, depth, max_depth)
        if granted:
            from . import tools
        for header in granted:
            if header["tool"] not in self._granted:
                grant = tools.Grant.from_header(header)
                self._granted[grant.tool_id] = tools.stand_in(self, grant)

    def current(self) -> Current:
        """Returns the invocation that this code is."""
        return self._current

    def decode(self, data: bytes, name: str) -> Any:
        """Decodes an input; artifacts become handles and tools their stand-ins."""
        return values.decode(data, root=name, artifact=self._artifact, tool=self._tool)

    def scope(self, **named_values: Any) -> Scope:
        """Gives every call made inside the `with` block these inputs beside its own, which win."""
        return Scope(self._scope, named_values)

    def invoke(self, *given: Any, **options: Any) -> Any:
        """Runs a program in a sandbox of its own and waits for its value.

        Args:
            given: policies: `ReturnType(T)` (or `T` itself), `RecursionLimit(max_depth)`.
            options: `program` (source text) or `task`; `inputs` (a mapping), `label`,
                `timeout_seconds`, `memory_limit_bytes`, `pids_limit`, `cpu_limit_millis`,
                `tmpfs_limit_bytes`, `open_files_limit`, `max_depth`, `max_children`,
                `max_concurrent`, `max_descendants`, `output_view_bytes`, `output_limit_bytes`,
                `artifact_patterns`, `template`, `retry_on_loss`. Every other keyword is an input.

        Raises:
            InvocationFailed: the child ended without a value; its subclasses say how.
            RequestRefused: it was not started; its subclasses say why.
            ValueEncodeError: an input cannot cross; nothing was started.
        """
        pending, hint = self._spawn(given, options, detached=False)
        wait(pending)
        return self._finish(pending.result(), hint)

    async def ainvoke(self, *given: Any, **options: Any) -> Any:
        """Does what `invoke` does, awaitable."""
        pending, hint = self._spawn(given, options, detached=False, loop=_running_loop())
        return self._finish(await wait_async(pending), hint)

    def spawn(self, *given: Any, **options: Any) -> Child:
        """Starts a child and returns its handle once it is accepted; arguments as for `invoke`."""
        pending, hint = self._spawn(given, options, detached=True)
        wait(pending)
        return Child(self._channel, self._child_id(pending), lambda data: self._finish(data, hint))

    async def aspawn(self, *given: Any, **options: Any) -> AsyncChild:
        """Does what `spawn` does, awaitable; the handle's methods are awaitable too."""
        pending, hint = self._spawn(given, options, detached=True, loop=_running_loop())
        await wait_async(pending)
        child = Child(self._channel, self._child_id(pending), lambda data: self._finish(data, hint))
        return AsyncChild(child)

    def _spawn(
        self, given: Sequence[Any], options: dict[str, Any], *, detached: bool, loop: Any = None
    ) -> tuple[Pending, Any]:
        request = _Request(given, options, self._scope.get({}))
        header, contents = request.to_frame(detached, _Giving(self, loop))
        return self._channel.call(header, contents), request.hint

    def own_tools(self) -> tools.Owner:
        """Returns the tools of this code; they are served from the first time on."""
        if self._owner is None:
            from . import tools

            # A REPL in the place of one that died must not answer for the tools of that one.
            first = posix.getpid() % MAX_PIDS * TOOLS_A_PROCESS + 1
            self._owner = tools.Owner(self._current.invocation_id, first)
            self._serve(self._owner)
        return self._owner

    def _serve(self, owner: tools.Owner) -> None:
        from .serving import Server

        server = Server(
            owner,
            self._send_outcome,
            artifact=self._artifact,
            # It is none of the code's threads, which end with the cell that is stopped.
            start_loop=lambda run: start_new_thread(run, ()),
        )

        def on_tool(header: dict[str, Any], contents: list[bytes]) -> None:
            if header["type"] == "tool_cancel":
                server.cancel(header["call"])
            else:
                server.call(header["call"], header["tool"], header["method"], contents[0])

        self._channel.on_tool = on_tool

    def _send_outcome(
        self, call_id: str, value: bytes | None, failure: errors.Failure | None
    ) -> None:
        header: dict[str, Any] = {"type": "tool_result", "call": call_id}
        if failure is not None:
            self._channel.send({**header, "failure": failure.to_dict()}, [])
        else:
            self._channel.send({**header, "value": Place(0)}, [value or b"null"])

    def call_tool(self, grant: tools.Grant, method: str, arguments: bytes) -> Any:
        """Calls a granted tool and waits; `tools.Tool` calls it."""
        pending = self._call_tool(grant, method, arguments)
        wait(pending)
        return self._finish_tool(pending, grant)

    async def acall_tool(self, grant: tools.Grant, method: str, arguments: bytes) -> Any:
        """Does the same for coroutines."""
        pending = self._call_tool(grant, method, arguments)
        await wait_answered(pending)
        return self._finish_tool(pending, grant)

    def _call_tool(self, grant: tools.Grant, method: str, arguments: bytes) -> Pending:
        header = {"op": "tool", "tool": grant.tool_id, "method": method, "arguments": Place(0)}
        return self._channel.call(header, [arguments])

    def _finish_tool(self, pending: Pending, grant: tools.Grant) -> Any:
        if pending.failure is not None:
            raise errors.from_tool(pending.failure, grant.name)
        return values.decode(pending.answer, artifact=self._artifact)

    def _tool(self, tool_id: str) -> tools.Tool | tools.ToolObject:
        if tool_id not in self._granted:
            from . import tools

            self._granted[tool_id] = tools.stand_in(self, tools.Grant(tool_id))
        return self._granted[tool_id]

    def _finish(self, data: bytes, hint: Any) -> Any:
        if hint is NoHint:
            return values.decode(data, artifact=self._artifact)
        return values.decode(data, hint=hint, artifact=self._artifact)

    def _artifact(self, artifact_id: str) -> Artifact:
        return Artifact(self._channel, artifact_id)

    @staticmethod
    def _child_id(pending: Pending) -> str:
        return str(values.decode(pending.result()))


class Scope:
    """The `with` block of `scope`."""

    def __init__(self, variable: Any, named_values: dict[str, Any]) -> None:
        """Takes the values; they count from `with` on."""
        self._variable = variable
        self._values = named_values
        self._tokens: list[Token[dict[str, Any]]] = []

    def __enter__(self) -> None:
        """Adds the values to those of the blocks around."""
        outer = self._variable.get({})
        self._tokens.append(self._variable.set({**outer, **self._values}))

    def __exit__(self, *details: object) -> None:
        """Takes them away again."""
        self._variable.reset(self._tokens.pop())


def _running_loop() -> Any:
    import asyncio

    return asyncio.get_running_loop()


async def wait_async(pending: Pending) -> bytes:
    """Waits for an answer without holding up the event loop.

    Raises:
        HutchError: the call failed.
    """
    await wait_answered(pending)
    return pending.result()


async def wait_answered(pending: Pending) -> None:
    """Waits until there is an answer, whatever it is."""
    import asyncio

    loop = asyncio.get_running_loop()
    here = asyncio.Event()

    def wake() -> None:
        try:
            loop.call_soon_threadsafe(here.set)
        except RuntimeError:
            pass  # the loop was closed; nobody waits any more

    pending.when_answered(wake)
    await here.wait()


class _Giving:
    """The tools that one request gives; what serves them is loaded with the first."""

    __slots__ = ("_giving", "_guest", "_loop")

    def __init__(self, guest: Guest, loop: Any) -> None:
        self._guest = guest
        self._loop = loop
        self._giving: tools.Giving | None = None

    def __call__(self, given: Any) -> str:
        if self._giving is None:
            from . import tools

            self._giving = tools.Giving(self._guest.own_tools(), self._loop)
        return self._giving(given)

    def headers(self) -> list[dict[str, Any]]:
        """Returns what a frame says of them."""
        if self._giving is None:
            return []
        from . import tools

        tools.check_size(self._giving.grants.values())
        return [grant.to_header() for grant in self._giving.grants.values()]


class _Request:
    """The arguments of one call, checked."""

    GRANTS = ("max_children", "max_concurrent", "max_descendants")
    RESOURCES = (
        "memory_limit_bytes",
        "pids_limit",
        "cpu_limit_millis",
        "tmpfs_limit_bytes",
        "open_files_limit",
    )
    OUTPUT = ("output_view_bytes", "output_limit_bytes")

    def __init__(
        self, given: Sequence[Any], options: dict[str, Any], scope: Mapping[str, Any]
    ) -> None:
        options = dict(options)
        self.hint: Any = NoHint
        self._max_failures = 0
        self._depths: list[int] = []
        self._take_policies(given)
        depth = _take_number(options, "max_depth", None)
        self._depths += [] if depth is None else [depth]
        self._program, self._task = _take_work(options)
        self._inputs = {**scope, **_take_inputs(options)}
        if options.pop("driver", ""):
            raise invalid("driver", "a child runs on its parent's driver")
        options.pop("cancel_on_disconnect", None)  # a child always ends with its parent
        self._plain = {
            "label": _take_text(options, "label"),
            "template": _take_text(options, "template"),
            "timeout_ms": _take_timeout(options),
            "artifact_patterns": _take_patterns(options),
            "retry_on_loss": bool(options.pop("retry_on_loss", False)),
            **{name: _take_number(options, name, 0) for name in self.OUTPUT},
        }
        self._grants = _take_given(options, self.GRANTS)
        self._resources = _take_given(options, self.RESOURCES)
        self._inputs.update(options)
        _check_names(self._inputs)

    def _take_policies(self, given: Sequence[Any]) -> None:
        for policy in (*policies.inherited(), *given):
            if isinstance(policy, policies.RecursionLimit):
                self._depths.append(policy.max_depth)
                continue
            if self.hint is not NoHint:
                raise invalid("contract", "two return types are given; one call has one")
            wanted = policies.declared(policy)
            self.hint, self._max_failures = wanted.hint, wanted.max_failures

    def to_frame(self, detached: bool, giving: _Giving) -> tuple[dict[str, Any], list[bytes]]:
        """Returns the call's header and the contents that its places name."""
        contents: list[bytes] = []

        def place(data: bytes) -> Place:
            contents.append(data)
            return Place(len(contents) - 1)

        contract = None
        if self.hint is not NoHint:
            from . import returns

            schema = place(returns.schema_json(self.hint))
            contract = {"schema": schema, "max_failures": self._max_failures}
        if self._depths:
            self._grants["max_depth"] = min(self._depths)
        inputs = [
            {
                "name": name,
                "value": place(values.encode(value, root=name, tool=giving)),
                "description": "",
            }
            for name, value in self._inputs.items()
        ]
        program = place(self._program.encode("utf-8")) if self._program is not None else None
        header = {
            "op": "spawn",
            "detached": detached,
            "program": program,
            "task": self._task,
            "inputs": inputs,
            "contract": contract,
            "spawn": self._grants,
            "resources": self._resources,
            "tools": giving.headers(),
            **self._plain,
        }
        return header, contents


def invalid(field: str, message: str) -> errors.FieldInvalidError:
    """Makes the exception of a bad argument."""
    return errors.FieldInvalidError(message, "FIELD_INVALID", {"field": field})


def _take_work(options: dict[str, Any]) -> tuple[str | None, str | None]:
    program, task = options.pop("program", None), options.pop("task", None)
    if (program is None) == (task is None):
        raise invalid("work", "give exactly one of program= and task=")
    for name, text in (("program", program), ("task", task)):
        if text is None:
            continue
        if not isinstance(text, str):
            raise invalid(name, f"{name} is a {type(text).__name__}, not a text")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise invalid(name, f"{name} is no valid text: it has lone surrogates") from None
    return (None if program is None else dedent(program)), task


def dedent(source: str) -> str:
    """Takes the indentation away that all lines of a program share."""
    lines = source.split("\n")
    margins = [line[: len(line) - len(line.lstrip())] for line in lines if line.strip()]
    if not margins or not margins[0]:
        return source
    margin = min(margins, key=len)
    if not all(other.startswith(margin) for other in margins):
        return source
    return "\n".join(line[len(margin) :] if line.strip() else line for line in lines)


def _take_text(options: dict[str, Any], name: str) -> str:
    value = options.pop(name, "")
    if not isinstance(value, str):
        raise invalid(name, f"{name} is a {type(value).__name__}, not a text")
    return value


def _take_number(options: dict[str, Any], name: str, default: Any) -> Any:
    value = options.pop(name, None)
    if value is None:
        return default
    if type(value) is not int or not 0 <= value < 2**63:
        raise invalid(name, f"{name} is {value!r}; a whole number from 0 is needed")
    return value


def _take_given(options: dict[str, Any], names: tuple[str, ...]) -> dict[str, int]:
    taken = {name: _take_number(options, name, None) for name in names}
    return {name: value for name, value in taken.items() if value is not None}


def _take_timeout(options: dict[str, Any]) -> int:
    seconds = options.pop("timeout_seconds", None)
    if seconds is None:
        return 0
    if not isinstance(seconds, (int, float)) or not 0 < seconds <= MAX_TIMEOUT_SECONDS:
        raise invalid("timeout_seconds", f"timeout_seconds is {seconds!r}; it must be above 0")
    return max(1, int(seconds * 1000))


def _take_patterns(options: dict[str, Any]) -> list[str]:
    patterns = options.pop("artifact_patterns", ())
    if isinstance(patterns, str):
        message = "artifact_patterns is one text; give a list of them"
        raise invalid("artifact_patterns", message)
    return [str(pattern) for pattern in patterns]


def _take_inputs(options: dict[str, Any]) -> dict[str, Any]:
    inputs = options.pop("inputs", None)
    if inputs is not None and not hasattr(inputs, "keys"):
        raise invalid("inputs", f"inputs is a {type(inputs).__name__}, not a dict of named values")
    return dict(inputs or {})


def _check_names(inputs: Mapping[str, Any]) -> None:
    from keyword import iskeyword

    for name in inputs:
        if not isinstance(name, str) or not name.isidentifier() or iskeyword(name):
            raise invalid("inputs", f"the input name {name!r} is not a Python identifier")


def _load(name: str) -> Any:
    """Loads what few programs need when it is first used (PEP 562)."""
    if name != "tool":
        raise AttributeError(f"module 'hutch' has no attribute {name!r}")
    from . import tools

    return tools.tool


def install(channel: Channel) -> Guest:
    """Makes `import hutch` give the functions of a new guest."""
    guest = Guest(channel)
    module = sys.modules[__package__]
    public = {
        "invoke": guest.invoke,
        "ainvoke": guest.ainvoke,
        "spawn": guest.spawn,
        "aspawn": guest.aspawn,
        "scope": guest.scope,
        "current": guest.current,
        "artifacts": guest.artifacts,
        "ReturnType": policies.ReturnType,
        "RecursionLimit": policies.RecursionLimit,
        "Record": records.Record,
        "Artifact": Artifact,
        "Child": Child,
        "AsyncChild": AsyncChild,
        "errors": errors,
    }
    for name in dir(errors):
        if isinstance(getattr(errors, name), type):
            public[name] = getattr(errors, name)
    module.__dict__.update(public, __all__=sorted([*public, "tool"]), __getattr__=_load)
    sys.modules["hutch"] = module
    sys.modules["hutch.errors"] = errors
    return guest
