"""Simulated runs, and what is read from them."""

from __future__ import annotations

from collections.abc import Sequence

from distillspec.serving.simulation import (
    Hardware,
    SimulatedRequest,
    Simulation,
    SimulationResult,
    make_policy,
)

PLAIN = "none"  # no speculation


def simulation(
    machine: Hardware, requests: Sequence[SimulatedRequest], policy: str, selection: str, seed: int = 0
) -> Simulation:
    """Return a simulation that has not run yet.

    Args:
        policy: of lengths, unless the selection is `PLAIN`.
        selection: a selection, a draft for every request, or `PLAIN`.
        seed: of the selection.
    """
    name, chosen = (PLAIN, None) if selection == PLAIN else (policy, selection)
    return Simulation(requests, make_policy(name, machine.latency, requests, selection=chosen, seed=seed), machine)


def rate(result: SimulationResult) -> float:
    """Return the tokens a second over the whole run."""
    last = result.steps[-1]
    return sum(request.output_tokens for request in result.requests) / (last.at_s + last.seconds)


def draft_rates(machine: Hardware, requests: Sequence[SimulatedRequest], policy: str) -> dict[str, float]:
    """Return the tokens a second with each draft for all requests."""
    return {draft: rate(simulation(machine, requests, policy, draft).run()) for draft in machine.latency.members}


def by_domain(result: SimulationResult) -> dict[str, float]:
    """Return the tokens a second of one row, while it answers requests of a domain."""
    tokens, seconds = dict[str, int](), dict[str, float]()
    for request, stats in zip(result.requests, result.stats, strict=True):
        assert stats.finished_s is not None, "it is answered"
        assert stats.admitted_s is not None
        tokens[request.domain] = tokens.get(request.domain, 0) + request.output_tokens
        seconds[request.domain] = seconds.get(request.domain, 0.0) + stats.finished_s - stats.admitted_s
    return {domain: count / seconds[domain] for domain, count in sorted(tokens.items())}
