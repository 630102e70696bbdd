"""Typed, opaque ids. Only `IdSource` makes new ones; derived ids are functions of an invocation's.

Called by the whole controller. An id is a prefix and lower-case hexadecimal digits or letters, so
it is safe as a path component; it is unguessable because its invocation's is.
"""

from __future__ import annotations

import re
import secrets
from typing import NewType

TenantId = NewType("TenantId", str)
InvocationId = NewType("InvocationId", str)
SandboxId = NewType("SandboxId", str)
CellId = NewType("CellId", str)
CallId = NewType("CallId", str)
ArtifactId = NewType("ArtifactId", str)
HostId = NewType("HostId", str)
SessionId = NewType("SessionId", str)
ToolId = NewType("ToolId", str)
ToolCallId = NewType("ToolCallId", str)
ToolServerId = NewType("ToolServerId", str)

LOCAL_TENANT = TenantId("local")

_ID = re.compile(r"[a-z]{2,8}_[0-9a-z]{1,64}")
_TOOL = re.compile(r"tool_(inv_[0-9a-z]{1,64}|[0-9A-Za-z]{16,64})_[1-9][0-9]{0,9}")


def is_id(text: str, prefix: str) -> bool:
    """Whether `text` has the form of an id with this prefix (`inv`, `art`, ...)."""
    return _ID.fullmatch(text) is not None and text.startswith(prefix + "_")


def new_invocation_id() -> InvocationId:
    """A fresh id with 128 random bits."""
    return InvocationId(f"inv_{secrets.token_hex(16)}")


def new_tool_call_id() -> ToolCallId:
    """A fresh id with 128 random bits."""
    return ToolCallId(f"tc_{secrets.token_hex(16)}")


def new_artifact_id() -> ArtifactId:
    """A fresh id with 128 random bits."""
    return ArtifactId(f"art_{secrets.token_hex(16)}")


def sandbox_id_of(invocation_id: InvocationId, attempt: int) -> SandboxId:
    """The sandbox of one attempt; the same attempt always means the same sandbox."""
    return SandboxId(f"sbx_{invocation_id.partition('_')[2]}a{attempt}")


def cell_id_of(invocation_id: InvocationId, attempt: int, index: int = 1) -> CellId:
    """The cell of one attempt; the same cell never runs twice because its id is the same."""
    return CellId(f"cell_{invocation_id.partition('_')[2]}a{attempt}c{index}")


def tool_owner(tool_id: str) -> str:
    """Who owns a tool: an invocation's id, or the id of a client's tool server; empty when the text
    is no tool's id."""
    found = _TOOL.fullmatch(tool_id)
    return found[1] if found else ""
