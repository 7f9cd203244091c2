"""Hard use of a real `distill serve` on the tiny target; runs for minutes, ends with 1 when anything goes wrong.

    python benchmarks/server_hard_use.py mutate --bodies 10000    # broken bodies beside good requests
    python benchmarks/server_hard_use.py schema                   # schemathesis over the OpenAPI document
    python benchmarks/server_hard_use.py soak --minutes 10        # 256 streams, of which 30 % leave early
    python benchmarks/server_hard_use.py chaos --minutes 5        # and 10 % send garbage, and drafts swap

`schema` needs `pip install schemathesis`.
Good answers are greedy and must be the same from beginning to end. Results: `results/server_WHAT.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from common import write_result
from served import ADMIN_KEY, Served, served

from distillspec.config import DraftConfig, TargetConfig
from distillspec.models import initialise_draft, load_target, save_draft

GOOD = {"model": "tiny", "prompt": "abcabcabc", "max_tokens": 24, "temperature": 0}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "temperature": 0}
TOKENIZE, DETOKENIZE = {"model": "tiny", "prompt": "abc"}, {"model": "tiny", "tokens": [70, 71]}
BODIES = (
    ("/v1/completions", GOOD),
    ("/v1/chat/completions", CHAT),
    ("/tokenize", TOKENIZE),
    ("/detokenize", DETOKENIZE),
)
WISHES = (
    "n",
    "stop",
    "logprobs",
    "seed",
    "stream",
    "stream_options",
    "logit_bias",
    "speculation",
    "min_p",
    "user",
    "x",
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 3, 2**31, 2**63, 10**30, 0.5, -1e308, 1e308),
    *("", "x", "\0", "\ud800", "é" * 99, "x" * 999, [], [[]], ["x"], [0, 10**9], {}, {"a": [{}]}, {"0": 1e9}),
)
EXPECTED = {200, 400, 404, 413, 429}
PATIENCE_S = 120.0
GROWTH = 0.05  # of memory, after a fifth of the time
SLOTS = {"mutate": 32, "schema": 32, "soak": 256, "chaos": 64}
LONGEST_LINE = 1 << 24  # of schemathesis's report
MOST = {"schema": 64}  # tokens of an answer with its prompt: made-up bodies seldom set a bound, and all are waited for


@dataclass
class Tally:
    """What clients met."""

    outcomes: Counter[str] = field(default_factory=Counter)
    texts: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0

    def as_json(self) -> dict[str, Any]:
        good = {"answers": sum(self.texts.values()), "different_answers": len(self.texts)}
        return {"outcomes": dict(sorted(self.outcomes.items())), **good, "slowest_s": self.slowest_s}


def mutated(dice: random.Random) -> tuple[str, bytes]:
    """A path, and a body with fields dropped, replaced or added, or bytes changed, cut off or doubled."""
    path, body = dice.choice(BODIES)
    changed = json.loads(json.dumps(body))
    for _ in range(dice.choice((1, 1, 1, 2, 3, 4))):
        name = dice.choice([*body, *WISHES])
        if dice.random() < 0.2:
            changed.pop(name, None)
        else:
            changed[name] = dice.choice(VALUES)
    raw = bytearray(json.dumps(changed).encode())
    lot = dice.random()
    if lot < 0.25:
        for _ in range(dice.randint(1, 5)):
            raw[dice.randrange(len(raw))] = dice.randrange(256)
    elif lot < 0.3:
        raw = raw[: dice.randrange(len(raw))]
    elif lot < 0.35:
        raw += bytes(raw)
    return path, bytes(raw)


async def send_garbage(client: httpx.AsyncClient, dice: random.Random, tally: Tally) -> None:
    path, raw = mutated(dice)
    began = time.monotonic()
    reply = await client.post(path, content=raw, headers={"Content-Type": "application/json"})
    tally.slowest_s = max(tally.slowest_s, time.monotonic() - began)
    tally.outcomes[f"garbage {reply.status_code}"] += 1


async def read_stream(client: httpx.AsyncClient, events: int | None, tally: Tally) -> None:
    """A good request, left after so many events, or read to its end."""
    text, seen, whole = "", 0, False
    async with client.stream("POST", "/v1/completions", json={**GOOD, "stream": True}) as reply:
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                whole = True
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
    tally.outcomes[f"{reply.status_code}" if whole or reply.status_code != 200 else "broken off"] += 1
    if whole:
        tally.texts[text] += 1


async def mutate(server: Served, options: argparse.Namespace) -> dict[str, Any]:
    """Send broken bodies, sixteen at a time, and a good request among every hundred."""
    dice, tally, limit = random.Random(options.seed), Tally(), asyncio.Semaphore(16)
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, trust_env=False) as client:

        async def one(good: bool) -> None:
            async with limit:
                await (read_stream(client, None, tally) if good else send_garbage(client, dice, tally))

        await asyncio.gather(*(one(place % 100 == 99) for place in range(options.bodies * 100 // 99)))
        state = await settled(client)
    allowed = {"200", *(f"garbage {status}" for status in EXPECTED)}
    fine = set(tally.outcomes) <= allowed and len(tally.texts) == 1 and state["free"]
    return {"bodies": options.bodies, **tally.as_json(), **state, "fine": fine}


async def soak(server: Served, options: argparse.Namespace) -> dict[str, Any]:
    """Streams that never pause, of which three in ten leave early; memory is looked at all the time."""
    return await endure(server, options, leaving=0.3, garbage=0.0, swap_s=None)


async def chaos(server: Served, options: argparse.Namespace) -> dict[str, Any]:
    """The same with garbage among the requests and another draft every three seconds."""
    return await endure(server, options, leaving=0.3, garbage=0.1, swap_s=3.0)


async def endure(
    server: Served, options: argparse.Namespace, *, leaving: float, garbage: float, swap_s: float | None
) -> dict[str, Any]:
    end, tally = time.monotonic() + 60 * options.minutes, Tally()
    memory: list[int] = []
    most_running = swaps = 0
    process, limits = psutil.Process(server.process.pid), httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, trust_env=False, limits=limits) as client:

        async def one(dice: random.Random) -> None:
            while time.monotonic() < end:
                lot = dice.random()
                try:
                    if lot < garbage:
                        await send_garbage(client, dice, tally)
                    else:
                        await read_stream(client, dice.randint(0, 12) if lot < garbage + leaving else None, tally)
                except httpx.HTTPError as error:
                    tally.outcomes[f"connection: {type(error).__name__}"] += 1

        async def watch() -> None:
            nonlocal most_running
            while time.monotonic() < end:
                memory.append(process.memory_info().rss)
                most_running = max(most_running, running_in((await client.get("/metrics")).text))
                await asyncio.sleep(2)

        async def swap() -> None:
            nonlocal swaps
            for name in itertools.cycle(("one", "two")):
                if swap_s is None or time.monotonic() > end:
                    return
                await asyncio.sleep(swap_s)
                reply = await client.post("/admin/drafts/load", json={"draft": name}, headers=admin())
                tally.outcomes["swap" if reply.status_code == 200 else f"swap {reply.status_code}"] += 1
                swaps += reply.status_code == 200

        await asyncio.gather(watch(), swap(), *(one(random.Random(i)) for i in range(options.streams)))
        state = await settled(client)
    fifth = max(1, len(memory) // 5)
    warm, last = statistics.median(memory[fifth : 2 * fifth]), statistics.median(memory[-fifth:])
    growth = last / warm - 1
    allowed = {"left", "200", "swap", *(f"garbage {status}" for status in EXPECTED)}
    fine = set(tally.outcomes) <= allowed and len(tally.texts) == 1 and state["free"] and growth < GROWTH
    return {
        "streams": options.streams,
        "minutes": options.minutes,
        **tally.as_json(),
        **state,
        "most_running": most_running,
        "draft_swaps": swaps,
        "memory_mb": [round(value / 2**20) for value in memory[:: max(1, len(memory) // 60)]],
        "growth": growth,
        "fine": fine,
    }


async def settled(client: httpx.AsyncClient) -> dict[str, Any]:
    """Whether every slot is free shortly after the last client."""
    for _ in range(100):
        metrics = (await client.get("/metrics")).text
        if running_in(metrics) == 0 and re.search(r"num_requests_waiting\{[^}]*\} 0\.0", metrics):
            return {"free": True}
        await asyncio.sleep(0.1)
    return {"free": False}


def running_in(metrics: str) -> int:
    found = re.search(r"num_requests_running\{[^}]*\} (\S+)", metrics)
    return int(float(found[1])) if found else -1


def admin() -> dict[str, str]:
    return {"Authorization": f"Bearer {ADMIN_KEY}"}


async def schema(server: Served, options: argparse.Namespace) -> dict[str, Any]:
    """schemathesis over the OpenAPI document, with the admin key; good requests beside it.

    Left out: `/admin/drain`, after which nothing is served, the endless `/dashboard/events`, and what answers 501 here
    because it is switched off.
    """
    tally = Tally()
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--no-color"),
        *("--checks", options.checks, "--max-examples", str(options.examples), "--seed", str(options.seed)),
        *("--exclude-path", "/admin/drain", "--exclude-path", "/dashboard/events", "--request-timeout", "60"),
        *("--exclude-path-regex", "^/admin/(online|replay|drafts/promote)", "--continue-on-failure", "--header"),
        *(f"Authorization: Bearer {ADMIN_KEY}", "--suppress-health-check", "all"),
    ]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, limit=LONGEST_LINE
    )
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, trust_env=False) as client:
        reading = asyncio.create_task(_shown(process))
        while not reading.done():
            await read_stream(client, None, tally)
            await asyncio.sleep(0.5)
        report = await reading
        state = await settled(client)
    cases = re.search(r"(\d+) generated", report)
    fine = process.returncode == 0 and set(tally.outcomes) == {"200"} and len(tally.texts) == 1 and state["free"]
    summary = [line.strip() for line in report.splitlines() if re.search(r"generated|passed|failed|unique", line)]
    cases_seen = {"cases": int(cases[1]) if cases else None, "checks": options.checks, "summary": summary[-6:]}
    return {**cases_seen, **tally.as_json(), **state, "fine": fine}


async def _shown(process: asyncio.subprocess.Process) -> str:
    """All that a process prints, shown line by line as it comes; it has ended."""
    assert process.stdout is not None
    lines = []
    async for line in process.stdout:
        lines.append(line.decode())
        print(lines[-1], end="", flush=True)
    await process.wait()
    return "".join(lines)


def save_drafts(folder: Path) -> None:
    """Two drafts, `one` and `two`."""
    target = load_target(TargetConfig(path="tiny", dtype="float32", device="cpu"))
    for layers, name in ((1, "one"), (2, "two")):
        save_draft(initialise_draft(DraftConfig(layers=layers), target), folder / name, target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=tuple(SLOTS))
    parser.add_argument("--bodies", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--examples", type=int, default=200, help="of schemathesis, an operation")
    parser.add_argument("--checks", default="not_a_server_error,status_code_conformance,content_type_conformance")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", help="of the result; server_WHAT if left out")
    options = parser.parse_args()
    section = {"mutate": mutate, "schema": schema, "soak": soak, "chaos": chaos}[options.what]
    with tempfile.TemporaryDirectory() as folder:
        save_drafts(Path(folder))
        words = [
            "target=tiny",
            f"engine.max_slots={SLOTS[options.what]}",
            f"engine.max_model_len={MOST.get(options.what, 256)}",
        ]
        words += ["server.max_queue=1024", f"server.drafts_folder={folder}", f"draft.path={folder}/one"]
        words += ["engine.compile=false", "engine.controller=fixed", "engine.speculation_length=3"]
        with served(*words, threads=1) as server:
            result = asyncio.run(section(server, options))
            failures = server.failures()
    result = {**result, "errors_in_log": failures, "fine": result["fine"] and not failures}
    write_result(options.name or f"server_{options.what}", result, options.seed)
    return 0 if result["fine"] else 1


if __name__ == "__main__":
    sys.exit(main())
