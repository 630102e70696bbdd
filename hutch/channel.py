"""Where a controller listens, and gRPC channels to it.

Called by `hutch.aio`; calls grpcio only. A target is `unix:PATH` or `HOST:PORT`; nothing else is
dialled.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

import grpc

from hutch.errors import FieldInvalidError

_SOCKET_PATH_LIMIT = 107  # bytes; the kernel's sun_path without its end
_MESSAGE_LIMIT_BYTES = 64 * 1024 * 1024  # a full page of invocations with tracebacks
_TCP_TARGET = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}")
_OPTIONS: Sequence[tuple[str, int | str]] = (
    ("grpc.max_receive_message_length", _MESSAGE_LIMIT_BYTES),
    ("grpc.max_send_message_length", _MESSAGE_LIMIT_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_retries", 0),  # ours know which calls are safe
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)
_TCP_OPTIONS: Sequence[tuple[str, int | str]] = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)
# What a reader has not taken waits in memory here: a window that grows with the line's speed would
# hold tens of megabytes of it.
_SLOW_READER_OPTIONS: Sequence[tuple[str, int | str]] = (
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1024 * 1024),
)


def check_target(target: str) -> str:
    """The target as gRPC takes it.

    Raises:
        FieldInvalidError: It is neither `unix:PATH` nor `HOST:PORT`, or the path is too long.
    """
    if target.startswith("unix:"):
        path = target.removeprefix("unix:").removeprefix("//")
        if len(path.encode()) > _SOCKET_PATH_LIMIT:
            raise _invalid(
                f"the socket path {path!r} is over {_SOCKET_PATH_LIMIT} bytes; "
                "choose a shorter one (set XDG_RUNTIME_DIR to a short directory)"
            )
        if not path:
            raise _invalid("the target 'unix:' names no path")
        return f"unix:{path}"
    if _TCP_TARGET.fullmatch(target) and int(target.rpartition(":")[2]) <= 65535:
        return target
    raise _invalid(f"the target {target!r} is neither unix:PATH nor HOST:PORT")


def _invalid(message: str) -> FieldInvalidError:
    return FieldInvalidError(message, "FIELD_INVALID", {"field": "target"})


def open_channel(target: str, *, slow_reader: bool = False) -> grpc.aio.Channel:
    """A channel to a checked target; it connects when first used.

    Args:
        target: Where to.
        slow_reader: Whether what is not read must stay with the sender.
    """
    options = (*_OPTIONS, *(_SLOW_READER_OPTIONS if slow_reader else ()))
    if target.startswith("unix:"):
        # The peer is a path, not a name: every server takes this authority.
        options = (*options, ("grpc.default_authority", "localhost"))
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.insecure_channel(target, options=(*options, *_TCP_OPTIONS))


def credentials(target: str, api_key: str) -> tuple[tuple[str, str], ...]:
    """The metadata that carries a key; none for a private unix socket.

    Raises:
        FieldInvalidError: The key would cross a network in clear text.
    """
    if not api_key or target.startswith("unix:"):
        return ()
    if not _is_loopback(target.rpartition(":")[0].strip("[]")):
        raise _invalid(
            f"the key is not sent in clear text to {target!r}: this release speaks no TLS, so "
            "forward the port to this machine (for example with ssh -L) and use 127.0.0.1:PORT"
        )
    return (("authorization", f"Bearer {api_key}"),)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
