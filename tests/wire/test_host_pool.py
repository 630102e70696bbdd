"""Warm sandboxes: each given away once, made again in the background, in nobody's way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from hutch.v1 import host_service_pb2 as pb
from sandbox.drivers.driver import SandboxRequest
from sandbox.host import pool as pools
from sandbox.host.config import HostConfig
from tests.support.host import (
    READY,
    Conversation,
    HostUnderTest,
    ManualClock,
    ScriptedContainer,
    ScriptedDriver,
    host,
    make_spec,
    until,
)
from tests.wire.test_host_sandbox import NAMES, real_host, rest

# What `make_spec` asks for.
POOLED: dict[str, Any] = {"pool_tmpfs_limit_bytes": 64 << 20}


class Ready(ScriptedDriver):
    """Makes sandboxes that say at once that they are ready; the pool's may be held back."""

    def __init__(self) -> None:
        """Holds nothing back."""
        super().__init__()
        self.pool_gate = asyncio.Event()
        self.pool_gate.set()
        self.requests: list[SandboxRequest] = []

    async def create(self, request: SandboxRequest) -> ScriptedContainer:
        """Makes one and speaks for it."""
        self.requests.append(request)
        if request.sandbox_id.startswith("warm_"):
            await self.pool_gate.wait()
        container = await super().create(request)
        await container.say(READY)
        return container

    def warm(self) -> list[str]:
        """The names of those that were made ahead."""
        return [name for name in self.made if name.startswith("warm_")]


async def filled(it: HostUnderTest, count: int) -> None:
    """Waits until so many can be claimed."""
    await until(lambda: it.running.table.pool.ready_count == count)


async def claim(it: HostUnderTest, sandbox_id: str, **changes: Any) -> Conversation:
    """Asks for a sandbox and reads on to `ready`."""
    talk = it.attach(sandbox_id, spec=make_spec(**changes))
    assert (await talk.greeting()).started
    await talk.next("ready")
    return talk


def test_unasked_a_pooled_sandbox_has_what_a_controller_grants() -> None:
    config = HostConfig()
    assert (config.pool_size, config.pool_pids_limit) == (2, 128)
    assert config.pool_memory_limit_bytes == 512 << 20
    assert config.pool_tmpfs_limit_bytes == 128 << 20


async def test_a_warm_sandbox_is_ready_with_the_greeting_and_is_used_once() -> None:
    driver = Ready()
    async with host(driver, pool_size=2, **POOLED) as it:
        await filled(it, 2)
        assert len(driver.made) == 2
        talk = it.attach("sbx_1")
        greeting = await talk.greeting()
        assert (greeting.started, greeting.last_sequence) == (True, 1)
        assert (await talk.next("ready")).python_version == "3.11.2"
        await talk.run()
        (name,) = [name for name in driver.warm() if driver.made[name]._theirs.fileno() >= 0][:1]
        assert (await driver.made[name].hear()).header["cell"] == "cell_1"
        assert set(await it.sandboxes()) == {"sbx_1"}
        await filled(it, 2)
        assert len(driver.made) == 3
        await it.destroy("sbx_1")
        assert (await talk.next("gone")).cause == pb.GONE_CAUSE_DESTROYED
        assert driver.made[name].destroy_count == 1
        assert it.running.table.pool.ready_count == 2  # it did not come back


async def test_other_limits_start_cold_under_the_owners_name() -> None:
    driver = Ready()
    async with host(driver, pool_size=1, **POOLED) as it:
        await filled(it, 1)
        spec = make_spec()
        spec.resources.pids_limit = 64
        await claim(it, "sbx_cold", resources=spec.resources)
        assert "sbx_cold" in driver.made
        assert it.running.table.pool.ready_count == 1


async def test_warm_sandboxes_take_nobodys_place_and_nobody_sees_them() -> None:
    driver = Ready()
    async with host(driver, pool_size=3, capacity=1, **POOLED) as it:
        await filled(it, 3)
        assert await it.sandboxes() == {}
        await claim(it, "sbx_1")
        assert it.running.table.live_count() == 1


async def test_200_claims_on_100_warm_give_200_sandboxes_and_no_one_waits_for_refill() -> None:
    driver = Ready()
    async with host(driver, pool_size=100, capacity=200, **POOLED) as it:
        await filled(it, 100)
        before = set(driver.made)
        driver.pool_gate.clear()  # whoever needed a refill now would wait for ever
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(claim(it, f"sbx_{index}")) for index in range(200)]
        talks = [task.result() for task in tasks]
        for index, talk in enumerate(talks):
            await talk.run(cell=f"cell_{index}")
        cells = [(await container.hear()).header["cell"] for container in driver.made.values()]
        assert sorted(cells) == sorted(f"cell_{index}" for index in range(200))
        assert len(before & set(driver.made)) == 100
        assert sum(name.startswith("sbx_") for name in driver.made) == 100
        driver.pool_gate.set()
        await filled(it, 100)


async def test_refill_waits_while_anything_starts() -> None:
    driver = Ready()
    async with host(driver, pool_size=1, **POOLED) as it:
        await filled(it, 1)
        driver.gate = asyncio.Event()
        spec = make_spec()
        spec.resources.pids_limit = 64
        cold = it.attach("sbx_cold", spec=spec)
        await cold.greeting()
        await until(lambda: len(driver.requests) == 2)
        await claim(it, "sbx_warm")
        assert it.running.table.pool.existing_count == 0  # nothing is begun
        driver.gate.set()
        await cold.next("ready")
        await filled(it, 1)
        assert [request.sandbox_id[:4] for request in driver.requests] == ["warm", "sbx_", "warm"]


@pytest.mark.parametrize("how", ["dies", "speaks", "garbage"])
async def test_one_that_dies_or_speaks_is_replaced(how: str) -> None:
    driver, clock = Ready(), ManualClock()
    async with host(driver, clock=clock, pool_size=1, **POOLED) as it:
        await filled(it, 1)
        (first,) = driver.made.values()
        if how == "dies":
            first.exit(signal=9)
        elif how == "speaks":
            await first.say({"type": "started", "cell": "cell_1"})
        else:
            await first.say_raw(b"\xff" * 8)
        await until(lambda: first.destroy_count == 1)
        # Not at once: whatever kills it may kill the next one.
        assert len(driver.made) == 1
        await clock.advance(1)
        await filled(it, 1)
        assert len(driver.made) == 2


async def test_one_that_died_a_moment_ago_is_given_to_nobody() -> None:
    driver = Ready()
    async with host(driver, pool_size=2, **POOLED) as it:
        await filled(it, 2)
        first, second = driver.made.values()
        first.exit(signal=9)  # and the host's loop has not turned since
        request = second.request
        shape = pools.Shape(driver=driver.name, template=request.template, limits=request.limits)
        warm = it.running.table.pool.claim(shape)
        assert warm is not None
        assert warm.container is second
        assert it.running.table.pool.claim(shape) is None
        warm.channel.close()
        await second.destroy()


async def test_what_cannot_be_made_ahead_is_tried_again_ever_more_rarely() -> None:
    driver, clock = Ready(), ManualClock()
    driver.problem = "the kernel forbids it"
    async with host(driver, clock=clock, pool_size=1, **POOLED) as it:
        for tries, pause in ((1, 1), (2, 2), (3, 4)):
            await until(lambda: len(driver.requests) == tries)  # noqa: B023
            await clock.advance(pause - 0.5)
            assert len(driver.requests) == tries
            await clock.advance(0.5)
        driver.problem = ""
        await clock.advance(8)
        await filled(it, 1)


async def test_shutdown_and_a_lapsed_lease_end_all_and_the_next_claim_fills_again() -> None:
    driver, clock = Ready(), ManualClock()
    settings: dict[str, Any] = {"pool_size": 2, "lease_seconds": 10, "orphan_grace_seconds": 10}
    async with host(driver, clock=clock, **settings, **POOLED) as it:
        await filled(it, 2)
        await clock.advance(21)
        await until(lambda: it.running.table.pool.existing_count == 0)
        assert all(container.destroy_count == 1 for container in driver.made.values())
        await claim(it, "sbx_1")
        assert "sbx_1" in driver.made
        await filled(it, 1)
        await clock.advance(1)
        await filled(it, 2)
        await it.stop()
        assert all(container.destroy_count == 1 for container in driver.made.values())


async def test_little_memory_stops_the_refill(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    facts = tmp_path / "meminfo"
    facts.write_text("MemTotal: 9000000 kB\nMemAvailable: 1000 kB\n")
    monkeypatch.setattr(pools, "MEMORY_FACTS", facts)
    driver, clock = Ready(), ManualClock()
    async with host(driver, clock=clock, pool_size=1, **POOLED) as it:
        await clock.advance(60)
        assert driver.requests == []
        await claim(it, "sbx_1")
        facts.write_text("MemTotal: 9000000 kB\nMemAvailable: 1000000 kB\n")
        await clock.advance(5)
        await filled(it, 1)


@pytest.mark.parametrize("name", NAMES)
async def test_real_warm_sandboxes_run_code_and_hold_nothing_of_one_another(name: str) -> None:
    code = (
        "import os; print(os.listdir('/workspace' if os.path.isdir('/workspace') else '.'));"
        "open('left', 'w').write('x'); open('/tmp/left', 'a').close() if os.getpid() else 0"
    )
    async with real_host(name, pool_size=2, capacity=8, **POOLED) as (it, driver):
        await filled(it, 2)
        for index in range(4):
            talk = it.attach(f"sbx_{index}")
            await talk.run(code)
            await talk.greeting()
            await talk.next("ready")
            await talk.next("cell_started")
            printed, completed = await rest(talk)
            assert printed.strip() == b"[]", printed
            assert completed.evidence.wall_time.ToSeconds() < 60
            await it.destroy(f"sbx_{index}")
            await filled(it, 2)
        assert len(driver.made) == len(set(driver.made)) == 6
        assert all(made.startswith("warm_") for made in driver.made)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "warm", "claims"),
    [
        ("fake", 100, 200),
        ("bubblewrap", 4, 8),
        pytest.param("bubblewrap", 100, 200, marks=pytest.mark.soak),
    ],
)
async def test_real_claims_at_once_give_each_a_sandbox_of_its_own(
    name: str, warm: int, claims: int
) -> None:
    """Scale: 4 and 8 for 100 and 200 with bubblewrap."""
    async with real_host(name, pool_size=warm, capacity=claims, **POOLED) as (it, _):
        await filled(it, warm)

        async def one(index: int) -> bytes:
            talk = it.attach(f"sbx_{index}")
            await talk.run("import os, sys; print(os.urandom(8).hex())")
            await talk.greeting()
            await talk.next("ready")
            await talk.next("cell_started")
            printed, _ = await rest(talk)
            return printed

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(index)) for index in range(claims)]
        assert len({task.result() for task in tasks}) == claims
        assert len(await it.sandboxes()) == claims
