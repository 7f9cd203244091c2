"""A broken draft, promoted by hand, and the requests until the server takes it back.

    python benchmarks/collapse.py --prompts math.jsonl --draft RUN/draft

`distill serve online=on` with its default settings. `--streams` clients send prompts one after another. After
`--before` requests an operator promotes the draft with noise in its layers' weights. The requests that end until
another one serves are counted, `--times` times. Writes `results/collapse.json`. The exit code is 1 if one time takes
more than 100.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from common import write_result
from hard_use_clients import PATIENCE_S, admin

from distillspec.config import TargetConfig
from distillspec.models import LanguageModel, load_target, save_draft
from distillspec.recipes.served import served
from distillspec.serving.draft_loading import load_draft
from distillspec.serving.online.state.registry import VersionRegistry

GOAL, GIVE_UP = 100, 400  # requests
NOISE = 1.0  # standard deviations of each weight's own tensor
TOKENS = 96  # of an answer, at most


@dataclass
class Traffic:
    """Clients, and the requests of theirs that have ended."""

    client: httpx.AsyncClient
    prompts: Iterator[str]
    ended: int = 0
    over: bool = False
    clients: list[asyncio.Task[None]] = field(default_factory=list)

    async def ask(self) -> None:
        """Send one request after another."""
        while not self.over:
            message = {"role": "user", "content": next(self.prompts)}
            body = {"model": "smollm2", "messages": [message], "max_tokens": TOKENS}
            reply = await self.client.post("/v1/chat/completions", json=body)
            reply.raise_for_status()
            self.ended += 1

    async def passed(self, requests: int) -> None:
        """Wait until so many more have ended."""
        end = self.ended + requests
        while self.ended < end:
            await self.pause(0.02)

    async def pause(self, seconds: float) -> None:
        """Wait. A client's failure ends the benchmark."""
        await asyncio.sleep(seconds)
        for client in self.clients:
            if client.done():
                client.result()

    async def current(self) -> str:
        drafts = (await admin(self.client, "GET", "drafts"))["drafts"]
        return str(next(draft["name"] for draft in drafts if draft["current"]))

    async def taken_back(self, broken: str) -> dict[str, Any]:
        """Promote a version. Return the requests and seconds until another one serves, and those until a suspicion."""
        done = await admin(self.client, "POST", "drafts/promote", draft=broken)
        if "version" not in done:
            raise SystemExit(f"{broken} is not promoted: {done}")
        start = self.ended
        began_s = time.monotonic()
        suspected = None
        while await self.current() != broken and self.ended < start + GIVE_UP:
            await self.pause(0.1)
        while await self.current() == broken and self.ended < start + GIVE_UP:
            if suspected is None and (await admin(self.client, "GET", "online"))["suspected"]:
                suspected = self.ended - start
            await self.pause(0.1)
        serves = await self.current()
        taken = {"suspected": suspected, "requests": self.ended - start, "seconds": time.monotonic() - began_s}
        return {**taken, "undone": serves != broken, "serves": serves}


async def measure(url: str, options: argparse.Namespace, texts: list[str], broken: list[str]) -> list[dict[str, Any]]:
    outcomes = []
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False) as client:
        traffic = Traffic(client, itertools.cycle(texts))
        traffic.clients = [asyncio.create_task(traffic.ask()) for _ in range(options.streams)]
        for version in broken:
            await traffic.passed(options.before)
            outcomes.append(await traffic.taken_back(version))
            print(version, outcomes[-1], flush=True)
        traffic.over = True
        await asyncio.gather(*traffic.clients)
    return outcomes


def make_versions(folder: Path, options: argparse.Namespace) -> list[str]:
    """Register the draft, which serves, and broken copies of it. Return the names of these."""
    target = load_target(TargetConfig(path="smollm2", dtype=options.dtype))
    registry, names = VersionRegistry(folder / "versions"), []
    for number in range(options.times + 1):
        draft = load_draft(options.draft, target)
        if number:
            spoil(draft, number)
        version = registry.add(lambda path, draft=draft: save_draft(draft, path, target))  # type: ignore[misc]
        if number:
            registry.judged(version.name, "inconclusive", {}, "broken on purpose")
            names.append(version.name)
        else:
            registry.promote(version.name, "the first draft")
    registry.close()
    return names


@torch.no_grad()
def spoil(draft: LanguageModel, seed: int, noise: float = NOISE) -> None:
    """Add noise to each of the layers' weights, of so many standard deviations of its tensor."""
    generator = torch.Generator().manual_seed(seed)
    for weight in draft.decoder.layers.parameters():
        drawn = torch.randn(weight.shape, generator=generator)
        weight += (noise * weight.float().std() * drawn).to(weight.dtype)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--before", type=int, default=80, help="requests before each promotion")
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    texts = [json.loads(line)["prompt"] for line in Path(options.prompts).read_text().splitlines()[:400]]
    with tempfile.TemporaryDirectory() as folder:
        broken = make_versions(Path(folder), options)
        with served("target=smollm2", "online=on", f"online.folder={folder}") as server:
            outcomes = asyncio.run(measure(server.url, options, texts, broken))
            failures = server.failures()
    setting = {"streams": options.streams, "before": options.before, "goal": GOAL}
    met = all(outcome["undone"] and outcome["requests"] <= GOAL for outcome in outcomes)
    write_result("collapse", {**setting, "times": outcomes, "met": met, "errors_in_log": failures})
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
