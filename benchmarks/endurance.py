"""Streams without a pause for minutes, with clients that leave, garbage and draft swaps."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
from hard_use_clients import EXPECTED, PATIENCE_S, Tally, growth_of, read_stream, running_in, send_garbage, settled

from distillspec.recipes.served import ADMIN_KEY, Served

GROWTH = 0.05  # of memory, after a fifth of the time


@dataclass
class Endurance:
    """Shares of leaving clients and of garbage, seconds between swaps, and everything observed until `end_s`."""

    client: httpx.AsyncClient
    end_s: float
    leaving: float
    garbage: float
    swap_s: float | None
    tally: Tally = field(default_factory=Tally)
    memory: list[int] = field(default_factory=list)
    most_running: int = 0
    swaps: int = 0

    async def send(self, dice: random.Random) -> None:
        """Send one request after another."""
        while time.monotonic() < self.end_s:
            draw = dice.random()
            try:
                if draw < self.garbage:
                    await send_garbage(self.client, dice, self.tally)
                else:
                    events = dice.randint(0, 12) if draw < self.garbage + self.leaving else None
                    await read_stream(self.client, events, self.tally)
            except httpx.HTTPError as error:
                self.tally.outcomes[f"connection: {type(error).__name__}"] += 1

    async def watch(self, process: psutil.Process) -> None:
        """Record the server's memory and load every two seconds."""
        while time.monotonic() < self.end_s:
            self.memory.append(process.memory_info().rss)
            self.most_running = max(self.most_running, running_in((await self.client.get("/metrics")).text))
            await asyncio.sleep(2)

    async def swap(self) -> None:
        """Load the other draft every `swap_s` seconds."""
        for name in itertools.cycle(("one", "two")):
            if self.swap_s is None or time.monotonic() > self.end_s:
                return
            await asyncio.sleep(self.swap_s)
            headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
            reply = await self.client.post("/admin/drafts/load", json={"draft": name}, headers=headers)
            self.tally.outcomes["swap" if reply.status_code == 200 else f"swap {reply.status_code}"] += 1
            self.swaps += reply.status_code == 200

    def as_json(self, free: bool) -> dict[str, Any]:
        """Return the result. `fine` is true if nothing unexpected happened."""
        allowed = {"left", "200", "swap", *(f"garbage {status}" for status in EXPECTED)}
        agree = set(self.tally.outcomes) <= allowed and len(self.tally.texts) == 1
        growth = growth_of(self.memory)
        return {
            **self.tally.as_json(),
            "free": free,
            "most_running": self.most_running,
            "draft_swaps": self.swaps,
            "memory_mb": [round(value / 2**20) for value in self.memory[:: max(1, len(self.memory) // 60)]],
            "growth": growth,
            "fine": agree and free and growth < GROWTH,
        }


async def endure(
    server: Served, options: argparse.Namespace, *, leaving: float, garbage: float, swap_s: float | None
) -> dict[str, Any]:
    """Run `options.streams` clients for `options.minutes` and return the result."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, trust_env=False, limits=limits) as client:
        run = Endurance(client, time.monotonic() + 60 * options.minutes, leaving, garbage, swap_s)
        clients = [run.send(random.Random(i)) for i in range(options.streams)]
        await asyncio.gather(run.watch(psutil.Process(server.process.pid)), run.swap(), *clients)
        state = await settled(client)
    return {"streams": options.streams, "minutes": options.minutes, **run.as_json(state["free"])}
