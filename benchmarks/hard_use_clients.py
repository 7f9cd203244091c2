"""Clients of the hard-use benchmarks: greedy streams that must all agree, mutated bodies, and a busy operator."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from distillspec.recipes.served import ADMIN_KEY

GOOD = {"model": "tiny", "prompt": "abcabcabc", "max_tokens": 24, "temperature": 0}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "temperature": 0}
TOKENIZE, DETOKENIZE = {"model": "tiny", "prompt": "abc"}, {"model": "tiny", "tokens": [70, 71]}
BODIES = (
    ("/v1/completions", GOOD),
    ("/v1/chat/completions", CHAT),
    ("/tokenize", TOKENIZE),
    ("/detokenize", DETOKENIZE),
)
Bodies = Sequence[tuple[str, dict[str, Any]]]
FIELDS = (
    *("n", "stop", "logprobs", "seed", "stream", "stream_options", "logit_bias"),
    *("speculation", "min_p", "user", "x"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 3, 2**31, 2**63, 10**30, 0.5, -1e308, 1e308),
    *("", "x", "\0", "\ud800", "é" * 99, "x" * 999, [], [[]], ["x"], [0, 10**9], {}, {"a": [{}]}, {"0": 1e9}),
)
EXPECTED = {200, 400, 404, 413, 429}
EXPECTED_OF_ADMIN = {200, 400, 404, 409}  # 409: the draft before the first one
PATIENCE_S = 120.0
JSON = {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"}


@dataclass
class Tally:
    """Outcomes of all requests, and the different texts of the greedy answers."""

    outcomes: Counter[str] = field(default_factory=Counter)
    texts: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0

    def as_json(self) -> dict[str, Any]:
        good = {"answers": sum(self.texts.values()), "different_answers": len(self.texts)}
        return {"outcomes": dict(sorted(self.outcomes.items())), **good, "slowest_s": self.slowest_s}


async def admin(client: httpx.AsyncClient, method: str, path: str, **body: str) -> dict[str, Any]:
    """Send a request of an operator. Return its reply, whatever its status."""
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    return (await client.request(method, f"/admin/{path}", headers=headers, json=body or None)).json()


def admin_bodies(versions: Sequence[str]) -> Bodies:
    """Return the paths of /admin that change a server which learns, but for /admin/drain, each with a legal body."""
    return (
        *((f"/admin/drafts/{what}", {"draft": version}) for what in ("load", "promote") for version in versions),
        ("/admin/drafts/rollback", {}),
        ("/admin/controller", {"policy": "fixed", "speculation_length": 2}),
        *((f"/admin/online/{what}", {}) for what in ("pause", "resume", "trigger")),
        *(("/admin/replay/exclude", {"tenant": "default", "excluded": excluded}) for excluded in (True, False)),
        ("/admin/replay/delete", {"tenant": "default"}),
    )


def mutated(dice: random.Random, bodies: Bodies = BODIES) -> tuple[str, bytes]:
    """Return a path, and a body with fields dropped, replaced or added, or bytes changed, cut off or doubled."""
    path, body = dice.choice(bodies)
    changed = json.loads(json.dumps(body))
    for _ in range(dice.choice((1, 1, 1, 2, 3, 4))):
        name = dice.choice(dice.choice((tuple(body) or FIELDS, FIELDS)))
        if dice.random() < 0.2:
            changed.pop(name, None)
        else:
            changed[name] = dice.choice(VALUES)
    raw = bytearray(json.dumps(changed).encode())
    draw = dice.random()
    if draw < 0.25:
        for _ in range(dice.randint(1, 5)):
            raw[dice.randrange(len(raw))] = dice.randrange(256)
    elif draw < 0.3:
        raw = raw[: dice.randrange(len(raw))]
    elif draw < 0.35:
        raw += bytes(raw)
    return path, bytes(raw)


async def send_garbage(client: httpx.AsyncClient, dice: random.Random, tally: Tally, bodies: Bodies = BODIES) -> None:
    """Send one mutated body, with the admin key."""
    path, raw = mutated(dice, bodies)
    started_s = time.monotonic()
    reply = await client.request(method_of(path), path, content=raw, headers=JSON)
    tally.slowest_s = max(tally.slowest_s, time.monotonic() - started_s)
    kind = "garbage to admin" if path.startswith("/admin") else "garbage"
    tally.outcomes[f"{kind} {reply.status_code}"] += 1


async def operate(client: httpx.AsyncClient, tally: Tally, bodies: Bodies) -> None:
    """Send these bodies in turn, as a busy operator, until cancelled."""
    for path, body in itertools.cycle(bodies):
        reply = await client.request(method_of(path), path, json=body, headers=JSON)
        tally.outcomes[f"admin {reply.status_code}"] += 1
        await asyncio.sleep(0.5)


def method_of(path: str) -> str:
    """Return the method that changes something at this path."""
    return "PATCH" if path == "/admin/controller" else "POST"


async def read_stream(client: httpx.AsyncClient, events: int | None, tally: Tally) -> None:
    """Send a good request. Leave after so many events, or read to the end."""
    text = ""
    seen = 0
    finished = False
    async with client.stream("POST", "/v1/completions", json={**GOOD, "stream": True}) as reply:
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                finished = True
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    tally.outcomes[f"error {event['error']['code']}"] += 1
                    return
                text += event["choices"][0]["text"]
            seen += 1
            if events is not None and seen > events:
                tally.outcomes["left"] += 1
                return
    tally.outcomes[f"{reply.status_code}" if finished or reply.status_code != 200 else "broken off"] += 1
    if finished:
        tally.texts[text] += 1


async def settled(client: httpx.AsyncClient) -> dict[str, Any]:
    """Wait up to ten seconds after the last client. Return whether every slot is free then."""
    for _ in range(100):
        metrics = (await client.get("/metrics")).text
        if running_in(metrics) == 0 and re.search(r"num_requests_waiting\{[^}]*\} 0\.0", metrics):
            return {"free": True}
        await asyncio.sleep(0.1)
    return {"free": False}


def growth_of(memory: Sequence[int]) -> float:
    """Return the growth of memory from the second fifth of the samples to the last."""
    fifth = max(1, len(memory) // 5)
    return statistics.median(memory[-fifth:]) / statistics.median(memory[fifth : 2 * fifth]) - 1


def running_in(metrics: str) -> int:
    """Return the number of running answers in the text of /metrics, -1 if it is missing."""
    match = re.search(r"num_requests_running\{[^}]*\} (\S+)", metrics)
    return int(float(match[1])) if match else -1
