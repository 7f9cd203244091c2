"""Measure how many requests a cache of a given size holds at once, and what of its memory is wasted.

    python benchmarks/memory.py --gib 0.5

Prompts of real lengths are read until no more fit. The memory in use is what the system says (smaps), beside what
blocks of 16 tokens would take by arithmetic, and slots of the longest length. A second wave of requests follows, whose
prompts overwrite the texts that the first one left.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import write_result

from distillspec.config import TargetConfig
from distillspec.models import LanguageModel, load_target
from distillspec.models.memory import slot_bytes, token_bytes
from distillspec.models.slot_cache import SlotCache
from distillspec.serving import Engine, EngineSettings, Request, SamplingParams

BLOCK = 16
MOST_ROWS = 256
ANSWER = 64  # tokens: enough that none is done before the last prompt is read
CHUNK = 4096


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--gib", type=float, default=0.5)
    parser.add_argument("--max-len", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    target = load_target(TargetConfig(path=options.target, dtype=options.dtype, device="cpu"))
    chance = random.Random(options.seed)
    loads = {
        "chats of 300 tokens": [300] * MOST_ROWS,
        "50 to 2,000 tokens": [chance.randint(50, 2000) for _ in range(MOST_ROWS)],
    }
    result = {
        "target": options.target,
        "dtype": options.dtype,
        "budget_gib": options.gib,
        "max_model_len": options.max_len,
        "token_bytes": token_bytes([target]),
        "loads": {name: held(target, lengths, options) for name, lengths in loads.items()},
    }
    write_result("memory", result, options.seed)
    return 0


def held(target: LanguageModel, lengths: Sequence[int], options: argparse.Namespace) -> dict[str, Any]:
    """Fill an engine with requests of these lengths, in order, and measure what it holds."""
    budget = options.gib * 2**30
    settings = EngineSettings(
        max_slots=MOST_ROWS,
        max_model_len=options.max_len,
        cache_gib=options.gib,
        prefill_chunk=CHUNK,
        speculation_length=0,
        compile=False,
    )
    engine = Engine(target, None, settings)
    chance = random.Random(options.seed)
    waves = []
    for wave in range(2):
        for number, length in enumerate(lengths):
            prompt = tuple(chance.randrange(1000, 9000) for _ in range(length - ANSWER // 2))
            engine.submit(Request(f"{wave}/{number}", prompt, SamplingParams(max_tokens=ANSWER, ignore_eos=True)))
        waves.append(filled(engine))
        for number in range(len(lengths)):
            engine.abort(f"{wave}/{number}")
        engine.step()
    engine.close()
    return {
        "waves": waves,
        "waste": max(wave["waste"] for wave in waves),
        "within_budget": all(wave["resident_bytes"] <= budget for wave in waves),
        "requests": min(wave["requests"] for wave in waves),
        "requests_of_blocks_of_16": fitting([-(-length // BLOCK) * BLOCK for length in lengths], budget, target),
        "requests_without_waste": fitting(lengths, budget, target),
        "requests_of_whole_slots": int(budget // slot_bytes([target], options.max_len)),
    }


def filled(engine: Engine) -> dict[str, Any]:
    """Step until nothing more is admitted and everything admitted is read. Return what is held then."""
    before = -1
    while True:
        engine.step()
        read = [sequence.computed for sequence in engine.sequences.decoding]
        if len(read) == len(engine.sequences.running) == before:
            break
        before = len(engine.sequences.running)
    used = sum(read) * token_bytes([engine.target])
    taken = resident(engine.runner.cache)
    kept = sum(map(len, engine.sequences.pool.contents)) - sum(read)
    return {
        "requests": len(read),
        "tokens": sum(read),
        "tokens_of_free_texts": kept,
        "used_bytes": used,
        "resident_bytes": taken,
        "waste": 1 - (used + kept * token_bytes([engine.target])) / taken,
    }


def fitting(sizes: Sequence[int], budget: float, target: LanguageModel) -> int:
    """Return how many requests, in order, take at most `budget` bytes."""
    room, count = budget / token_bytes([target]), 0
    for size in sizes:
        room -= size
        if room < 0:
            break
        count += 1
    return count


def resident(cache: SlotCache) -> int:
    """Return the bytes of a cache's tensors that are in memory, by /proc/self/smaps."""
    starts, total, inside = [held.data_ptr() for held in cache.tensors()], 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = line.split(" ")[0].split("-")
        if len(bounds) == 2:
            inside = any(int(bounds[0], 16) <= start < int(bounds[1], 16) for start in starts)
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


if __name__ == "__main__":
    sys.exit(main())
