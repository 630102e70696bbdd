"""Hutch runs untrusted agent code in a tree of sandboxes.

What users import is here by name and loaded when it is first used (PEP 562), so that a program
which needs the wire contract only (`hutch.v1`) loads neither pydantic nor the client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hutch.aio import AsyncClient
    from hutch.aio_boxes import AsyncBox, AsyncCell
    from hutch.boxes import Box, Cell
    from hutch.calls import ainvoke, aspawn, invoke, scope, spawn
    from hutch.cells import CellResult
    from hutch.client import Client, Handle, connect
    from hutch.errors import (
        BudgetExhaustedError,
        CellBusyError,
        CellFailed,
        CellNotFoundError,
        ConnectionLostError,
        CredentialInvalidError,
        DeadlineExceededError,
        Failure,
        FieldInvalidError,
        GrantDeniedError,
        HintError,
        HutchError,
        InternalError,
        InvocationCancelled,
        InvocationCrashed,
        InvocationEndedError,
        InvocationFailed,
        InvocationLost,
        InvocationRaised,
        NotBuiltError,
        NotEnforceableError,
        NotFoundError,
        PayloadTooLargeError,
        QuotaExceededError,
        RecursionLimitError,
        RequestIdReusedError,
        RequestRefused,
        ResourceExceededError,
        ResultTimeoutError,
        ReturnTypeError,
        ToolError,
        ToolOutcomeUnknown,
        ToolTimeoutError,
        ToolUnreachableError,
        UnavailableError,
        ValueDecodeError,
        ValueEncodeError,
        ValueTooLargeError,
    )
    from hutch.handles import AsyncHandle
    from hutch.local import LocalControllerError
    from hutch.policies import RecursionLimit, ReturnType
    from hutch.records import ArtifactReference, Record
    from hutch.tools import tool
    from hutch.types import Artifact, CellOutput, Display, Ending, Event, Invocation, Spec

    __version__: str

__all__ = [
    "Artifact",
    "ArtifactReference",
    "AsyncBox",
    "AsyncCell",
    "AsyncClient",
    "AsyncHandle",
    "Box",
    "BudgetExhaustedError",
    "Cell",
    "CellBusyError",
    "CellFailed",
    "CellNotFoundError",
    "CellOutput",
    "CellResult",
    "Client",
    "ConnectionLostError",
    "CredentialInvalidError",
    "DeadlineExceededError",
    "Display",
    "Ending",
    "Event",
    "Failure",
    "FieldInvalidError",
    "GrantDeniedError",
    "Handle",
    "HintError",
    "HutchError",
    "InternalError",
    "Invocation",
    "InvocationCancelled",
    "InvocationCrashed",
    "InvocationEndedError",
    "InvocationFailed",
    "InvocationLost",
    "InvocationRaised",
    "LocalControllerError",
    "NotBuiltError",
    "NotEnforceableError",
    "NotFoundError",
    "PayloadTooLargeError",
    "QuotaExceededError",
    "Record",
    "RecursionLimit",
    "RecursionLimitError",
    "RequestIdReusedError",
    "RequestRefused",
    "ResourceExceededError",
    "ResultTimeoutError",
    "ReturnType",
    "ReturnTypeError",
    "Spec",
    "ToolError",
    "ToolOutcomeUnknown",
    "ToolTimeoutError",
    "ToolUnreachableError",
    "UnavailableError",
    "ValueDecodeError",
    "ValueEncodeError",
    "ValueTooLargeError",
    "__version__",
    "ainvoke",
    "aspawn",
    "connect",
    "invoke",
    "scope",
    "spawn",
    "tool",
]

_HOMES = {
    "hutch.aio": ("AsyncClient",),
    "hutch.aio_boxes": ("AsyncBox", "AsyncCell"),
    "hutch.boxes": ("Box", "Cell"),
    "hutch.cells": ("CellResult",),
    "hutch.handles": ("AsyncHandle",),
    "hutch.calls": ("ainvoke", "aspawn", "invoke", "scope", "spawn"),
    "hutch.client": ("Client", "Handle", "connect"),
    "hutch.local": ("LocalControllerError",),
    "hutch.policies": ("RecursionLimit", "ReturnType"),
    "hutch.records": ("ArtifactReference", "Record"),
    "hutch.tools": ("tool",),
    "hutch.types": ("Artifact", "CellOutput", "Display", "Ending", "Event", "Invocation", "Spec"),
}


def __getattr__(name: str) -> Any:
    """Loads what is named from its home."""
    if name == "__version__":
        metadata = importlib.import_module("importlib.metadata")
        return metadata.version("hutch")
    if name not in __all__:
        raise AttributeError(f"module 'hutch' has no attribute {name!r}")
    home = next((home for home, names in _HOMES.items() if name in names), "hutch.errors")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    """What users import."""
    return sorted(__all__)
