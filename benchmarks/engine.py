"""The serving engine's speed on this machine, medians of paired runs in one process.

    python benchmarks/engine.py --prompts math.jsonl [--summaries summarization.jsonl] [--draft FOLDER]

plain         no speculation against transformers' `generate`, batch 1 and 8
ragged        the same for 32 prompts of 16 to 1,024 tokens
speculation   a draft, and prompt lookup on summaries, against the same engine without speculation, and the draft in
              an engine with default proposers, shapes and lengths ("default": n-grams beside it, trees, goodput)
verify        passes of the target over 8 rows of one or five tokens, beside their linear products alone
overhead      what verdicts of 8 rows × 5 positions of logits take
steps         where the time of whole steps with a draft goes, at a fixed length and by goodput, as tables
scaling       batch sizes and prompt lengths, as curves

Each section writes `results/engine_SECTION.json`. Both sides of a comparison take turns, and the ratio is the
median of the rounds' ratios. With `--compile` engines compile their passes first (minutes), and the results are
`engine_SECTION_compiled.json`. `--temperature 0.7` makes it `engine_speculation_t0.7.json`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch
from bandwidth import read_share
from common import write_result
from scaling import scaling
from sides import (
    NEW_TOKENS,
    alternating_seconds,
    answers,
    generate,
    greedy,
    hf_generate,
    make_engine,
    paired,
    ragged,
    read_prompts,
)
from step_parts import steps
from turns import Side
from verification import verify

from distillspec.config import TargetConfig
from distillspec.data.trained_prompts import trained_prompts
from distillspec.models import LanguageModel, load_target
from distillspec.serving import Engine, SamplingParams
from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.fixed import FixedLength
from distillspec.serving.base.requests import Request, SequenceState
from distillspec.serving.base.tree import DraftProbs, TokenTree
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.decoding.sampling import TokenSampler
from distillspec.serving.decoding.windows import VerificationWindow
from distillspec.serving.draft_loading import load_draft

GOALS = {
    "plain": {"1": 1.4, "8": 1.9},
    "ragged": {"32": 2.0},
    "speculation": {"1": 1.55, "8": 1.2, "lookup": 1.3},
    "overhead": {"greedy": 2.0, "temperature 1": 5.0, "top-p 0.95": 8.0, "batch 1": 1.5},
}
RAGGED = 32  # prompts of unlike lengths
OWN_PLAIN = "default, nothing drafted"


def main() -> None:
    options = _options()
    sections: dict[str, Callable[[argparse.Namespace, LanguageModel], dict[str, Any]]] = {
        "plain": plain,
        "ragged": ragged_prompts,
        "speculation": speculation,
        "verify": verify,
        "overhead": overhead,
        "steps": steps,
        "scaling": scaling,
    }
    target = load_target(TargetConfig(path=options.target, dtype=options.dtype))
    for name in options.sections.split(","):
        result = sections[name](options, target)
        machine = {"dtype": str(target.dtype), "threads": torch.get_num_threads(), "compiled": options.compile}
        drawn = f"_t{options.temperature:g}" if name == "speculation" and options.temperature else ""
        write_result(f"engine_{name}{drawn}{'_compiled' if options.compile else ''}", {**machine, **result})


def plain(options: argparse.Namespace, target: LanguageModel) -> dict[str, Any]:
    """Ours without speculation against transformers, the same prompts and as many tokens. At batch 1, the bandwidth."""
    prompts = read_prompts(options.prompts, target, max(options.batches))
    comparison = _against_transformers("plain", options, target, [prompts[:batch] for batch in options.batches])
    alone = comparison["batch"].get("1")
    rate = None if alone is None else alone["sides"]["distillspec"]["tokens_per_s"]
    return comparison if rate is None else {**comparison, "bandwidth": read_share(target, rate)}


def ragged_prompts(options: argparse.Namespace, target: LanguageModel) -> dict[str, Any]:
    """The same where prompts have 16 to 1,024 tokens."""
    return _against_transformers("ragged", options, target, [ragged(options.prompts, target, RAGGED)])


def _against_transformers(
    section: str, options: argparse.Namespace, target: LanguageModel, batches: Sequence[list[list[int]]]
) -> dict[str, Any]:
    # A second copy: the engine changes attention and products of the model it has.
    untouched = load_target(TargetConfig(path=options.target, dtype=options.dtype))
    by_batch: dict[str, Any] = {}
    for texts in batches:
        engine = make_engine(options, target, None, len(texts), max_model_len=2048, prefill_chunk=2048)

        def ours(engine: Engine = engine, texts: list[list[int]] = texts) -> int:
            return generate(engine, texts, greedy())

        def theirs(texts: list[list[int]] = texts) -> int:
            return hf_generate(untouched, texts)

        by_batch[str(len(texts))] = paired({"distillspec": ours, "transformers": theirs}, options.rounds)
        print(f"{section} {len(texts)}: {by_batch[str(len(texts))]['ratios']}", flush=True)
        engine.close()
    return {"tokens": NEW_TOKENS, "batch": by_batch, "goals": GOALS[section], "met": _met(by_batch, GOALS[section])}


def speculation(options: argparse.Namespace, target: LanguageModel) -> dict[str, Any]:
    """Lengths 1 to 4 of a draft on prompts it has not seen, and lookups on summaries, against length 0.

    Each round has prompts of its own, the same for all sides.
    """
    by_batch: dict[str, Any] = {}
    goals: dict[str, float] = {}
    if options.draft:
        draft = load_draft(options.draft, target)
        seen = trained_prompts(draft.lineage)
        prompts = read_prompts(options.prompts, target, (options.rounds + 1) * max(options.batches), without=seen)
        other = load_target(TargetConfig(path=options.target, dtype=options.dtype))  # an engine changes what it holds
        for batch in options.batches:
            engine = make_engine(options, target, draft, batch, speculation_length=4, controller="goodput")
            default_draft = load_draft(options.draft, other)
            default = make_engine(options, other, default_draft, batch, proposer=None, controller="goodput")
            by_batch[str(batch)] = _against_plain(engine, prompts, batch, (0, 1, 2, 3, 4), options, default)
            goals[str(batch)] = GOALS["speculation"][str(batch)]
    if options.summaries:
        texts = read_prompts(options.summaries, target, 4, longest=600)
        lookup_settings = {"proposer": "prompt_lookup", "speculation_length": 7, "controller": "goodput"}
        engine = make_engine(options, target, None, 1, **lookup_settings)
        by_batch["lookup"] = _against_plain(engine, texts, len(texts), (0, 3, 5, 7), options)
        goals["lookup"] = GOALS["speculation"]["lookup"]
    written = {"tokens": NEW_TOKENS, "temperature": options.temperature}
    return {**written, "batch": by_batch, "goals": goals, "met": _met(by_batch, goals)}


def _against_plain(
    engine: Engine,
    prompts: list[list[int]],
    batch: int,
    lengths: Sequence[int],
    options: argparse.Namespace,
    default: Engine | None = None,
) -> dict[str, Any]:
    """Compare fixed lengths of one engine, 0 among them, with lengths by goodput and the costs measured at its start.

    Args:
        default: another engine, with default settings. It is compared with its own plain decoding, since the weights of
            two engines lie in different pages, whose speed differs by some percent. Sides are tenants: n-grams must not
            learn an answer from the side before.
    """
    params = SamplingParams(temperature=options.temperature, max_tokens=NEW_TOKENS, ignore_eos=True)
    controllers: dict[str, LengthController] = {str(k): FixedLength(k) for k in lengths}
    controllers["goodput"] = GoodputController(max(lengths), engine.costs, drafts_with_model=engine.draft is not None)
    sides = {name: Side(engine, controller) for name, controller in controllers.items()}
    if default is not None:
        sides |= {"default": Side(default, default.controller), OWN_PLAIN: Side(default, FixedLength(0))}

    parts = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
    turns = {name: cycle(parts) for name in sides}
    steps: dict[str, list[int]] = {name: [] for name in sides}

    def under(name: str) -> int:
        sides[name].use()
        outputs = answers(sides[name].engine, next(turns[name]), params, tenant=name)
        steps[name].append(sum(output.stats.steps for output in outputs))
        return sum(len(output.token_ids) for output in outputs)

    timed = paired({name: (lambda name=name: under(name)) for name in sides}, options.rounds, against="0")
    for name, step_counts in steps.items():
        timed["sides"][name]["block_efficiency"] = len(step_counts) * batch * NEW_TOKENS / sum(step_counts)
    engine.close()
    if default is not None:
        default.close()
        rates = [timed["sides"][name]["rounds"] for name in ("default", OWN_PLAIN)]
        pairs = zip(*rates, strict=True)
        timed["ratios"]["default"] = statistics.median(default_rate / plain_rate for default_rate, plain_rate in pairs)
    best = max((str(k) for k in lengths if k), key=lambda name: timed["ratios"][name])
    return {**timed, "best_length": int(best), "ratio": timed["ratios"][best], "goodput": timed["ratios"]["goodput"]}


def overhead(options: argparse.Namespace, target: LanguageModel) -> dict[str, Any]:
    """Time verdicts on 8 × 5 rows of real logits (batch 1: 5), in ms. Drafts are noisy copies of the target."""
    vocab, generator = target.identity.vocab_size, torch.Generator().manual_seed(0)
    logits = _real_logits(options, target, 40)
    likely = logits.float().amax(0).topk(min(8192, vocab)).indices.sort().values
    noisy = logits.float()[:, likely] + 0.5 * torch.randn(40, len(likely), generator=generator)
    probs = torch.softmax(noisy, -1).view(8, 5, -1)
    params_by_name = {
        "greedy": SamplingParams(temperature=0.0),
        "temperature 1": SamplingParams(temperature=1.0),
        "top-p 0.95": SamplingParams(temperature=1.0, top_p=0.95),
        "top-k 50": SamplingParams(temperature=1.0, top_k=50),
        "seeded": SamplingParams(temperature=1.0, seed=1),
        "penalties": SamplingParams(temperature=1.0, presence_penalty=0.5, repetition_penalty=1.2),
        "batch 1": SamplingParams(temperature=1.0),
    }
    sides: dict[str, Callable[[], int]] = {}
    for name, params in params_by_name.items():
        sampler, rows = TokenSampler(vocab, target.device), 1 if name == "batch 1" else 8
        table = DraftProbs(probs[:, :4].flatten(0, 1), likely)
        columns = torch.multinomial(table.probs, 1, generator=generator).view(8, 4)
        windows = [
            VerificationWindow(
                SequenceState(f"r{r}", Request(f"r{r}", (5,), params), 0, r, [5], frozenset(), 64),
                TokenTree.chain(likely[columns[r]].tolist(), table, range(4 * r, 4 * r + 4)),
            )
            for r in range(rows)
        ]
        sides[name] = lambda s=sampler, w=windows, x=logits[: 5 * rows]: len(s.verify(x, w))
    times = alternating_seconds(sides, 10 * options.rounds)
    medians = {name: 1e3 * statistics.median(seconds) for name, seconds in times.items()}
    met = {name: medians[name] <= goal for name, goal in GOALS["overhead"].items()}
    return {"median_ms": medians, "goals_ms": GOALS["overhead"], "met": met}


@torch.inference_mode()
def _real_logits(options: argparse.Namespace, target: LanguageModel, rows: int) -> torch.Tensor:
    """The target's logits at the last places of some prompts, `[rows, V]`."""
    prompts = read_prompts(options.prompts, target, 8)
    return torch.cat([target.logits(torch.tensor([prompt]))[0, -(rows // 8) :] for prompt in prompts])


def _met(by_batch: dict[str, Any], goals: dict[str, float]) -> dict[str, bool]:
    return {name: by_batch[name]["ratio"] >= goal for name, goal in goals.items() if name in by_batch}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--summaries")
    parser.add_argument("--draft")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="of plain, speculation and steps")
    parser.add_argument("--temperature", type=float, default=0.0, help="of speculation")
    parser.add_argument("--compile", action="store_true", help="compile passes first")
    parser.add_argument("--sections", default="plain,ragged,verify,overhead,speculation,scaling")
    return parser.parse_args()


if __name__ == "__main__":
    main()
