"""Profiler: times an engine's passes over a grid of contexts, rows and tokens, for the controller's cost model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import median

import torch

from distillspec.evaluation.bootstrap import median_interval
from distillspec.serving.base.params import SamplingParams
from distillspec.serving.base.requests import Request
from distillspec.serving.base.rows import Option
from distillspec.serving.costs.fitted import Timed, fit
from distillspec.serving.costs.hardware_profile import (
    HostCost,
    ModelKey,
    PassKey,
    Profile,
    ProfiledDraft,
    machine,
    size_of,
)
from distillspec.serving.engine import Engine
from distillspec.serving.timed_passes import TimedPasses, Work

RESAMPLES = 1000  # bootstrap samples of the rounds
HOST_PROMPT, HOST_STEPS = 8, 48  # tokens of a prompt, and of its answer, whose steps show what the host takes


@dataclass(frozen=True)
class Grid:
    """Grid of timed passes: all combinations of contexts, rows and lengths, and prompts of some lengths.

    Attributes:
        contexts: tokens cached in each row.
        rows: rows of a pass.
        lengths: drafted tokens of each row.
        prompts: tokens of each prompt.
        rounds: measurements of each pass.
        held_out: share of each kind's points that the fit does not use.
    """

    contexts: Sequence[int]
    rows: Sequence[int]
    lengths: Sequence[int]
    prompts: Sequence[int]
    rounds: int = 5
    held_out: float = 0.25

    @property
    def longest_text(self) -> int:
        return max(max(self.contexts) + max(self.lengths), max(self.prompts)) + 2


@torch.inference_mode()
def measure(
    engine: Engine,
    grid: Grid,
    *,
    seed: int = 0,
    on_pass: Callable[[int, int], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Profile:
    """Time the grid on an idle engine and fit costs.

    All points take turns, so that a slow minute falls on all of them alike. The first round warms up. A verification
    follows the plain pass over the same rows and contexts, and is compared with it round by round.

    Args:
        engine: with slots and room for the largest point.
        grid: passes to time.
        seed: of the choice of held-out points.
        on_pass: called with (done, total) after each timed pass.
        clock: seconds.
    """
    passes = engine.timed_passes(clock)
    recorded = passes.recorded
    works = [*_verifications(passes, grid), *(passes.prefill(tokens, grid.rounds) for tokens in grid.prompts)]
    drafts = passes.drafts() if engine.proposer is not None else []
    for draft in drafts:
        works += _draft_loops(passes, grid, draft)
    seconds: list[list[float]] = [[] for _ in works]
    passes.warm_up(works)
    total = len(works) * (grid.rounds + 1)
    for done in range(total):
        round_, place = divmod(done, len(works))
        took = passes.seconds(works[place])
        if round_ > 0:
            seconds[place].append(took)
        if on_pass is not None:
            on_pass(done + 1, total)
    generator = torch.Generator().manual_seed(seed)
    points: dict[tuple[str, str], list[Timed]] = {}
    for place, (work, times) in enumerate(zip(works, seconds, strict=True)):
        over_plain = None if work.plain is None else paired_ratio(times, seconds[place - work.plain])
        own = points.setdefault((work.source, work.kind), [])
        own.append(replace(work.point, seconds=median(times), over_plain=over_plain))
    points = {key: _hold_out(found, grid.held_out, generator) for key, found in points.items()}
    return Profile(
        machine(engine.target.device),
        PassKey.of(engine.settings),
        ModelKey.of(engine.target),
        fit([point for (source, _), found in points.items() if not source for point in found], recorded.target),
        {
            draft.source: ProfiledDraft(
                (model := engine.drafts[draft.source]).name,
                size_of(model),
                fit(found, recorded.drafts),
                draft.drafts_block,
            )
            for draft in drafts
            if (found := points.get((draft.source, "drafting")))
        },
        HostCost.through({rows: _host_s(engine, rows) for rows in {1, max(grid.rows)}}),
    )


def _host_s(engine: Engine, rows: int) -> float:
    """Return the seconds of an idle engine's steps outside their passes, the median over steps in which rows decode."""
    params = SamplingParams(max_tokens=max(1, min(HOST_STEPS, engine.max_model_len - HOST_PROMPT)), ignore_eos=True)
    for row in range(rows):
        engine.submit(Request(f"host {rows} {row}", (1,) * HOST_PROMPT, params))
    found = list[float]()
    while engine.has_work:
        result = engine.step().result
        if result is not None and not result.prefill_tokens and len(result.rows) == rows:
            found.append(result.total_s - result.draft_s - result.target_s)
    return median(found) if found else 0.0


def _verifications(passes: TimedPasses, grid: Grid) -> list[Work]:
    """Return verifications, each after the plain pass over the same rows and contexts if the grid has one."""
    lengths = sorted(grid.lengths)
    return [
        passes.verification(rows, length, context, place if place and lengths[0] == 0 else None)
        for context, rows, (place, length) in product(grid.contexts, grid.rows, enumerate(lengths))
    ]


def _draft_loops(passes: TimedPasses, grid: Grid, draft: Option) -> list[Work]:
    lengths = sorted({min(length, draft.limit) for length in grid.lengths if length > 0})
    return [
        passes.drafting(rows, length, context, draft.source)
        for context, rows, length in product(grid.contexts, grid.rows, lengths)
    ]


def paired_ratio(times: Sequence[float], plain: Sequence[float]) -> tuple[float, float, float]:
    """Return the median over rounds of `times / plain`, and its 95 % bootstrap interval."""
    found = median_interval([taken / own for taken, own in zip(times, plain, strict=True)], RESAMPLES, 0)
    return found.mean, found.low, found.high


def _hold_out(points: Sequence[Timed], share: float, generator: torch.Generator) -> list[Timed]:
    """Mark a random share of the points as held out: at least one, and at least one left to fit."""
    held = min(max(1, round(share * len(points))), len(points) - 1)
    chosen = set(torch.randperm(len(points), generator=generator)[:held].tolist())
    return [replace(point, held_out=place in chosen) for place, point in enumerate(points)]
