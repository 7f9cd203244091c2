"""Live: the same prompts of several domains under each selection by turns, on one engine with all drafts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from distillspec.commands.unseen import trained_prompts
from distillspec.config import DataConfig, TargetConfig
from distillspec.config.registry import SELECTIONS
from distillspec.data.chat import render_prompt
from distillspec.data.prompts import prompt_key, read_rows
from distillspec.errors import ConfigError
from distillspec.evaluation.turns import in_turn
from distillspec.models import LanguageModel, load_target
from distillspec.progress import progress
from distillspec.serving import Engine, EngineSettings, Request, SamplingParams
from distillspec.serving.base.controllers import LengthController
from distillspec.serving.baselines.named import named_controller
from distillspec.serving.draft_loading import evaluated, load_drafts
from distillspec.serving.selection.named import compared_selection
from distillspec.serving.selection.selecting import selecting

NONE = "none"  # no speculation
LONGEST = 512  # tokens of a prompt


class Asked(NamedTuple):
    """A prompt and its domain."""

    domain: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Live:
    """Settings of the live part.

    Attributes:
        files: prompts, one file a domain.
        drafts: folders.
        batches: slots of the engines.
        rounds: each asks `each` prompts of every domain under every selection.
        tokens: of an answer.
    """

    target: str
    files: Sequence[Path]
    drafts: Sequence[str]
    batches: Sequence[int] = (1, 4)
    rounds: int = 6
    each: int = 4
    tokens: int = 96
    temperature: float = 0.0

    def run(self) -> dict[str, Any]:
        """Return tokens a second of each selection by batch and round, and what goodput chose."""
        return {str(batch): self._batch(batch) for batch in self.batches}

    def _batch(self, batch: int) -> dict[str, Any]:
        target = load_target(TargetConfig(path=self.target))
        drafts = load_drafts(list(self.drafts), target)
        assert isinstance(drafts, dict)
        seen = frozenset().union(*(trained_prompts(draft.lineage) for draft in drafts.values()))
        engine = Engine(
            target, drafts, EngineSettings(max_slots=batch, max_model_len=1024, prefix_reuse=False, compile=False)
        )
        sides = _sides(engine)
        asked = _prompts(self.files, target, self.rounds * self.each, seen)
        rates: dict[str, list[float]] = {name: [] for name in sides}
        by_domain: dict[str, dict[str, list[float]]] = {name: {} for name in sides}
        with progress(f"batch {batch}") as line:
            for round_ in range(self.rounds):
                parts = [part[round_ * self.each : (round_ + 1) * self.each] for part in asked.values()]
                own = [one for alike in zip(*parts, strict=True) for one in alike]  # of all domains in turn
                for place, name in enumerate(in_turn(sides, round_)):
                    line.update((round_ + place / len(sides)) / self.rounds, name)
                    engine.use_controller(sides[name])
                    spent = self._answer(engine, own, batch, round_)
                    rates[name].append(sum(n for n, _ in spent.values()) / sum(s for _, s in spent.values()))
                    for domain, (tokens, seconds) in spent.items():
                        by_domain[name].setdefault(domain, []).append(tokens / seconds)
        chosen = selecting(sides["goodput"])
        assert chosen is not None
        figures = {name: dict(getattr(chosen.figures, name)) for name in ("requests", "tokens", "switches")}
        lost = {"explored": chosen.figures.explored, "lost": chosen.figures.lost}
        engine.close()
        return {
            "tokens_per_s": rates,
            "by_domain": {
                name: {domain: statistics.median(found) for domain, found in own.items()}
                for name, own in by_domain.items()
            },
            "goodput_chose": {**figures, **lost},
        }

    def _answer(self, engine: Engine, asked: Sequence[Asked], batch: int, round_: int) -> dict[str, tuple[int, float]]:
        """Answer prompts, alone one by one, else together. Return tokens and seconds by domain, or of "all".

        Each prompt has a seed, so that the same text is written whatever drafts.
        """
        engine.forget_prompts()
        seeded = [(round_ * len(asked) + place, one) for place, one in enumerate(asked)]
        groups = [[pair] for pair in seeded] if batch == 1 else [seeded]
        found: dict[str, tuple[int, float]] = {}
        for group in groups:
            started = time.perf_counter()
            names = []
            for seed, one in group:
                params = SamplingParams(temperature=self.temperature, max_tokens=self.tokens, seed=seed)
                names.append(f"{seed}-{time.perf_counter_ns()}")
                engine.submit(Request(names[-1], one.ids, params, domain=one.domain))
            done = engine.run_until_done(names)
            key = group[0][1].domain if batch == 1 else "all"
            tokens, seconds = found.get(key, (0, 0.0))
            tokens += sum(len(output.token_ids) for output in done.values())
            found[key] = tokens, seconds + time.perf_counter() - started
        return found


def _sides(engine: Engine) -> dict[str, LengthController]:
    """Return a controller for no speculation, for each selection, and for each draft alone."""
    names, most = list(engine.drafts), engine.settings.speculation_length
    sides: dict[str, LengthController] = {NONE: named_controller(NONE, most, engine.costs)}
    for name in [*names, *(name for name in SELECTIONS if name not in ("fixed", "lookup_else_model"))]:
        inside = named_controller("goodput", most, engine.costs)
        known = evaluated(engine.drafts)
        sides[name] = compared_selection(inside, name, names, {}, expected=known, costs=engine.costs)
    return sides


def _prompts(files: Sequence[Path], target: LanguageModel, count: int, seen: Collection[str]) -> dict[str, list[Asked]]:
    """Return `count` prompts of each file that no draft was trained on, by domain.

    Raises:
        ConfigError: a file has fewer.
    """
    found: dict[str, list[Asked]] = {}
    for file in files:
        rows = read_rows(DataConfig(prompts=str(file)))
        texts = (render_prompt(target.text_tokenizer, row["prompt"]) for row in rows)
        fit = (ids for ids in texts if len(ids) <= LONGEST and prompt_key(ids) not in seen)
        found[file.stem] = [Asked(file.stem, ids) for ids in islice(fit, count)]
        if len(found[file.stem]) < count:
            raise ConfigError(f"{file} has {len(found[file.stem])} short prompts that no draft has seen, not {count}")
    return found


def ratios(rates: Mapping[str, Sequence[float]], name: str, other: str) -> list[float]:
    """Return a side's rate over another's, by round."""
    return [a / b for a, b in zip(rates[name], rates[other], strict=True)]
