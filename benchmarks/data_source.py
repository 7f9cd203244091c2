"""Speed of writing training data: transformers' `generate`, the slot generator and the engine on the same prompts.

    python benchmarks/data_source.py --prompts math.jsonl [--draft FOLDER] [--count 64] [--slots 16]

Temperature 1, answers of any length up to `--tokens`, the teacher's signal not recorded (`--signal` records it, which
transformers cannot). transformers takes the prompts in left-padded batches of `--slots`, the longest together, which
suits it. The sides take turns. Tokens a second are medians of the rounds, and the first round warms up. With `--draft`
the engine also speculates, and with lookups. Result: `results/data_source.json`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from common import write_result
from sides import left_padded, paired, read_prompts

from distillspec.config import TargetConfig
from distillspec.generation import SlotGenerator
from distillspec.models import LanguageModel, load_target
from distillspec.models.draft import load_pretrained
from distillspec.serving import EngineSettings
from distillspec.serving.generator import EngineGenerator
from distillspec.signals import SignalRequest
from distillspec.types import GenerationRequest, Generator, Prompt, SamplingPolicy


def main() -> None:
    options = _options()
    target = load_target(TargetConfig(path=options.target, dtype=options.dtype))
    # A second copy: engines change attention and products of the model they have.
    untouched = load_target(TargetConfig(path=options.target, dtype=options.dtype))
    texts = read_prompts(options.prompts, target, options.count)
    requests = [GenerationRequest(Prompt(str(i), tuple(text)), options.tokens, seed=i) for i, text in enumerate(texts)]
    sides: dict[str, Callable[[], int]] = {
        name: (lambda generator=generator: written(generator, requests, target, options.signal))
        for name, generator in generators(target, options).items()
    }
    sides["transformers"] = lambda: hf_sampled(untouched, texts, options.slots, options.tokens)
    result = paired(sides, options.rounds)
    shape = {"prompts": len(texts), "slots": options.slots, "tokens": options.tokens, "signal": options.signal}
    write_result("data_source", {"dtype": str(target.dtype), "threads": torch.get_num_threads(), **shape, **result})


def generators(target: LanguageModel, options: argparse.Namespace) -> dict[str, Generator]:
    """Ours, by name."""

    def engine(length: int, proposer: str | None, draft: LanguageModel | None) -> EngineGenerator:
        settings = EngineSettings(
            max_slots=options.slots,
            speculation_length=length,
            proposer=proposer,
            controller="goodput" if length else "fixed",
            prefill_chunk=2048,
            prefix_reuse=False,
        )
        return EngineGenerator(target, settings, draft=draft)

    by_name: dict[str, Generator] = {
        "engine": engine(0, None, None),
        "slots": SlotGenerator(target, slots=options.slots),
    }
    if options.draft:
        draft = load_pretrained(options.draft, target, target.dtype)
        by_name["engine, draft"] = engine(4, "draft_model", draft)
        by_name["engine, lookup else draft"] = engine(4, "lookup_else_model", draft)
    return by_name


def written(generator: Generator, requests: Sequence[GenerationRequest], target: LanguageModel, signal: bool) -> int:
    """Answer all requests and return the tokens written."""
    signal_request = SignalRequest("topk", 64) if signal else None
    samples = generator.generate(list(requests), SamplingPolicy(), stop_ids=target.stop_ids, signal=signal_request)
    return sum(len(sample.response_ids) for _, sample in samples)


@torch.inference_mode()
def hf_sampled(target: LanguageModel, texts: Sequence[Sequence[int]], batch: int, tokens: int) -> int:
    """Sample with transformers in left-padded batches of like lengths and return the tokens up to each answer's end."""
    ordered, stop = sorted(texts, key=len, reverse=True), target.stop_ids[0]
    total = 0
    for start in range(0, len(ordered), batch):
        group = ordered[start : start + batch]
        ids, mask = left_padded(group, stop)
        out: Any = target.model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=tokens,
            eos_token_id=list(target.stop_ids),
            pad_token_id=stop,
        )
        ends = torch.isin(out[:, ids.shape[1] :], torch.tensor(target.stop_ids))
        total += int((ends.cumsum(1) - ends.long() == 0).sum())
    return total


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--signal", action="store_true", help="record the teacher's 64 best log-probabilities (ours)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
