"""Hard use of a server that learns: clients leave and send garbage, drafts swap, the trainer is killed repeatedly.

    python benchmarks/server_swaps.py --minutes 10
    python benchmarks/server_swaps.py --minutes 10 --decoupled --full-disk

`distill serve online=on` on the tiny target. Of its clients 30 % leave early and 10 % send garbage. Every few seconds
another version is promoted by hand and the trainer is killed, every second time while it learns. Every remaining answer
is greedy and must equal that of a quiet run before. All slots must be free afterwards, and the log must have no error
but the alarms that are due. The exit code is 1 if anything went wrong. Result: `results/server_swaps.json`.

With --decoupled the trainer is `distill adapt` in a session of its own, with --full-disk the disk of the online folder
is full again and again: answers are dropped from the log then, and written again afterwards. The names of their results
end in `_decoupled` and `_full_disk`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from common import write_result
from hard_use_clients import EXPECTED, GOOD, PATIENCE_S, admin, growth_of, mutated, settled
from online_trouble import DecoupledTrainer, Disk, make_versions, small_disk

from distillspec.recipes.served import Served, served

# Alarms that this must raise: drafts of random weights are promoted by hand, and the trainer is killed soon.
PROVOKED = ("acceptance collapsed", "is rolled back", "the online trainer keeps ending")
DISK_FULL = ("disk is full", "No space left")  # in the errors of a full disk
DISK_MIB, LOG_MIB = 64, 16  # of the disk that is filled, and of the log on it
ENGINE = {
    "max_slots": 32,
    "max_model_len": 256,
    "compile": "false",
    "proposer": "draft_model",
    "controller": "fixed",
    "speculation_length": 3,
}
LEARNING = {
    "online": "on",
    "replay.share": 1,
    "replay.max_mib": 64,
    "replay.flush_s": 2,
    "adapt.every_requests": 200,
    "adapt.busy_share": 1,  # else it would never be seen learning: requests always run
    "adapt.row_tokens": 128,
    "adapt.batch_tokens": 256,
    "adapt.max_steps": 40,
    "gate.min_requests": 8,
    "gate.requests": 32,
    "gate.bootstrap_samples": 200,
    "online.metrics_s": 60,
}
OF_THE_TRAINER = ("adapt.row_tokens", "adapt.batch_tokens", "adapt.max_steps")
OF_BOTH = ("adapt.every_requests", "gate.min_requests", "gate.requests", "gate.bootstrap_samples")
IN_LOG = ("answers", "bytes", "errors", "incomplete", "dropped_queue", "dropped_disk")
TEXTS = ("abcabcabc", "Hello", "SELECT x FROM", "1 + 1 =", "the sky", "zzz", "def f(x):", "Dear Sir")
GARBAGE, LEAVING = 0.1, 0.3
SWAP_EVERY_S, KILL_EVERY_S = (2.0, 8.0), (3.0, 12.0)
FILL_EVERY_S, FULL_S, REFILL_EVERY_S = (5.0, 20.0), (3.0, 10.0), 0.2


@dataclass
class Trouble:
    """Clients, an operator and a killer of trainers until `end`, with everything they observed.

    Attributes:
        trainer: None: the server has one.
        disk: of the online folder, to be filled.
    """

    client: httpx.AsyncClient
    quiet: dict[str, str]
    end: float
    trainer: DecoupledTrainer | None = None
    disk: Disk | None = None
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    memory: list[int] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return time.monotonic() > self.end

    async def ask(self, dice: random.Random) -> None:
        """Send one request after another."""
        while not self.over:
            draw, text = dice.random(), dice.choice(TEXTS)
            if draw < GARBAGE:
                await self._send_garbage(dice)
            else:
                await self._stream(text, leaves=draw < GARBAGE + LEAVING, dice=dice)

    async def swap(self, dice: random.Random) -> None:
        """Promote another version every few seconds, as an operator."""
        while not self.over:
            await asyncio.sleep(dice.uniform(*SWAP_EVERY_S))
            drafts = (await admin(self.client, "GET", "drafts"))["drafts"]
            others = [draft["name"] for draft in drafts if not draft["current"]]
            done = await admin(self.client, "POST", "drafts/promote", draft=dice.choice(others))
            self.outcomes["swapped" if "version" in done else "swap refused"] += 1

    async def kill(self, dice: random.Random) -> None:
        """Kill the trainer again and again: in turn after some seconds at any stage, and while it learns."""
        for patient in itertools.cycle((False, True)):
            await asyncio.sleep(dice.uniform(*KILL_EVERY_S))
            trainer = await self._trainer(learning=patient)
            if self.over:
                return
            if trainer["failing"]:  # killed too often in a row
                await admin(self.client, "POST", "online/resume")
                self.outcomes["trainer resumed"] += 1
            elif trainer["pid"]:
                if self.trainer is not None:
                    self.trainer.kill()
                else:
                    with suppress(ProcessLookupError):
                        os.kill(trainer["pid"], signal.SIGKILL)
                self.outcomes[f"trainer killed, {trainer['stage']}"] += 1

    async def _trainer(self, learning: bool) -> dict[str, Any]:
        """Return the trainer's state. With `learning`, wait until it learns or keeps ending."""
        while True:
            own_pid = None if self.trainer is None else self.trainer.pid  # `pid` starts a trainer if none runs
            trainer: dict[str, Any] = (await admin(self.client, "GET", "online"))["trainer"]
            if own_pid not in (None, trainer["pid"]):  # the server tells of the trainer before this one
                trainer |= {"pid": own_pid, "stage": "starting"}
            if not learning or trainer["stage"] in ("learning", "failing") or self.over:
                return trainer
            await asyncio.sleep(0.02)

    async def fill(self, dice: random.Random) -> None:
        """Fill the disk for some seconds, again and again."""
        while self.disk is not None and not self.over:
            await asyncio.sleep(dice.uniform(*FILL_EVERY_S))
            self.outcomes["disk filled"] += 1
            for _ in range(round(dice.uniform(*FULL_S) / REFILL_EVERY_S)):
                self.disk.fill()
                await asyncio.sleep(REFILL_EVERY_S)
            self.disk.empty()

    async def watch(self, process: psutil.Process) -> None:
        """Record the server's memory every five seconds."""
        while not self.over:
            self.memory.append(process.memory_info().rss)
            await asyncio.sleep(5)

    @property
    def failures(self) -> list[str]:
        """Outcomes with an unexpected status."""
        known = {f"{kind} {code}" for kind in ("garbage", "answered") for code in EXPECTED}
        return [name for name in self.outcomes if name.startswith(("garbage", "answered")) and name not in known]

    async def _send_garbage(self, dice: random.Random) -> None:
        path, raw = mutated(dice)
        reply = await self.client.post(path, content=raw, headers={"Content-Type": "application/json"})
        self.outcomes[f"garbage {reply.status_code}"] += 1

    async def _stream(self, text: str, leaves: bool, dice: random.Random) -> None:
        seen = ""
        body = {**GOOD, "prompt": text, "stream": True, "speculation": {"domain": text[:3].strip()}}
        async with self.client.stream("POST", "/v1/completions", json=body) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    seen += json.loads(line[6:])["choices"][0]["text"]
                    if leaves and dice.random() < 0.3:
                        break
        self.outcomes["left" if leaves else f"answered {reply.status_code}"] += 1
        self.wrong[text] += not leaves and seen != self.quiet[text]


async def answers(client: httpx.AsyncClient) -> dict[str, str]:
    """Return the server's answer to each text, one request at a time."""
    by_text = {}
    for text in TEXTS:
        reply = await client.post("/v1/completions", json={**GOOD, "prompt": text})
        by_text[text] = reply.json()["choices"][0]["text"]
    return by_text


async def cause_trouble(
    server: Served, options: argparse.Namespace, trainer: DecoupledTrainer | None, disk: Disk | None
) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=options.streams + 4)
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, trust_env=False, limits=limits) as client:
        run = Trouble(client, await answers(client), time.monotonic() + 60 * options.minutes, trainer, disk)
        clients = [run.ask(random.Random(i)) for i in range(options.streams)]
        others = (
            run.swap(random.Random(-1)),
            run.kill(random.Random(-2)),
            run.fill(random.Random(-3)),
            run.watch(psutil.Process(server.process.pid)),
        )
        await asyncio.gather(*others, *clients)
        state, status = await settled(client), await admin(client, "GET", "online")
        again = await answers(client)
        await asyncio.sleep(2 * LEARNING["replay.flush_s"])
        written = (await admin(client, "GET", "online"))["log"]["written"] - status["log"]["written"]
    log = {name: status["log"].get(name, 0) for name in IN_LOG}
    differ = sum(run.wrong.values())
    fine = not differ and again == run.quiet and state["free"] and not run.failures and not log["errors"]
    fine = fine and run.outcomes["trainer killed, learning"] > 0  # else nothing was shown
    fine = fine and written > 0 and (log["dropped_disk"] > 0) == (disk is not None)
    ended = [] if trainer is None else trainer.ended
    return {
        "streams": options.streams,
        "minutes": options.minutes,
        "outcomes": dict(sorted(run.outcomes.items())),
        "answers_that_differ": differ,
        **state,
        "growth": growth_of(run.memory),
        "log": log,
        "written_afterwards": written,
        "trainers": {"of_their_own": trainer is not None, "ended_by_themselves": ended},
        "updates": status["trainer"]["updates"],
        "fine": fine and (not ended or disk is not None),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--decoupled", action="store_true", help="a trainer in a session of its own")
    parser.add_argument("--full-disk", action="store_true", help="fill the disk of the online folder (mounts a tmpfs)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, small_disk(DISK_MIB) if options.full_disk else nullcontext() as disk:
        if options.full_disk and disk is None:
            print("skipped: this account may not mount a small disk (tmpfs)", file=sys.stderr)
            return 0
        result, logged = run(Path(folder), disk, options)
    due = (*PROVOKED, *(DISK_FULL if options.full_disk else ()))
    alarms = {alarm: sum(alarm in line for line in logged) for alarm in due}
    failures = [line for line in logged if not any(alarm in line for alarm in due)]
    result = {**result, "alarms": alarms, "errors_in_log": failures, "fine": result["fine"] and not failures}
    name = "server_swaps" + "_decoupled" * options.decoupled + "_full_disk" * options.full_disk
    write_result(name, result)
    return 0 if result["fine"] else 1


def run(folder: Path, disk: Disk | None, options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Serve with trouble. Return the figures, and the errors in the server's log.

    Args:
        folder: for trainers of their own, and for the online folder where there is no disk.
    """
    online = folder / "online" if disk is None else disk.folder / "online"
    make_versions(online)
    common = {"target": "tiny", "online.folder": online}
    settings = {**common, "server.max_queue": 1024, **{f"engine.{name}": value for name, value in ENGINE.items()}}
    settings |= LEARNING if disk is None else {**LEARNING, "replay.max_mib": LOG_MIB}
    trainer = None
    if options.decoupled:
        settings = {
            name: value for name, value in settings.items() if name not in (*OF_THE_TRAINER, "adapt.busy_share")
        }
        settings["online"] = "decoupled"
        trainer_settings = {name: LEARNING[name] for name in (*OF_THE_TRAINER, *OF_BOTH)}
        trainer = DecoupledTrainer(folder, {**common, **trainer_settings})
    with served(*(f"{name}={value}" for name, value in settings.items()), threads=1) as server:
        try:
            return asyncio.run(cause_trouble(server, options, trainer, disk)), server.failures()
        finally:
            if trainer is not None:
                trainer.kill()


if __name__ == "__main__":
    sys.exit(main())
