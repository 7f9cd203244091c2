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
from distillspec.recipes.spin.answers import SeededPrompt
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
        rounds: in each of them every side answers `each` prompts of every domain.
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

        SPIN's parts, and regret on recorded answers, are there if the settings name them.

        Args:
            file: written anew whenever more figures are known.
        """
        batches = dict[str, Any]()
        largest = max(self.batches)
        figures = {SETTINGS: self._settings(), PROVENANCE: provenance([], 0), BATCHES: batches}
        for batch in self.batches:
            batches[str(batch)] = self._batch(batch)
            write_json(file, figures)
        if self.parts:
            figures[ABLATION] = self._parts(largest, batches[str(largest)]["tokens_per_s"])
            write_json(file, figures)
        if self.recorded:
            figures[REGRET] = self._regret(largest)
            write_json(file, figures)
        return figures

    def _batch(self, batch: int) -> dict[str, Any]:
        with ExitStack() as opened:
            sides = all_sides(Engines(self.target, batch, opened), self.drafts, self.selections)
            prompts = self._prompts(sides[NONE].engine)
            mixed = run_rounds(f"batch {batch}", sides, self._mixed(prompts), self._params)
            figures = {**mixed.figures(), "chose": {name: choices(sides[name].controller) for name in OURS}}
            if batch > 1 and self.alone:
                figures[ALONE] = self._alone(batch, sides, prompts)
        return figures

    def _alone(self, batch: int, sides: dict[str, Side], prompts: dict[str, list[SeededPrompt]]) -> dict[str, Any]:
        """Return tokens a second by domain, side and round, in rounds of one domain alone."""
        compared = {name: sides[name] for name in (NONE, *draft_names(self.drafts), *OURS, LOOKUP)}
        first, count = self.rounds * self.each, max(self.each, batch)
        rates = {}
        for domain, domain_prompts in prompts.items():
            rounds = [
                domain_prompts[start : start + count] for start in range(first, first + self.alone * count, count)
            ]
            rates[domain] = run_rounds(f"batch {batch}, {domain} alone", compared, rounds, self._params).whole
        return rates

    def _parts(self, batch: int, rates: dict[str, list[float]]) -> dict[str, Any]:
        """Return tokens a second with each of SPIN's parts, on the prompts of the mixed rounds.

        Args:
            rates: of all sides at this batch.
        """
        best = best_on_odd(rates, draft_names(self.drafts))
        with ExitStack() as opened:
            sides = part_sides(Engines(self.target, batch, opened), self.drafts, best)
            rounds = self._mixed(self._prompts(sides[BASE].engine))
            measured = run_rounds(f"batch {batch}, SPIN's parts", sides, rounds, self._params)
        return {"batch": batch, "best_draft": best, **measured.figures()}

    def _regret(self, batch: int) -> dict[str, Any]:
        with ExitStack() as opened:
            engine = Engines(self.target, batch, opened).open(self.drafts, proposer="draft_model")
            groups = zip(*self._prompts(engine).values(), strict=True)
            prompts = [prompt for group in islice(groups, self.recorded) for prompt in group]  # of all domains in turn
            return recorded_regret(engine, prompts, self.tokens, self.regret)

    def _prompts(self, engine: Engine) -> dict[str, list[SeededPrompt]]:
        """Return prompts of each file that no draft was trained on, by domain: for mixed rounds, then for others.

        They are as many as any batch needs, so that a file with too few is refused before anything is answered.
        """
        drafts, most = list(engine.drafts.values()), max(self.batches)
        alone = self.alone * max(self.each, most) if most > 1 else 0
        count = max(self.rounds * self.each + alone, self.recorded)
        prompts = {file.stem: unseen_prompts(file, engine.target, drafts, count, LONGEST) for file in self.files}
        return {
            domain: [
                SeededPrompt(domain, ids, seed=index * len(prompts) + domain_index)
                for index, ids in enumerate(token_ids)
            ]
            for domain_index, (domain, token_ids) in enumerate(prompts.items())
        }

    def _mixed(self, prompts: dict[str, list[SeededPrompt]]) -> list[list[SeededPrompt]]:
        """Return the prompts of each round, of all domains in turn."""
        rounds = [range(round_ * self.each, (round_ + 1) * self.each) for round_ in range(self.rounds)]
        return [
            [domain_prompts[index] for index in indices for domain_prompts in prompts.values()] for indices in rounds
        ]

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
