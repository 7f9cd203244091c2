"""Live: the same prompts of several domains under each selection by turns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from distillspec.files import write_json
from distillspec.provenance import provenance
from distillspec.recipes.rates import best_on_odd
from distillspec.recipes.spin.ablation import BASE, part_sides
from distillspec.recipes.spin.answers import Asked
from distillspec.recipes.spin.kept import PROVENANCE, SETTINGS
from distillspec.recipes.spin.recorded import recorded_regret
from distillspec.recipes.spin.regret import Regret
from distillspec.recipes.spin.rounds import run_rounds
from distillspec.recipes.spin.sides import COMPARED, LOOKUP, NONE, OURS, Engines, Side, all_sides, choices
from distillspec.recipes.unseen import unseen_prompts
from distillspec.serving import Engine, SamplingParams
from distillspec.serving.draft_loading import draft_names

LONGEST = 900  # tokens of a prompt
BATCHES, ALONE, ABLATION, REGRET = "batches", "alone", "parts", "regret"  # in the JSON


@dataclass(frozen=True)
class Live:
    """Settings of the live part.

    Attributes:
        files: prompts, one file a domain.
        drafts: folders. `lookup_else_model` uses the first where nothing is found.
        batches: slots of the engines.
        rounds: each asks `each` prompts of every domain of every side.
        alone: rounds of each domain alone, at batches above 1. With one slot every prompt is answered alone.
        tokens: of an answer.
        selections: to compare with, among the drafts alone.
        parts: whether SPIN's parts are compared, at the largest batch.
        recorded: prompts of every domain whose greedy answers are recorded with each draft, for regret.
    """

    target: str
    files: Sequence[Path]
    drafts: Sequence[str]
    batches: Sequence[int] = (1, 4)
    rounds: int = 6
    each: int = 4
    alone: int = 6
    tokens: int = 96
    temperature: float = 0.0
    selections: Sequence[str] = COMPARED
    parts: bool = False
    recorded: int = 0
    regret: Regret = field(default_factory=Regret)

    def run(self, file: Path) -> dict[str, Any]:
        """Return tokens a second of each side by batch and round, idle shares, and what goodput chose.

        With them are SPIN's parts, and regret on recorded answers, where these are asked for.

        Args:
            file: takes each of these when it is known.
        """
        batches, most = dict[str, Any](), max(self.batches)
        found = {SETTINGS: self._settings(), PROVENANCE: provenance([], 0), BATCHES: batches}
        for batch in self.batches:
            batches[str(batch)] = self._batch(batch)
            write_json(file, found)
        if self.parts:
            found[ABLATION] = self._parts(most, batches[str(most)]["tokens_per_s"])
            write_json(file, found)
        if self.recorded:
            found[REGRET] = self._regret(most)
            write_json(file, found)
        return found

    def _batch(self, batch: int) -> dict[str, Any]:
        with ExitStack() as opened:
            sides = all_sides(Engines(self.target, batch, opened), self.drafts, self.selections)
            asked = self._asked(sides[NONE].engine)
            mixed = run_rounds(f"batch {batch}", sides, self._mixed(asked), self._params)
            found = {**mixed.figures(), "chose": {name: choices(sides[name].controller) for name in OURS}}
            if batch > 1 and self.alone:
                found[ALONE] = self._alone(batch, sides, asked)
        return found

    def _alone(self, batch: int, sides: dict[str, Side], asked: dict[str, list[Asked]]) -> dict[str, Any]:
        """Return tokens a second by domain, side and round, where nothing else is asked at the same time."""
        compared = {name: sides[name] for name in (NONE, *draft_names(self.drafts), *OURS, LOOKUP)}
        first, count = self.rounds * self.each, max(self.each, batch)
        found = {}
        for domain, own in asked.items():
            rounds = [own[place : place + count] for place in range(first, first + self.alone * count, count)]
            found[domain] = run_rounds(f"batch {batch}, {domain} alone", compared, rounds, self._params).whole
        return found

    def _parts(self, batch: int, rates: dict[str, list[float]]) -> dict[str, Any]:
        """Return tokens a second with each of SPIN's parts, on the prompts of the mixed rounds.

        Args:
            rates: of all sides at this batch.
        """
        best = best_on_odd(rates, draft_names(self.drafts))
        with ExitStack() as opened:
            sides = part_sides(Engines(self.target, batch, opened), self.drafts, best)
            rounds = self._mixed(self._asked(sides[BASE].engine))
            found = run_rounds(f"batch {batch}, SPIN's parts", sides, rounds, self._params)
        return {"batch": batch, "best_draft": best, **found.figures()}

    def _regret(self, batch: int) -> dict[str, Any]:
        with ExitStack() as opened:
            engine = Engines(self.target, batch, opened).open(self.drafts, proposer="draft_model")
            prompts = zip(*self._asked(engine).values(), strict=True)
            asked = [one for alike in islice(prompts, self.recorded) for one in alike]  # of all domains in turn
            return recorded_regret(engine, asked, self.tokens, self.regret)

    def _asked(self, engine: Engine) -> dict[str, list[Asked]]:
        """Return prompts of each file that no draft was trained on, by domain: for mixed rounds, then for others.

        They are as many as any batch needs, so that a file with too few is refused before anything is answered.
        """
        drafts, most = list(engine.drafts.values()), max(self.batches)
        alone = self.alone * max(self.each, most) if most > 1 else 0
        count = max(self.rounds * self.each + alone, self.recorded)
        prompts = {file.stem: unseen_prompts(file, engine.target, drafts, count, LONGEST) for file in self.files}
        return {
            domain: [Asked(domain, ids, place * len(prompts) + number) for place, ids in enumerate(own)]
            for number, (domain, own) in enumerate(prompts.items())
        }

    def _mixed(self, asked: dict[str, list[Asked]]) -> list[list[Asked]]:
        """Return the prompts of each round, of all domains in turn."""
        rounds = [range(round_ * self.each, (round_ + 1) * self.each) for round_ in range(self.rounds)]
        return [[own[place] for place in places for own in asked.values()] for places in rounds]

    @property
    def _params(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, max_tokens=self.tokens)

    def _settings(self) -> dict[str, Any]:
        """Return what the figures hang on, without the paths of files."""
        plain = ("batches", "rounds", "each", "alone", "tokens", "temperature", "selections", "parts", "recorded")
        return {
            "target": Path(self.target).name,
            "drafts": draft_names(self.drafts),
            "domains": [file.stem for file in self.files],
            **{name: getattr(self, name) for name in plain},
        }
