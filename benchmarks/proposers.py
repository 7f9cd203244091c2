"""Proposers, and rules that end a draft, against the draft alone: engines with goodput, by turns on the same prompts.

A round has four prompts at least. Each engine answers them whole, in random order, for some sources learn from answers.

    python benchmarks/proposers.py --prompts math.jsonl --draft RUN/draft --sides staged-suffix staged-ngram ngram
    python benchmarks/proposers.py --prompts math.jsonl --draft RUN/draft --sides threshold stop-probs stop-state \\
        --probs runs/train-stop/A --state runs/train-stop/B

Ratios are tokens a second over those of the draft by itself, with 95 % intervals over rounds (Student's). `staged`
needs a draft that reads tokens alone, `stop-…` what `distill train-stop` wrote. With `--ends natural` answers end where
the target ends them. Of sides with a draft its passes are counted, those that read text included: a staged draft is to
take fewer for as many drafted tokens. Writes `results/NAME.json`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from common import write_result
from sides import NEW_TOKENS, answers, generate, greedy, make_engine, read_prompts
from turns import ALIKE, NO_DRAFT, interval, shown, turn_options

from distillspec.config import TargetConfig
from distillspec.data.trained_prompts import trained_prompts
from distillspec.models import load_target
from distillspec.recipes.rates import ratios
from distillspec.serving import Engine, SamplingParams
from distillspec.serving.draft_loading import load_draft
from distillspec.serving.proposers.by_name import draft_models

ALONE = "draft"
THRESHOLD = 0.3  # of what is gated: below, verification and drafting cost more than they bring
SETTINGS: dict[str, dict[str, Any]] = {
    NO_DRAFT: {"proposer": "none"},
    ALONE: {},
    "threshold": {"draft_confidence": THRESHOLD},
    "stop-probs": {"draft_confidence": THRESHOLD},
    "stop-state": {"draft_confidence": THRESHOLD},
    **{
        f"staged-{helper}": {"proposer": "staged", "proposer_options": {"helper": helper}}
        for helper in ("suffix", "ngram", "recycling", "prompt_lookup")
    },
    **{name: {"proposer": name} for name in ("ngram", "suffix", "recycling")},
    "ngram-and-draft": {"proposer": ["ngram", "draft_model"]},
    "recycling-and-draft": {"proposer": ["recycling", "draft_model"]},
}


def main() -> None:
    options = turn_options(
        __doc__ or "", (1,), sides=list(SETTINGS)[2:3], probs="", state="", name="proposers", ends="at-limit"
    )
    if unknown := [name for name in options.sides if name not in SETTINGS]:
        raise SystemExit(f"--sides {unknown[0]} is not known; use some of {', '.join(SETTINGS)}")
    names = [NO_DRAFT, ALONE, *options.sides]
    largest = max(options.batches)
    engines = {name: _engine(options, name, largest) for name in names}
    draft = engines[ALONE].draft
    assert draft is not None
    count = options.rounds * max(ALIKE, largest)
    prompts = read_prompts(options.prompts, engines[ALONE].target, count, without=trained_prompts(draft.lineage))
    params = SamplingParams(
        temperature=options.temperature, max_tokens=NEW_TOKENS, ignore_eos=options.ends != "natural"
    )
    by_batch = {}
    for batch in options.batches:
        rounds = _rounds(engines, prompts[: options.rounds * max(ALIKE, batch)], batch, params)
        rates = {name: [round_.rate for round_ in side_rounds] for name, side_rounds in rounds.items()}
        by_batch[str(batch)] = figures = {
            **shown(rates),
            "over_draft": {name: interval(ratios(rates, name, ALONE)) for name in names if name != ALONE},
            "draft_passes": passes_of(
                {name: side_rounds for name, side_rounds in rounds.items() if draft_models(engines[name].proposer)}
            ),
        }
        print(batch, figures, flush=True)
    setting = {
        "draft": draft.kind,
        "temperature": options.temperature,
        "tokens": NEW_TOKENS,
        "threshold": THRESHOLD,
        "ends": options.ends,
    }
    write_result(options.name, {**setting, "dtype": str(engines[ALONE].target.dtype), "batches": by_batch})


class Round(NamedTuple):
    """The answers of an engine to the prompts of a round."""

    answers: int
    tokens: int
    seconds: float
    passes: int  # of the draft
    drafted: int  # tokens, of all sources

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def _rounds(
    engines: Mapping[str, Engine], prompts: Sequence[Sequence[int]], batch: int, params: SamplingParams
) -> dict[str, list[Round]]:
    """Return the rounds of each engine, without the one that warms up.

    Batches are tenants: n-grams must not know the answers that an earlier batch has written.
    """
    chance = random.Random(0)
    prompts_a_round = max(ALIKE, batch)
    tenant = f"batch {batch}"
    rounds: dict[str, list[Round]] = {name: [] for name in engines}
    for engine in engines.values():
        generate(engine, prompts[:batch], greedy(32))
    for start in range(0, len(prompts), prompts_a_round):
        groups = [prompts[first : first + batch] for first in range(start, start + prompts_a_round, batch)]
        for name in chance.sample(list(engines), len(engines)):
            rounds[name].append(answered(engines[name], groups, params, tenant))
    return rounds


def answered(
    engine: Engine, groups: Sequence[Sequence[Sequence[int]]], params: SamplingParams, tenant: str = "default"
) -> Round:
    """Answer one group of prompts after another, for a tenant."""
    before, started = _draft_passes(engine), time.perf_counter()
    outputs = [output for group in groups for output in answers(engine, group, params, tenant)]
    seconds = time.perf_counter() - started
    tokens = sum(len(output.token_ids) for output in outputs)
    drafted = sum(output.stats.proposed for output in outputs)
    return Round(len(outputs), tokens, seconds, _draft_passes(engine) - before, drafted)


def _draft_passes(engine: Engine) -> int:
    return sum(draft.runner.passes for draft in draft_models(engine.proposer))


def passes_of(rounds: Mapping[str, Sequence[Round]]) -> dict[str, Any]:
    """Return the passes that the draft of each side took an answer, and the tokens drafted and written a pass.

    `saved`: the share of passes a drafted token that a side saves, against the draft by itself.
    """
    totals = {name: Round(*map(sum, zip(*side_rounds, strict=True))) for name, side_rounds in rounds.items()}
    passes_a_token = {name: total.passes / total.drafted if total.drafted else 0.0 for name, total in totals.items()}
    return {
        name: {
            "passes_an_answer": total.passes / total.answers,
            "drafted_a_pass": total.drafted / total.passes if total.passes else 0.0,
            "written_a_pass": total.tokens / total.passes if total.passes else 0.0,
            "saved": 1 - passes_a_token[name] / passes_a_token[ALONE] if passes_a_token[ALONE] else 0.0,
        }
        for name, total in totals.items()
    }


def _engine(options: Any, name: str, batch: int) -> Any:
    target = load_target(TargetConfig(path=options.target, dtype=options.dtype))
    path = {"stop-probs": options.probs, "stop-state": options.state}.get(name, options.draft)
    if not path:
        raise SystemExit(f"{name} needs a draft that distill train-stop has taught: --probs or --state")
    settings = {"controller": "goodput", **SETTINGS[name]}
    draft = None if name in (NO_DRAFT, "ngram", "suffix", "recycling") else load_draft(path, target)
    return make_engine(options, target, draft, batch, **settings)


if __name__ == "__main__":
    main()
