"""Who may call, and what a start on a taken port or a wrong address says."""

from __future__ import annotations

import socket
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import hutch
from tests.support.stack import NotReady, Stack


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_the_loopback_port_needs_the_key_and_the_socket_does_not(own_stack: Stack) -> None:
    own_stack.kill_controller()
    port = free_port()
    own_stack.start_controller("--listen", f"127.0.0.1:{port}")
    key = (own_stack.state / "client.key").read_text().strip()
    assert (own_stack.state / "client.key").stat().st_mode & 0o777 == 0o600
    target = f"127.0.0.1:{port}"
    with hutch.connect(target, api_key=key) as client:
        assert client.invoke(program="return 1") == 1
    for wrong in ("0" * 64, ""):
        with (
            pytest.raises(hutch.CredentialInvalidError),
            hutch.connect(target, api_key=wrong) as client,
        ):
            client.list_invocations()


@pytest.mark.parametrize("address", ["0.0.0.0:7999", "192.0.2.1:7999", "127.0.0.1"])
def test_case_s29_only_a_loopback_address_is_served_without_tls(
    own_stack: Stack, address: str
) -> None:
    own_stack.kill_controller()
    with pytest.raises(NotReady, match="only a loopback address"):
        own_stack.start_controller("--listen", address)


def test_a_port_in_use_is_said(own_stack: Stack) -> None:
    own_stack.kill_controller()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(NotReady, match="the port is in use"):
            own_stack.start_controller("--listen", f"127.0.0.1:{taken.getsockname()[1]}")


def test_health_is_served_and_reflection_only_when_asked(own_stack: Stack) -> None:
    with grpc.insecure_channel(own_stack.target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for service in ("", "hutch.v1.InvocationService", "hutch.v1.ArtifactService"):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as refused:
            _services(channel)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    own_stack.kill_controller()
    own_stack.start_controller("--reflection")
    with grpc.insecure_channel(own_stack.target) as channel:
        assert "hutch.v1.InvocationService" in _services(channel)


def _services(channel: grpc.Channel) -> set[str]:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    request: Any = reflection_pb2.ServerReflectionRequest(list_services="")
    answer = next(iter(stub.ServerReflectionInfo(iter([request]))))
    return {item.name for item in answer.list_services_response.service}
