"""The exceptions that callers of Hutch meet, in the SDK and inside a sandbox alike.

    HutchError
    ├── ValueEncodeError        a value cannot cross; .path (also a TypeError)
    ├── ValueTooLargeError      a value is over a limit; .limit (also a ValueError)
    ├── ValueDecodeError        bytes are no value, or none of the hint; .path (also a ValueError)
    ├── HintError               a type hint that no contract can express; .hint (also a TypeError)
    ├── ResultTimeoutError      a wait ended before the invocation did (also a TimeoutError)
    ├── ToolError               a tool raised; .failure has its class, text and traceback
    ├── ToolOutcomeUnknown      a tool's owner is gone; the call may or may not have happened
    ├── ToolTimeoutError        a tool did not answer in its time (also a TimeoutError)
    ├── CellFailed              a cell of a box did not run to its end; .outcome .cell_id .failure
    ├── ConnectionLostError     the controller cannot be reached (also a ConnectionError)
    ├── RequestRefused          a request was refused and nothing was started; .reason .details
    │   ├── FieldInvalidError       FIELD_INVALID (also a ValueError)
    │   ├── PayloadTooLargeError    PAYLOAD_TOO_LARGE (also a ValueError)
    │   ├── CredentialInvalidError  CREDENTIAL_INVALID
    │   ├── GrantDeniedError        GRANT_DENIED (also a PermissionError)
    │   ├── NotFoundError           INVOCATION_, ARTIFACT_, SANDBOX_, FILE_NOT_FOUND (a LookupError)
    │   │   └── CellNotFoundError       CELL_NOT_FOUND
    │   ├── CellBusyError           CELL_BUSY
    │   ├── RecursionLimitError     DEPTH_LIMIT_REACHED
    │   ├── RequestIdReusedError    REQUEST_ID_REUSED
    │   ├── QuotaExceededError      QUOTA_EXCEEDED
    │   ├── InvocationEndedError    INVOCATION_ENDED
    │   ├── UnavailableError        CONTROLLER_DRAINING, HOST_, STORE_UNAVAILABLE, STORE_FULL
    │   │   └── ToolUnreachableError    TOOL_UNREACHABLE
    │   ├── NotEnforceableError     NOT_ENFORCEABLE
    │   ├── NotBuiltError           NOT_BUILT (also a NotImplementedError)
    │   └── InternalError           INTERNAL, OWNER_FENCED
    └── InvocationFailed        an invocation ended without a value; .ending .child_id .failure
        ├── InvocationRaised        raised: its code raised .failure
        ├── ReturnTypeError         contract_violated; .path .expected .got
        ├── BudgetExhaustedError    budget_exhausted, iteration_limit
        ├── DeadlineExceededError   deadline_exceeded, idle_timeout (also a TimeoutError)
        ├── ResourceExceededError   memory_, pids_, disk_, output_exceeded
        ├── InvocationCrashed       crashed, exited, denied
        ├── InvocationCancelled     cancelled
        └── InvocationLost          sandbox_, host_, capacity_lost, start_, model_failed, internal

Called by `values`, the SDK and the guest; it calls nothing. It is a member of two packages (see
docs/adr/0002), so it imports nothing but its neighbours.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


class Failure:
    """An exception as data: what an invocation's code raised, or how its value missed its contract.

    All fields are texts, empty where unknown, and may come from hostile code.
    """

    __slots__ = (
        "ending",
        "expected",
        "got",
        "invocation_id",
        "message",
        "path",
        "reason",
        "traceback",
        "type_name",
    )

    def __init__(
        self,
        *,
        type_name: str = "",
        message: str = "",
        traceback: str = "",
        invocation_id: str = "",
        ending: str = "",
        reason: str = "",
        path: str = "",
        expected: str = "",
        got: str = "",
    ) -> None:
        """Holds the parts as they are.

        Args:
            type_name: the exception's class name, for example `ValueError`.
            message: the exception's text.
            traceback: the traceback with the code's own frames.
            invocation_id: the invocation in which it arose.
            ending: the lower-case ending kind of that invocation.
            reason: the reason of a refused request, for example `GRANT_DENIED`.
            path: where the value missed its contract, for example `result["rows"][3]`.
            expected: what the contract asks for there.
            got: what was there.
        """
        self.type_name = type_name
        self.message = message
        self.traceback = traceback
        self.invocation_id = invocation_id
        self.ending = ending
        self.reason = reason
        self.path = path
        self.expected = expected
        self.got = got

    @classmethod
    def from_mapping(cls, data: Mapping[str, object]) -> Failure:
        """Takes the known texts out of a mapping and leaves everything else."""
        fields = {name: data.get(name, "") for name in cls.__slots__}
        return cls(**{name: text for name, text in fields.items() if isinstance(text, str)})

    def to_dict(self) -> dict[str, str]:
        """Returns all fields by name."""
        return {name: getattr(self, name) for name in self.__slots__}

    def __repr__(self) -> str:
        """Names the class and the message."""
        return f"Failure({self.type_name}: {self.message!r})"


class HutchError(Exception):
    """The root of everything that Hutch raises."""


class ValueEncodeError(HutchError, TypeError):
    """A value cannot cross a boundary; `path` says which part of it, for example `result["f"]`."""

    def __init__(self, message: str, path: str = "") -> None:
        """Keeps the place beside the message, which names it already."""
        super().__init__(message)
        self.path = path


class ValueTooLargeError(HutchError, ValueError):
    """A value is over a limit; `limit` is the limit in words, for example `67108864 bytes`."""

    def __init__(self, message: str, limit: str = "") -> None:
        """Keeps the limit beside the message, which names it already."""
        super().__init__(message)
        self.limit = limit


class ValueDecodeError(HutchError, ValueError):
    """Bytes are not an encoded value, or not one of the given hint; `path` says where."""

    def __init__(self, message: str, path: str = "") -> None:
        """Keeps the place beside the message, which names it already."""
        super().__init__(message)
        self.path = path


class HintError(HutchError, TypeError):
    """A type hint cannot be expressed as a contract; `hint` is the part that cannot."""

    def __init__(self, message: str, hint: object = None) -> None:
        """Keeps the hint beside the message, which names it already."""
        super().__init__(message)
        self.hint = hint


class ResultTimeoutError(HutchError, TimeoutError):
    """A wait ended before the invocation did. The invocation goes on."""


class ToolError(HutchError):
    """A tool raised an exception; `failure` has its class name, text and traceback."""

    def __init__(self, message: str, failure: Failure | None = None) -> None:
        """Keeps the exception, as data, beside the message."""
        super().__init__(message)
        self.failure = failure if failure is not None else Failure()


class ToolOutcomeUnknown(HutchError):
    """A tool's owner is gone: the call may or may not have happened. It is never sent again."""


class ToolTimeoutError(HutchError, TimeoutError):
    """A tool did not answer in its time: whether it ran to its end cannot be known."""


class CellFailed(HutchError):
    """A cell of a box did not run to its end; the box lives on, unless it has ended as well.

    Attributes:
        outcome: the lower-case outcome, for example `errored`, `interrupted`, `timed_out`.
        cell_id: the cell.
        failure: what its code raised or how its value missed the contract, where there is that.
    """

    def __init__(
        self, message: str, *, outcome: str = "", cell_id: str = "", failure: Failure | None = None
    ) -> None:
        """Keeps the evidence beside the message."""
        super().__init__(message)
        self.outcome = outcome
        self.cell_id = cell_id
        self.failure = failure if failure is not None else Failure()


class ConnectionLostError(HutchError, ConnectionError):
    """The other side cannot be reached, or the channel to it is closed."""


class RequestRefused(HutchError):
    """A request was refused; nothing was started.

    Attributes:
        reason: the reason without prefix, for example `GRANT_DENIED`.
        details: what the refusal names (`field`, `excess`, `limit`, ...), as texts.
    """

    def __init__(
        self, message: str, reason: str = "", details: Mapping[str, str] | None = None
    ) -> None:
        """Keeps reason and details beside the message."""
        super().__init__(message)
        self.reason = reason
        self.details = dict(details or {})


class FieldInvalidError(RequestRefused, ValueError):
    """A field is missing, malformed or out of range; `details["field"]` names it."""


class PayloadTooLargeError(RequestRefused, ValueError):
    """A program, value, artifact or message is larger than its limit, in `details["limit"]`."""


class CredentialInvalidError(RequestRefused):
    """The credential is missing or wrong."""


class GrantDeniedError(RequestRefused, PermissionError):
    """More was asked for than may be given; the message names each excess."""


class NotFoundError(RequestRefused, LookupError):
    """No such invocation, artifact, sandbox or file within reach."""


class CellNotFoundError(NotFoundError):
    """The box was never given such a cell."""


class CellBusyError(RequestRefused):
    """Another cell runs and this one would not wait; it did not run."""


class RecursionLimitError(RequestRefused):
    """A child would be deeper than the granted depth."""


class RequestIdReusedError(RequestRefused):
    """A request id was used before, with other content."""


class QuotaExceededError(RequestRefused):
    """A quota or rate is used up for now."""


class InvocationEndedError(RequestRefused):
    """The invocation has ended, so the request cannot act on it."""


class UnavailableError(RequestRefused):
    """The controller, a host or a store cannot serve the request now."""


class ToolUnreachableError(UnavailableError):
    """The owner of a tool is gone; the call was not sent."""


class NotEnforceableError(RequestRefused):
    """A limit that the caller named cannot be enforced here."""


class NotBuiltError(RequestRefused, NotImplementedError):
    """The feature is named in the interface but not built in this release."""


class InternalError(RequestRefused):
    """An invariant of the system broke."""


class InvocationFailed(HutchError):
    """An invocation ended without a value.

    Attributes:
        ending: the lower-case ending kind, for example `raised`.
        child_id: the id of the invocation that ended so.
        failure: what its code raised or how it missed its contract, where there is that.
    """

    def __init__(
        self,
        message: str,
        *,
        ending: str = "",
        child_id: str = "",
        failure: Failure | None = None,
    ) -> None:
        """Keeps the evidence beside the message."""
        super().__init__(message)
        self.ending = ending
        self.child_id = child_id
        self.failure = failure if failure is not None else Failure()


class InvocationRaised(InvocationFailed):
    """Its code raised an exception that left it; `failure` has its class, text and traceback."""


class ReturnTypeError(InvocationFailed, TypeError):
    """The returned value does not fit the contract."""

    @property
    def path(self) -> str:
        """The place inside the value, for example `result["rows"][3]`."""
        return self.failure.path

    @property
    def expected(self) -> str:
        """What the contract asks for there."""
        return self.failure.expected

    @property
    def got(self) -> str:
        """What was there, shortened."""
        return self.failure.got


class BudgetExhaustedError(InvocationFailed):
    """A granted budget or all turns were used up."""


class DeadlineExceededError(InvocationFailed, TimeoutError):
    """The deadline passed."""


class ResourceExceededError(InvocationFailed):
    """The sandbox used up its memory, processes, disk or output."""


class InvocationCrashed(InvocationFailed):
    """The REPL died of a signal, left by `os._exit`, or broke the frame protocol."""


class InvocationCancelled(InvocationFailed):
    """Somebody cancelled the invocation, or its parent ended."""


class InvocationLost(InvocationFailed):
    """The system lost the invocation or could not start it."""


def refusal_class(reason: str) -> type[RequestRefused]:
    """Returns the exception class of a refusal's reason."""
    return {
        "FIELD_INVALID": FieldInvalidError,
        "PAYLOAD_TOO_LARGE": PayloadTooLargeError,
        "CREDENTIAL_INVALID": CredentialInvalidError,
        "GRANT_DENIED": GrantDeniedError,
        "INVOCATION_NOT_FOUND": NotFoundError,
        "ARTIFACT_NOT_FOUND": NotFoundError,
        "SANDBOX_NOT_FOUND": NotFoundError,
        "FILE_NOT_FOUND": NotFoundError,
        "CELL_NOT_FOUND": CellNotFoundError,
        "CELL_BUSY": CellBusyError,
        "DEPTH_LIMIT_REACHED": RecursionLimitError,
        "REQUEST_ID_REUSED": RequestIdReusedError,
        "QUOTA_EXCEEDED": QuotaExceededError,
        "INVOCATION_ENDED": InvocationEndedError,
        "CONTROLLER_DRAINING": UnavailableError,
        "HOST_UNAVAILABLE": UnavailableError,
        "STORE_UNAVAILABLE": UnavailableError,
        "STORE_FULL": UnavailableError,
        "TOOL_UNREACHABLE": ToolUnreachableError,
        "NOT_ENFORCEABLE": NotEnforceableError,
        "NOT_BUILT": NotBuiltError,
        "INTERNAL": InternalError,
        "OWNER_FENCED": InternalError,
    }.get(reason, RequestRefused)


def ending_class(ending: str) -> type[InvocationFailed]:
    """Returns the exception class of an ending kind."""
    return {
        "raised": InvocationRaised,
        "contract_violated": ReturnTypeError,
        "budget_exhausted": BudgetExhaustedError,
        "iteration_limit": BudgetExhaustedError,
        "deadline_exceeded": DeadlineExceededError,
        "idle_timeout": DeadlineExceededError,
        "memory_exceeded": ResourceExceededError,
        "pids_exceeded": ResourceExceededError,
        "disk_exceeded": ResourceExceededError,
        "output_exceeded": ResourceExceededError,
        "crashed": InvocationCrashed,
        "exited": InvocationCrashed,
        "denied": InvocationCrashed,
        "cancelled": InvocationCancelled,
        "sandbox_lost": InvocationLost,
        "host_lost": InvocationLost,
        "capacity_lost": InvocationLost,
        "start_failed": InvocationLost,
        "model_failed": InvocationLost,
        "internal": InvocationLost,
    }.get(ending, InvocationFailed)


def refused(reason: str, message: str, details: Mapping[str, str] | None = None) -> RequestRefused:
    """Makes the exception of a refused request."""
    return refusal_class(reason)(message or reason, reason, details)


def failed(ending: str, child_id: str, failure: Failure, message: str = "") -> InvocationFailed:
    """Makes the exception of an invocation that ended without a value."""
    return ending_class(ending)(
        _describe(ending, child_id, failure, message),
        ending=ending,
        child_id=child_id,
        failure=failure,
    )


def from_failure(failure: Failure) -> HutchError:
    """Makes the exception of a failed call: a child's ending, else a refusal."""
    if failure.ending:
        return failed(failure.ending, failure.invocation_id, failure)
    if failure.reason == "TOOL_OUTCOME_UNKNOWN":
        return ToolOutcomeUnknown(failure.message)
    if failure.reason == "TOOL_TIMED_OUT":
        return ToolTimeoutError(failure.message)
    if failure.reason:
        return refused(failure.reason, failure.message)
    return HutchError(failure.message or failure.type_name or "the call failed")


def from_tool(failure: Failure, name: str) -> HutchError:
    """Makes the exception of a failed tool call: what it raised, or why there is no outcome."""
    if failure.ending or failure.reason:
        return from_failure(failure)
    text = f": {failure.message}" if failure.message else ""
    return ToolError(f"the tool {name} raised {failure.type_name or 'an exception'}{text}", failure)


def _describe(ending: str, child_id: str, failure: Failure, message: str) -> str:
    subject = child_id or "the invocation"
    if ending == "contract_violated" and failure.path:
        where = f"at {failure.path}: expected {failure.expected}, got {failure.got}"
        return f"{subject} returned a value that its contract refuses {where}"
    if ending == "raised" and failure.type_name:
        text = f": {failure.message}" if failure.message else ""
        return f"{subject} raised {failure.type_name}{text}"
    text = message or failure.message
    return f"{subject} ended {ending}{': ' + text if text else ''}"
