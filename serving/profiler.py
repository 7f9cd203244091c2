"""Times an engine's own passes over a grid of contexts, rows and tokens, for the length controller's cost model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import count, product
from statistics import median

import numpy
import torch

from distillspec.serving.control.profile import ModelKey, PassKey, Profile, Timed, experts_of, fit, machine
from distillspec.serving.engine import Engine
from distillspec.serving.params import SamplingParams
from distillspec.serving.proposers.base import ProposalRequest
from distillspec.serving.requests import Request, Sequence
from distillspec.serving.runner import RowInput
from distillspec.serving.sampling import Window
from distillspec.serving.tree import TokenTree

TOKEN = 5  # what is read does not matter
RESAMPLES = 1000  # of the rounds


@dataclass(frozen=True)
class Grid:
    """Which passes are timed: every combination of contexts, rows and lengths, and prompts of some lengths.

    `held_out` of each kind's points are kept from the fit.
    """

    contexts: Seq[int]
    rows: Seq[int]
    lengths: Seq[int]
    prompts: Seq[int]
    rounds: int = 5
    held_out: float = 0.25

    @property
    def longest_text(self) -> int:
        return max(max(self.contexts) + max(self.lengths), max(self.prompts)) + 2


@dataclass(frozen=True)
class Work:
    """One thing to time."""

    kind: str
    point: Timed  # without its seconds
    run: Callable[[], object]
    plain: int | None = None  # how many works before this one its plain pass is; None: there is none


@torch.inference_mode()
def measure(
    engine: Engine,
    grid: Grid,
    *,
    seed: int = 0,
    on_pass: Callable[[int, int], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Profile:
    """Time the grid on an idle engine and fit costs; the engine must have slots and room for the largest point.

    All points take turns, so that a slow minute falls on all of them alike; the first round warms up. A
    verification follows the plain pass over the same rows and contexts, and is compared with it round by round.

    Args:
        on_pass: told (done, total) after each timed pass.
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
        over_plain = None if work.plain is None else _ratio(times, seconds[place - work.plain])
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
    """The target over newest and drafted tokens, up to the verdicts, as in a step."""
    core, found = engine.core, []
    lengths = sorted(grid.lengths)
    for context, rows, (place, length) in product(grid.contexts, grid.rows, enumerate(lengths)):
        sequences = _sequences(rows, context)
        tree = TokenTree.chain([TOKEN] * length)
        windows = [Window(sequence, tree) for sequence in sequences]
        inputs = [RowInput(s.held_slot, context - 1, [TOKEN] * (1 + length), 1 + length, tree) for s in sequences]

        def run(inputs: list[RowInput] = inputs, windows: list[Window] = windows) -> object:
            logits = core.target.full_width(core.runner.logits(core.runner.read(inputs)))
            return core.sampler.verify(logits, windows)

        point = Timed(rows * context, rows * (1 + length), 1, 0.0)
        found.append(Work("verification", point, run, place if place and lengths[0] == 0 else None))
    return found


def _prefills(engine: Engine, grid: Grid) -> list[Work]:
    """The target over prompts from their first token on.

    Every pass is one token shorter than the one before, as real prompts have no length twice: what libraries remember
    of a shape does not help.
    """
    core, found = engine.core, []
    for longest in grid.prompts:
        lengths = count(longest, -1)

        def run(lengths: Iterator[int] = lengths) -> object:
            inputs = [RowInput(0, 0, [TOKEN] * max(1, next(lengths)))]
            return core.runner.logits(core.runner.read_uneven(inputs)).argmax(-1).tolist()

        tokens = max(1.0, longest - (grid.rounds + 1) / 2)  # of the rounds that count, in the mean
        found.append(Work("prefill", Timed(0, tokens, 1, 0.0), run))
    return found


def _draftings(engine: Engine, grid: Grid) -> list[Work]:
    """The draft's whole loops, one pass a depth, for greedy requests."""
    proposer, found = engine.core.proposer, []
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


def _sequences(rows: int, context: int) -> list[Sequence]:
    """Greedy requests with `context` tokens of text, in the first slots."""
    request = Request("profile", (TOKEN,) * context, SamplingParams(temperature=0.0))
    return [
        Sequence(f"profile/{slot}", request, slot, slot, [TOKEN] * context, frozenset(), 1 << 20, slot=slot)
        for slot in range(rows)
    ]


def _timed(run: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    """Seconds of a call that ends with a look at its result."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = clock()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - started


def _ratio(times: Seq[float], plain: Seq[float]) -> tuple[float, float, float]:
    """Median over rounds of `times / plain`, and its 95 % interval by resampling rounds."""
    ratios = numpy.array(times) / numpy.array(plain)
    drawn = numpy.random.default_rng(0).choice(ratios, (RESAMPLES, len(ratios)))
    low, high = numpy.quantile(numpy.median(drawn, axis=1), (0.025, 0.975))
    return float(numpy.median(ratios)), float(low), float(high)


def _hold_out(points: Seq[Timed], share: float, generator: torch.Generator) -> list[Timed]:
    """Mark a share of the points at random; at least one, and never so many that nothing is left to fit."""
    held = min(max(1, round(share * len(points))), len(points) - 1)
    chosen = set(torch.randperm(len(points), generator=generator)[:held].tolist())
    return [replace(point, held_out=place in chosen) for place, point in enumerate(points)]
