"""`distill quality`: answers by exact and lossy verification, how good they are, and how fast they were."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import torch
from rich.console import Console
from rich.table import Table

from distillspec.commands.run_folder import close_run, open_run, plain
from distillspec.config import QualityCommand
from distillspec.errors import ConfigError
from distillspec.evaluation.answer_quality import SAMPLES, Answer, Quality, likelihood, quality
from distillspec.evaluation.bootstrap import interval
from distillspec.evaluation.measured import in_turn
from distillspec.evaluation.speedup import FEWEST
from distillspec.files import write_json
from distillspec.models import LanguageModel, load_target
from distillspec.progress import progress
from distillspec.serving.base.params import SamplingParams
from distillspec.serving.commands.bench_prompts import read_prompts
from distillspec.serving.commands.measured_engine import check_no_store, check_speculates, find_named, fitting
from distillspec.serving.draft_loading import load_drafts
from distillspec.serving.engine import Engine
from distillspec.types import Interval, Prompt


@dataclass
class _Side:
    """Answers of one verification, and the speed of each round."""

    engine: Engine
    answers: list[Answer] = field(default_factory=list)
    steps: int = 0
    accepted_by_source: Counter[str] = field(default_factory=Counter)
    rates: list[float] = field(default_factory=list)  # tokens a second


def run(config: QualityCommand, folder: Path) -> None:
    """Write `answers.json` (every answer) and `summary.json`.

    Raises:
        ConfigError: a setting is impossible, a file cannot be read, or the draft is refused.
    """
    torch.manual_seed(config.seed)
    chosen = config.quality
    check_no_store(config.engine)
    paths = find_named(config.engine, config.drafts)
    targets = {name: load_target(config.target) for name in chosen.verifications}  # each engine holds its own models
    target = targets[chosen.verifications[0]]
    read = read_prompts(chosen.prompts, chosen.longest_prompt, target, "quality.prompts")
    sides: dict[str, _Side] = {}
    try:
        for name, side_target in targets.items():
            drafts = load_drafts(paths or config.draft.path, side_target)
            sides[name] = _Side(Engine(side_target, drafts, config.settings(name)))
        check_speculates(sides[chosen.verifications[0]].engine)
        prompts = fitting(read, sides[chosen.verifications[0]].engine, "quality.prompts")[: chosen.count]
        if len(prompts) < chosen.rounds:
            raise ConfigError(f"quality.rounds={chosen.rounds} is above the {len(prompts)} prompts that there are")
        open_run(folder, config)
        _answer(config, sides, prompts)
    finally:
        for side in sides.values():
            side.engine.close()
    write_json(
        folder / "answers.json",
        {name: [{"id": a.prompt.id, "text": a.text} for a in side.answers] for name, side in sides.items()},
    )
    qualities = _judge(config, target, sides)
    first = sides[chosen.verifications[0]]
    faster = {name: _times_faster(side.rates, first.rates, config.seed) for name, side in sides.items()}
    Console().print(_table(sides, qualities, faster, chosen.verifications[0]))
    summary = {
        name: {
            **plain(qualities[name]),
            "tokens_per_s": side.rates,
            "tokens_per_step": qualities[name].tokens / side.steps,
            "accepted_by_source": dict(side.accepted_by_source),
            "times_faster": plain(faster[name]),
        }
        for name, side in sides.items()
    }
    close_run(folder, "quality", {"verifications": summary})


def _answer(config: QualityCommand, sides: dict[str, _Side], prompts: Sequence[Prompt]) -> None:
    """Answer all prompts by all sides, in rounds. The order of the sides changes from round to round."""
    chosen = config.quality
    policy = config.sampling.policy
    done = 0
    params = SamplingParams(policy.temperature, policy.top_p, policy.top_k, policy.min_p, max_tokens=chosen.max_tokens)
    parts = numpy.array_split(numpy.arange(len(prompts)), chosen.rounds)
    with progress("answering") as line:
        for round_, part in enumerate(parts):
            round_prompts = [prompts[i] for i in part]
            for side in in_turn(sides.values(), round_):
                _answer_round(side, round_prompts, params)
                done += len(round_prompts)
                total = len(prompts) * len(sides)
                line.update(done / total, f"{done} of {total} answers")


def _answer_round(side: _Side, prompts: Sequence[Prompt], params: SamplingParams) -> None:
    started = time.perf_counter()
    outputs = side.engine.generate([prompt.token_ids for prompt in prompts], params)
    seconds, tokens = time.perf_counter() - started, sum(len(output.token_ids) for output in outputs)
    side.rates.append(tokens / seconds)
    side.steps += sum(output.stats.steps for output in outputs)
    for output in outputs:
        side.accepted_by_source.update(output.stats.accepted_by_source)
    side.answers += [
        Answer(prompt, output.token_ids, output.text or "") for prompt, output in zip(prompts, outputs, strict=True)
    ]


def _judge(config: QualityCommand, target: LanguageModel, sides: dict[str, _Side]) -> dict[str, Quality]:
    qualities, total, done = {}, sum(len(side.answers) for side in sides.values()), 0
    with progress("judging") as line:
        for name, side in sides.items():
            chance, scores = torch.Generator().manual_seed(config.seed), []
            for answer in side.answers:
                scores.append(likelihood(target, answer, config.sampling.policy, chance))
                done += 1
                line.update(done / total, f"{done} of {total} answers")
            qualities[name] = quality(side.answers, scores, config.seed)
    return qualities


def _times_faster(rates: Sequence[float], first: Sequence[float], seed: int) -> Interval:
    """Return the mean ratio of two sides' rates, with its interval over rounds."""
    ratios = [rate / first_rate for rate, first_rate in zip(rates, first, strict=True)]
    return interval(ratios, [1] * len(ratios), SAMPLES, seed)


def _table(sides: dict[str, _Side], qualities: dict[str, Quality], faster: dict[str, Interval], first: str) -> Table:
    table = Table(title="answers by verification, with 95 % intervals")
    table.add_column("figure")
    for name in qualities:
        table.add_column(name, justify="right")
    figures: dict[str, Callable[[str, Quality], str]] = {
        "answers with the right number": lambda _, judged: "–" if judged.accuracy is None else _shown(judged.accuracy),
        "perplexity under the target": lambda _, judged: f"{judged.perplexity:.2f}",
        "surprise over entropy, nats a token (exact: 0)": lambda _, judged: _shown(judged.surprise_over_entropy),
        "tokens that the filters rule out (exact: rounding)": lambda _, judged: f"{judged.ruled_out:.4f}",
        "tokens that are the target's best": lambda _, judged: _shown(judged.agreement),
        "distance to the target's law (by chance)": lambda _, judged: (
            f"{judged.distance:.3f} ({judged.distance_by_chance:.3f})"
        ),
        "different bigrams": lambda _, judged: f"{judged.distinct:.3f}",
        "tokens a step": lambda name, judged: f"{judged.tokens / sides[name].steps:.2f}",
        "tokens a second": lambda name, _: f"{numpy.median(sides[name].rates):.1f}",
        f"times as fast as {first}": lambda name, _: _faster(faster[name], len(sides[name].rates)),
    }
    for figure, shown in figures.items():
        table.add_row(figure, *(shown(name, judged) for name, judged in qualities.items()))
    return table


def _faster(value: Interval, rounds: int) -> str:
    """Show a ratio, with its interval where there are enough rounds for one."""
    return _shown(value) if rounds >= FEWEST else f"{value.mean:.3f}"


def _shown(value: Interval) -> str:
    return f"{value.mean:.3f} [{value.low:.3f}, {value.high:.3f}]"
