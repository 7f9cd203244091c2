"""Costs measured when an engine starts: a few passes of rising size, within a budget of seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.ladder import Ladder
from distillspec.serving.base.rows import Option
from distillspec.serving.base.tree import DRAFT
from distillspec.serving.base.wrapped import innermost
from distillspec.serving.costs.fitted import Timed, fit
from distillspec.serving.costs.known import TakesCosts
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import KNOTS, CostTable
from distillspec.serving.selection.selecting import selecting
from distillspec.serving.sequences.scheduler import Limits
from distillspec.serving.timed_passes import TimedPasses, Work

log = logging.getLogger(__name__)

CONTEXT, LONG_CONTEXT = 32, 1024  # cached tokens a row, at most
MOST_RUNS = 8  # of a pass
WIDEST = 40  # tokens of the target's passes that are timed for trees
LARGEST_PROMPT, APART = 256, 1.9  # prompt tokens, and the least ratio of two sizes that are timed


@torch.inference_mode()
def measure_at_start(
    passes: TimedPasses,
    limits: Limits,
    speculation_length: int,
    budget_s: float,
    *,
    with_draft: bool,
) -> LatencyModel | None:
    """Time passes of rising size until the budget is spent, and fit cost tables. Larger ones are extrapolated.

    Args:
        passes: of an idle engine.
        limits: its slots and tokens.
        speculation_length: the most tokens a row drafts.
        budget_s: seconds, besides the first pass of each model. A pass that would not fit in them is not started.
        with_draft: the proposer drafts with a model.

    Returns:
        The costs, None where not even two sizes of the target's could be timed, or no draft.
    """
    works = _works(passes, limits, speculation_length, with_draft)
    seconds = _time_in_turn(passes, works, budget_s)
    points: dict[str, list[Timed]] = {}
    for work, times in zip(works, seconds, strict=True):
        own = points.setdefault(work.source, [])
        # The least, since pauses only add. Live steps correct the speed.
        own += [replace(work.point, seconds=max(min(times), 1e-9))] if times else []
    recorded = passes.recorded
    target = _table(points.pop("", []), recorded.target)
    sizes = {source: _sizes([work.point for work in works if work.source == source]) for source in points}
    drafts = {source: _table(own, recorded.drafts, alone=len(sizes[source]) == 1) for source, own in points.items()}
    known = {source: table for source, table in drafts.items() if table is not None}
    if target is None or (with_draft and not known):
        return None
    log.info("costs: %s", ", ".join(f"{tokens:g} tokens {1e3 * s:.1f} ms" for tokens, s in target.knots))
    draft = next(iter(known.values()), None)
    return LatencyModel(target, draft, members={} if DRAFT in known else known)


def takes_costs(controller: LengthController) -> bool:
    """Return True for a controller that predicts times, or selects among drafts."""
    return isinstance(innermost(controller), TakesCosts) or selecting(controller) is not None


def give_costs(controller: LengthController, costs: LatencyModel) -> None:
    """Let a controller go on from known costs, if it takes any."""
    own, chooses = innermost(controller), selecting(controller)
    if isinstance(own, TakesCosts):
        own.use_costs(costs)
    if chooses is not None:
        chooses.costs = costs


def _works(passes: TimedPasses, limits: Limits, speculation_length: int, with_draft: bool) -> list[Work]:
    """Return the works, small passes first. Whole batches are timed without drafts and with long contexts too."""
    room = limits.max_len - speculation_length - 1
    slots = max(1, min(limits.slots, limits.cache_tokens // (speculation_length + 2)))
    room_each = max(1, limits.cache_tokens // slots - speculation_length - 1)
    context, far = min(CONTEXT, room, room_each), min(LONG_CONTEXT, room, room_each)
    nodes = max(speculation_length, limits.lookahead + limits.extra)
    places = slots * (min(limits.max_len, limits.cache_tokens // slots) - context)
    most = max(slots * (speculation_length + 1), min(slots * (nodes + 1), WIDEST, places))
    sizes = [n for n in KNOTS if n < most] + [most]
    rows = {n: min(slots, -(-n // (speculation_length + 1))) for n in sizes}
    windows = {(r, round(n / r) - 1, context) for n, r in rows.items()}
    windows |= {(r, 0, context) for r in sizes if r <= slots}
    windows |= {(slots, 0, context), (slots, 0, far), (1, 0, far)}
    works = [passes.verification(*window) for window in sorted(windows)]
    longest_prompt = min(room, limits.prefill_chunk, LARGEST_PROMPT)
    prompt = float(most)
    for n in KNOTS:
        if APART * prompt <= n <= longest_prompt:
            works.append(passes.prefill(n, MOST_RUNS))
            prompt = n
    if with_draft and speculation_length:
        for draft in passes.drafts():
            works += _draft_loops(passes, draft, slots, speculation_length, context, far)
    return sorted(works, key=lambda work: work.point.tokens)


def _draft_loops(
    passes: TimedPasses, draft: Option, slots: int, speculation_length: int, context: int, far: int
) -> list[Work]:
    """Return a draft's loops: whole ones of rising rows, or of blocks whose positions add up to rising numbers.

    A loop's first pass reads text and takes longer than the others: loops of one token show by how much.
    """
    longest = min(speculation_length, draft.limit)
    if draft.drafts_block:
        loops = {(rows := -(-n // longest), round(n / rows), context) for n in KNOTS if n < slots * longest}
    else:
        loops = {(n, longest, context) for n in KNOTS if n < slots} | {(1, 1, context), (slots, 1, context)}
    loops |= {(slots, longest, context), (slots, longest, far)}
    return [passes.drafting(*loop, draft.source) for loop in sorted(loops)]


def _time_in_turn(passes: TimedPasses, works: Sequence[Work], budget_s: float) -> list[list[float]]:
    """Return the times of each work. All are run once as far as the budget goes, then that with the least time so far.

    So what is decided by, small passes, is timed most often: the machine's pauses are seconds apart.
    """
    clock: Callable[[], float] = time.perf_counter
    seconds: list[list[float]] = [[] for _ in works]
    passes.warm_up(works)
    until = clock() + budget_s
    a_token: dict[str, float] = {}  # seconds, of the last pass of each model
    for work, times in zip(works, seconds, strict=True):
        if clock() + work.point.tokens * a_token.get(work.source, 0.0) <= until:
            times.append(passes.seconds(work))
            a_token[work.source] = times[-1] / work.point.tokens
    while True:
        left = until - clock()
        again = [place for place, own in enumerate(seconds) if own and len(own) < MOST_RUNS and max(own) <= left]
        if not again:
            return seconds
        place = min(again, key=lambda place: sum(seconds[place]))
        seconds[place].append(passes.seconds(works[place]))


def _table(points: Sequence[Timed], recorded: Ladder, *, alone: bool = False) -> CostTable | None:
    """Fit the points. `alone`: no other size occurs (drafts of a single slot), so any may cost as much."""
    if alone:
        points = [*points, *(replace(point, tokens=point.tokens + point.passes) for point in points)]
    return fit(points, recorded).cost if len(_sizes(points)) > 1 else None


def _sizes(points: Sequence[Timed]) -> set[float]:
    """Return the numbers of tokens a pass."""
    return {point.tokens / point.passes for point in points}
