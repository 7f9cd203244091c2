"""Cost of a weak draft at batch 1, from the first answer of a fresh engine on."""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from collapse import spoil
from sides import answers, generate, greedy, make_engine, rate_of
from turns import Side, interval

from distillspec.config import TargetConfig
from distillspec.models import LanguageModel, load_target
from distillspec.serving import SamplingParams
from distillspec.serving.base.acceptance import AcceptanceCounter
from distillspec.serving.base.fixed import FixedLength
from distillspec.serving.draft_loading import load_draft
from distillspec.types import Prompt

TOKENS = 128  # of an answer
EACH = 4  # answers of an engine
LENGTH = 4  # the most drafted tokens a row
NEAR = 0.02  # that the acceptance may be off
TRIES = 10  # strengths of noise
ASKED, WRITTEN = 16, 64  # prompts that acceptance is measured on, and tokens of their answers
PLAIN, DEFAULT_PLAIN = "none", "default, nothing drafted"
AGAINST = {"fixed-1": PLAIN, "goodput": PLAIN, "default": DEFAULT_PLAIN}
JUDGED = ("goodput", "default")
GOALS = {"mean": 0.98, "low": 0.96}  # tokens a second over none, and the lower end of the interval


def weak(options: argparse.Namespace, target: LanguageModel, prompts: list[Prompt]) -> dict[str, Any]:
    """Lengths by goodput and default proposers with a weak draft, over no speculation, in `options.engines` engines."""
    texts = [prompt.token_ids for prompt in prompts]
    noise, alpha = noise_for(options, target, texts[:ASKED])
    print(f"noise {noise:.3f}: α {alpha:.3f}", flush=True)
    other = load_target(TargetConfig(path=options.target, dtype="auto"))  # an engine changes what it holds
    models = [(model, noisy(options.draft, model, noise)) for model in (target, other)]
    chance = random.Random(options.seed)
    rounds = [_round(options, models, chance.sample(texts, EACH), chance) for _ in range(options.engines)]
    ratios = {name: [_over(rates[name], rates[plain]) for rates in rounds] for name, plain in AGAINST.items()}
    over_none = {
        name: {"all": interval([pair[0] for pair in pairs]), "first": interval([pair[1] for pair in pairs])}
        for name, pairs in ratios.items()
    }
    return {
        "draft": {"noise": noise, "alpha": alpha},
        "tokens": TOKENS,
        "answers_an_engine": EACH,
        "engines": options.engines,
        "rates": rounds,
        "over_none": over_none,
        "goals": GOALS,
        "met": {name: {which: _met(ratio) for which, ratio in over_none[name].items()} for name in JUDGED},
    }


def noise_for(
    options: argparse.Namespace, target: LanguageModel, texts: Sequence[Sequence[int]]
) -> tuple[float, float]:
    """Return the strength of noise with which the draft accepts `options.alpha`, and what it accepts then.

    Raises:
        SystemExit: the sound draft accepts less, or no strength that was tried comes near.
    """
    sound = acceptance(options, target, noisy(options.draft, target, 0.0), texts)
    if sound < options.alpha - NEAR:
        raise SystemExit(f"--alpha {options.alpha}: the draft accepts {sound:.3f} without noise; give a lower one")
    weakest, strongest = 0.0, 1.0
    for _ in range(TRIES):
        noise = (weakest + strongest) / 2
        measured = acceptance(options, target, noisy(options.draft, target, noise), texts)
        if abs(measured - options.alpha) <= NEAR:
            return noise, measured
        weakest, strongest = (noise, strongest) if measured > options.alpha else (weakest, noise)
    raise SystemExit(f"--alpha {options.alpha}: no noise comes near; the last gives {measured:.3f}")


def noisy(path: str, target: LanguageModel, noise: float) -> LanguageModel:
    """Load a draft and add noise to its layers' weights, of so many of their standard deviations."""
    draft = load_draft(path, target)
    spoil(draft, 0, noise)
    return draft


def acceptance(
    options: argparse.Namespace, target: LanguageModel, draft: LanguageModel, texts: Sequence[Sequence[int]]
) -> float:
    """Return the share of first drafted tokens that the target accepts, at the temperature of the options."""
    engine = make_engine(options, target, draft, options.slots, speculation_length=1)
    counter = AcceptanceCounter()
    for answer in answers(engine, texts, _params(options, WRITTEN)):
        counter.merge(answer.stats.acceptance)
    engine.close()
    assert counter.rate is not None
    return counter.rate


def _params(options: argparse.Namespace, tokens: int) -> SamplingParams:
    return SamplingParams(temperature=options.temperature, max_tokens=tokens, ignore_eos=True)


def _round(
    options: argparse.Namespace,
    models: Sequence[tuple[LanguageModel, LanguageModel]],
    texts: Sequence[Sequence[int]],
    chance: random.Random,
) -> dict[str, list[float]]:
    """Return the tokens a second of each answer by side, in two fresh engines. Sides take turns in random order.

    Sides are tenants: n-grams must not know an answer from the side before.
    """
    proposers = ("draft_model", None)
    settings = {"controller": "goodput", "speculation_length": LENGTH}
    alone, default = (
        make_engine(options, *pair, 1, proposer=proposer, **settings)
        for pair, proposer in zip(models, proposers, strict=True)
    )
    sides = {
        PLAIN: Side(alone, FixedLength(0)),
        "fixed-1": Side(alone, FixedLength(1)),
        "goodput": Side(alone, alone.controller),
        DEFAULT_PLAIN: Side(default, FixedLength(0)),
        "default": Side(default, default.controller),
    }
    for name in (PLAIN, DEFAULT_PLAIN):  # the target's passes get warm, and no controller that learns sees it
        sides[name].use()
        generate(sides[name].engine, texts[:1], greedy(16), "warm up")
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for text in texts:
        for name in chance.sample(list(sides), len(sides)):
            rates[name].append(_rate(options, name, sides[name], text))
    alone.close()
    default.close()
    return rates


def _rate(options: argparse.Namespace, tenant: str, side: Side, text: Sequence[int]) -> float:
    side.use()
    return rate_of(lambda: generate(side.engine, [text], _params(options, TOKENS), tenant))


def _over(side_rates: Sequence[float], plain_rates: Sequence[float]) -> tuple[float, float]:
    """Return how many times as fast a side wrote all answers of an engine, and the first one. All are as long."""
    return statistics.harmonic_mean(side_rates) / statistics.harmonic_mean(plain_rates), side_rates[0] / plain_rates[0]


def _met(over_none: Mapping[str, float]) -> bool:
    return all(over_none[name] >= goal for name, goal in GOALS.items())
