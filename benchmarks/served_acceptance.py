"""Acceptance by the engine beside that by the evaluator, of the same draft on the same texts, position by position.

    python benchmarks/served_acceptance.py --draft RUN --prompts math.jsonl [--target smollm2] [--name eagle]

The engine answers prompts that the draft never saw, with drafted chains of a fixed length at temperature 1. Each token
that it tried was accepted or not. The evaluator gives the probability of that from the finished text: Σ min(p, q) at
the same token and depth. The means must agree. Their difference comes by depth, with a 95 % interval over prompts.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean

from common import write_result

from distillspec.commands.drafts import find_draft
from distillspec.commands.unseen import unseen
from distillspec.config import DataConfig, EngineConfig, TargetConfig
from distillspec.data.prompts import read_prompts
from distillspec.data.trained_prompts import trained_prompts
from distillspec.evaluation.positions import measure_positions
from distillspec.evaluation.states import TargetStates
from distillspec.models import LanguageModel, load_draft, load_target
from distillspec.serving import Engine, Request, SamplingParams
from distillspec.types import Sample, SamplingPolicy

RESAMPLES = 1000


@dataclass(frozen=True)
class Tried:
    """A drafted token that the engine tried."""

    prompt: int
    position: int  # in the answer, from 0 on
    depth: int  # 1 for the first token of its chain
    accepted: bool
    expected: float = 0.0  # Σ min(p, q) there, by the evaluator


def serve(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> tuple[list[Tried], list[Sample]]:
    """Answer the prompts. Return what was tried, and the texts."""
    for number, ids in enumerate(prompts):
        engine.submit(Request(str(number), tuple(ids), params))
    written: Counter[int] = Counter()
    tried: list[Tried] = []
    answers: dict[int, Sample] = {}
    while engine.has_work:
        step = engine.step()
        for row in () if step.result is None else step.result.rows:
            number = int(row.sequence_id.split("/")[0])
            tried += [
                Tried(number, written[number] + trial.depth - 1, trial.depth, trial.accepted) for trial in row.trials
            ]
            written[number] += row.emitted
        for output in step.finished:
            number = int(output.request_id)
            answers[number] = Sample(str(number), "", tuple(prompts[number]), tuple(output.token_ids))
    return tried, [answers[number] for number in range(len(prompts))]


def expected(
    tried: Sequence[Tried], samples: Sequence[Sample], draft: LanguageModel, target: LanguageModel
) -> list[Tried]:
    """Return the trials with the evaluator's probabilities at temperature 1."""
    states = TargetStates(target)
    length = max(trial.depth for trial in tried)
    measured = [
        measure_positions(draft, target, sample, SamplingPolicy(), states=states, speculation_length=length)
        for sample in samples
    ]
    return [
        replace(trial, expected=float(measured[trial.prompt].at(trial.depth - 1).alpha[trial.position]))
        for trial in tried
    ]


def compared(tried: Sequence[Tried], depth: int | None = None, seed: int = 0) -> dict[str, float]:
    """Return means and their difference at a depth, or at all, with a bootstrap interval over prompts."""
    trials = [trial for trial in tried if depth is None or trial.depth == depth]
    by_prompt: dict[int, list[float]] = {}
    for trial in trials:
        by_prompt.setdefault(trial.prompt, []).append(trial.accepted - trial.expected)
    groups, chance = list(by_prompt.values()), random.Random(seed)
    means = []
    for _ in range(RESAMPLES):
        drawn = [chance.choice(groups) for _ in groups]
        means.append(sum(map(sum, drawn)) / sum(map(len, drawn)))
    means.sort()
    return {
        "trials": len(trials),
        "served": fmean(trial.accepted for trial in trials),
        "evaluated": fmean(trial.expected for trial in trials),
        "difference": fmean(trial.accepted - trial.expected for trial in trials),
        "low": means[int(0.025 * RESAMPLES)],
        "high": means[int(0.975 * RESAMPLES)],
    }


def main() -> int:
    options = read_options()
    target = load_target(TargetConfig(path=options.target))
    draft = load_draft(find_draft(str(options.draft)), target)
    data = DataConfig(prompts=str(options.prompts))
    pool = list(islice(read_prompts(data, target.text_tokenizer, shuffled=True), options.pool))
    prompts = unseen(pool[::-1], trained_prompts(draft.lineage))[: options.count]
    settings = EngineConfig(
        verification="exact_by_token",  # tokens of a chain that is verified as a whole are not judged one by one
        controller="fixed",
        speculation_length=options.length,
        max_slots=options.batch,
        compile=False,
    )
    engine = Engine(target, draft, settings)
    params = SamplingParams(temperature=1.0, max_tokens=options.tokens)
    try:
        tried, samples = serve(engine, [prompt.token_ids for prompt in prompts], params)
    finally:
        engine.close()
    tried = expected(tried, samples, draft, target)
    depths = range(1, options.length + 1)
    result = {
        "prompts": len(prompts),
        "batch": options.batch,
        "speculation_length": options.length,
        "draft": draft.lineage.get("kind", "pruned"),
        "dtype": str(target.dtype).removeprefix("torch."),
        "all": compared(tried),
        "by_depth": [compared(tried, depth) for depth in depths],
    }
    write_result(f"served_acceptance_{options.name}", result)
    return 0


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--name", default="draft")
    parser.add_argument("--pool", type=int, default=4000, help="prompts read from the file, to find unseen ones")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--length", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=160)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
