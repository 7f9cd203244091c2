"""A sure gain is promoted, a loss is refused, the rest stays open."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distillspec.config import DraftConfig, GateConfig
from distillspec.models import LanguageModel, initialise_draft
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.online.gate.decision import Comparison, Costs, decide, estimate_costs
from distillspec.serving.online.gate.shadow import Score

from .conftest import CONFIG, COSTS, scores


def verdict_of(before: list[Score], after: list[Score], config: GateConfig = CONFIG, offline=None):  # type: ignore[no-untyped-def]
    return decide("new", "old", Comparison(before, after, COSTS), offline, config)


def test_a_sure_gain_is_let_in_and_an_unsure_one_waits() -> None:
    easy_and_hard = [0.1 + 0.02 * i for i in range(30)]
    better = verdict_of(scores(easy_and_hard), scores([a + 0.03 for a in easy_and_hard]))
    assert better.decision == "promoted"
    assert better.gain is not None
    assert 0 < better.gain.low < better.gain.mean < better.gain.high
    # The same mean gain, but of opposite signs: paired differences tell them apart, pooled ones would not.
    mixed = [a + (0.2 if i % 2 else -0.14) for i, a in enumerate(easy_and_hard)]
    assert verdict_of(scores(easy_and_hard), scores(mixed)).decision == "inconclusive"
    worse = verdict_of(scores(easy_and_hard), scores([a - 0.05 for a in easy_and_hard]))
    assert worse.decision == "refused"
    assert verdict_of(scores(easy_and_hard), scores(easy_and_hard)).decision == "inconclusive"
    margin = replace(CONFIG, margin=0.5)
    assert verdict_of(scores([0.3] * 20), scores([0.4] * 20), margin).decision == "inconclusive"


def test_a_loss_on_one_domain_or_on_the_offline_set_is_refused() -> None:
    before = scores([0.3] * 20) + scores([0.5] * 5, "b")
    after = scores([0.6] * 20) + scores([0.2] * 5, "b")
    verdict = verdict_of(before, after)
    assert verdict.decision == "refused"
    assert "on b" in verdict.reason
    assert verdict.domains["a"] > 0 > verdict.domains["b"]
    few = verdict_of(before[:-2], after[:-2])  # three requests are no evidence of their own
    assert few.decision == "promoted"
    offline = Comparison(scores([0.6] * 5), scores([0.4] * 5), COSTS)
    assert "offline" in verdict_of(scores([0.3] * 20), scores([0.6] * 20), offline=offline).reason


def test_a_better_draft_is_let_in_where_neither_is_worth_its_cost() -> None:
    dear = Costs(draft=2.0, verify=1.0)
    verdict = decide("n", "o", Comparison(scores([0.1] * 20), scores([0.3] * 20), dear), None, CONFIG)
    assert verdict.decision == "promoted"
    assert verdict.goodput is not None
    assert max(verdict.goodput) < 1


@pytest.mark.parametrize("measured", [True, False])
def test_further_tokens_of_a_block_cost_less_than_its_first(target: LanguageModel, measured: bool) -> None:
    """By measured costs a block of four takes one pass over four tokens, and other drafts take four passes."""
    latency = LatencyModel(CostTable.line(0, 0.0, 10.0), CostTable.line(0, 0.1, 0.9)) if measured else None
    block, eagle = (
        estimate_costs(target, initialise_draft(DraftConfig(kind=kind), target), latency) for kind in ("block", "eagle")
    )
    assert eagle.of(4) - 1 - 4 * eagle.verify == pytest.approx(4 * (eagle.of(1) - 1 - eagle.verify))
    assert block.of(4) - block.of(1) < 0.9 * (eagle.of(4) - eagle.of(1))
    if measured:
        assert block.of(4) == pytest.approx(1 + 0.13)
        assert eagle.of(4) == pytest.approx(1 + 0.4)
