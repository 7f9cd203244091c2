"""Training throughput in response tokens a second, SmolLM2 → 4 layers.

    python benchmarks/training.py [--seconds 60]

Two comparisons, each with steps of its sides in turn in one process. Medians are quoted.

- A recorded teacher signal against a live teacher, in the product's own setting (vocabulary of 8,192).
- A step against one of TRL's distillation (GKD) trainer, like for like: the whole vocabulary, all weights trained, a
  live teacher, forward KL, batches of 8 × 384.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import write_result

from distillspec.config import DraftConfig, LossConfig, TargetConfig, TrainConfig
from distillspec.data.collect import score
from distillspec.data.packing import collate
from distillspec.generation import SlotGenerator
from distillspec.models import LanguageModel, initialise_draft, load_target
from distillspec.models.vocabulary import choose_kept_ids, count_tokens
from distillspec.signals import SignalRequest
from distillspec.training.feed import SampleFeed
from distillspec.training.module import DistillModule, teacher_view
from distillspec.training.optimizer import choose_trainable, make_optimizer
from distillspec.types import GenerationRequest, Prompt, Sample, SamplingPolicy, TokenBatch

GOALS = {"response_tokens_per_s": 1500, "against_trl": 1.3}
TRL_ROWS, TRL_LENGTH = 8, 384

Step = Callable[[], int]  # runs an optimizer step, returns its response tokens


def main() -> None:
    options = _options()
    target = load_target(TargetConfig())
    samples = written_samples(target, options.samples)
    ours = alternate(
        {
            "recorded signal": _packed_step(target, samples, vocabulary=8192),
            "live teacher": _packed_step(target, [bare(sample) for sample in samples], vocabulary=8192),
        },
        options.seconds,
    )
    like_for_like = alternate(_against_trl(target, samples), options.seconds)
    rate = ours["recorded signal"]["median"]
    result: dict[str, Any] = {"own": ours, "like_for_like": like_for_like, "goals": GOALS, "dtype": str(target.dtype)}
    met = {"response_tokens_per_s": rate >= GOALS["response_tokens_per_s"], "against_trl": None}
    if "trl" in like_for_like:
        result["against_trl"] = like_for_like["distillspec"]["median"] / like_for_like["trl"]["median"]
        met["against_trl"] = result["against_trl"] >= GOALS["against_trl"]
    write_result("training", {**result, "met": met})


def alternate(sides: dict[str, Step], seconds: float) -> dict[str, dict[str, Any]]:
    """Response tokens a second of each side, a step of one after a step of the other, after one to warm up."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for step in sides.values():
        step()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name, step in sides.items():
            started = time.perf_counter()
            tokens = step()
            rates[name].append(tokens / (time.perf_counter() - started))
    return {
        name: {"median": statistics.median(values), "min": min(values), "max": max(values), "steps": len(values)}
        for name, values in rates.items()
    }


def _packed_step(target: LanguageModel, samples: list[Sample], vocabulary: int) -> Step:
    counts = count_tokens((s.prompt_ids + s.response_ids for s in samples), target.identity.vocab_size)
    draft = initialise_draft(
        DraftConfig(layers=4), target, kept_ids=choose_kept_ids(counts, vocabulary, target.tokenizer)
    )
    choose_trainable(draft, train_embeddings=False)
    config = TrainConfig(max_steps=1)
    feed = SampleFeed(samples, config, target.tokenizer.eos_token_id, seed=0)
    return optimizer_step(DistillModule(draft, LossConfig()), target, config, feed.take)


def _padded_step(target: LanguageModel, samples: list[Sample]) -> Step:
    """The comparison's batches: so many samples side by side, cut at the same length, all weights trained."""
    draft = initialise_draft(DraftConfig(layers=4), target)
    choose_trainable(draft, train_embeddings=True)
    taken = 0

    def take() -> TokenBatch:
        nonlocal taken
        rows = [[samples[(taken + i) % len(samples)]] for i in range(TRL_ROWS)]
        taken += TRL_ROWS
        return collate(rows, TRL_LENGTH, target.tokenizer.eos_token_id)

    return optimizer_step(DistillModule(draft, LossConfig()), target, TrainConfig(max_steps=1), take)


def optimizer_step(
    module: DistillModule, target: LanguageModel, config: TrainConfig, take: Callable[[], TokenBatch]
) -> Step:
    """Return a step of training on the CPU, in bfloat16 where `config.dtype` says so."""
    optimizer, half = make_optimizer(module.train(), config), config.dtype == "bfloat16"

    def step() -> int:
        batch = take()
        weights, teacher = torch.ones(batch.response_tokens), teacher_view(module.mix, batch, target)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = module(batch, teacher, weights, float(batch.response_tokens)).loss
        loss.backward()
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        torch.nn.utils.clip_grad_norm_(trained, config.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return batch.response_tokens

    return step


def _against_trl(target: LanguageModel, samples: list[Sample]) -> dict[str, Step]:
    """Our padded step beside TRL's, or alone when TRL is not installed."""
    alone = [bare(s) for s in samples]
    sides = {"distillspec": _padded_step(target, alone)}
    try:
        from trl_step import trl_step
    except ImportError:
        print("TRL is not installed: the comparison is left out (pip install trl)")
        return sides
    draft = initialise_draft(DraftConfig(layers=4), target)
    return sides | {"trl": trl_step(draft.model, target, alone, TRL_ROWS, TRL_LENGTH)}


def written_samples(target: LanguageModel, count: int) -> list[Sample]:
    """Self-written maths-like answers of full length, scored by the target: the content hardly matters here."""
    question = "A shop sells {n} boxes of {m} pencils at ${k} a box. Explain step by step what they cost in all."
    texts = [question.format(n=i + 3, m=2 * i + 5, k=i % 7 + 2) for i in range(count)]
    from distillspec.data.chat import render_prompt

    prompts = [Prompt(str(i), render_prompt(target.tokenizer, text)) for i, text in enumerate(texts)]
    requests = [GenerationRequest(p, 224, seed=i) for i, p in enumerate(prompts)]
    written = SlotGenerator(target, slots=count).generate(requests, SamplingPolicy(), stop_ids=target.stop_ids)
    return score([sample for _, sample in sorted(written, key=lambda pair: pair[0])], target, SignalRequest(), seed=0)


def bare(sample: Sample) -> Sample:
    """Return the sample without the signal."""
    return Sample(sample.prompt_id, sample.domain, sample.prompt_ids, sample.response_ids)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each comparison")
    parser.add_argument("--samples", type=int, default=64)
    return parser.parse_args()


if __name__ == "__main__":
    main()
