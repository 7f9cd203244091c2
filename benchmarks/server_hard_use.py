"""Hard use of a real `distill serve` on the tiny target. Runs for minutes. The exit code is 1 if anything goes wrong.

    python benchmarks/server_hard_use.py mutate --bodies 10000    # broken bodies beside good requests
    python benchmarks/server_hard_use.py schema                   # schemathesis over the OpenAPI document
    python benchmarks/server_hard_use.py soak --minutes 10        # 256 streams, of which 30 % leave early
    python benchmarks/server_hard_use.py chaos --minutes 5        # and 10 % send garbage, and drafts swap

The servers of `mutate` and `schema` learn (`online=on`): what operators do is sent, generated and mutated too.
`schema` needs `pip install schemathesis`.
Good answers are greedy and must all be the same. Results: `results/server_WHAT.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from common import write_result
from endurance import endure
from hard_use_clients import (
    BODIES,
    EXPECTED,
    EXPECTED_OF_ADMIN,
    PATIENCE_S,
    Bodies,
    Tally,
    admin,
    admin_bodies,
    operate,
    read_stream,
    send_garbage,
    settled,
)
from online_trouble import make_versions
from server_swaps import LEARNING, PROVOKED

from distillspec.config import DraftConfig, TargetConfig
from distillspec.models import initialise_draft, load_target, save_draft
from distillspec.recipes.served import ADMIN_KEY, Served, served

SLOTS = {"mutate": 32, "schema": 32, "soak": 256, "chaos": 64}
LONGEST_LINE = 1 << 24  # of schemathesis's report
LEARNS = ("mutate", "schema")
CONTEXT = {"schema": 64}  # tokens. Short: generated bodies seldom bound their answers


async def mutate(server: Served, options: argparse.Namespace) -> dict[str, Any]:
    """Send broken bodies, sixteen at a time, half of them to /admin, and a good request among every hundred."""
    dice, tally, limit = random.Random(options.seed), Tally(), asyncio.Semaphore(16)
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, trust_env=False) as client:
        of_operators = await operators_bodies(client)

        async def send(good: bool) -> None:
            async with limit:
                if good:
                    await read_stream(client, None, tally)
                else:
                    await send_garbage(client, dice, tally, dice.choice((BODIES, of_operators)))

        await asyncio.gather(*(send(number % 100 == 99) for number in range(options.bodies * 100 // 99)))
        state = await settled(client)
    allowed = {"200", *(f"garbage {status}" for status in EXPECTED)}
    allowed |= {f"garbage to admin {status}" for status in EXPECTED_OF_ADMIN}
    fine = set(tally.outcomes) <= allowed and len(tally.texts) == 1 and state["free"]
    return {"bodies": options.bodies, **tally.as_json(), **state, "fine": fine}


async def soak(server: Served, options: argparse.Namespace) -> dict[str, Any]:
    """Run streams without a pause, of which three in ten leave early. Memory is recorded."""
    return await endure(server, options, leaving=0.3, garbage=0.0, swap_s=None)


async def chaos(server: Served, options: argparse.Namespace) -> dict[str, Any]:
    """Run the same with garbage among the requests and another draft every three seconds."""
    return await endure(server, options, leaving=0.3, garbage=0.1, swap_s=3.0)


async def schema(server: Served, options: argparse.Namespace) -> dict[str, Any]:
    """Run schemathesis over the OpenAPI document with the admin key, and good requests beside it.

    Left out: `/admin/drain`, after which nothing is served, the endless `/dashboard/events`, and
    `/admin/drafts/unload`, which a server with one draft does not offer (501). An operator goes on beside it, with
    names that exist.
    """
    tally = Tally()
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--no-color"),
        *("--checks", options.checks, "--max-examples", str(options.examples), "--seed", str(options.seed)),
        *("--exclude-path", "/admin/drain", "--exclude-path", "/dashboard/events", "--request-timeout", "60"),
        *("--exclude-path", "/admin/drafts/unload", "--continue-on-failure", "--header"),
        *(f"Authorization: Bearer {ADMIN_KEY}", "--suppress-health-check", "all"),
    ]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, limit=LONGEST_LINE
    )
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, trust_env=False) as client:
        operating = asyncio.create_task(operate(client, tally, await operators_bodies(client)))
        reading = asyncio.create_task(_shown(process))
        while not reading.done():
            await read_stream(client, None, tally)
            await asyncio.sleep(0.5)
        report = await reading
        operating.cancel()
        with suppress(asyncio.CancelledError):
            await operating
        state = await settled(client)
    cases = re.search(r"(\d+) generated", report)
    allowed = {"200", *(f"admin {status}" for status in EXPECTED_OF_ADMIN)}
    fine = process.returncode == 0 and set(tally.outcomes) <= allowed and len(tally.texts) == 1 and state["free"]
    summary = [line.strip() for line in report.splitlines() if re.search(r"generated|passed|failed|unique", line)]
    cases_seen = {"cases": int(cases[1]) if cases else None, "checks": options.checks, "summary": summary[-6:]}
    return {**cases_seen, **tally.as_json(), **state, "fine": fine}


async def operators_bodies(client: httpx.AsyncClient) -> Bodies:
    """Return the legal bodies of /admin, for the versions that the server has."""
    drafts = (await admin(client, "GET", "drafts"))["drafts"]
    return admin_bodies([draft["name"] for draft in drafts])


async def _shown(process: asyncio.subprocess.Process) -> str:
    """Print a process's output line by line as it comes. Return it when the process has ended."""
    assert process.stdout is not None
    lines = []
    async for line in process.stdout:
        lines.append(line.decode())
        print(lines[-1], end="", flush=True)
    await process.wait()
    return "".join(lines)


def save_drafts(folder: Path) -> None:
    """Save two drafts, `one` and `two`."""
    target = load_target(TargetConfig(path="tiny", dtype="float32", device="cpu"))
    for layers, name in ((1, "one"), (2, "two")):
        save_draft(initialise_draft(DraftConfig(layers=layers), target), folder / name, target)


def words_of(what: str, folder: Path) -> list[str]:
    """Return the settings of the server. Its drafts are made in the folder."""
    words = [
        "target=tiny",
        f"engine.max_slots={SLOTS[what]}",
        f"engine.max_model_len={CONTEXT.get(what, 256)}",
    ]
    words += ["server.max_queue=1024", "engine.compile=false", "engine.controller=fixed", "engine.speculation_length=3"]
    if what in LEARNS:
        make_versions(folder)
        learning = [f"{name}={value}" for name, value in LEARNING.items()]
        return [*words, "engine.proposer=draft_model", f"online.folder={folder}", *learning]
    save_drafts(folder)
    return [*words, f"server.drafts_folder={folder}", f"draft.path={folder}/one"]


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
    with (
        tempfile.TemporaryDirectory() as folder,
        served(*words_of(options.what, Path(folder)), threads=1) as server,
    ):
        result = asyncio.run(section(server, options))
        failures = server.failures()
    if options.what in LEARNS:
        failures = [line for line in failures if not any(alarm in line for alarm in PROVOKED)]
    result = {**result, "errors_in_log": failures, "fine": result["fine"] and not failures}
    write_result(options.name or f"server_{options.what}", result, options.seed)
    return 0 if result["fine"] else 1


if __name__ == "__main__":
    sys.exit(main())
