"""Greedy output against transformers' own, on real prompts, for every proposer, length and batch size.

    python benchmarks/exactness.py --prompts math.jsonl --draft FOLDER --other FOLDER [--count 200]

float32, token by token. A difference is excused only where the two best logits of a float64 pass are closer than
float32 can tell (1e-4): a tie. In some runs every request is more urgent than those before and takes their slots. In
others two drafts take turns in mid-request.
The long version of tests/integration/test_engine_smollm2.py. Writes `results/exactness.json`.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import Counter
from typing import Any

import torch
from common import write_result
from sides import read_prompts

from distillspec.config import TargetConfig
from distillspec.models import LanguageModel, load_target
from distillspec.models.draft import load_pretrained
from distillspec.serving import Engine, EngineSettings, Request, RequestOutput, SamplingParams

TIE = 1e-4
ARRIVE_EVERY, SWAP_EVERY = 4, 10  # steps
PROPOSERS = ("draft_model", "prompt_lookup", "lookup_else_model")
LENGTHS = tuple(range(9))
BATCHES = (1, 8)
EVENTS = ("none", "preempt", "swap")


def main() -> None:
    options = _options()
    target = load_target(TargetConfig(dtype="float32"))
    draft = load_pretrained(options.draft, target, torch.float32)
    prompts = read_prompts(options.prompts, target, options.count)
    wanted = [_reference(target, prompt, options.tokens) for prompt in prompts]
    counts: Counter[str] = Counter()
    events: Counter[str] = Counter()
    combinations = list(itertools.product(PROPOSERS, LENGTHS, BATCHES, EVENTS))
    started = time.perf_counter()
    for number, (proposer, length, batch, event) in enumerate(combinations):
        # Every combination gets its share of the prompts, so that all prompts and all combinations are met.
        share = options.share
        places = [(number * share + i) % len(prompts) for i in range(share)]
        swaps = event == "swap" and proposer != "prompt_lookup"
        engine = Engine(target, draft, _settings(proposer, length, batch))
        outputs = _run(engine, [prompts[i] for i in places], options, event == "preempt", swaps)
        engine.check_integrity()
        engine.close()
        for place, output in zip(places, outputs, strict=True):
            counts[_compare(target, prompts[place], wanted[place], list(output.token_ids))] += 1
            events["preemptions"] += output.stats.preemptions
            events["requests drafted for by both drafts"] += len(output.stats.draft_versions) > 1
        print(f"{number + 1} of {len(combinations)}: {dict(counts)}", flush=True)
    write_result(
        "exactness",
        {
            "prompts": len(prompts),
            "combinations": len(combinations),
            "outputs": sum(counts.values()),
            "tokens_each": options.tokens,
            **{name: counts[name] for name in ("identical", "tie", "different")},
            **events,
            "seconds": time.perf_counter() - started,
            "met": counts["different"] == 0 and min(events.values()) > 0,
        },
    )


def _settings(proposer: str, length: int, batch: int) -> EngineSettings:
    return EngineSettings(
        max_slots=batch, max_model_len=400, proposer=proposer, controller="fixed", speculation_length=length
    )


def _run(
    engine: Engine, prompts: list[list[int]], options: argparse.Namespace, preempts: bool, swaps: bool
) -> list[RequestOutput]:
    """Answer the prompts, together or (each more urgent than the last) one every few steps."""
    params = SamplingParams(temperature=0.0, max_tokens=options.tokens)
    waiting = [Request(str(i), tuple(p), params, priority=-i if preempts else 0) for i, p in enumerate(prompts)]
    done: dict[str, RequestOutput] = {}
    drafts = itertools.cycle((options.other, options.draft))
    step = 0
    while waiting or engine.has_work:
        while waiting and (not preempts or step % ARRIVE_EVERY == 0):
            engine.submit(waiting.pop(0))
            if preempts:
                break
        if swaps and step % SWAP_EVERY == SWAP_EVERY - 1:
            engine.load_draft(next(drafts))
        done.update({output.request_id: output for output in engine.step().finished})
        step += 1
    return [done[str(i)] for i in range(len(prompts))]


def _reference(target: LanguageModel, prompt: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=tokens,
        eos_token_id=list(target.stop_ids),
        pad_token_id=target.stop_ids[0],
    )
    return out[0, len(prompt) :].tolist()


def _compare(target: LanguageModel, prompt: list[int], wanted: list[int], found: list[int]) -> str:
    if wanted == found:
        return "identical"
    place = next(i for i, (a, b) in enumerate(itertools.zip_longest(wanted, found)) if a != b)
    best = _exact_logits(target, prompt + wanted[:place]).topk(2).values
    return "tie" if float(best[0] - best[1]) < TIE else "different"


@torch.no_grad()
def _exact_logits(target: LanguageModel, ids: list[int]) -> Any:
    """float64 logits after `ids`."""
    target.model.double()
    try:
        return target.logits(torch.tensor([ids]))[0, -1]
    finally:
        target.model.float()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--other", required=True, help="the draft that takes turns with --draft")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--share", type=int, default=10, help="prompts a combination")
    parser.add_argument("--tokens", type=int, default=48)
    return parser.parse_args()


if __name__ == "__main__":
    main()
