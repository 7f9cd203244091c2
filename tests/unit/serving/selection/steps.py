"""Steps of a made-up engine with several drafts, for selections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from distillspec.serving.base.acceptance import RowResult, Trial
from distillspec.serving.base.plans import Plan, RowPlan, StepResult
from distillspec.serving.base.rows import BatchView, Option, RowView
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.selection.base import Choices, Selection, SelectionParts

LENGTH = 3  # of every chain
TARGET = CostTable(((1.0, 0.02), (8.0, 0.022), (64.0, 0.05)))
CHEAP, DEAR = CostTable(((1.0, 1e-3), (8.0, 2e-3))), CostTable(((1.0, 8e-3), (8.0, 9e-3)))
COSTS = LatencyModel(TARGET, CHEAP, members={"a": CHEAP, "b": CHEAP, "dear": DEAR})


def parts(drafts: Sequence[str] = ("a", "b"), seed: int = 0, free: Sequence[str] = ()) -> SelectionParts:
    return SelectionParts(tuple(drafts), seed, lambda: COSTS, LENGTH, free=tuple(free))


def row(
    name: str,
    drafts: Sequence[str] = ("a", "b"),
    *,
    written: int = 0,
    domain: str = "default",
    prompt: Sequence[int] = (1, 2, 3),
    free: Sequence[str] = (),
) -> RowView:
    """Return a row that these drafts, and these sources without a model, could draft for."""
    options = [Option(LENGTH, False, 2, source=source) for source in free]
    options += [Option(LENGTH, source=source, unread_tokens=1) for source in drafts]
    first, others = options[0], tuple(options[1:])
    context = len(prompt) + written
    return RowView(name, context, *first, others=others, domain=domain, prompt=tuple(prompt))


def verified(
    chosen: Mapping[str, str | None], brings: Mapping[str, tuple[int, int]], readings_s: float = 0.0
) -> StepResult:
    """Return a step that took what `COSTS` say.

    Args:
        chosen: rows, and the draft of each.
        brings: drafts, the tokens that each drafts for a row, and those that the row then writes. Without a draft a
            row writes one.
    """
    rows = [(name, *brings.get(source or "", (0, 1))) for name, source in chosen.items()]
    results = tuple([RowResult(name, nodes, nodes, written - 1, written) for name, nodes, written in rows])
    drafted_s = {
        source: COSTS.of_draft(source).loop_s(list(chosen.values()).count(source), 0, nodes)
        for source, (nodes, _) in brings.items()
        if source in chosen.values()
    }
    target_s = TARGET.seconds(0, sum([1 + nodes for _, nodes, _ in rows]))
    view, plan = BatchView(tuple([row(name) for name in chosen])), Plan(tuple([RowPlan(name) for name in chosen]))
    draft_s = sum(drafted_s.values()) + readings_s
    return StepResult(results, view, plan, 0, draft_s, target_s, target_s + draft_s, 0, drafted_s, readings_s)


class World:
    """Answers whose drafted tokens are accepted with a chance by draft and domain.

    chances: draft → domain → P(a token is accepted | those before it were).
    behind: each is tried behind a rejected one of n-grams.
    """

    def __init__(
        self, selection: Selection, chances: Mapping[str, Mapping[str, float]], seed: int = 0, *, behind: bool = False
    ) -> None:
        self.selection, self.chances, self.random, self.behind = selection, chances, Random(seed), behind
        self.tokens = self.seconds = 0.0
        self.served: list[tuple[str, str]] = []  # domain, and the draft that wrote most
        self.free: tuple[str, ...] = ()  # those of the sources in `chances` that are without a model
        self.asked = 0

    def serve(self, domain: str, tokens: int = 64) -> dict[str, int]:
        """Serve one answer to its end. Return the tokens written with each draft."""
        self.asked += 1
        name, written, by = f"{self.asked}/0", 0, dict[str, int]()
        while written < tokens:
            view = BatchView((self.row(name, written, domain),))
            chosen = self.selection.choose(view.rows)
            emitted = self.step(view, chosen, domain)
            source = chosen[name]
            assert source is not None
            by[source] = by.get(source, 0) + emitted
            written += emitted
        self.served.append((domain, max(by, key=lambda source: by[source])))
        return by

    def row(self, name: str, written: int, domain: str) -> RowView:
        """Return the row of an answer. `chance` may depend on all that it has."""
        drafts = tuple([source for source in self.chances if source not in self.free])
        free = {"free": self.free} if self.free else {}
        return row(name, drafts, written=written, domain=domain, **free)

    def chance(self, source: str, domain: str, one: RowView) -> float:
        """Return P(a token is accepted | those before it were)."""
        return self.chances[source][domain]

    def step(self, view: BatchView, chosen: Choices, domain: str) -> int:
        """Run a step of one row. Return the tokens that it wrote."""
        (one,) = view.rows
        source = chosen[one.sequence_id]
        assert source is not None
        chance, accepted = self.chance(source, domain, one), 0
        while accepted < LENGTH and self.random.random() < chance:
            accepted += 1
        drafted_s = 0.0 if source in self.free else COSTS.of_draft(source).loop_s(1, 0, LENGTH)
        target_s = TARGET.seconds(0, 1 + LENGTH)
        result = RowResult.chain(one.sequence_id, LENGTH, accepted, accepted + 1, source, domain)
        if self.behind:
            pairs = [(Trial(own.depth, 0, "ngram", False), own._replace(rank=1)) for own in result.trials]
            result = result._replace(trials=tuple(trial for pair in pairs for trial in pair))
        plan = Plan((RowPlan.chain(one, LENGTH),), chosen=chosen)
        self.tokens += accepted + 1
        self.seconds += drafted_s + target_s
        self.selection.observe(
            StepResult((result,), view, plan, 0, drafted_s, target_s, drafted_s + target_s, 0, {source: drafted_s}),
            chosen,
        )
        return accepted + 1

    def share(self, source: str, domain: str, last: int) -> float:
        """Return the share of the last answers of a domain that a draft wrote most of."""
        served = [draft for own, draft in self.served if own == domain][-last:]
        return served.count(source) / len(served)
