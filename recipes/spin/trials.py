"""Cost of finding out which draft is best, over a long stream: estimated by the selection, and measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from distillspec.recipes.rates import interval
from distillspec.recipes.spin.runs import rate, simulation
from distillspec.serving.selection.goodput import GoodputSelection
from distillspec.serving.selection.losses import share_lost
from distillspec.serving.selection.selecting import SelectingController, selecting
from distillspec.serving.simulation import Hardware, SimulatedRequest, Simulation, SimulationResult

LEARNT = "learnt"  # the selection that has learnt from these requests already, and tries nothing any more
PIECES, A_ROW = 10, 4  # of the stream, whose ratios have an interval; answers of a row that a piece has at least


def cost_of_trials(machine: Hardware, requests: Sequence[SimulatedRequest], policy: str, best: str) -> dict[str, Any]:
    """Return shares of the tokens that trials wrote and cost, and tokens a second beside selections that know.

    Two selections know: the same selection once more, which has learnt from these requests and has stopped its trials,
    and the best single draft from the start. The tokens that the first of them writes more are the cost of trials. An
    oracle that takes each request's best draft is no bound where several rows share a step.

    Args:
        requests: as many as keep all rows busy.
        best: the best single draft.
    """
    first = simulation(machine, requests, policy, "goodput")
    result = first.run()
    controller = _selecting(first)
    pieces = max(1, min(PIECES, len(requests) // (A_ROW * machine.slots)))
    assert isinstance(controller.selection, GoodputSelection), "the policy is goodput"
    knowing = {
        LEARNT: _with_learnt(machine, requests, policy, controller.selection),
        best: simulation(machine, requests, policy, best),
    }
    over = {name: {**_compared(result, other.run(), pieces), **_tried(other)} for name, other in knowing.items()}
    return {
        "requests": len(requests),
        **_tried(first),
        "tokens_per_s": rate(result),
        "best_draft": best,
        "over": over,
    }


def piece_rates(result: SimulationResult, pieces: int) -> list[float]:
    """Return the tokens a second of pieces of a run, each until as many requests have ended."""
    pairs = zip(result.requests, result.stats, strict=True)
    ends = [(stats.finished_s or 0.0, request.output_tokens) for request, stats in pairs]
    ends.sort()
    count = len(ends)
    rates = list[float]()
    start_s = 0.0
    for piece in range(pieces):
        ended = ends[count * piece // pieces : count * (piece + 1) // pieces]
        rates.append(sum(tokens for _, tokens in ended) / (ended[-1][0] - start_s))
        start_s = ended[-1][0]
    return rates


def _compared(result: SimulationResult, other: SimulationResult, pieces: int) -> dict[str, Any]:
    """Return a run's tokens a second over another's, as a whole and by pieces."""
    rates = zip(piece_rates(result, pieces), piece_rates(other, pieces), strict=True)
    by_piece = [ours / theirs for ours, theirs in rates]
    return {
        "tokens_per_s": rate(other),
        "ratio": rate(result) / rate(other),
        "interval": interval(by_piece),
        "by_piece": by_piece,
    }


def _tried(run: Simulation) -> dict[str, float | None]:
    """Return the share of the tokens that trials wrote, and of tokens a second that they cost, None: not estimated."""
    figures, tokens = _selecting(run).figures, sum(request.output_tokens for request in run.requests)
    lost = figures.losses.trials
    return {"explored": figures.explored / tokens, "lost": None if lost is None else share_lost(lost, tokens)}


def _with_learnt(
    machine: Hardware, requests: Sequence[SimulatedRequest], policy: str, selection: GoodputSelection
) -> Simulation:
    """Return a simulation whose lengths are learnt anew, and whose selection goes on without trials."""
    selection.tries = False
    again = [replace(request, id=f"again-{request.id}") for request in requests]
    run = simulation(machine, again, policy, "goodput")
    _selecting(run).selection = selection
    return run


def _selecting(run: Simulation) -> SelectingController:
    chosen = selecting(run.policy.controller)
    assert chosen is not None, "the policy selects"
    return chosen
