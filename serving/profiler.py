"""Profiler: times an engine's passes over a grid of contexts, rows and tokens, for the controller's cost model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, product
from statistics import median

import numpy
import torch

from distillspec.serving.base.params import SamplingParams
from distillspec.serving.base.requests import Request, SequenceState
from distillspec.serving.base.tree import TokenTree
from distillspec.serving.control.hardware_profile import ModelKey, PassKey, Profile, Timed, experts_of, fit, machine
from distillspec.serving.decoding.sampling import VerificationWindow
from distillspec.serving.engine import Engine
from distillspec.serving.execution.flat_batch import RowInput
from distillspec.serving.proposers.base import ProposalRequest

TOKEN = 5  # any token costs the same
RESAMPLES = 1000  # bootstrap samples of the rounds


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


@dataclass(frozen=True)
class Work:
    """One pass to time."""

    kind: str
    point: Timed  # without its seconds
    run: Callable[[], object]
    plain: int | None = None  # its plain pass is this many works earlier, None without one


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
    works = [*_verifications(engine, grid), *_prefills(engine, grid), *_draftings(engine, grid)]
    seconds: list[list[float]] = [[] for _ in works]
    total = len(works) * (grid.rounds + 1)
    for done in range(total):
        round_, place = divmod(done, len(works))
        took = _timed(works[place].run, engine.target.device, clock)
        if round_ > 0:
            seconds[place].append(took)
        if on_pass is not None:
            on_pass(done + 1, total)
    generator = torch.Generator().manual_seed(seed)
    points: dict[str, list[Timed]] = {}
    for place, (work, times) in enumerate(zip(works, seconds, strict=True)):
        over_plain = None if work.plain is None else paired_ratio(times, seconds[place - work.plain])
        points.setdefault(work.kind, []).append(replace(work.point, seconds=median(times), over_plain=over_plain))
    points = {kind: _hold_out(found, grid.held_out, generator) for kind, found in points.items()}
    drafting = fit(points["drafting"]) if "drafting" in points else None
    return Profile(
        machine(engine.target.device),
        PassKey.of(engine.settings),
        ModelKey.of(engine.target),
        fit(points["verification"], *experts_of(engine.target), may_bump=True),
        fit(points["prefill"]),
        None if engine.draft is None else ModelKey.of(engine.draft),
        drafting,
    )


def _verifications(engine: Engine, grid: Grid) -> list[Work]:
    """Return passes of the target over newest and drafted tokens, up to the verdicts, as in a step."""
    found: list[Work] = []
    lengths = sorted(grid.lengths)
    for context, rows, (place, length) in product(grid.contexts, grid.rows, enumerate(lengths)):
        sequences = _sequences(rows, context)
        tree = TokenTree.chain([TOKEN] * length)
        windows = [VerificationWindow(sequence, tree) for sequence in sequences]
        inputs = [RowInput(s.held_slot, context - 1, [TOKEN] * (1 + length), 1 + length, tree) for s in sequences]

        def run(inputs: list[RowInput] = inputs, windows: list[VerificationWindow] = windows) -> object:
            logits = engine.target.full_width(engine.runner.logits(engine.runner.read(inputs)))
            return engine.sampler.verify(logits, windows)

        point = Timed(rows * context, rows * (1 + length), 1, 0.0)
        found.append(Work("verification", point, run, place if place and lengths[0] == 0 else None))
    return found


def _prefills(engine: Engine, grid: Grid) -> list[Work]:
    """Return passes of the target over whole prompts.

    Every pass is one token shorter than the one before: real prompts rarely repeat a length, so that libraries' caches
    by shape do not help.
    """
    found = []
    for longest in grid.prompts:
        lengths = count(longest, -1)

        def run(lengths: Iterator[int] = lengths) -> object:
            inputs = [RowInput(0, 0, [TOKEN] * max(1, next(lengths)))]
            return engine.runner.logits(engine.runner.read(inputs)).argmax(-1).tolist()

        tokens = max(1.0, longest - (grid.rounds + 1) / 2)  # mean over the rounds that count
        found.append(Work("prefill", Timed(0, tokens, 1, 0.0), run))
    return found


def _draftings(engine: Engine, grid: Grid) -> list[Work]:
    """Return whole draft loops, one pass a depth, for greedy requests."""
    proposer, found = engine.proposer, []
    if engine.draft is None or proposer is None:
        return []
    for context, rows, length in product(grid.contexts, grid.rows, sorted({k for k in grid.lengths if k > 0})):
        requests = [ProposalRequest(sequence, length) for sequence in _sequences(rows, context)]

        def run(requests: list[ProposalRequest] = requests, context: int = context) -> object:
            for request in requests:
                request.sequence.draft_computed = context - 1
            return proposer.propose(requests)

        point = Timed(rows * context * length, rows * length, length, 0.0)
        found.append(Work("drafting", point, run))
    return found


def _sequences(rows: int, context: int) -> list[SequenceState]:
    """Return greedy sequences with `context` tokens of text, in the first slots."""
    request = Request("profile", (TOKEN,) * context, SamplingParams(temperature=0.0))
    return [
        SequenceState(f"profile/{slot}", request, slot, slot, [TOKEN] * context, frozenset(), 1 << 20, slot=slot)
        for slot in range(rows)
    ]


def _timed(run: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    """Return the seconds of a call, synchronised with the device before and after."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = clock()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - started


def paired_ratio(times: Sequence[float], plain: Sequence[float]) -> tuple[float, float, float]:
    """Return the median over rounds of `times / plain`, and its 95 % bootstrap interval."""
    ratios = numpy.array(times) / numpy.array(plain)
    drawn = numpy.random.default_rng(0).choice(ratios, (RESAMPLES, len(ratios)))
    low, high = numpy.quantile(numpy.median(drawn, axis=1), (0.025, 0.975))
    return float(numpy.median(ratios)), float(low), float(high)


def _hold_out(points: Sequence[Timed], share: float, generator: torch.Generator) -> list[Timed]:
    """Mark a random share of the points as held out: at least one, and at least one left to fit."""
    held = min(max(1, round(share * len(points))), len(points) - 1)
    chosen = set(torch.randperm(len(points), generator=generator)[:held].tolist())
    return [replace(point, held_out=place in chosen) for place, point in enumerate(points)]
