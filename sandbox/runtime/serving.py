"""Runs the tools of this process when they are called: at once, and each call once.

Called by `guest` and the SDK's tool server; calls `tools` and the functions themselves. It is a
member of two packages (see docs/adr/0002), so it runs on Python 3.9 and needs the standard library
only.
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque

from . import tools, values
from .errors import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Deliver = Callable[[str, "bytes | None", "Failure | None"], None]

THREADS = 32
MAX_TYPE_NAME = 200
MAX_MESSAGE = 8_000
MAX_TRACEBACK = 16_000


class Call:
    """One call that is served.

    Attributes:
        call_id: its id.
        owner: whose tool it calls.
        is_open: whether it has no outcome yet.
    """

    def __init__(
        self, server: Server, call_id: str, tool_id: str, method: str, arguments: bytes
    ) -> None:
        """Takes what the caller sent."""
        self.call_id = call_id
        self.owner = server.owner
        self.is_open = True
        self.tool_id = tool_id
        self.method = method
        self.arguments = arguments
        self.is_cancelled = False
        self.context: Any = None
        self.loop: Any = None  # with the task, where the tool is asynchronous
        self.task: Any = None
        self._server = server
        self._thread = 0

    def enter(self) -> None:
        """Notes the thread that serves it, in this thread's context."""
        self._thread = threading.get_ident()
        tools.current.set(self)

    def step_aside(self) -> bool:
        """Frees the place of the serving thread, if this is that; whether it is."""
        if not self.is_open or self._thread != threading.get_ident():
            return False
        self._thread = 0  # a wait within a wait frees nothing
        self._server.add_place(1)
        return True

    def step_back(self) -> None:
        """Takes the place again."""
        self._thread = threading.get_ident()
        self._server.add_place(-1)


class Server:
    """Serves the calls of an owner's tools.

    At most so many threads run tools at a time; further calls wait. A tool that itself waits for an
    invocation or another tool counts for none: what it waits for may need a place. Coroutines run
    on the loop that gave the tool while it runs, else on one loop of the server's own.
    """

    def __init__(
        self,
        owner: tools.Owner,
        deliver: Deliver,
        *,
        artifact: Callable[[str], Any] | None = None,
        context: contextvars.Context | None = None,
        start_loop: Callable[[Callable[[], None]], object] | None = None,
        threads: int = THREADS,
    ) -> None:
        """Begins without calls.

        Args:
            owner: has the tools.
            deliver: given each call's id with its value or its failure, once, on any thread.
            artifact: makes a handle of an artifact's id, for the arguments.
            context: what the tools' context is a copy of.
            start_loop: starts the thread of the server's own loop.
            threads: how many calls run at a time.
        """
        self.owner = owner
        self._deliver = deliver
        self._artifact = artifact
        self._context = context if context is not None else contextvars.Context()
        self._start_loop = start_loop if start_loop is not None else _start_thread
        self._places = threads
        self._guard = threading.Lock()  # of the fields below
        self._calls: dict[str, Call] = {}
        self._queue: deque[Call] = deque()
        self._active = 0  # threads
        self._starting = 0  # of them, those that have not looked at the queue yet
        self._loop: _LoopThread | None = None

    def call(self, call_id: str, tool_id: str, method: str, arguments: bytes) -> None:
        """Begins a call, or nothing if it has begun already; never waits for it."""
        call = Call(self, call_id, tool_id, method, arguments)
        with self._guard:
            if call_id in self._calls:
                return
            self._calls[call_id] = call
            self._queue.append(call)
        self._start_threads()

    def cancel(self, call_id: str) -> None:
        """Gives up a call: one that waits never runs, a coroutine is cancelled, others run on."""
        with self._guard:
            call = self._calls.get(call_id)
            if call is None:
                return
            call.is_cancelled = True
            loop, task = call.loop, call.task
        if task is not None:
            _call_soon(loop, task.cancel)

    def close(self) -> None:
        """Gives up all calls and ends the server's own loop; threads end with their calls."""
        with self._guard:
            calls = list(self._calls)
            self._queue.clear()
            loop, self._loop = self._loop, None
        for call_id in calls:
            self.cancel(call_id)
        if loop is not None:
            loop.stop()

    def add_place(self, places: int) -> None:
        """Lets more threads run, or fewer."""
        with self._guard:
            self._places += places
        self._start_threads()

    def _start_threads(self) -> None:
        while True:
            with self._guard:
                if self._active >= self._places or len(self._queue) <= self._starting:
                    return
                self._active += 1
                self._starting += 1
            try:
                threading.Thread(target=self._work, name="hutch-tool", daemon=True).start()
            except RuntimeError as error:  # no more processes are allowed here
                self._without_thread(error)
                return

    def _without_thread(self, error: RuntimeError) -> None:
        """Leaves the queue to the threads that there are; without any, nobody would ever come."""
        with self._guard:
            self._active -= 1
            self._starting -= 1
            stranded = [] if self._active else list(self._queue)
            if stranded:
                self._queue.clear()
        for call in stranded:
            self._end(call, None, describe_failure(error))

    def _work(self) -> None:
        with self._guard:
            self._starting -= 1
        while (call := self._next()) is not None:
            try:
                call.context = self._context.copy()
                call.context.run(self._run, call)
            except BaseException as error:  # a stopped cell ends its threads wherever they are
                self._end(call, None, describe_failure(error))

    def _next(self) -> Call | None:
        """Takes the next call; without one the thread is over."""
        with self._guard:
            if self._queue and self._active <= self._places:
                return self._queue.popleft()
            self._active -= 1
            return None

    def _run(self, call: Call) -> None:
        if call.is_cancelled:
            self._end(call, None, _refusal("the call was cancelled before it began"))
            return
        owned = self.owner.find(call.tool_id)
        function = owned.function(call.method) if owned is not None else None
        if owned is None or function is None:
            reason = "" if owned is not None else "TOOL_UNREACHABLE"
            self._end(call, None, _refusal("there is no such tool here", reason))
            return
        call.enter()
        try:
            args, kwargs = tools.read_arguments(call.arguments, self._artifact)
            call.arguments = b""
            result = function(*args, **kwargs)
            if hasattr(result, "__await__"):
                self._await(call, owned.loop, result)
                return
            data = values.encode(result)
        except BaseException as error:  # whatever a tool raises, its caller is told
            self._end(call, None, describe_failure(error))
            return
        self._end(call, data, None)

    def _await(self, call: Call, loop: Any, awaitable: Any) -> None:
        """Leaves a coroutine to a loop."""
        if loop is None or not loop.is_running():
            with self._guard:
                if self._loop is None:
                    self._loop = _LoopThread(self._start_loop)
                loop = self._loop.loop

        def begin() -> None:
            call.task = loop.create_task(_outcome(awaitable))
            call.task.add_done_callback(lambda task: self._end_task(call, task))
            if call.is_cancelled:
                call.task.cancel()

        call.loop = loop
        _call_soon(loop, begin, call.context.copy())

    def _end_task(self, call: Call, task: Any) -> None:
        if task.cancelled():
            self._end(call, None, _refusal("the call was cancelled"))
        else:
            self._end(call, *task.result())

    def _end(self, call: Call, value: bytes | None, failure: Failure | None) -> None:
        with self._guard:
            if not call.is_open:
                return
            call.is_open = False
            self._calls.pop(call.call_id, None)
        self._deliver(call.call_id, value, failure)


def _start_thread(function: Callable[[], None]) -> None:
    threading.Thread(target=function, name="hutch-tool-loop", daemon=True).start()


class _LoopThread:
    """One event loop in a thread."""

    def __init__(self, start: Callable[[Callable[[], None]], object]) -> None:
        self.loop: Any = None
        self._stop: Any = None
        self._is_running = threading.Event()
        self._has_ended = threading.Event()
        start(self._run)
        self._is_running.wait()

    def _run(self) -> None:
        import asyncio

        async def serve() -> None:
            self.loop = asyncio.get_running_loop()
            self._stop = asyncio.Event()
            self._is_running.set()
            await self._stop.wait()

        asyncio.run(serve())
        self._has_ended.set()

    def stop(self) -> None:
        """Cancels what runs there and ends the thread."""
        _call_soon(self.loop, self._stop.set)
        self._has_ended.wait(5)


async def _outcome(awaitable: Any) -> tuple[bytes | None, Failure | None]:
    """Awaits a tool's coroutine; what it raises is nobody's but its caller's."""
    import asyncio

    try:
        return values.encode(await awaitable), None
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # as in a thread
        return None, describe_failure(error)


def _call_soon(loop: Any, action: Callable[[], object], context: Any = None) -> None:
    try:
        loop.call_soon_threadsafe(action, context=context)
    except RuntimeError:
        pass  # the loop was closed, and its tasks are over


def _refusal(message: str, reason: str = "") -> Failure:
    return Failure(type_name="ToolUnreachableError", message=message, reason=reason)


def describe_failure(error: BaseException) -> Failure:
    """Writes an exception of a tool as data, with the traceback from the tool's own frame on."""
    failure = Failure(type_name=_cut(type(error).__name__, MAX_TYPE_NAME))
    try:
        failure.message = _cut(str(error), MAX_MESSAGE)
        failure.traceback = _cut(_traceback(error), MAX_TRACEBACK)
    except BaseException as problem:  # the class is the tool's own: anything may happen in it
        failure.message = f"its description failed: {type(problem).__name__}"
    return failure


def _traceback(error: BaseException) -> str:
    import traceback

    own = (describe_failure.__code__.co_filename, tools.describe.__code__.co_filename)
    entry = error.__traceback__
    while entry is not None and entry.tb_frame.f_code.co_filename in own:
        entry = entry.tb_next
    return "".join(traceback.format_exception(type(error), error, entry))


def _cut(text: str, limit: int) -> str:
    sound = str.__str__(text).encode("utf-8", "backslashreplace").decode("utf-8")
    if len(sound) <= limit:
        return sound
    mark = "\n[...]\n" if limit > 500 else "..."
    half = (limit - len(mark)) // 2
    return sound[:half] + mark + sound[len(sound) - half :]
