"""Functions and objects that cross as tools: what is told of them, and what stands for them.

Called by the SDK, the guest and `serving`; calls `values`. It is a member of two packages (see
docs/adr/0002), so it runs on Python 3.9 and needs the standard library only. A tool itself never
crosses: its owner keeps it and gives an id; whoever is granted it has a stand-in that calls by id.
"""

from __future__ import annotations

import _thread
from contextvars import ContextVar

from . import fastjson, signatures, values
from .errors import (
    FieldInvalidError,
    PayloadTooLargeError,
    ValueDecodeError,
    ValueEncodeError,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any, Protocol

    class Port(Protocol):
        """Calls tools of others."""

        def call_tool(self, grant: Grant, method: str, arguments: bytes) -> Any:
            """Calls and waits for the value."""

        async def acall_tool(self, grant: Grant, method: str, arguments: bytes) -> Any:
            """Does the same for coroutines."""

    class Serving(Protocol):
        """A call that is being served; see `serving`."""

        call_id: str
        owner: Owner
        is_open: bool

        def step_aside(self) -> bool:
            """Frees the thread's place; whether it had one."""

        def step_back(self) -> None:
            """Takes it again."""


MAX_NAME = 128
MAX_DESCRIPTION = 2_000
MAX_METHOD_DESCRIPTION = 500
MAX_METHODS = 64
MAX_TOLD_BYTES = 48 * 1024  # of all tools of a request; they travel in one frame's header
MAX_TIMEOUT_SECONDS = 3_600

current: ContextVar[Serving | None] = ContextVar("hutch_tool_call", default=None)


class Waiting:
    """Surrounds a wait for others: a tool that waits takes no other tool's place meanwhile."""

    __slots__ = ("_call",)

    def __enter__(self) -> None:
        """Frees the place of the call that this thread serves, if it serves one."""
        call = current.get()
        self._call = call if call is not None and call.step_aside() else None

    def __exit__(self, *details: object) -> None:
        """Takes it again."""
        if self._call is not None:
            self._call.step_back()


class Method:
    """What is told of one method of an object."""

    __slots__ = ("description", "name", "signature")

    def __init__(self, name: str, signature: str, description: str) -> None:
        """Holds the texts."""
        self.name = name
        self.signature = signature
        self.description = description


class Grant:
    """What is told of a tool to whoever may call it.

    Attributes:
        tool_id: its id.
        name: the name that a traceback shows.
        description: its docstring.
        signature: as Python writes it; empty for an object.
        methods: those of an object; none for a function.
        delegable: whether whoever has it may give it on.
        timeout_ms: how long one call may take; 0 means the default.
    """

    __slots__ = (
        "delegable",
        "description",
        "methods",
        "name",
        "signature",
        "timeout_ms",
        "tool_id",
    )

    def __init__(
        self,
        tool_id: str,
        name: str = "tool",
        description: str = "",
        signature: str = "",
        methods: tuple[Method, ...] = (),
        delegable: bool = False,
        timeout_ms: int = 0,
    ) -> None:
        """Holds the parts."""
        self.tool_id = tool_id
        self.name = name
        self.description = description
        self.signature = signature
        self.methods = methods
        self.delegable = delegable
        self.timeout_ms = timeout_ms

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> Grant:
        """Reads it from a frame."""
        methods = tuple(
            Method(item["name"], item["signature"], item["description"])
            for item in header["methods"]
        )
        return cls(
            header["tool"],
            header["name"],
            header["description"],
            header["signature"],
            methods,
            header["delegable"],
            header["timeout_ms"],
        )

    def to_header(self) -> dict[str, Any]:
        """Writes it for a frame."""
        methods = [
            {"name": item.name, "signature": item.signature, "description": item.description}
            for item in self.methods
        ]
        return {
            "tool": self.tool_id,
            "name": self.name,
            "description": self.description,
            "signature": self.signature,
            "methods": methods,
            "delegable": self.delegable,
            "timeout_ms": self.timeout_ms,
        }


class OwnTool:
    """A function or object with what is said about it as a tool; made by `tool`.

    Called, it calls the function.
    """

    __hutch_tool__ = True

    def __init__(
        self,
        target: Any,
        *,
        name: str | None,
        description: str | None,
        timeout_seconds: float | None,
        delegable: bool,
    ) -> None:
        """Keeps the target and what is said; see `tool`."""
        self.target = target
        self.name = name
        self.description = description
        self.timeout_ms = 0 if timeout_seconds is None else max(1, int(timeout_seconds * 1000))
        self.delegable = delegable
        self.__wrapped__ = target
        self.__doc__ = getattr(target, "__doc__", None)
        self.__name__ = getattr(target, "__name__", type(target).__name__)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return self.target(*args, **kwargs)

    def __repr__(self) -> str:
        """Names the target."""
        return f"hutch.tool({self.target!r})"


def tool(
    target: Any = None,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout_seconds: float | None = None,
    delegable: bool = False,
) -> Any:
    """Makes a tool of a function or of an object, whose public methods may then be called.

    A plain function given as an input is a tool anyway; this says more about it. Without a target
    it is a decorator: `@hutch.tool(delegable=True)`.

    Args:
        target: the function or object.
        name: what it is called; by default its own name.
        description: what it does; by default its docstring.
        timeout_seconds: how long one call may take, at most 3,600.
        delegable: whether whoever is granted it may grant it further.

    Raises:
        FieldInvalidError: the time is none.
        ValueEncodeError: the target cannot be a tool.
    """
    if target is None:
        return lambda given: tool(
            given,
            name=name,
            description=description,
            timeout_seconds=timeout_seconds,
            delegable=delegable,
        )
    if timeout_seconds is not None and (
        isinstance(timeout_seconds, bool)
        or not isinstance(timeout_seconds, (int, float))
        or not 0 < timeout_seconds <= MAX_TIMEOUT_SECONDS
    ):
        message = f"timeout_seconds is {timeout_seconds!r}; above 0, at most {MAX_TIMEOUT_SECONDS}"
        raise FieldInvalidError(message, "FIELD_INVALID", {"field": "tools.timeout"})
    made = OwnTool(
        target,
        name=name,
        description=description,
        timeout_seconds=timeout_seconds,
        delegable=bool(delegable),
    )
    describe("", made)
    return made


def describe(tool_id: str, given: Any) -> Grant:
    """Says what is told of a function, or of what `tool` made.

    Raises:
        ValueEncodeError: it cannot be a tool; the text is the reason.
    """
    said = given if type(given) is OwnTool else None
    target = said.target if said is not None else given
    if hasattr(type(target), "__hutch_tool__"):
        raise ValueEncodeError("what is a tool already; give it as it is")
    methods: tuple[Method, ...] = ()
    signature = ""
    if isinstance(target, type):
        raise ValueEncodeError(f"the class {target.__name__}; give an instance or a function")
    if callable(target):
        _check_function(target, "a")
        signature = signatures.written(target)
    else:
        methods = _methods(target)
    function = getattr(target, "func", target)  # of a functools.partial
    name = getattr(function, "__name__", None) or type(target).__name__
    description = _documentation(function)
    if said is not None:
        name = name if said.name is None else said.name
        description = description if said.description is None else said.description
    return Grant(
        tool_id,
        _cut(name, MAX_NAME),
        _cut(description, MAX_DESCRIPTION),
        signature,
        methods,
        said.delegable if said is not None else False,
        said.timeout_ms if said is not None else 0,
    )


def _check_function(function: Any, article: str) -> None:
    import inspect

    call = getattr(type(function), "__call__", None)  # noqa: B004 - of an instance with the method
    for one in (function, call):
        if inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one):
            raise ValueEncodeError(
                f"{article} generator function cannot be a tool: give one that returns a list"
            )


def _methods(target: Any) -> tuple[Method, ...]:
    import inspect

    found = []
    for name in dir(target):
        if name.startswith("_"):
            continue
        static = inspect.getattr_static(target, name, None)
        if isinstance(static, type) or not (callable(static) or _is_bound_kind(static)):
            continue  # a property would run code
        function = getattr(target, name)
        _check_function(function, f"its method {name} is a")
        text = signatures.written(function)
        found.append(Method(_cut(name, MAX_NAME), text, _documentation(function, short=True)))
    if not found:
        kind = type(target).__name__
        raise ValueEncodeError(f"a {kind} without public methods cannot be a tool")
    if len(found) > MAX_METHODS:
        raise ValueEncodeError(f"an object with {len(found)} methods; at most {MAX_METHODS}")
    return tuple(found)


def _is_bound_kind(static: Any) -> bool:
    return isinstance(static, (staticmethod, classmethod))


def _documentation(function: Any, *, short: bool = False) -> str:
    import inspect

    try:
        text = inspect.getdoc(function) or ""
    except Exception:  # the class is the caller's own
        text = ""
    return _cut(text, MAX_METHOD_DESCRIPTION if short else MAX_DESCRIPTION)


def _cut(text: object, limit: int) -> str:
    sound = str(text).encode("utf-8", "backslashreplace").decode("utf-8")
    return sound if len(sound) <= limit else sound[: limit - 3] + "..."


class Owned:
    """A tool at its owner."""

    __slots__ = ("_methods", "_target", "given", "grant", "loop")

    def __init__(self, given: Any, grant: Grant) -> None:
        """Keeps what was given, alive."""
        self.given = given
        self.grant = grant
        self.loop: Any = None  # of the coroutine that gave it last, for its async functions
        self._target = given.target if type(given) is OwnTool else given
        self._methods = {item.name for item in grant.methods}

    def function(self, method: str) -> Any:
        """Returns what a call runs; None where there is no such method."""
        if not self._methods:
            return self._target if not method else None
        return getattr(self._target, method) if method in self._methods else None


class Owner:
    """The tools of one process: the same object has the same id, for as long as the owner is."""

    def __init__(self, owner_id: str, first: int = 1) -> None:
        """Begins without tools; ids are `tool_<owner id>_<number>`, from `first` on."""
        self.owner_id = owner_id
        self._next = first
        self._guard = _thread.allocate_lock()
        self._by_key: dict[Any, Owned] = {}
        self._by_id: dict[str, Owned] = {}

    def grant(self, given: Any, loop: Any = None) -> Grant:
        """Returns what is told of a function, or of what `tool` made.

        Args:
            given: the function or wrapper.
            loop: the event loop of the coroutine that gives it.

        Raises:
            ValueEncodeError: it cannot be a tool; the text is the reason.
        """
        key = _identity(given)
        with self._guard:
            owned = self._by_key.get(key)
        if owned is None:
            grant = describe("", given)
            with self._guard:
                owned = self._by_key.get(key)
                if owned is None:
                    grant.tool_id = f"tool_{self.owner_id}_{self._next}"
                    self._next += 1
                    owned = self._by_key[key] = Owned(given, grant)
                    self._by_id[grant.tool_id] = owned
        owned.loop = loop
        return owned.grant

    def find(self, tool_id: str) -> Owned | None:
        """Returns the tool of an id."""
        return self._by_id.get(tool_id)


def _identity(given: Any) -> Any:
    """A key of an object; a bound method is made anew whenever it is looked up."""
    kind = type(given).__name__
    if kind == "method" and type(given).__module__ == "builtins":
        return (id(given.__self__), id(given.__func__))
    return id(given)


class Giving:
    """The tools that one request gives: what `values.encode` asks for ids."""

    def __init__(self, owner: Owner, loop: Any = None) -> None:
        """Begins without any."""
        self._owner = owner
        self._loop = loop
        self.grants: dict[str, Grant] = {}

    def __call__(self, given: Any) -> str:
        """Returns the id of a function, of what `tool` made, or of a tool granted to this code."""
        if type(given) in (Tool, ToolObject):
            grant = grant_of(given)
        else:
            grant = self._owner.grant(given, self._loop)
        self.grants[grant.tool_id] = grant
        return grant.tool_id


def check_size(grants: Iterable[Grant]) -> None:
    """Checks that what is told of the tools of one request fits into a frame.

    Raises:
        PayloadTooLargeError: it does not.
    """
    told = fastjson.dumps([grant.to_header() for grant in grants])
    size = len(told.encode("utf-8"))
    if size > MAX_TOLD_BYTES:
        message = (
            f"names, signatures and docstrings of the tools have {size} bytes in all;"
            f" {MAX_TOLD_BYTES} are allowed: give fewer tools or shorter descriptions"
        )
        raise PayloadTooLargeError(message, "PAYLOAD_TOO_LARGE", {"limit": str(MAX_TOLD_BYTES)})


def grant_of(given: Tool | ToolObject) -> Grant:
    """What is told of a tool that was granted to this code.

    Raises:
        ValueEncodeError: it is one method of an object.
    """
    grant: Grant = object.__getattribute__(given, "_grant")
    if type(given) is Tool and given._method:
        raise ValueEncodeError(f"one method of the tool {grant.name}; give the whole tool")
    return grant


class Tool:
    """A function of somebody else: called, it runs there.

    `await tool.acall(...)` does the same for coroutines.
    """

    __slots__ = ("__dict__", "_grant", "_method", "_port", "_signature")
    __hutch_tool__ = True

    def __init__(self, port: Port, grant: Grant, method: Method | None = None) -> None:
        """Stands for a function, or for one method of an object."""
        told: Any = grant if method is None else method
        self._port = port
        self._grant = grant
        self._method = method.name if method is not None else ""
        self._signature = told.signature
        self.__name__ = told.name if method is None else f"{grant.name}.{method.name}"
        self.__qualname__ = self.__name__
        self.__doc__ = told.description

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the tool and waits for its value.

        Raises:
            ToolError: it raised an exception.
            ToolTimeoutError: it did not answer in its time.
            ToolOutcomeUnknown: its owner died meanwhile.
            RequestRefused: it was not called; its subclasses say why.
            ValueEncodeError: an argument cannot cross.
        """
        return self._port.call_tool(self._grant, self._method, self._encode(args, kwargs))

    async def acall(self, /, *args: Any, **kwargs: Any) -> Any:
        """Does what a call does, awaitable."""
        data = self._encode(args, kwargs)
        return await self._port.acall_tool(self._grant, self._method, data)

    def _encode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        return values.encode({"args": list(args), "kwargs": kwargs}, root="arguments")

    @property
    def __signature__(self) -> Any:
        """Its signature, for `inspect.signature`; defaults and annotations are only text."""
        return signatures.parsed(self._signature)

    def __repr__(self) -> str:
        """Writes name and signature."""
        return f"<hutch tool {self.__name__}{self._signature}>"


class ToolObject:
    """An object of somebody else: its methods are called there."""

    __slots__ = ("__dict__", "_grant", "_port")
    __hutch_tool__ = True

    def __init__(self, port: Port, grant: Grant) -> None:
        """Stands for an object."""
        self._port = port
        self._grant = grant
        self.__doc__ = grant.description
        for method in grant.methods:
            self.__dict__[method.name] = Tool(port, grant, method)

    def __getattr__(self, name: str) -> Any:
        """Says which methods there are."""
        names = ", ".join(item.name for item in self._grant.methods)
        raise AttributeError(f"the tool {self._grant.name} has no {name!r}; it has {names}")

    def __repr__(self) -> str:
        """Names it and its methods."""
        names = ", ".join(item.name for item in self._grant.methods)
        return f"<hutch tool {self._grant.name}: {names}>"


def stand_in(port: Port, grant: Grant) -> Tool | ToolObject:
    """Makes what stands for a granted tool."""
    return ToolObject(port, grant) if grant.methods else Tool(port, grant)


def read_arguments(
    data: bytes, artifact: Callable[[str], Any] | None = None
) -> tuple[list[Any], dict[str, Any]]:
    """Decodes the arguments of a call. They come from hostile code.

    Raises:
        ValueDecodeError: they are not what they must be.
    """
    found = values.decode(data, root="arguments", artifact=artifact)
    if type(found) is dict and set(found) == {"args", "kwargs"}:
        args, kwargs = found["args"], found["kwargs"]
        if type(args) is list and type(kwargs) is dict and all(type(k) is str for k in kwargs):
            return args, kwargs
    raise ValueDecodeError("the arguments of a tool are a list and named values")
