"""Hard use of a real `distill serve` on the tiny target; runs for minutes, ends with 1 when anything goes wrong.

    python benchmarks/server_hard_use.py mutate --bodies 10000    # broken bodies beside good requests
    python benchmarks/server_hard_use.py soak --minutes 10        # 256 streams, 30 % of which leave early
    python benchmarks/server_hard_use.py overhead                 # HTTP against the engine alone, 8 streams
    python benchmarks/server_hard_use.py swaps --minutes 10       # online=on: drafts swap, its trainer is killed

Prints one JSON object. Good answers are greedy and must be the same from beginning to end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from distillspec.config import DraftConfig, TargetConfig
from distillspec.models import initialise_draft, load_target, save_draft
from distillspec.serving import Engine, SamplingParams
from distillspec.serving.online.registry import VersionRegistry

SETTINGS = {"max_slots": 32, "max_model_len": 256, "proposer": "prompt_lookup", "compile": False}
GOOD = {"model": "tiny", "prompt": "abcabcabc", "max_tokens": 24, "temperature": 0}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "temperature": 0}
VALUES: tuple[Any, ...] = (None, True, -1, 0, 3, 2**40, 10**30, 0.5, -1e308, "", "x", "\0", "é" * 99, [], [[]], {})
EXPECTED = {200, 400, 404, 413, 429}
LEARNING = {
    "online": "on",
    "engine.proposer": "draft_model",
    "engine.speculation_length": 3,
    "replay.share": 1,
    "replay.max_mib": 64,
    "replay.flush_s": 2,
    "adapt.every_requests": 200,
    "adapt.niceness": 0,
    "adapt.row_tokens": 128,
    "adapt.batch_tokens": 256,
    "adapt.max_steps": 40,
    "gate.min_requests": 8,
    "gate.requests": 32,
    "gate.bootstrap_samples": 200,
    "online.metrics_s": 60,
}
TEXTS = ("abcabcabc", "Hello", "SELECT x FROM", "1 + 1 =", "the sky", "zzz", "def f(x):", "Dear Sir")
ADMIN = {"Authorization": "Bearer admin-of-hard-use"}
SWAP_EVERY_S, KILL_EVERY_S = (1.0, 4.0), (3.0, 12.0)
PATIENCE_S = 120.0


def serve(*words: str, folder: Path | None = None) -> tuple[subprocess.Popen[str], str]:
    """A server in a process of its own, and its address; its folder is the current one unless told otherwise."""
    settings = [f"engine.{name}={value}" for name, value in SETTINGS.items()]
    command = [sys.executable, "-m", "distillspec.cli", "serve", "target=tiny", "server.port=0", *settings, *words]
    environment = {**os.environ, "DISTILLSPEC_ADMIN_KEY": ADMIN["Authorization"].split()[1]}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=folder, env=environment
    )
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


def make_versions(folder: Path) -> None:
    """Two drafts in the folder's registry, the first of them promoted."""
    target = load_target(TargetConfig(path="tiny", dtype="float32", device="cpu"))
    registry = VersionRegistry(folder / "online" / "versions")
    for layers in (2, 3):
        draft = initialise_draft(DraftConfig(layers=layers), target)
        version = registry.add(lambda place, draft=draft: save_draft(draft, place, target))
        if layers == 2:
            registry.promote(version.name, "the beginning")
        else:
            registry.judged(version.name, "inconclusive", {}, "swapped in by hand")
    registry.close()


async def swaps(url: str, streams: int, minutes: float, process: psutil.Process) -> dict[str, Any]:
    """Of the clients 30 % leave and 10 % send garbage, while drafts swap and the trainer is killed; then all quiet."""
    end, outcomes, wrong = time.monotonic() + 60 * minutes, Counter[str](), Counter[str]()
    memory: list[int] = []
    limits = httpx.Limits(max_connections=streams + 4)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False, limits=limits) as client:

        async def answer(text: str) -> str:
            reply = await client.post("/v1/completions", json={**GOOD, "prompt": text})
            return reply.json()["choices"][0]["text"]

        async def admin(path: str, **body: str) -> dict[str, Any]:
            method = "POST" if body or path.endswith("resume") else "GET"
            return (await client.request(method, f"/admin/{path}", headers=ADMIN, json=body or None)).json()

        quiet = {text: await answer(text) for text in TEXTS}

        async def one(dice: random.Random) -> None:
            while time.monotonic() < end:
                luck, text = dice.random(), dice.choice(TEXTS)
                if luck < 0.1:
                    path, raw = mutated(dice)
                    reply = await client.post(path, content=raw, headers={"Content-Type": "application/json"})
                    outcomes[f"garbage {reply.status_code}"] += 1
                    continue
                leaves, seen = luck < 0.4, ""
                body = {**GOOD, "prompt": text, "stream": True, "speculation": {"domain": text[:3].strip()}}
                async with client.stream("POST", "/v1/completions", json=body) as reply:
                    async for line in reply.aiter_lines():
                        if line.startswith("data: {"):
                            seen += json.loads(line[6:])["choices"][0]["text"]
                            if leaves and dice.random() < 0.3:
                                break
                outcomes["left" if leaves else f"answered {reply.status_code}"] += 1
                wrong[text] += not leaves and seen != quiet[text]

        async def swap(dice: random.Random) -> None:
            while time.monotonic() < end:
                await asyncio.sleep(dice.uniform(*SWAP_EVERY_S))
                drafts = (await admin("drafts"))["drafts"]
                others = [draft["name"] for draft in drafts if not draft["current"]]
                done = await admin("drafts/promote", draft=dice.choice(others))
                outcomes["swapped" if "version" in done else "swap refused"] += 1

        async def kill(dice: random.Random) -> None:
            while time.monotonic() < end:
                await asyncio.sleep(dice.uniform(*KILL_EVERY_S))
                trainer = (await admin("online"))["trainer"]
                if trainer["quarantined"]:  # killed too often in a row
                    await admin("online/resume")
                    outcomes["trainer resumed"] += 1
                elif trainer["pid"]:
                    with suppress(ProcessLookupError):
                        os.kill(trainer["pid"], signal.SIGKILL)
                        outcomes[f"trainer killed, {trainer['stage']}"] += 1

        async def watch() -> None:
            while time.monotonic() < end:
                memory.append(process.memory_info().rss)
                await asyncio.sleep(5)

        clients = [one(random.Random(i)) for i in range(streams)]
        await asyncio.gather(watch(), swap(random.Random(-1)), kill(random.Random(-2)), *clients)
        await asyncio.sleep(2)
        metrics, status = (await client.get("/metrics")).text, await admin("online")
        again = {text: await answer(text) for text in TEXTS}
    free = re.search(r"num_requests_running\{[^}]*\} 0\.0", metrics) is not None
    log = {name: status["log"].get(name, 0) for name in ("answers", "bytes", "errors", "incomplete", "dropped_queue")}
    known = {f"{kind} {code}" for kind in ("garbage", "answered") for code in EXPECTED}
    failed = [name for name in outcomes if name.startswith(("garbage", "answered")) and name not in known]
    fine = not sum(wrong.values()) and again == quiet and free and not failed and not log["errors"]
    return {
        "outcomes": dict(outcomes),
        "answers_that_differ": sum(wrong.values()),
        "slots_free": free,
        "growth": memory[-1] / memory[len(memory) // 5] - 1,
        "log": log,
        "updates": status["trainer"]["updates"],
        "fine": fine,
    }


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
    parser.add_argument("what", choices=("mutate", "soak", "overhead", "swaps"))
    parser.add_argument("--bodies", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=None)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="hard-use-"))
    if chosen.what == "swaps":
        make_versions(folder)
    learning = [f"{name}={value}" for name, value in LEARNING.items()] if chosen.what == "swaps" else []
    process, url = serve("server.max_queue=1024", *learning, folder=folder)
    try:
        if chosen.what == "mutate":
            result = asyncio.run(mutate(url, chosen.bodies, chosen.seed))
        elif chosen.what == "soak":
            result = asyncio.run(soak(url, chosen.streams or 256, chosen.minutes, psutil.Process(process.pid)))
        elif chosen.what == "swaps":
            result = asyncio.run(swaps(url, chosen.streams or 32, chosen.minutes, psutil.Process(process.pid)))
        else:
            result = asyncio.run(overhead(url, chosen.streams or 8, chosen.rounds))
    finally:
        process.terminate()
        process.wait(60)
        shutil.rmtree(folder, ignore_errors=True)
    text = json.dumps({"what": chosen.what, **result}, indent=1)
    print(text)
    if chosen.output is not None:
        chosen.output.write_text(text + "\n")
    return 0 if result.get("fine", True) else 1


if __name__ == "__main__":
    sys.exit(main())
