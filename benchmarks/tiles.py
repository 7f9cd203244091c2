"""Passes of a target's layers and head with AMX's tiles, and by vectors of pairs of bfloat16, for the same tokens.

    python benchmarks/tiles.py [--context 200] [--rounds 15]

Each side is a process of its own: one builds its kernels for this processor, the other for one without AMX. They take
turns, a pass each, and the ratio is the median of the rounds' ratios. Needs a CPU with AMX. Writes
`results/tiles.json`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from common import write_result

from distillspec.config import TargetConfig
from distillspec.models import LanguageModel, load_target
from distillspec.models.native_layers import NativeLayers
from distillspec.models.native_rows import NativeRows
from distillspec.models.numerics import cpu_has_tiles
from distillspec.models.packed_linear import PackedLinears
from distillspec.models.slot_cache import SlotCache

# Rows, and tokens of each.
SHAPES = ((1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (8, 1), (8, 2), (8, 3), (8, 4), (8, 8), (16, 1), (16, 2), (16, 4))
PROCESSORS = {"tiles": "native", "pairs": "cooperlake"}  # DISTILLSPEC_MARCH of each side


def main() -> None:
    options = _options()
    if options.worker:
        answer(load_target(TargetConfig(path=options.target, dtype="bfloat16", device="cpu")), options.context)
        return
    if not cpu_has_tiles():
        sys.exit("this CPU has no AMX: there is nothing to compare")
    sides = {name: _start(processor) for name, processor in PROCESSORS.items()}
    shapes = {f"{rows} × {tokens}": _compare(sides, rows, tokens, options.rounds) for rows, tokens in SHAPES}
    for side in sides.values():
        side.communicate("", timeout=60)
    write_result("tiles", {"context": options.context, "threads": torch.get_num_threads(), "shapes": shapes})


def answer(target: LanguageModel, context: int) -> None:
    """Read lines of rows and tokens, and write the milliseconds of such a pass behind `context` tokens."""
    native, linears = NativeLayers.of(target), PackedLinears(target)
    assert native is not None, "the kernel was not built"
    cache, head = SlotCache(max(rows for rows, _ in SHAPES), context + 64), target.head.weight
    for line in sys.stdin:
        rows, tokens = map(int, line.split())
        read = NativeRows.chains(range(rows), [context] * rows, [tokens] * rows)
        ids = torch.arange(rows * tokens)[None] + 1000
        with torch.inference_mode():
            started = time.perf_counter()
            linears.linear(native.hidden_of(cache, read, ids), head)
            print(1e3 * (time.perf_counter() - started), flush=True)


def _start(processor: str) -> subprocess.Popen[str]:
    command = [sys.executable, *sys.argv, "--worker"]
    environment = os.environ | {"DISTILLSPEC_MARCH": processor}
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _compare(sides: dict[str, subprocess.Popen[str]], rows: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Return the median milliseconds of each side, and of their ratios. The first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(1 + rounds):
        for name, side in sides.items():
            times[name].append(_ask(side, rows, tokens))
    measured = {name: times_ms[1:] for name, times_ms in times.items()}
    ratio = statistics.median(tiles / pairs for tiles, pairs in zip(measured["tiles"], measured["pairs"], strict=True))
    medians = {f"{name}_ms": statistics.median(times_ms) for name, times_ms in measured.items()}
    return {**medians, "tiles_over_pairs": ratio}


def _ask(side: subprocess.Popen[str], rows: int, tokens: int) -> float:
    assert side.stdin is not None
    assert side.stdout is not None
    print(rows, tokens, file=side.stdin, flush=True)
    return float(side.stdout.readline())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--context", type=int, default=200, help="cached tokens of each row")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
