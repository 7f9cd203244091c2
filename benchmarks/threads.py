"""Attention, packed products and verdicts with one, two and all cores, each number in a process of its own.

    python benchmarks/threads.py --prompts math.jsonl

attention   what 1,024 cached tokens a row add to a pass over 8 rows, of one and of five tokens each
products    a product with the head's weight, not in the cache, by kind, for 1, 8 and 40 tokens
verdicts    `engine.py --sections overhead`: verdicts on 8 rows × 5 positions of logits

All in ms. Writes `results/threads.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bandwidth import product_seconds
from common import write_result
from engine import overhead
from sides import alternating_seconds, make_engine

from distillspec.config import TargetConfig
from distillspec.files import write_json
from distillspec.models import LanguageModel, load_target
from distillspec.provenance import usable_cores
from distillspec.serving import Engine
from distillspec.serving.execution.row_input import RowInput

ROWS, NEAR, FAR = 8, 16, 1024  # rows, and cached tokens of each
PRODUCTS = (1, 8, 40)  # tokens


def main() -> None:
    options = _options()
    if options.worker:
        write_json(Path(options.worker), measure(options))
        return
    cores = usable_cores()
    by_threads = {str(count): _in_process(count) for count in sorted({1, min(2, cores), cores})}
    write_result("threads", {"dtype": options.dtype, "cores": cores, "threads": by_threads})


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all parts with the threads of this process."""
    target = load_target(TargetConfig(path=options.target, dtype=options.dtype, device="cpu"))
    weight = target.head.weight.detach()
    products = {
        str(tokens): {kind: 1e3 * seconds for kind, seconds in product_seconds(weight, tokens).items()}
        for tokens in PRODUCTS
    }
    return {
        "torch_threads": torch.get_num_threads(),
        "dtype": str(target.dtype),
        "attention": attention(options, target),
        "products": products,
        "verdicts": overhead(options, target)["median_ms"],
    }


def attention(options: argparse.Namespace, target: LanguageModel) -> dict[str, float]:
    """Time passes behind short and long texts by turns, and return the medians of their differences within rounds."""
    engine = make_engine(options, target, None, ROWS, max_model_len=FAR + 64, prefill_chunk=FAR)
    with torch.inference_mode():
        engine.runner.read([RowInput(slot, 0, [5] * FAR, 0) for slot in range(ROWS)])
    sides: dict[str, Callable[[], int]] = {
        f"{tokens} behind {context}": partial(_read, engine, context, tokens)
        for tokens in (1, 5)
        for context in (NEAR, FAR)
    }
    times = alternating_seconds(sides, 8 * options.rounds)
    engine.close()
    differences_ms = {}
    for tokens in (1, 5):
        pairs = zip(times[f"{tokens} behind {FAR}"], times[f"{tokens} behind {NEAR}"], strict=True)
        differences_ms[f"{ROWS} × {tokens}"] = 1e3 * statistics.median(far - near for far, near in pairs)
    return differences_ms


@torch.inference_mode()
def _read(engine: Engine, context: int, tokens: int) -> int:
    return len(engine.runner.read([RowInput(slot, context, [7] * tokens) for slot in range(ROWS)]))


def _in_process(count: int) -> dict[str, Any]:
    """Return what a process with so many threads measures."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", str(file)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": str(count)})
        figures: dict[str, Any] = json.loads(file.read_text())
    return figures


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="compile passes first")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
