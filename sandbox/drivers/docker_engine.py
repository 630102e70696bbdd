"""The container engine, as far as the docker driver needs it: blocking calls, typed answers.

Called by the docker driver in threads of its own; calls the `docker` package. Whoever can speak to
the engine is root on this machine, so its socket is opened here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sandbox.drivers.docker_channel import AttachedSocket

if TYPE_CHECKING:
    from docker.errors import APIError

OWNER_LABEL = "hutch.owner"
DRIVER_LABEL = "hutch.driver"
SANDBOX_LABEL = "hutch.sandbox"
GENERATION_LABEL = "hutch.host_generation"
_CALL_SECONDS = 30
_LIMITS = {"memory": "MemoryLimit", "pids": "PidsLimit", "cpu": "CpuCfsQuota"}
_MAX_PROBLEM = 1000


class EngineProblem(Exception):
    """The engine refused, or does not answer; the text is what it said."""


class NameTaken(EngineProblem):
    """A container of that name exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the engine says of itself."""

    version: str
    api_version: str
    runtimes: tuple[str, ...]
    runc_version: str
    cgroup_version: str
    limits: frozenset[str]  # memory, pids, cpu: those that it can hold

    def version_of(self, runtime: str) -> str:
        """The version of a runtime; empty where the engine does not say it."""
        return self.runc_version if runtime == "runc" else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """How one container is."""

    running: bool
    pid: int  # of its first process as the engine's machine sees it; 0 when it does not run
    exit_code: int
    oom_killed: bool
    problem: str


class Engine:
    """One engine, by its address.

    Raises:
        EngineProblem: from every method, when the engine refuses or does not answer.
    """

    def __init__(self, address: str) -> None:
        """Connects and agrees on a version of the interface."""
        # Loaded here, because a host without an engine should not pay for it.
        import docker

        with _problems():
            self._api = docker.APIClient(
                base_url=address, version="auto", timeout=_CALL_SECONDS, use_ssh_client=False
            )
        # A connection for each call: none is kept, so none can go stale when the engine restarts.
        self._api.headers["Connection"] = "close"
        self._any: Any = self._api  # for what its stubs leave without types

    def close(self) -> None:
        """Frees its connections."""
        self._api.close()

    def facts(self) -> Facts:
        """Asks what it is."""
        with _problems():
            version, info = self._api.version(), self._api.info()
        parts = {
            item.get("Name"): item.get("Version", "") for item in version.get("Components", ())
        }
        return Facts(
            version=str(version.get("Version", "")),
            api_version=str(version.get("ApiVersion", "")),
            runtimes=tuple(sorted(info.get("Runtimes") or {})),
            runc_version=str(parts.get("runc", "")),
            cgroup_version=str(info.get("CgroupVersion", "")),
            limits=frozenset(name for name, key in _LIMITS.items() if info.get(key)),
        )

    def image(self, reference: str) -> dict[str, Any]:
        """An image's description; EngineProblem when it is not there."""
        with _problems():
            found: dict[str, Any] = self._any.inspect_image(reference)
            return found

    def create(self, name: str, config: dict[str, Any]) -> str:
        """Makes a container and answers with its id.

        Raises:
            NameTaken: There is one of that name.
        """
        with _problems():
            made: dict[str, Any] = self._any.create_container_from_config(config, name)
            return str(made["Id"])

    def attach(self, container: str) -> AttachedSocket:
        """Attaches to the three standard streams of a container that was not started yet."""
        wanted = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
        with _problems():
            given: Any = self._api.attach_socket(container, params=wanted)
        # Nothing was read ahead: the container has written nothing yet.
        return AttachedSocket(given._sock.detach())

    def start(self, container: str) -> None:
        """Starts it."""
        with _problems():
            self._api.start(container)

    def state(self, container: str) -> State | None:
        """How it is; None when there is none."""
        try:
            with _problems():
                found = self._api.inspect_container(container)["State"]
        except _Absent:
            return None
        return State(
            running=bool(found.get("Running")),
            pid=int(found.get("Pid") or 0),
            exit_code=int(found.get("ExitCode") or 0),
            oom_killed=bool(found.get("OOMKilled")),
            problem=str(found.get("Error") or "")[:_MAX_PROBLEM],
        )

    def remove(self, container: str) -> None:
        """Kills and removes it, with all it had; nothing happens when there is none, or when it is
        being removed already."""
        try:
            with _problems():
                self._api.remove_container(container, v=True, force=True)
        except _Absent:
            return
        except EngineProblem as problem:
            if "already in progress" not in str(problem):
                raise

    def owned(self, labels: dict[str, str]) -> dict[str, str]:
        """The containers with all these labels, whatever their state: id, and sandbox."""
        with _problems():
            found = self._api.containers(
                all=True, filters={"label": [f"{key}={value}" for key, value in labels.items()]}
            )
        return {item["Id"]: item["Labels"].get(SANDBOX_LABEL, "") for item in found}

    def usage(self, container: str) -> dict[str, Any]:
        """What the engine measured of a running container."""
        with _problems():
            found: dict[str, Any] = self._api.stats(container, stream=False, one_shot=True)
            return found


class _Absent(EngineProblem):
    """There is no such container."""


@contextmanager
def _problems() -> Iterator[None]:
    import requests
    from docker.errors import APIError, DockerException, NotFound

    try:
        yield
    except NotFound as error:
        raise _Absent(_said(error)) from error
    except APIError as error:
        taken = error.status_code == requests.codes["conflict"] and "already in use" in str(error)
        raise (NameTaken if taken else EngineProblem)(_said(error)) from error
    except (DockerException, requests.RequestException, OSError) as error:
        raise EngineProblem(f"the engine does not answer: {error}"[:_MAX_PROBLEM]) from error


def _said(error: APIError) -> str:
    return str(error.explanation or error)[:_MAX_PROBLEM]
