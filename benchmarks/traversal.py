"""Trees verified from their leaves to the root (traversal verification) against level by level, on the same trees.

    python benchmarks/traversal.py --prompts math.jsonl --draft RUN/draft

An engine with trees of a fixed shape answers prompts that the draft was not trained on, one at a time. For the tree of
each step both verifications' expected tokens are computed from the target's and the draft's probabilities: outcomes of
chance would hide a gain of few per cent. The gain's interval is that of the mean over prompts. Each tree is also judged
by every verifier that there is, in turn, and timed: from the leaves and by level in C++, by level in torch. At last two
engines, `verification=exact` and `exact_by_token`, take turns on the same texts with every shape (`turns.py`). Writes
`results/traversal.json`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from common import write_result
from sides import make_engine
from torch import Tensor
from turns import Bench, Side, interval, shown, turn_options

from distillspec.config import TargetConfig
from distillspec.evaluation.measured import in_turn
from distillspec.models import load_target
from distillspec.recipes.rates import ratios
from distillspec.sampling import policy_probs
from distillspec.serving import Engine, SamplingParams
from distillspec.serving.base.fixed import FixedTree
from distillspec.serving.base.shape import TreeShape
from distillspec.serving.decoding.sampling import TokenSampler
from distillspec.serving.decoding.traversal import expected_by_level, expected_tokens
from distillspec.serving.decoding.verdict import Judgement
from distillspec.serving.decoding.windows import VerificationWindow
from distillspec.serving.draft_loading import load_draft
from distillspec.serving.step.commit import Emission
from distillspec.types import SamplingPolicy

SHAPES = {
    "chain of 4": TreeShape.full((1, 1, 1, 1)),
    "siblings 2, 2, 2": TreeShape.spine((2, 2, 2)),
    "siblings 3, 2, 1, 1": TreeShape.spine((3, 2, 1, 1)),
    "tree 2, 2, 2": TreeShape.full((2, 2, 2)),
    "tree 4, 2, 2, 1": TreeShape.full((4, 2, 2, 1)),
}
TOKENS = 48  # of an answer


class Watch:
    """Expected tokens of each step by traversal, and level by level."""

    def __init__(self, policy: SamplingPolicy, depth: int) -> None:
        self.policy, self.depth = policy, depth
        self.whole: list[float] = []
        self.levels: list[float] = []

    def __call__(self, emissions: Sequence[Emission], logits: Tensor) -> None:
        (emission,) = emissions
        tree = emission.tree
        if tree.depth < self.depth:
            return
        probs = policy_probs(logits[: 1 + len(tree)].float(), self.policy)
        self.whole.append(1 + expected_tokens(probs, tree))
        self.levels.append(1 + expected_by_level(probs, tree))


class Judges:
    """Lets every verifier judge an engine's trees before its own does, and times them."""

    def __init__(self, engine: Engine) -> None:
        size, device = engine.target.identity.vocab_size, engine.target.device
        self.samplers = {
            "from the leaves": TokenSampler(size, device),
            "by level": TokenSampler(size, device, verification="exact_by_token"),
            "by level, torch": TokenSampler(size, device, verification="exact_by_token", kernel=False),
        }
        self.spent: dict[str, list[float]] = {name: [] for name in self.samplers}
        self._engine = engine
        self._turns = count()
        self._plain = engine.sampler.verify
        engine.sampler.verify = self.verify  # type: ignore[method-assign]

    def verify(self, logits: Tensor, windows: Sequence[VerificationWindow]) -> list[Judgement]:
        """Judge by all, and return the verdict of the engine's sampler. The first one reads the logits from memory."""
        if any(len(window.tree) for window in windows):
            for name, sampler in in_turn(list(self.samplers.items()), next(self._turns)):
                started = time.perf_counter()
                sampler.verify(logits, windows)
                self.spent[name].append(time.perf_counter() - started)
        return self._plain(logits, windows)

    def leave(self) -> dict[str, float]:
        """Leave the engine as it was. Return the median milliseconds of a verdict."""
        self._engine.sampler.verify = self._plain  # type: ignore[method-assign]
        return {name: 1e3 * statistics.median(seconds) for name, seconds in self.spent.items()}


def main() -> None:
    options = turn_options(__doc__ or "", (1,), prompts_each=24)
    tree_settings = {"controller": "fixed", "tree": "given", "widths": [4, 2, 2, 1], "nodes": 44, "prefix_reuse": True}
    bench = Bench.prepare(options, 4, **tree_settings)
    by_shape = {name: _measure(bench, shape) for name, shape in SHAPES.items()}
    target = load_target(TargetConfig(path=options.target, dtype=options.dtype))
    words = {**tree_settings, "speculation_length": 4, "verification": "exact_by_token"}
    by_level = make_engine(options, target, load_draft(options.draft, target), max(options.batches), **words)
    speed = {str(batch): _speed(bench, by_level, batch) for batch in options.batches}
    write_result("traversal", {**bench.setting, "shapes": by_shape, "batch": speed})


def _speed(bench: Bench, by_level: Engine, batch: int) -> dict[str, Any]:
    """Return the tokens a second with each shape, from the leaves and by level, and the ratios of the rounds."""
    sides = {}
    for name, shape in SHAPES.items():
        sides[name] = Side(bench.engine, FixedTree(shape))
        sides[f"{name}, by level"] = Side(by_level, FixedTree(shape))
    rates = bench.rates_of(sides, batch)
    over = {name: interval(ratios(rates, name, f"{name}, by level")) for name in SHAPES}
    print(batch, over, flush=True)
    return {**shown(rates), "over_by_level": over}


def _measure(bench: Bench, shape: TreeShape) -> dict[str, Any]:
    engine, options = bench.engine, bench.options
    policy = SamplingPolicy(temperature=options.temperature)
    params = SamplingParams(temperature=options.temperature, max_tokens=TOKENS, ignore_eos=True)
    engine.use_controller(FixedTree(shape))
    gains, whole, levels = [], [], []
    judges = Judges(engine)
    for prompt in bench.prompts[: options.prompts_each]:
        engine.observer = watch = Watch(policy, shape.depth)
        engine.generate([prompt], params)
        if watch.whole:
            gains.append(sum(watch.whole) / sum(watch.levels) - 1)
            whole, levels = whole + watch.whole, levels + watch.levels
    engine.observer = None
    figures = {
        "nodes": shape.nodes,
        "steps": len(whole),
        "tokens_by_traversal": float(torch.tensor(whole).mean()),
        "tokens_by_level": float(torch.tensor(levels).mean()),
        "gained": interval(gains),
        "verdict_ms": judges.leave(),
    }
    print(figures, flush=True)
    return figures


if __name__ == "__main__":
    main()
