"""Policies of a simulation: the engine's controllers, and some that only a simulation can have."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy

from distillspec.config.engine import CUT, EngineConfig
from distillspec.config.registry import CONTROLLERS
from distillspec.errors import ConfigError
from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.fixed import FixedTree
from distillspec.serving.base.plans import Plan, RowPlan, StepResult
from distillspec.serving.base.rows import BatchView, RowView
from distillspec.serving.base.shape import TreeShape
from distillspec.serving.baselines.by_name import CONTROLLER_NAMES, FIXED, named_controller
from distillspec.serving.baselines.smartspec import SmartSpecController
from distillspec.serving.baselines.tree_names import TREE_NAMES, tree_settings
from distillspec.serving.costs.chain_batch import ChainBatch
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.selection.baselines import ByRequest
from distillspec.serving.selection.by_name import compared_selection
from distillspec.serving.selection.selecting import SelectingController
from distillspec.serving.simulation.workload import SimulatedRequest

HEADS, MOST_CANDIDATES = 3, 3  # of the Medusa policies
CONFIDENCE = 0.5  # default threshold: drafting stops at or below it
POLICY_NAMES = {
    **CONTROLLER_NAMES,
    "confidence": "goodput, and a row drafts on only while the draft is surer than 0.5 (confidence-T: than T)",
    "smartspec-confidence": "the paper's Algorithm 3: rows draft while the draft is surer than 0.5, then goodput cuts",
    "random": "a random length a step",
    "random-request": "a random length for each row and step",
    "oracle": "knows what will be accepted, and takes what gives the most tokens a second",
    "medusa": f"{HEADS} heads with up to {MOST_CANDIDATES} candidates each, trees by goodput",
    "medusa-topK": f"{HEADS} heads with K candidates each",
    **{name: about for name, about in TREE_NAMES.items() if not name.startswith(CUT)},
}


@dataclass(frozen=True)
class Policy:
    """A controller, and the confidence at or below which drafting stops (None: never)."""

    name: str
    controller: LengthController
    confidence_threshold: float | None = None


def make_policy(
    name: str,
    latency: LatencyModel,
    requests: Sequence[SimulatedRequest],
    *,
    speculation_length: int = 5,
    seed: int = 0,
    settings: EngineConfig | None = None,
    selection: str | None = None,
    selection_options: Mapping[str, Any] | None = None,
) -> Policy:
    """Build the policy of a name, and with several drafts what selects among them.

    Args:
        selection: a name of the table, a draft's for every request, or `oracle`. None: `goodput`.
        selection_options: of a name of the table.
        name, latency, requests, speculation_length, seed, settings: see `_make_policy`.

    Raises:
        ConfigError: a name is unknown. The message lists the known ones.
    """
    policy = _make_policy(
        name,
        latency,
        requests,
        speculation_length=speculation_length,
        seed=seed,
        settings=settings or EngineConfig(speculation_length=speculation_length),
    )
    if not latency.members:
        return policy
    if name == "oracle":
        raise ConfigError("policy oracle knows one draft; with several give selections=[oracle]")
    shown = policy.name if selection is None else f"{policy.name} {selection}"
    controller = _with_selection(policy.controller, selection, selection_options or {}, latency, requests, seed)
    return replace(policy, name=shown, controller=controller)


def _with_selection(
    inside: LengthController,
    selection: str | None,
    options: Mapping[str, Any],
    latency: LatencyModel,
    requests: Sequence[SimulatedRequest],
    seed: int,
) -> SelectingController:
    if selection == "oracle":
        return SelectingController(inside, lambda _: KnownBest(requests, latency, inside.speculation_length))
    return compared_selection(inside, selection or "goodput", list(latency.members), options, seed=seed, costs=latency)


def _make_policy(
    name: str,
    latency: LatencyModel,
    requests: Sequence[SimulatedRequest],
    *,
    speculation_length: int,
    seed: int,
    settings: EngineConfig,
) -> Policy:
    """Build the policy of a name in `POLICY_NAMES`. Policies learn, so each run needs a new one.

    Args:
        name: a policy, with its number if it has one.
        latency: costs of steps, as a profile has them.
        requests: known to the oracle.
        speculation_length: the most tokens a row drafts where the policy chooses.
        seed: of random policies.
        settings: trees of policies that choose them.

    Raises:
        ConfigError: the name is unknown. The message lists the known ones.
    """
    word, _, number = name.partition("-")
    if name == "confidence" or (word == "confidence" and re.fullmatch(r"0?\.\d+|0", number)):
        return Policy(name, _named("goodput", speculation_length, latency, settings), float(number or CONFIDENCE))
    if name == "smartspec-confidence":
        return Policy(
            name, SmartSpecController(speculation_length, latency, gated=latency.draft is not None), CONFIDENCE
        )
    if name in ("random", "random-request"):
        return Policy(name, RandomLength(speculation_length, by_row=name == "random-request", seed=seed))
    if name == "oracle":
        return Policy(name, Oracle(speculation_length, latency, requests))
    if name == "medusa":
        return Policy(name, _of_heads(latency))
    if re.fullmatch(r"medusa-top[1-9]", name):
        return Policy(name, FixedTree(TreeShape.full((int(name[-1]),) * HEADS)))
    is_tree = tree_settings(name, settings) is not None
    if is_tree and name.startswith(CUT):  # a trace has the ranks of tokens alone
        raise ConfigError(
            f"policy {name} chooses nodes by a draft's scores, which a simulation lacks; use tree-3-2 or so"
        )
    if is_tree or name in CONTROLLER_NAMES or (name in CONTROLLERS and name != "fixed") or FIXED.fullmatch(name):
        return Policy(name, _named(name, speculation_length, latency, settings))
    raise ConfigError(f"policies: {name} is not known; use some of {', '.join(POLICY_NAMES)}")


class RandomLength(LengthController):
    """Draws lengths uniformly from 0 to `speculation_length`, for the whole step or for each row."""

    def __init__(self, speculation_length: int, *, by_row: bool, seed: int = 0) -> None:
        if speculation_length < 0:
            raise ConfigError(f"speculation_length={speculation_length} must be at least 0")
        self.speculation_length, self.by_row = speculation_length, by_row
        self._seed, self._steps = seed, 0

    def plan(self, view: BatchView) -> Plan:
        draws = Random(f"{self._seed}/{self._steps}")
        same = draws.randint(0, self.speculation_length)
        lengths = [draws.randint(0, self.speculation_length) if self.by_row else same for _ in view.rows]
        return _plan(view, [min(length, row.limit) for length, row in zip(lengths, view.rows, strict=True)])

    def observe(self, result: StepResult) -> None:
        """Count the step, so that the next one draws anew."""
        self._steps += 1


class KnownBest(ByRequest):
    """Selection that knows each answer's traces: the draft of the most tokens a second at its best length.

    That is the best single draft of each request alone in a step, which regret is measured against.
    """

    def __init__(self, requests: Sequence[SimulatedRequest], latency: LatencyModel, speculation_length: int) -> None:
        super().__init__()
        self.latency, self.speculation_length = latency, speculation_length
        self._known = {f"{request.id}/0": request for request in requests}

    def pick(self, row: RowView, drafts: Sequence[str]) -> str:
        request = self._known[row.sequence_id]
        return max(drafts, key=lambda source: self._rate(request, source))

    def _rate(self, request: SimulatedRequest, source: str) -> float:
        """Return the tokens a second of the best fixed length."""
        runs = request.traces[source].runs
        latency = self.latency.of_draft(source)
        context = request.prompt_tokens + request.output_tokens // 2  # in the mean
        best = 0.0
        for length in range(1, self.speculation_length + 1):
            place = steps = 0
            while place < request.output_tokens:
                place, steps = place + min(runs[place], length) + 1, steps + 1
            best = max(best, request.output_tokens / (steps * latency.alike_s(1, context, length)))
        return best


class Oracle(LengthController):
    """Knows each request's acceptance trace and the true costs: most tokens a second, and no rejected token.

    It maximises each step's goodput, which need not give the least latency over all requests.
    """

    def __init__(self, speculation_length: int, latency: LatencyModel, requests: Sequence[SimulatedRequest]) -> None:
        self.speculation_length, self.latency = speculation_length, latency
        self._known = {f"{request.id}/0": (request.prompt_tokens, request.trace.runs) for request in requests}

    def plan(self, view: BatchView) -> Plan:
        runs = [self._run(row.sequence_id, row.context_tokens) for row in view.rows]
        pairs = zip(view.rows, runs, strict=True)
        right = numpy.array([min(row.limit, run, self.speculation_length) for row, run in pairs], dtype=numpy.int64)
        contexts = numpy.array([row.context_tokens for row in view.rows], dtype=numpy.int64)
        certain = numpy.ones((len(right), self.speculation_length))
        batch = ChainBatch(certain, right, contexts, self.latency, view.prefill_tokens)
        choices = zip(batch.expected(batch.alike), batch.alike.tolist(), strict=True)
        best, lengths = max(choices, key=lambda choice: choice[0].goodput)
        prompts_s = self.latency.prompts_s(len(view.rows), view.prefill_tokens)
        return _plan(view, lengths, best.tokens, best.seconds + prompts_s)

    def _run(self, sequence_id: str, context_tokens: int) -> int:
        prompt_tokens, runs = self._known[sequence_id]
        return runs[context_tokens - prompt_tokens]


def _named(name: str, speculation_length: int, latency: LatencyModel, settings: EngineConfig) -> LengthController:
    with_model = latency.draft is not None
    return named_controller(name, speculation_length, latency, drafts_with_model=with_model, settings=settings)


def _of_heads(latency: LatencyModel) -> LengthController:
    """Return goodput over all trees of the heads' candidates."""
    widths = [MOST_CANDIDATES] * HEADS
    every = TreeShape.full(widths).nodes
    settings = EngineConfig(tree="medusa", widths=widths, nodes=every, speculation_length=HEADS)
    return named_controller("goodput", HEADS, latency, drafts_with_model=latency.draft is not None, settings=settings)


def _plan(view: BatchView, lengths: Sequence[int], tokens: float | None = None, seconds: float | None = None) -> Plan:
    rows = tuple([RowPlan.chain(row, length) for row, length in zip(view.rows, lengths, strict=True)])
    return Plan(rows, tokens, seconds)
