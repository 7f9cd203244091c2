"""Turns of tenants: a flood of one delays its own work, and who leaves gives its turn up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from distillspec.serving.server.answers.turns import TenantTurns


def test_tenants_take_turns() -> None:
    async def run() -> list[str]:
        turns, done = TenantTurns(1), list[str]()

        async def work(tenant: str) -> None:
            async with turns.place(tenant):
                await asyncio.sleep(0)
                done.append(tenant)

        flood = [asyncio.create_task(work("flood")) for _ in range(4)]
        await asyncio.sleep(0)
        assert turns.waiting("flood") == 3
        await asyncio.gather(*flood, work("quiet"), work("quiet"))
        return done

    assert asyncio.run(run()) == ["flood", "flood", "flood", "quiet", "flood", "quiet"]


def test_as_many_work_at_a_time_as_there_are_places() -> None:
    async def run() -> int:
        turns, now, most = TenantTurns(2), 0, 0

        async def work() -> None:
            nonlocal now, most
            async with turns.place("a"):
                now += 1
                most = max(most, now)
                await asyncio.sleep(0)
                now -= 1

        await asyncio.gather(*[work() for _ in range(7)])
        assert turns.waiting("a") == 0
        return most

    assert asyncio.run(run()) == 2


async def work(turns: TenantTurns) -> str:
    async with turns.place("a"):
        return "done"


async def hold(turns: TenantTurns, leave: asyncio.Event, within: Callable[[], Any], after: Callable[[], Any]) -> None:
    """Hold the place until the event, then do something within the block, and something behind it."""
    async with turns.place("a"):
        await leave.wait()
        within()
    after()


def test_who_is_cancelled_just_as_its_turn_comes_is_passed_over() -> None:
    async def run() -> None:
        turns, leave = TenantTurns(1), asyncio.Event()
        # The task that is cancelled runs after the place is given on.
        first = asyncio.create_task(hold(turns, leave, lambda: leaver.cancel(), lambda: None))
        leaver, last = (asyncio.create_task(work(turns)) for _ in range(2))
        await asyncio.sleep(0)
        leave.set()
        await first
        assert await asyncio.wait_for(last, 5) == "done"
        assert leaver.cancelled()
        assert await asyncio.wait_for(work(turns), 5) == "done", "the place is free again"

    asyncio.run(run())


def test_who_is_cancelled_gives_its_turn_up() -> None:
    """While it waits, and just as its turn has come."""

    async def run() -> None:
        turns, leave = TenantTurns(1), asyncio.Event()
        # The next one has its turn when it is cancelled, and has not run yet.
        first = asyncio.create_task(hold(turns, leave, lambda: None, lambda: next_one.cancel()))
        waiting, next_one, last = (asyncio.create_task(work(turns)) for _ in range(3))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert turns.waiting("a") == 2
        leave.set()
        await first
        await asyncio.gather(next_one, return_exceptions=True)
        assert next_one.cancelled()
        assert await asyncio.wait_for(last, 5) == "done"

    asyncio.run(run())
