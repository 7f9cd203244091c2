"""Chains verified as a whole (block verification) against chains verified token by token, live in one process.

    python benchmarks/blocks.py --prompts math.jsonl --draft RUN/draft [--batches 1 4 8]

The sides take turns (`turns.py`) with answers of 256 tokens: fixed lengths of 2 to 6 tokens, each by both verifications,
and an engine without a draft. Writes `results/blocks.json`.
"""

from __future__ import annotations

from typing import Any

from common import write_result
from turns import NO_DRAFT, Bench, interval, ratios, shown, turn_options

from distillspec.serving.control.base import BatchView, LengthController, Plan
from distillspec.serving.control.fixed import FixedLength
from distillspec.serving.decoding import row_kinds
from distillspec.serving.decoding.sampling import TokenSampler

LENGTHS = (2, 3, 4, 6)
BLOCK, TOKEN = "exact", "exact_by_token"


class Verified(FixedLength):
    """A fixed length, and one of the verifications for its steps."""

    def __init__(self, length: int, sampler: TokenSampler, verification: str) -> None:
        super().__init__(length)
        self.sampler, self.verification = sampler, verification

    def plan(self, view: BatchView) -> Plan:
        self.sampler.verification = self.verification
        return super().plan(view)


def main() -> None:
    options = turn_options(__doc__ or "", (1, 4, 8))
    row_kinds.BLOCK = 2  # chains of two tokens as well, to see where it begins to pay
    bench = Bench.prepare(options, max(LENGTHS), controller="fixed", tree="off")
    sampler, found = bench.engine._executor.sampler, dict[str, Any]()
    for batch in options.batches:
        controllers: dict[str, LengthController] = {
            f"{length} {name}": Verified(length, sampler, name) for length in LENGTHS for name in (BLOCK, TOKEN)
        }
        rates = bench.rates(controllers, batch)
        found[str(batch)] = {
            **shown(rates),
            "block_over_token": {str(k): interval(ratios(rates, f"{k} {BLOCK}", f"{k} {TOKEN}")) for k in LENGTHS},
            "times_no_draft": {name: interval(ratios(rates, name, NO_DRAFT)) for name in controllers},
        }
        print(f"batch {batch}: {found[str(batch)]['block_over_token']}", flush=True)
        print(f"times no draft: {found[str(batch)]['times_no_draft']}", flush=True)
    write_result("blocks", {**bench.setting, "batch": found})


if __name__ == "__main__":
    main()
