"""Chains verified as a whole (block verification) against chains verified token by token, on the same drafted chains.

    python benchmarks/blocks.py --prompts math.jsonl --draft RUN/draft [--batches 1 4 8]

An engine with chains of a fixed length answers prompts that the draft was not trained on. In each step both
verifications judge the same logits, each first in turn, and are timed. The tokens that each is expected to emit are
computed from its probabilities of acceptance, given the drafted chains: outcomes of chance would hide a gain of few per
cent. The gain in speed is that in tokens, less the time that the verdict takes more. Writes `results/blocks.json`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common import write_result
from torch import Tensor
from turns import Bench, turn_options

from distillspec.serving import SamplingParams
from distillspec.serving.base.fixed import FixedLength
from distillspec.serving.decoding import row_kinds
from distillspec.serving.decoding.block_verification import Blocks
from distillspec.serving.decoding.row_values import row_probs
from distillspec.serving.decoding.sampling import TokenSampler
from distillspec.serving.decoding.tree_batch import TreeBatch
from distillspec.serving.decoding.verdict import Judgement
from distillspec.serving.decoding.windows import VerificationWindow, policies_of

LENGTHS = (2, 3, 4, 6)
BLOCK, TOKEN = "exact", "exact_by_token"


@dataclass
class Measured:
    """Steps of one length and batch size: expected tokens and seconds of the verdict, by verification."""

    tokens: dict[str, list[float]] = field(default_factory=lambda: {BLOCK: [], TOKEN: []})
    seconds: dict[str, list[float]] = field(default_factory=lambda: {BLOCK: [], TOKEN: []})

    def result(self, step_s: float) -> dict[str, Any]:
        """Return the figures, for steps of `step_s` seconds."""
        tokens = {name: statistics.fmean(values) for name, values in self.tokens.items()}
        verdict_s = {name: statistics.median(values) for name, values in self.seconds.items()}
        longer = (verdict_s[BLOCK] - verdict_s[TOKEN]) / step_s
        return {
            "steps": len(self.tokens[BLOCK]),
            "tokens_a_row": tokens,
            "tokens_gained": tokens[BLOCK] / tokens[TOKEN] - 1,
            "verdict_ms": {name: 1e3 * seconds for name, seconds in verdict_s.items()},
            "step_ms": 1e3 * step_s,
            "time_lost": longer,
            "speed_gained": tokens[BLOCK] / tokens[TOKEN] / (1 + longer) - 1,
        }


class Watch:
    """Judges each step by both verifications, and measures both."""

    def __init__(self, sampler: TokenSampler, batch: int) -> None:
        self.sampler = sampler
        self.batch = batch
        self.measured = Measured()
        self.plain = sampler.verify
        self._steps = 0

    def verify(self, logits: Tensor, windows: Sequence[VerificationWindow]) -> list[Judgement]:
        drawn_chains = [window for window in windows if window.tree.is_drawn_chain and len(window.tree)]
        if len(drawn_chains) < self.batch or len(drawn_chains) < len(windows):
            return self.plain(logits, windows)
        self._steps += 1
        judgements: list[Judgement] = []
        for name in (BLOCK, TOKEN) if self._steps % 2 else (TOKEN, BLOCK):
            self.sampler.verification, started = name, time.perf_counter()
            judgements = self.plain(logits, windows)
            self.measured.seconds[name].append(time.perf_counter() - started)
        blocks = _blocks(logits, windows)
        self.measured.tokens[BLOCK].append(1 + _by_block(blocks))
        self.measured.tokens[TOKEN].append(1 + _by_token(blocks))
        return judgements


def main() -> None:
    options = turn_options(__doc__ or "", (1, 4, 8))
    row_kinds.BLOCK = 2  # chains of two tokens too, to see where it begins to pay
    bench = Bench.prepare(options, max(LENGTHS), controller="fixed", tree="off")
    cases: dict[str, Any] = {}
    for batch in options.batches:
        for length in LENGTHS:
            cases[f"{batch} rows of {length}"] = case = _measure(bench, batch, length)
            print(f"{batch} rows of {length} tokens: {case}", flush=True)
    write_result("blocks", {**bench.setting, "cases": cases})


def _measure(bench: Bench, batch: int, length: int) -> dict[str, Any]:
    engine, options = bench.engine, bench.options
    sampler = engine.sampler
    watch = Watch(sampler, batch)
    params = SamplingParams(temperature=options.temperature, max_tokens=96, ignore_eos=True)
    engine.use_controller(FixedLength(length))
    steps: list[float] = []
    for round_ in range(options.rounds * max(1, 4 // batch)):
        texts = bench.prompts[round_ * batch : (round_ + 1) * batch]
        for judged in (True, False):  # steps are timed without the second verdict
            sampler.verify = watch.verify if judged else watch.plain  # type: ignore[method-assign]
            before = time.perf_counter()
            outputs = engine.generate(texts, params)
            seconds = time.perf_counter() - before
            if not judged:
                steps.append(seconds / max(output.stats.steps for output in outputs))
    sampler.verify, sampler.verification = watch.plain, BLOCK  # type: ignore[method-assign]
    return watch.measured.result(statistics.median(steps))


def _blocks(logits: Tensor, windows: Sequence[VerificationWindow]) -> Blocks:
    batch = TreeBatch([window.tree for window in windows], logits.device)
    return Blocks(batch, range(len(windows)), row_probs(logits, policies_of(windows), True))


def _by_block(blocks: Blocks) -> float:
    """Return the mean number of tokens that are accepted as a whole: the sum of P(at least i are)."""
    refused = (1 - blocks.chances()).masked_fill(~blocks.drafted, 1.0)
    return float((1 - refused.flip(1).cumprod(1).flip(1)).masked_fill(~blocks.drafted, 0.0).sum(1).mean())


def _by_token(blocks: Blocks) -> float:
    """Return the mean number of tokens that are accepted one by one."""
    ratio = blocks.ratios.clamp(max=1.0).masked_fill(~blocks.drafted, 0.0)
    return float(ratio.cumprod(1).sum(1).mean())


if __name__ == "__main__":
    main()
