"""Controllers that take turns on the same running requests, so that a machine whose speed wanders is the same for all.

A round answers `batch` prompts that the draft was not trained on. The sides take turns of eight steps, in random order.
They are controllers of one engine, and an engine without a draft beside it. That engine continues the text of the first
one, since a step takes longer with a longer context. The first step of a turn does not count: a draft may have to read
what it missed.

Some benchmarks compare with the best of several sides. It is chosen in the first half of the rounds, in which all sides
take turns. The second half has other prompts and few sides, which write more tokens each (`Bench.halves`).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from scipy.stats import t as student
from sides import generate, greedy, make_engine, read_prompts

from distillspec.config import EngineConfig, TargetConfig
from distillspec.data.trained_prompts import trained_prompts
from distillspec.models import LanguageModel, load_target
from distillspec.serving import Engine, SamplingParams
from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.requests import Request
from distillspec.serving.baselines.tree_names import tree_settings
from distillspec.serving.draft_loading import load_draft
from distillspec.serving.proposers.by_name import use_trees

TOKENS = 256  # of an answer
TURN = 8  # steps of a side at a time
ALIKE = 4  # prompts: smaller batches have so many more rounds that they answer as many, since one answer tells little
NO_DRAFT = "no draft"


class Side(NamedTuple):
    """An engine, and the side's controller where sides share the engine.

    trees: settings that say how drafts grow trees, None: the engine's.
    """

    engine: Engine
    controller: LengthController | None = None
    trees: EngineConfig | None = None

    def use(self) -> None:
        """Let the engine's next steps be this side's."""
        if self.controller is not None:
            self.engine.use_controller(self.controller)
            use_trees(self.engine.proposer, self.trees or self.engine.settings)


@dataclass(frozen=True)
class Bench:
    """Two engines with as many slots as the largest batch, and prompts that the draft was not trained on.

    Args:
        engine: with the draft.
        plain: without one.
    """

    options: argparse.Namespace
    engine: Engine
    plain: Engine
    prompts: list[list[int]]
    setting: dict[str, Any]  # of the result

    @classmethod
    def prepare(cls, options: argparse.Namespace, speculation_length: int, **settings: Any) -> Bench:
        """Load target and draft as `turn_options` name them. `settings` are those of the engine with the draft."""
        target, plain_target = (load_target(TargetConfig(path=options.target, dtype=options.dtype)) for _ in range(2))
        draft = load_draft(options.draft, target)
        largest = max(options.batches)
        prompts = _unseen(options, options.prompts, target, draft)
        setting = {
            "dtype": str(target.dtype),
            "threads": torch.get_num_threads(),
            "draft": draft.kind,
            "tokens": TOKENS,
            "steps_a_turn": TURN,
            "temperature": options.temperature,
            "rounds": options.rounds,
        }
        engine = make_engine(options, target, draft, largest, speculation_length=speculation_length, **settings)
        plain = make_engine(options, plain_target, None, largest, prefix_reuse=True)  # it reads texts again and again
        return cls(options, engine, plain, prompts, setting)

    def asking(self, prompts: str) -> Bench:
        """Return the same engines with the prompts of another file."""
        assert self.engine.draft is not None
        return replace(self, prompts=_unseen(self.options, prompts, self.engine.target, self.engine.draft))

    def halves(self, batch: int) -> tuple[list[list[int]], list[list[int]]]:
        """Return the prompts of the rounds that choose, and of those that compare."""
        count = self.options.rounds * max(1, ALIKE // batch) // 2 * batch
        return self.prompts[:count], self.prompts[count : 2 * count]

    def rates(
        self, controllers: Mapping[str, LengthController], batch: int, prompts: Sequence[Sequence[int]]
    ) -> dict[str, list[float]]:
        """Return the tokens a second of each controller by round, and of `plain` as "no draft".

        Args:
            controllers: by names of policies, which may say how trees are grown.
        """
        named = {name: tree_settings(name, self.engine.settings) for name in controllers}
        sides = {name: Side(self.engine, controller, named[name]) for name, controller in controllers.items()}
        return self.rates_of({NO_DRAFT: Side(self.plain), **sides}, batch, prompts)

    def rates_of(
        self, sides: Mapping[str, Side], batch: int, prompts: Sequence[Sequence[int]] | None = None
    ) -> dict[str, list[float]]:
        """Return the tokens a second of each side by round. `prompts`: those of all rounds by default."""
        every = [text for half in self.halves(batch) for text in half]
        return by_turns(sides, every if prompts is None else prompts, self.options.temperature, batch)


def by_turns(
    sides: Mapping[str, Side], prompts: Sequence[Sequence[int]], temperature: float, batch: int
) -> dict[str, list[float]]:
    """Return the tokens a second of each side by round. Rounds have `batch` prompts each, the same for all sides."""
    params = SamplingParams(temperature=temperature, max_tokens=TOKENS, ignore_eos=True)
    engines = list({id(side.engine): side.engine for side in sides.values()}.values())
    leader = next(side.engine for side in sides.values() if side.controller is not None)
    rates: dict[str, list[float]] = {name: [] for name in sides}
    chance = random.Random(0)
    for side in sides.values():  # warm up
        side.use()
        generate(side.engine, prompts[:batch], greedy(16 if side.controller else 32))
    for first in range(0, len(prompts), batch):
        for engine in engines:
            _begin(engine, prompts[first : first + batch], params)
        spent: dict[str, list[tuple[int, float]]] = {name: [] for name in sides}
        while len(leader.sequences.decoding) == batch:
            for name in chance.sample(list(sides), len(sides)):
                sides[name].use()
                if sides[name].engine is not leader:
                    _follow(sides[name].engine, leader, params)
                spent[name] += _steps(sides[name].engine, batch)
        for engine in engines:
            _end(engine)
        for name, steps in spent.items():
            tokens, seconds = map(sum, zip(*steps, strict=True))
            rates[name].append(tokens / seconds)
    return rates


def turn_options(about: str, batches: Sequence[int], **more: Any) -> argparse.Namespace:
    """Read the command line of a benchmark by turns. `more`: further options, with their defaults."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batches", type=int, nargs="+", default=list(batches))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--compile", action="store_true", help="compile passes first")
    for name, default in more.items():
        kind: dict[str, Any] = {"nargs": "+"} if isinstance(default, list) else {"type": type(default)}
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, **kind)
    options = parser.parse_args()
    if options.rounds < 4:
        parser.error(f"--rounds {options.rounds}: two choose and two compare, so at least 4")
    return options


def shown(rates: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return medians and all rounds, for a result."""
    return {
        "tokens_per_s": {name: statistics.median(side_rates) for name, side_rates in rates.items()},
        "rounds": {name: [round(rate, 2) for rate in side_rates] for name, side_rates in rates.items()},
    }


def interval(values: list[float]) -> dict[str, float]:
    """Return mean, median and the 95 % interval of the mean (Student's)."""
    mean = statistics.fmean(values)
    half = float(student.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    return {"mean": mean, "low": mean - half, "high": mean + half, "median": statistics.median(values)}


def _unseen(options: argparse.Namespace, prompts: str, target: LanguageModel, draft: LanguageModel) -> list[list[int]]:
    """Return as many prompts of a file as all rounds have, none that the draft was trained on."""
    count = options.rounds * max(ALIKE, *options.batches)
    return read_prompts(prompts, target, count, without=trained_prompts(draft.lineage))


def _begin(engine: Engine, texts: Sequence[Sequence[int]], params: SamplingParams) -> None:
    """Submit the prompts and read them."""
    for row, text in enumerate(texts):
        engine.submit(Request(str(row), tuple(text), params))
    while len(engine.sequences.decoding) < len(texts):
        engine.step()


def _follow(engine: Engine, leader: Engine, params: SamplingParams) -> None:
    """Let an engine continue the texts of another one. It has read most of them before."""
    texts = [list(sequence.tokens) for sequence in leader.sequences.decoding]
    _end(engine)
    _begin(engine, texts, params)


def _steps(engine: Engine, batch: int) -> list[tuple[int, float]]:
    """Return tokens and seconds of the next steps in which all rows decode, without the first."""
    steps = []
    for _ in range(TURN):
        if len(engine.sequences.decoding) < batch:
            break
        started = time.perf_counter()
        output = engine.step()
        steps.append((sum(len(delta.token_ids) for delta in output.deltas), time.perf_counter() - started))
    return steps[1:]


def _end(engine: Engine) -> None:
    """Leave what is unfinished."""
    for name in list(engine.sequences.unfinished):
        engine.abort(name.split("/")[0])
    while engine.has_work:
        engine.step()
