"""Hard use of a real `distill serve` on the tiny target. Runs for minutes. The exit code is 1 if anything goes wrong.

    python benchmarks/server_hard_use.py mutate --bodies 10000    # broken bodies beside good requests
    python benchmarks/server_hard_use.py schema                   # schemathesis over the OpenAPI document
    python benchmarks/server_hard_use.py soak --minutes 10        # 256 streams, of which 30 % leave early
    python benchmarks/server_hard_use.py chaos --minutes 5        # and 10 % send garbage, and drafts swap

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
from pathlib import Path
from typing import Any

import httpx
from common import write_result
from endurance import endure
from hard_use_clients import EXPECTED, PATIENCE_S, Tally, read_stream, send_garbage, settled

from distillspec.config import DraftConfig, TargetConfig
from distillspec.models import initialise_draft, load_target, save_draft
from distillspec.recipes.served import ADMIN_KEY, Served, served

SLOTS = {"mutate": 32, "schema": 32, "soak": 256, "chaos": 64}
LONGEST_LINE = 1 << 24  # of schemathesis's report
CONTEXT = {"schema": 64}  # tokens. Short: generated bodies seldom bound their answers


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
    """Run streams without a pause, of which three in ten leave early. Memory is recorded."""
    return await endure(server, options, leaving=0.3, garbage=0.0, swap_s=None)


async def chaos(server: Served, options: argparse.Namespace) -> dict[str, Any]:
    """Run the same with garbage among the requests and another draft every three seconds."""
    return await endure(server, options, leaving=0.3, garbage=0.1, swap_s=3.0)


async def schema(server: Served, options: argparse.Namespace) -> dict[str, Any]:
    """Run schemathesis over the OpenAPI document with the admin key, and good requests beside it.

    Left out: `/admin/drain`, after which nothing is served, the endless `/dashboard/events`, and routes of features
    that are off here.
    """
    tally = Tally()
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--no-color"),
        *("--checks", options.checks, "--max-examples", str(options.examples), "--seed", str(options.seed)),
        *("--exclude-path", "/admin/drain", "--exclude-path", "/dashboard/events", "--request-timeout", "60"),
        *(
            "--exclude-path-regex",
            "^/admin/(online|replay|drafts/(promote|unload))",
            "--continue-on-failure",
            "--header",
        ),
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
            f"engine.max_model_len={CONTEXT.get(options.what, 256)}",
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
