"""Measure how long the first clients of a learning server wait, with `online=on` beside `online=off`.

    python benchmarks/online_start.py --draft RUN/draft --rounds 3

The two servers take turns. Requests start as soon as a server listens, one after another. `online=on` has an empty
folder of its own and logs every answer.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile

import numpy
from common import Others, write_result
from server_overhead import PROMPTS, spread, stream

from distillspec.recipes.served import served

SIDES = ("off", "on")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--draft", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=32)
    options = parser.parse_args()
    others = Others()
    first_s: dict[str, list[float]] = {side: [] for side in SIDES}
    for round_ in range(options.rounds):
        for side in SIDES if round_ % 2 else reversed(SIDES):
            first_s[side] += first_tokens(side, options)
            print(f"round {round_ + 1}, online={side}: {describe(first_s[side])}", flush=True)
    result = {
        "target": options.target,
        "requests": options.requests,
        "max_tokens": options.max_tokens,
        "first_token_s": first_s,
        "p50_s": {side: spread(values) for side, values in first_s.items()},
        "p90_s": {side: float(numpy.quantile(values, 0.9)) for side, values in first_s.items()},
        "worst_s": {side: max(values) for side, values in first_s.items()},
        "others_cores": others.cores(),
    }
    write_result("online_start", result)
    return 0


def first_tokens(side: str, options: argparse.Namespace) -> list[float]:
    """Return the seconds to the first event of each of a new server's first requests."""
    with tempfile.TemporaryDirectory() as folder:
        learning = [f"online.folder={folder}/online", "replay.share=1"] if side == "on" else []
        words = [f"target={options.target}", f"draft.path={options.draft}", f"online={side}", *learning]
        with served(*words) as server:
            return [
                asyncio.run(stream(server, options.target, PROMPTS[i % len(PROMPTS)], options.max_tokens))
                for i in range(options.requests)
            ]


def describe(values: list[float]) -> str:
    p50, p90 = numpy.quantile(values, (0.5, 0.9))
    return f"first token p50 {p50:.2f} s, p90 {p90:.2f} s, worst {max(values):.2f} s"


if __name__ == "__main__":
    sys.exit(main())
