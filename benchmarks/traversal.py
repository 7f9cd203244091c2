"""Trees verified from their leaves to the root (traversal verification) against level by level, on the same trees.

    python benchmarks/traversal.py --prompts math.jsonl --draft RUN/draft

An engine with trees of a fixed shape answers prompts that the draft was not trained on, one at a time. For the tree of
each step both verifications' expected tokens are computed from the target's and the draft's probabilities: outcomes of
chance would hide a gain of few per cent. The gain's interval is that of the mean over prompts. Times are not measured:
`traversal` is the readable form. Writes `results/traversal.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from common import write_result
from torch import Tensor
from turns import Bench, interval, turn_options

from distillspec.sampling import policy_probs
from distillspec.serving import SamplingParams
from distillspec.serving.base.fixed import FixedTree
from distillspec.serving.base.shape import TreeShape
from distillspec.serving.decoding.traversal import expected_by_level, expected_tokens
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


def main() -> None:
    options = turn_options(__doc__ or "", (1,), prompts_each=24)
    bench = Bench.prepare(options, 4, controller="fixed", tree="given", widths=[4, 2, 2, 1], nodes=44)
    found = {name: _measure(bench, shape) for name, shape in SHAPES.items()}
    write_result("traversal", {**bench.setting, "shapes": found})


def _measure(bench: Bench, shape: TreeShape) -> dict[str, Any]:
    engine, options = bench.engine, bench.options
    policy = SamplingPolicy(temperature=options.temperature)
    params = SamplingParams(temperature=options.temperature, max_tokens=TOKENS, ignore_eos=True)
    engine.use_controller(FixedTree(shape))
    gains, whole, levels = [], [], []
    for prompt in bench.prompts[: options.prompts_each]:
        engine.observer = watch = Watch(policy, shape.depth)
        engine.generate([prompt], params)
        if watch.whole:
            gains.append(sum(watch.whole) / sum(watch.levels) - 1)
            whole, levels = whole + watch.whole, levels + watch.levels
    engine.observer = None
    own = {
        "nodes": shape.nodes,
        "steps": len(whole),
        "tokens_by_traversal": float(torch.tensor(whole).mean()),
        "tokens_by_level": float(torch.tensor(levels).mean()),
        "gained": interval(gains),
    }
    print(own, flush=True)
    return own


if __name__ == "__main__":
    main()
