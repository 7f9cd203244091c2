"""Cells of the fidelity benchmark: one policy at one load, live and simulated, its figures and its picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from distillspec.files import write_png
from distillspec.serving.base.plans import StepResult
from distillspec.serving.bench.records import RequestRecord


@dataclass(frozen=True)
class LiveRun:
    """One policy at one load in one round, live."""

    policy: str
    rate: float
    requests: tuple[RequestRecord, ...]  # in order of arrival
    trials: dict[str, dict[int, int]]
    steps: Sequence[StepResult]
    others: float | None  # cores that other processes kept busy meanwhile

    @property
    def latencies_s(self) -> list[float]:
        return [request.latency_s for request in self.requests]


@dataclass(frozen=True)
class SimulatedRun:
    """The same in the simulator."""

    latencies_s: list[float]
    steps: Sequence[StepResult]


@dataclass(frozen=True)
class Cell:
    """One policy at one load both ways, round by round."""

    live: Sequence[LiveRun]
    simulated: Sequence[SimulatedRun]

    @property
    def policy(self) -> str:
        return self.live[0].policy

    @property
    def rate(self) -> float:
        return self.live[0].rate

    @property
    def live_s(self) -> list[float]:
        """Every request's median latency over the rounds, in order of arrival."""
        return _medians([run.latencies_s for run in self.live])

    @property
    def simulated_s(self) -> list[float]:
        return _medians([run.latencies_s for run in self.simulated])

    @property
    def ratio(self) -> float:
        """Simulated mean latency over the live one."""
        return float(numpy.mean(self.simulated_s) / numpy.mean(self.live_s))

    @property
    def rounds(self) -> list[float]:
        """The ratio of every round by itself."""
        both = zip(self.simulated, self.live, strict=True)
        return [float(numpy.mean(simulated.latencies_s) / numpy.mean(live.latencies_s)) for simulated, live in both]


def _medians(rounds: Sequence[Sequence[float]]) -> list[float]:
    medians: list[float] = numpy.median(numpy.array(rounds), 0).tolist()
    return medians


def figures_of(cell: Cell) -> dict[str, Any]:
    """Return latencies of both sides, their ratio, and the times of the steps' parts."""
    live_s, simulated_s = cell.live_s, cell.simulated_s
    return {
        "policy": cell.policy,
        "rate": round(cell.rate, 3),
        "others_cores": [run.others for run in cell.live],
        "requests": len(live_s),
        "live_mean_latency_s": float(numpy.mean(live_s)),
        "simulated_mean_latency_s": float(numpy.mean(simulated_s)),
        "ratio": cell.ratio,
        "ratio_by_round": cell.rounds,
        "correlation": float(numpy.corrcoef(live_s, simulated_s)[0, 1]) if len(live_s) > 1 else None,
        "live": _parts([step for run in cell.live for step in run.steps]),
        "simulated": _parts([step for run in cell.simulated for step in run.steps]),
    }


def step_time_errors(cells: Sequence[Cell]) -> dict[str, dict[str, float]]:
    """Return the median relative error of whole steps' times by load, and over all loads.

    Returns:
        `live`: of the controllers' predictions for each decoding step, if any of them predicts. `simulated`: of a
        simulated step's mean time against the live one's, by policy and kind of step.
    """
    errors: dict[str, dict[str, list[float]]] = {"live": {}, "simulated": {}}
    for cell in cells:
        rate = f"{cell.rate:.3f}"
        errors["live"].setdefault(rate, []).extend(_mispredicted(cell))
        errors["simulated"].setdefault(rate, []).extend(_simulated_wrongly(cell))
    for by_rate in errors.values():
        by_rate["all"] = [error for of_rate in by_rate.values() for error in of_rate]
    return {
        side: {rate: float(numpy.median(of_rate)) for rate, of_rate in by_rate.items()}
        for side, by_rate in errors.items()
        if all(by_rate.values())
    }


def _mispredicted(cell: Cell) -> list[float]:
    """Return the relative errors of predicted steps. Steps that read prompts are not predicted."""
    steps = [step for run in cell.live for step in run.steps if not step.prefill_tokens]
    return [abs(step.plan.predicted_s / step.total_s - 1) for step in steps if step.plan.predicted_s is not None]


def _simulated_wrongly(cell: Cell) -> list[float]:
    """Return the relative errors of the mean times of steps, by kind, of those that both sides took."""
    live = _parts([step for run in cell.live for step in run.steps])
    simulated = _parts([step for run in cell.simulated for step in run.steps])
    kinds = [kind for kind in live if kind in simulated and kind != "tokens"]
    return [abs(_step_ms(simulated[kind]) / _step_ms(live[kind]) - 1) for kind in kinds]


def _step_ms(parts: Mapping[str, float]) -> float:
    return parts["draft_ms"] + parts["target_ms"] + parts["rest_ms"]


def _parts(results: Sequence[StepResult]) -> dict[str, Any]:
    """Return milliseconds a step of each part, by kind of step."""
    kinds: Mapping[str, Callable[[StepResult], bool]] = {
        "plain": lambda step: not step.prefill_tokens and not any(row.nodes for row in step.rows),
        "speculating": lambda step: not step.prefill_tokens and any(row.nodes for row in step.rows),
        "with prompts": lambda step: step.prefill_tokens > 0,
    }
    rows = [row for result in results for row in result.rows]
    tokens = {name: sum(getattr(row, name) for row in rows) for name in ("nodes", "accepted", "emitted")}
    parts: dict[str, Any] = {"tokens": tokens}
    for kind, is_kind in kinds.items():
        steps = [result for result in results if is_kind(result)]
        if steps:
            times_s = [(step.draft_s, step.target_s, step.total_s - step.draft_s - step.target_s) for step in steps]
            draft, target, host = (1e3 * numpy.mean(times_s, 0)).round(2).tolist()
            parts[kind] = {
                "steps": len(steps),
                "rows": round(float(numpy.mean([len(step.view.rows) for step in steps])), 2),
                "draft_ms": draft,
                "target_ms": target,
                "rest_ms": host,
            }
    return parts


def draw(cells: Sequence[Cell], path: Path) -> None:
    """Mean latency by rate, live and simulated, and every request of both."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    means, requests = figure.subplots(1, 2)
    for index, policy in enumerate(dict.fromkeys(cell.policy for cell in cells)):
        of_policy, colour = [cell for cell in cells if cell.policy == policy], f"C{index}"
        rates = [cell.rate for cell in of_policy]
        means.plot(
            rates, [numpy.mean(cell.live_s) for cell in of_policy], color=colour, marker="o", label=f"{policy}, live"
        )
        means.plot(
            rates, [numpy.mean(cell.simulated_s) for cell in of_policy], color=colour, marker="x", linestyle="--"
        )
        requests.scatter(
            [latency_s for cell in of_policy for latency_s in cell.live_s],
            [latency_s for cell in of_policy for latency_s in cell.simulated_s],
            s=9,
            color=colour,
            label=policy,
        )
    longest = max(max(cell.live_s + cell.simulated_s) for cell in cells)
    requests.plot([0, longest], [0, longest], color="grey", linewidth=1)
    means.set(title="mean latency, s (dashed: simulated)", xlabel="requests/s", ylim=(0, None))
    requests.set(title="latency of every request, s", xlabel="live", ylabel="simulated")
    means.legend(fontsize="small")
    write_png(path, figure)
