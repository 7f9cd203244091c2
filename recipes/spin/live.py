"""Live: the same prompts of several domains under each selection by turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from distillspec.config import TargetConfig
from distillspec.config.registry import SELECTIONS
from distillspec.evaluation.turns import in_turn
from distillspec.models import load_target
from distillspec.progress import progress
from distillspec.recipes.spin.idle import Idle
from distillspec.recipes.unseen import unseen_prompts
from distillspec.serving import Engine, EngineSettings, Request, SamplingParams
from distillspec.serving.base.controllers import LengthController
from distillspec.serving.baselines.named import named_controller
from distillspec.serving.draft_loading import draft_names, evaluated, load_drafts
from distillspec.serving.selection.named import compared_selection
from distillspec.serving.selection.selecting import selecting

NONE = "none"  # no speculation
NGRAM = "ngram"  # the source without a model that stands beside drafts
BESIDE = "+ngram"  # after the name of a draft, or of goodput, that it stands beside
GOODPUT = "goodput"  # among the drafts alone
LOOKUP = "lookup_else_model"
COMPARED = tuple(name for name in SELECTIONS if name not in ("fixed", GOODPUT, LOOKUP))
LONGEST = 900  # tokens of a prompt


class Asked(NamedTuple):
    """A prompt and its domain."""

    domain: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Side:
    """A controller and the engine that it plans for."""

    engine: Engine
    controller: LengthController


@dataclass(frozen=True)
class Live:
    """Settings of the live part.

    Attributes:
        files: prompts, one file a domain.
        drafts: folders. `lookup_else_model` uses the first where nothing is found.
        batches: slots of the engines.
        rounds: each asks `each` prompts of every domain of every side.
        tokens: of an answer.
        selections: to compare with, among the drafts alone.
    """

    target: str
    files: Sequence[Path]
    drafts: Sequence[str]
    batches: Sequence[int] = (1, 4)
    rounds: int = 6
    each: int = 4
    tokens: int = 96
    temperature: float = 0.0
    selections: Sequence[str] = COMPARED

    def run(self) -> dict[str, Any]:
        """Return tokens a second of each side by batch and round, idle shares, and what goodput chose."""
        return {str(batch): self._batch(batch) for batch in self.batches}

    def _batch(self, batch: int) -> dict[str, Any]:
        with ExitStack() as opened:
            sides = self._sides(batch, opened)
            engine = sides[NONE].engine
            asked = self._asked(engine, self.rounds * self.each)
            rates: dict[str, list[float]] = {name: [] for name in sides}
            by_domain: dict[str, dict[str, list[float]]] = {name: {} for name in sides}
            idle = {name: Idle() for name in sides}
            line = opened.enter_context(progress(f"batch {batch}"))
            for round_ in range(self.rounds):
                parts = [part[round_ * self.each : (round_ + 1) * self.each] for part in asked.values()]
                own = [one for alike in zip(*parts, strict=True) for one in alike]  # of all domains in turn
                for place, name in enumerate(in_turn(sides, round_)):
                    line.update((round_ + place / len(sides)) / self.rounds, name)
                    spent = self._answer(name, sides[name], own, batch, round_, idle[name])
                    rates[name].append(sum(n for n, _ in spent.values()) / sum(s for _, s in spent.values()))
                    for domain, (tokens, seconds) in spent.items():
                        by_domain[name].setdefault(domain, []).append(tokens / seconds)
            chosen = {name: _figures(sides[name].controller) for name in (GOODPUT, f"{GOODPUT}{BESIDE}")}
        return {
            "tokens_per_s": rates,
            "by_domain": {
                name: {domain: statistics.median(found) for domain, found in own.items()}
                for name, own in by_domain.items()
            },
            "idle": {name: own.shares() for name, own in idle.items()},
            "chose": chosen,
        }

    def _asked(self, engine: Engine, count: int) -> dict[str, list[Asked]]:
        """Return `count` prompts of each file that no draft was trained on, by domain."""
        drafts = list(engine.drafts.values())
        prompts = {file.stem: unseen_prompts(file, engine.target, drafts, count, LONGEST) for file in self.files}
        return {domain: [Asked(domain, ids) for ids in own] for domain, own in prompts.items()}

    def _sides(self, batch: int, opened: ExitStack) -> dict[str, Side]:
        """Return all sides by name. Sides with the same sources share an engine."""
        names = draft_names(self.drafts)
        alone, beside, looking, ngram = (
            self._engine(batch, opened, proposer, self.drafts if proposer != NGRAM else ())
            for proposer in ("draft_model", [NGRAM, "draft_model"], LOOKUP, NGRAM)
        )
        return {
            NONE: Side(alone, named_controller(NONE, alone.settings.speculation_length, alone.costs)),
            **{name: _side(alone, name) for name in names},
            **{f"{name}{BESIDE}": _side(beside, name) for name in names},
            NGRAM: Side(ngram, _inside(ngram)),
            GOODPUT: _side(alone, GOODPUT),
            f"{GOODPUT}{BESIDE}": _side(beside, GOODPUT),
            LOOKUP: _side(looking, LOOKUP),
            **{name: _side(alone, name) for name in self.selections},
        }

    def _engine(self, batch: int, opened: ExitStack, proposer: str | list[str], drafts: Sequence[str]) -> Engine:
        target = load_target(TargetConfig(path=self.target))
        settings = EngineSettings(
            max_slots=batch, max_model_len=1024, prefix_reuse=False, compile=False, proposer=proposer
        )
        engine = Engine(target, load_drafts(list(drafts), target) if drafts else None, settings)
        opened.callback(engine.close)
        return engine

    def _answer(
        self, name: str, side: Side, asked: Sequence[Asked], batch: int, round_: int, idle: Idle
    ) -> dict[str, tuple[int, float]]:
        """Answer prompts, alone one by one, else together. Return tokens and seconds by domain, or of "all".

        Each prompt has a seed, so that the same text is written whatever drafts. A side is a tenant of its own, so that
        its n-grams know its own answers alone. How far their chances are believed is learnt from all sides together.
        """
        engine = side.engine
        engine.use_controller(side.controller)
        engine.forget_prompts()
        seeded = [(round_ * len(asked) + place, one) for place, one in enumerate(asked)]
        groups = [[pair] for pair in seeded] if batch == 1 else [seeded]
        found: dict[str, tuple[int, float]] = {}
        for group in groups:
            started = time.perf_counter()
            for seed, one in group:
                params = SamplingParams(temperature=self.temperature, max_tokens=self.tokens, seed=seed)
                engine.submit(Request(str(seed), one.ids, params, tenant=name, domain=one.domain))
            written = _written(engine, idle)
            key = group[0][1].domain if batch == 1 else "all"
            tokens, seconds = found.get(key, (0, 0.0))
            tokens += written
            found[key] = tokens, seconds + time.perf_counter() - started
        return found


def _written(engine: Engine, idle: Idle) -> int:
    """Step until all requests are answered. Return their tokens."""
    tokens = 0
    while engine.has_work:
        output = engine.step()
        idle.add(output.result)
        tokens += sum(len(done.token_ids) for done in output.finished)
    return tokens


def _inside(engine: Engine) -> LengthController:
    return named_controller(GOODPUT, engine.settings.speculation_length, engine.costs)


def _side(engine: Engine, name: str) -> Side:
    """Return a side with a selection, or with a draft for every request."""
    known = evaluated(engine.drafts)
    drafts = list(engine.drafts)
    return Side(engine, compared_selection(_inside(engine), name, drafts, {}, expected=known, costs=engine.costs))


def _figures(controller: LengthController) -> dict[str, Any]:
    """Return what a selection has chosen, the tokens of its trials, and what it estimates that choices have cost."""
    chosen = selecting(controller)
    assert chosen is not None
    figures = {name: dict(getattr(chosen.figures, name)) for name in ("requests", "tokens", "switches")}
    losses = chosen.figures.losses
    return {**figures, "explored": chosen.figures.explored, "lost": losses.trials, "regret": losses.regret}
