"""Hard use of a real `distill serve` on the tiny target; runs for minutes, ends with 1 when anything goes wrong.

    python benchmarks/server_hard_use.py mutate --bodies 10000    # broken bodies beside good requests
    python benchmarks/server_hard_use.py soak --minutes 10        # 256 streams, 30 % of which leave early
    python benchmarks/server_hard_use.py overhead                 # HTTP against the engine alone, 8 streams

Prints one JSON object. Good answers are greedy and must be the same from beginning to end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil

from distillspec.serving import Engine, SamplingParams

SETTINGS = {"max_slots": 32, "max_model_len": 256, "proposer": "prompt_lookup", "compile": False}
GOOD = {"model": "tiny", "prompt": "abcabcabc", "max_tokens": 24, "temperature": 0}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "temperature": 0}
VALUES: tuple[Any, ...] = (None, True, -1, 0, 3, 2**40, 10**30, 0.5, -1e308, "", "x", "\0", "é" * 99, [], [[]], {})
EXPECTED = {200, 400, 404, 413, 429}
PATIENCE_S = 120.0


def serve(*words: str) -> tuple[subprocess.Popen[str], str]:
    """A server in a process of its own, and its address."""
    settings = [f"engine.{name}={value}" for name, value in SETTINGS.items()]
    command = [sys.executable, "-m", "distillspec.cli", "serve", "target=tiny", "server.port=0", *settings, *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    found = re.search(r"http://[\d.:]+", process.stdout.readline())
    assert found, "the server did not start"
    return process, found[0]


def mutated(dice: random.Random) -> tuple[str, bytes]:
    """A path, and a body with fields dropped, replaced or added, or bytes changed."""
    path, body = dice.choice((("completions", GOOD), ("chat/completions", CHAT)))
    changed = json.loads(json.dumps(body))
    for _ in range(dice.randint(1, 4)):
        name = dice.choice([*body, "n", "stop", "logprobs", "seed", "stream", "logit_bias", "speculation", "x"])
        if dice.random() < 0.2:
            changed.pop(name, None)
        else:
            changed[name] = dice.choice(VALUES)
    raw = bytearray(json.dumps(changed).encode())
    if dice.random() < 0.3:
        for _ in range(dice.randint(1, 5)):
            raw[dice.randrange(len(raw))] = dice.randrange(256)
    return f"/v1/{path}", bytes(raw)


async def mutate(url: str, bodies: int, seed: int) -> dict[str, Any]:
    """Send broken bodies, sixteen at a time, and a good request after every hundred."""
    dice, statuses, texts = random.Random(seed), Counter[int](), Counter[str]()
    limit = asyncio.Semaphore(16)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False) as client:

        async def bad(path: str, raw: bytes) -> None:
            async with limit:
                reply = await client.post(path, content=raw, headers={"Content-Type": "application/json"})
                statuses[reply.status_code] += 1

        async def good() -> None:
            async with limit:
                texts[(await client.post("/v1/completions", json=GOOD)).json()["choices"][0]["text"]] += 1

        work = [bad(*mutated(dice)) for _ in range(bodies)] + [good() for _ in range(max(2, bodies // 100))]
        dice.shuffle(work)
        await asyncio.gather(*work)
    fine = set(statuses) <= EXPECTED and len(texts) == 1
    return {"statuses": dict(statuses), "good_requests": sum(texts.values()), "answers": len(texts), "fine": fine}


async def soak(url: str, streams: int, minutes: float, process: psutil.Process) -> dict[str, Any]:
    """Streams that never pause; three in ten leave after a few events."""
    end, outcomes, texts = time.monotonic() + 60 * minutes, Counter[str](), Counter[str]()
    memory: list[int] = []
    limits = httpx.Limits(max_connections=streams)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False, limits=limits) as client:

        async def one(dice: random.Random) -> None:
            while time.monotonic() < end:
                leaves, text = dice.random() < 0.3, ""
                async with client.stream("POST", "/v1/completions", json={**GOOD, "stream": True}) as reply:
                    async for line in reply.aiter_lines():
                        if line.startswith("data: {"):
                            text += json.loads(line[6:])["choices"][0]["text"]
                            if leaves:
                                break
                outcomes["left" if leaves else f"{reply.status_code}"] += 1
                if not leaves:
                    texts[text] += 1

        async def watch() -> None:
            while time.monotonic() < end:
                memory.append(process.memory_info().rss)
                await asyncio.sleep(5)

        await asyncio.gather(watch(), *(one(random.Random(i)) for i in range(streams)))
        await asyncio.sleep(2)
        metrics = (await client.get("/metrics")).text
    free = re.search(r"num_requests_running\{[^}]*\} 0\.0", metrics) is not None
    warm = memory[len(memory) // 5]  # after the first fifth, caches are warm
    growth = memory[-1] / warm - 1
    fine = set(outcomes) <= {"left", "200"} and len(texts) == 1 and free and growth < 0.05
    return {"outcomes": dict(outcomes), "answers": len(texts), "slots_free": free, "growth": growth, "fine": fine}


async def overhead(url: str, streams: int, rounds: int) -> dict[str, Any]:
    """Tokens a second of the engine alone and through HTTP, in turns; and an idle server's first token."""
    body = {**GOOD, "max_tokens": 128, "ignore_eos": True, "stream": True}
    params = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
    engine = Engine.from_pretrained("tiny", **{**SETTINGS, "dtype": "float32"})
    alone, through, first = [], [], []
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False) as client:

        async def one() -> float:
            began, seen = time.perf_counter(), 0.0
            async with client.stream("POST", "/v1/completions", json=body) as reply:
                async for line in reply.aiter_lines():
                    if line and not seen:
                        seen = time.perf_counter() - began
            return seen

        for _ in range(rounds):
            began = time.perf_counter()
            engine.generate([GOOD["prompt"]] * streams, params)
            alone.append(streams * 128 / (time.perf_counter() - began))
            began = time.perf_counter()
            await asyncio.gather(*(one() for _ in range(streams)))
            through.append(streams * 128 / (time.perf_counter() - began))
            first.append(await one())
    engine.close()
    middle = sorted(through)[rounds // 2] / sorted(alone)[rounds // 2]
    return {"engine_tokens_per_s": alone, "http_tokens_per_s": through, "ratio": middle, "first_token_s": first}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("mutate", "soak", "overhead"))
    parser.add_argument("--bodies", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=None)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    process, url = serve("server.max_queue=1024")
    try:
        if chosen.what == "mutate":
            result = asyncio.run(mutate(url, chosen.bodies, chosen.seed))
        elif chosen.what == "soak":
            result = asyncio.run(soak(url, chosen.streams or 256, chosen.minutes, psutil.Process(process.pid)))
        else:
            result = asyncio.run(overhead(url, chosen.streams or 8, chosen.rounds))
    finally:
        process.terminate()
        process.wait(60)
    text = json.dumps({"what": chosen.what, **result}, indent=1)
    print(text)
    if chosen.output is not None:
        chosen.output.write_text(text + "\n")
    return 0 if result.get("fine", True) else 1


if __name__ == "__main__":
    sys.exit(main())
