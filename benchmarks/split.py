"""Measure attention over rows of unlike lengths: padded, in pieces (SPIN), by each row's own keys.

    python benchmarks/split.py

One layer of SmolLM2's shape attends for a window of five tokens a row. The three take turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
from common import Others, write_result

from distillspec.models.few_queries import few_queries_attention, why_not
from distillspec.models.slot_cache import Attend, SlotCache, SlotView, masked_attention
from distillspec.models.split_attention import piece_length, pieces_cost, split_attention

HEADS, KV_HEADS, DIM, WINDOW = 9, 3, 64, 5
LOADS = {
    "8 × 512": [512] * 8,
    "2,048 and 7 × 128": [2048, *[128] * 7],
    "64, 128, … 2,048": [64, 128, 256, 384, 512, 768, 1024, 2048],
    "2,048 and 15 × 64": [2048, *[64] * 15],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    kinds: dict[str, Attend] = {"masked": masked_attention, "split": split_attention}
    if why_not() is None:
        kinds["native"] = few_queries_attention
    others, by_load = Others(), {}
    for name, lengths in LOADS.items():
        by_load[name] = _load(kinds, lengths, options.rounds)
    result = {"threads": torch.get_num_threads(), "window": WINDOW, "loads": by_load, "others_cores": others.cores()}
    write_result("split", result)
    return 0


@torch.inference_mode()
def _load(kinds: dict[str, Attend], lengths: list[int], rounds: int) -> dict[str, object]:
    """Return milliseconds of each attention over rows of such lengths, and the keys that it reads."""
    batch, longest = len(lengths), max(lengths) + WINDOW
    keys, values = (torch.randn(batch, KV_HEADS, longest + 1, DIM) for _ in range(2))
    query = torch.randn(batch, HEADS, WINDOW, DIM)
    times_s: dict[str, list[float]] = {name: [] for name in kinds}
    for round_ in range(rounds + 1):
        for name, attend in kinds.items():
            starts, counts = torch.tensor(lengths), torch.full((batch,), WINDOW)
            view = SlotView.append(SlotCache(batch, longest), [*range(batch)], starts, counts)
            attend(query, keys, values, view)  # masks and pieces are made once a pass, for all layers
            started = time.perf_counter()
            attend(query, keys, values, view)
            if round_:
                times_s[name].append(time.perf_counter() - started)
    ends, copied = [length + WINDOW for length in lengths], HEADS // KV_HEADS * WINDOW
    length = piece_length(ends, copied)
    pairs = zip(times_s["split"], times_s["masked"], strict=True)
    return {
        "ms": {name: 1e3 * statistics.median(seconds) for name, seconds in times_s.items()},
        "keys": {"masked": batch * max(ends), "split": pieces_cost(ends, length, 0), "native": sum(ends)},
        "piece": length,
        "split_over_masked": statistics.median(split_s / masked_s for split_s, masked_s in pairs),
    }


if __name__ == "__main__":
    sys.exit(main())
