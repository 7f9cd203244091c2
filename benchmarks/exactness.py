"""Greedy output against transformers' own, on real prompts, for every way of drafting in every circumstance.

    python benchmarks/exactness.py --prompts math.jsonl --draft FOLDER --other FOLDER [--states FOLDER]

float32, token by token. A difference is excused only where the two best logits of a float64 pass are closer than
float32 can tell (1e-4): a tie. Ways are chains of a draft, of lookups and of n-grams, trees, a draft that reads states,
and lengths by goodput. Each circumstance meets all prompts, spread over ways, lengths and batch sizes:

none      all requests are there from the start
preempt   every request is more urgent than those before and takes their slots
swap      two drafts take turns in mid-request
reuse     each prompt comes again with half of its answer behind it, and its cached text is used
abort     every other prompt is asked twice, and one of the two is aborted in mid-answer

The long version of tests/integration/test_engine_smollm2.py. Writes `results/exactness.json`.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import write_result
from sides import read_prompts

from distillspec.config import DraftConfig, TargetConfig
from distillspec.models import LanguageModel, initialise_draft, load_target, save_draft
from distillspec.models.draft import load_pretrained
from distillspec.serving import Engine, EngineSettings, Request, RequestOutput, SamplingParams

TIE = 1e-4
ARRIVE_EVERY, SWAP_EVERY, ABORT_EVERY = 4, 5, 3  # steps
CIRCUMSTANCES = ("none", "preempt", "swap", "reuse", "abort")
LENGTHS = tuple(range(9))
BATCHES = (1, 8)
CHAINS = {
    "draft": {"proposer": "draft_model"},
    "lookup": {"proposer": "prompt_lookup"},
    "lookup, else draft": {"proposer": "lookup_else_model"},
    "n-grams beside the draft": {"proposer": ["ngram", "draft_model"]},
    "states": {"proposer": "draft_model"},
}
WIDE: dict[str, dict[str, Any]] = {
    "sampled tree": {"proposer": "draft_model", "tree": "sampled", "widths": [3, 2]},
    "topk tree": {"proposer": "draft_model", "tree": "topk", "widths": [3, 2]},
    "dynamic tree": {"proposer": "draft_model", "tree": "dynamic", "nodes": 16},
    "dynamic tree, states": {"proposer": "draft_model", "tree": "dynamic", "nodes": 16},
    "goodput": {"controller": "goodput", "measure_costs_s": 0.5},
}
WAYS: dict[str, dict[str, Any]] = {**CHAINS, **WIDE}


class Case(NamedTuple):
    """A request, the answer that it must get, and whether it is aborted in mid-answer."""

    request: Request
    expected: list[int]
    aborted: bool = False


def main() -> None:
    options = _options()
    target = load_target(TargetConfig(path=options.target, dtype="float32"))
    with tempfile.TemporaryDirectory() as folder:
        options.states = options.states or _untrained(target, Path(folder))
        result = compare(options, target)
    write_result("exactness", result)


def compare(options: argparse.Namespace, target: LanguageModel) -> dict[str, Any]:
    """Run all combinations and count the outputs by circumstance and by way."""
    drafts = {path: load_pretrained(path, target, torch.float32) for path in (options.draft, options.states)}
    prompts = read_prompts(options.prompts, target, options.count)
    expected = [_reference(target, prompt, options.tokens) for prompt in prompts]
    combinations = list(itertools.product(BATCHES, WAYS))
    share = options.share or -(-len(prompts) // len(combinations))
    counts: dict[str, Counter[str]] = {name: Counter() for name in (*CIRCUMSTANCES, *WAYS)}
    events: Counter[str] = Counter()
    started = time.perf_counter()
    for number, (circumstance, (batch, way)) in enumerate(itertools.product(CIRCUMSTANCES, combinations)):
        first = number % len(combinations) * share
        indices = [(first + index) % len(prompts) for index in range(share)]
        chosen_prompts = [prompts[index] for index in indices]
        chosen_answers = [expected[index] for index in indices]
        cases = _cases(circumstance, chosen_prompts, chosen_answers, options.tokens)
        draft = options.states if "states" in way else options.draft
        engine = Engine(target, drafts[draft], _settings(way, LENGTHS[number % len(LENGTHS)], batch))
        swaps = circumstance == "swap" and way != "lookup"
        outputs = _run(engine, cases, batch, circumstance == "preempt", (options.other, draft) if swaps else ())
        engine.check_integrity()
        engine.close()
        for case in cases:
            output = outputs[case.request.id]
            verdict = _compare(target, case, output)
            for name in (circumstance, way):
                counts[name].update({verdict: 1, "outputs": 1, "accepted": output.stats.accepted})
            _count_events(events, circumstance, output)
        print(f"{circumstance}, batch {batch}, {way}: {dict(counts[circumstance])}", flush=True)
    total = sum((counts[name] for name in CIRCUMSTANCES), Counter[str]())
    return {
        "prompts": len(prompts),
        "combinations": len(combinations) * len(CIRCUMSTANCES),
        "tokens_each": options.tokens,
        "outputs": total["outputs"],
        **{name: total[name] for name in ("identical", "tie", "different")},
        "circumstances": {name: counts[name] for name in CIRCUMSTANCES},
        "ways": {name: counts[name] for name in WAYS},
        "events": events,
        "seconds": time.perf_counter() - started,
        "met": total["different"] == 0 and len(events) == 4 and min(events.values()) > 0,
    }


def _settings(way: str, length: int, batch: int) -> EngineSettings:
    levels = 2 + length % 3 if way in WIDE else length
    settings = {"controller": "fixed", "speculation_length": levels, **WAYS[way]}
    return EngineSettings(max_slots=batch, max_model_len=400, **settings)


def _cases(circumstance: str, prompts: list[list[int]], expected: list[list[int]], tokens: int) -> list[Case]:
    cases = []
    for number, (prompt, answer) in enumerate(zip(prompts, expected, strict=True)):
        priority = -number if circumstance == "preempt" else 0
        if circumstance == "abort" and number % 2 == 0:
            cases.append(Case(_request(f"{number} aborted", prompt, tokens), answer, aborted=True))
        cases.append(Case(_request(str(number), prompt, tokens, priority), answer))
        half = len(answer) // 2
        if circumstance == "reuse" and half:
            longer = _request(f"{number} again", [*prompt, *answer[:half]], tokens - half)
            cases.append(Case(longer, answer[half:]))
    return cases


def _request(name: str, prompt: Sequence[int], tokens: int, priority: int = 0) -> Request:
    return Request(name, tuple(prompt), SamplingParams(temperature=0.0, max_tokens=tokens), priority=priority)


def _run(
    engine: Engine, cases: Sequence[Case], batch: int, one_by_one: bool, swapped: Sequence[str]
) -> dict[str, RequestOutput]:
    """Answer the requests, together or one every few steps, while the engine swaps these drafts."""
    waiting = [case.request for case in cases]
    aborted = {case.request.id for case in cases if case.aborted}
    every = max(1, ARRIVE_EVERY // batch) if one_by_one else 0
    drafts: Iterator[str] = itertools.cycle(swapped)
    done: dict[str, RequestOutput] = {}
    step = 0
    while waiting or engine.has_work:
        arriving = int(step % every == 0) if every else len(waiting)
        for request in waiting[:arriving]:
            engine.submit(request)
        del waiting[:arriving]
        step += 1
        if swapped and step % SWAP_EVERY == 0:
            engine.load_draft(next(drafts))
        writing = [sequence.request.id for sequence in engine.sequences.decoding if sequence.request.id in aborted]
        if writing and step % ABORT_EVERY == 0:
            engine.abort(writing[0])
        done.update({output.request_id: output for output in engine.step().finished})
    return done


def _count_events(events: Counter[str], circumstance: str, output: RequestOutput) -> None:
    """Count what each circumstance is made for."""
    events["preemptions"] += output.stats.preemptions
    events["requests drafted for by both drafts"] += len(output.stats.draft_versions) > 1
    events["requests aborted in mid-answer"] += output.finish_reason == "abort" and bool(output.token_ids)
    events["prompt tokens reused"] += output.stats.prefix_tokens if circumstance == "reuse" else 0


def _untrained(target: LanguageModel, folder: Path) -> str:
    """Make a draft that reads states. What it proposes is seldom right, and must not change the output."""
    save_draft(initialise_draft(DraftConfig(kind="eagle"), target), folder / "states", target)
    return str(folder / "states")


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


def _compare(target: LanguageModel, case: Case, output: RequestOutput) -> str:
    """Return how an answer differs. An aborted one must be the start of the expected one."""
    answer = list(output.token_ids)
    expected = case.expected[: len(answer)] if output.finish_reason == "abort" else case.expected
    if expected == answer:
        return "identical"
    pairs = enumerate(itertools.zip_longest(expected, answer))
    index = next(index for index, (expected_id, answer_id) in pairs if expected_id != answer_id)
    best = _exact_logits(target, [*case.request.prompt_ids, *expected[:index]]).topk(2).values
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
    parser.add_argument("--other", required=True, help="the draft that takes turns with the others")
    parser.add_argument("--states", help="a draft that reads states; default: an untrained one")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--share", type=int, help="prompts a combination; default: all prompts in each circumstance")
    parser.add_argument("--tokens", type=int, default=24)
    return parser.parse_args()


if __name__ == "__main__":
    main()
