"""Proposers, and rules that end a draft, against the draft alone: engines with goodput, by turns on the same prompts.

    python benchmarks/proposers.py --prompts math.jsonl --draft RUN/draft --sides staged-suffix staged-ngram ngram
    python benchmarks/proposers.py --prompts math.jsonl --draft RUN/draft --sides threshold stop-probs stop-state \\
        --probs runs/train-stop/A --state runs/train-stop/B

Ratios are tokens a second over those of the draft by itself, with 95 % intervals over rounds (Student's). `staged`
needs a draft that reads tokens alone, `stop-…` what `distill train-stop` wrote. Writes `results/NAME.json`.
"""

from __future__ import annotations

from typing import Any

from common import write_result
from sides import make_engine, read_prompts
from turns import ALIKE, NO_DRAFT, TOKENS, Side, by_turns, interval, ratios, shown, turn_options

from distillspec.commands.unseen import trained_prompts
from distillspec.config import TargetConfig
from distillspec.models import load_target
from distillspec.serving.draft_loading import load_draft

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
    options = turn_options(__doc__ or "", (1,), sides=list(SETTINGS)[2:3], probs="", state="", name="proposers")
    if unknown := [name for name in options.sides if name not in SETTINGS]:
        raise SystemExit(f"--sides {unknown[0]} is not known; use some of {', '.join(SETTINGS)}")
    names, most = [NO_DRAFT, ALONE, *options.sides], max(options.batches)
    sides = {name: Side(_engine(options, name, most)) for name in names}
    draft = sides[ALONE].engine.draft
    assert draft is not None
    count = options.rounds * max(ALIKE, most)
    prompts = read_prompts(options.prompts, sides[ALONE].engine.target, count, without=trained_prompts(draft.lineage))
    found = {}
    for batch in options.batches:
        rates = by_turns(sides, options, prompts, batch)
        found[str(batch)] = own = {
            **shown(rates),
            "over_draft": {name: interval(ratios(rates, name, ALONE)) for name in names if name != ALONE},
        }
        print(batch, own, flush=True)
    setting = {"draft": draft.kind, "temperature": options.temperature, "tokens": TOKENS, "threshold": THRESHOLD}
    write_result(options.name, {**setting, "dtype": str(sides[ALONE].engine.target.dtype), "batches": found})


def _engine(options: Any, name: str, batch: int) -> Any:
    target = load_target(TargetConfig(path=options.target, dtype=options.dtype))
    path = {"stop-probs": options.probs, "stop-state": options.state}.get(name, options.draft)
    if not path:
        raise SystemExit(f"{name} needs a draft that distill train-stop has taught: --probs or --state")
    settings = {"controller": "goodput", "tree": "off", **SETTINGS[name]}
    draft = None if name in (NO_DRAFT, "ngram", "suffix", "recycling") else load_draft(path, target)
    return make_engine(options, target, draft, batch, **settings)


if __name__ == "__main__":
    main()
