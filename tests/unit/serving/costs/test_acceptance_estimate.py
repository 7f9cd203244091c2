"""Acceptance estimates against known truths."""

from __future__ import annotations

import numpy
import pytest

from distillspec.serving.base.acceptance import RowResult, Trial
from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.likely import LikelyNodes
from distillspec.serving.base.rows import RowView, evidence
from distillspec.serving.base.tree import DRAFT, NGRAM
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.costs.acceptance_estimate import AcceptanceEstimate


def test_what_lies_behind_a_rejection_was_never_tried() -> None:
    generator = numpy.random.default_rng(0)
    estimate = AcceptanceEstimate(5, global_memory=1e6)
    for _ in range(3000):
        accepted = int((generator.random(5) < 0.7).cumprod().sum())
        estimate.observe([RowResult.chain("a", 5, accepted, accepted + 1)])
    # Accepted over proposed would be 0.39.
    assert estimate.hazards() == pytest.approx(numpy.full(5, 0.7), abs=0.05)
    assert 1 + estimate.chances(["a"])[0, :, 0].cumprod().sum() == pytest.approx(2.94, abs=0.35)


def test_requests_move_from_the_global_estimate_to_their_own() -> None:
    estimate = AcceptanceEstimate(2, strength=10)
    for _ in range(200):
        estimate.observe([RowResult.chain("easy", 2, 2, 3), RowResult.chain("hard", 2, 0, 1)])
    easy, hard, new = estimate.chances(["easy", "hard", "new"])[:, 0, 0]
    assert easy > 0.9
    assert hard < 0.1
    assert new == pytest.approx(0.5, abs=0.05)
    assert GoodputController(2, acceptance=estimate).acceptance is estimate
    everyone = AcceptanceEstimate(2, strength=float("inf"))
    assert GoodputController(2, acceptance=everyone).acceptance is everyone  # an estimate that knows nobody yet is one
    everyone.observe([RowResult.chain("easy", 2, 2, 3)])
    assert len({tuple(row) for row in everyone.chances(["easy", "new"])[..., 0].tolist()}) == 1
    estimate.keep_only(["easy"])
    assert len(estimate) == 1
    assert estimate.chances(["hard"])[0, 0, 0] == pytest.approx(new)
    estimate.reset()
    assert estimate.chances(["easy"])[0, 0, 0] == pytest.approx(0.6)


def test_lookups_are_told_apart_by_the_length_of_their_match() -> None:
    estimate = AcceptanceEstimate(2)
    for _ in range(100):
        estimate.observe([RowResult.chain("a", 2, 2, 3), RowResult.chain("b", 2, 0, 1)], [4, 2])
    long, short, model = estimate.chances(["x", "x", "x"], [4, 2, 0])[:, 0, 0]
    assert long > 0.9
    assert short < 0.1
    assert model == pytest.approx(0.6)  # nothing was seen of one
    assert estimate.chances(["b"], [4])[0, 0, 0] == pytest.approx(long)  # its own evidence is of short matches


def test_steps_without_drafts_teach_nothing() -> None:
    estimate = AcceptanceEstimate(3)
    before = estimate.hazards()
    estimate.observe([])
    estimate.observe([RowResult.chain("a", 0, 0, 1)])
    assert (estimate.hazards() == before).all()
    assert estimate.chances([]).shape == (0, 3, 1)


def test_every_position_has_an_estimate_of_its_own_that_forgets() -> None:
    estimate = AcceptanceEstimate(3)
    generator = numpy.random.default_rng(0)

    def draft(hazards: tuple[float, ...], times: int) -> None:
        for _ in range(times):
            stood = int((generator.random(3) < hazards).cumprod().sum())
            estimate.observe([RowResult.chain("a", 3, stood, stood + 1)])

    draft((0.9, 0.5, 0.1), 3000)
    assert estimate.hazards().tolist() == pytest.approx([0.9, 0.5, 0.1], abs=0.06)
    draft((0.2, 0.2, 0.2), 3000)
    assert estimate.hazards()[0] == pytest.approx(0.2, abs=0.06)


def test_a_level_below_an_accepted_sibling_is_its_own() -> None:
    """The first of level 1 is never right, and that of level 2 always is."""
    estimate = AcceptanceEstimate(2, width=2, global_memory=1e6)
    trials = (Trial(1, 0, "draft", False), Trial(1, 1, "draft", True), Trial(2, 0, "draft", True))
    for _ in range(300):
        estimate.observe([RowResult("a", 2, 4, 2, 3, trials)])
    assert estimate.hazards() == pytest.approx([0.0, 1.0], abs=0.05)


def test_siblings_have_hazards_of_their_own() -> None:
    """One row: the chain's token is right in half the windows, its first sibling in a quarter, the second in none."""
    estimate = AcceptanceEstimate(2, width=3, global_memory=1e6)
    for turn in range(400):
        rank = (0, 1, 0, None)[turn % 4]
        trials = [Trial(1, tried, "draft", tried == rank) for tried in range(3 if rank is None else rank + 1)]
        accepted = int(rank is not None)
        estimate.observe([RowResult("a", 1, 3, accepted, accepted + 1, tuple(trials))])
    assert estimate.hazards()[0] == pytest.approx(0.5, abs=0.02)
    first, second = estimate.sibling_shares()[0]
    assert first == pytest.approx(0.5, abs=0.03)  # of the windows in which the chain's token was rejected
    assert second == pytest.approx(0.0, abs=0.03)
    assert estimate.sibling_shares()[1] == pytest.approx([0.5, 0.0], abs=0.03), "a level never tried is like the others"
    estimate.reset()
    assert estimate.sibling_shares()[0, 0] == pytest.approx(0.2)
    assert AcceptanceEstimate(2).sibling_shares().shape == (2, 0)


def test_what_sources_without_a_model_accept_outlives_a_draft() -> None:
    estimate = AcceptanceEstimate(2, 2)
    for _ in range(50):
        estimate.observe([RowResult.chain("a", 2, 1, 2)])
        estimate.observe([RowResult.chain("a", 2, 2, 3)], ["ngram"])
    named = estimate.hazards("ngram").tolist()
    estimate.change_draft(None)
    assert estimate.hazards("ngram").tolist() == named
    assert estimate.hazards().tolist() == pytest.approx([0.6, 0.6])
    assert estimate.chances(["a"])[0, 0, 0] == pytest.approx(0.6)


@pytest.mark.parametrize("ratio", [0.5, 1.2, 3.0])
def test_a_judged_draft_is_expected_to_accept_in_proportion(ratio: float) -> None:
    generator = numpy.random.default_rng(0)
    controller = GoodputController(3)
    estimate = controller.acceptance
    for _ in range(2000):
        accepted = int((generator.random(3) < 0.5).cumprod().sum())
        estimate.observe([RowResult.chain("a", 3, accepted, accepted + 1)])
    before = estimate.hazards().copy()
    controller.draft_changed(DraftChange(acceptance=ratio))
    assert estimate.hazards() == pytest.approx(numpy.minimum(before * ratio, 1.0), abs=0.03)
    assert estimate.chances(["a"])[0, 0, 0] == pytest.approx(min(before[0] * ratio, 1.0), abs=0.06)
    for _ in range(2000):
        estimate.observe([RowResult.chain("a", 3, 0, 1)])
    assert estimate.hazards()[0] < 0.1, "what is seen of the new draft takes over"
    controller.draft_changed(DraftChange())
    assert estimate.hazards() == pytest.approx(numpy.full(3, estimate.prior))


def test_what_is_believed_of_a_request_stands_for_the_estimate_until_its_own_trials() -> None:
    estimate = AcceptanceEstimate(3)
    for _ in range(200):
        estimate.observe([RowResult.chain("other", 3, 1, 2)])
    pooled = estimate.hazards()
    believed = estimate.chances(["new", "new"], None, [0.9, None])[..., 0]
    assert believed[1] == pytest.approx(pooled)
    mean = 200 / 400
    assert believed[0] == pytest.approx(numpy.clip(pooled * 0.9 / mean, 0, 1), rel=0.05)
    for _ in range(200):
        estimate.observe([RowResult.chain("own", 3, 0, 1)])
    assert estimate.chances(["own"], None, [0.9])[0, 0, 0] < 0.4


def test_one_kind_is_forgotten_or_scaled_alone() -> None:
    estimate = AcceptanceEstimate(2)
    for _ in range(50):
        for kind, accepted in (("a", 2), ("b", 1)):
            estimate.observe([RowResult.chain("r", 2, accepted, accepted + 1, kind)], [kind])
    before = estimate.hazards("b").tolist()
    estimate.change("a", 0.5)
    assert estimate.hazards("a")[0] == pytest.approx(0.5, abs=0.12)
    assert estimate.chances(["r"], ["a"])[0, 0, 0] < 0.6
    estimate.change("a", None)
    assert estimate.hazards("a").tolist() == AcceptanceEstimate(2).hazards("a").tolist()
    assert estimate.hazards("b").tolist() == before


def test_trials_behind_likely_nodes_are_the_drafts_alone() -> None:
    """Nodes with chances of their own teach nothing. A draft's first one behind them is no sibling of theirs."""
    nodes = LikelyNodes(NGRAM, (0.4,), (-1,), (1,))
    joined, named, plain = RowView("a", 9, 4, likely=nodes), RowView("b", 9, 4, False, likely=nodes), RowView("c", 9, 4)
    trials = (Trial(1, 0, NGRAM, False), Trial(1, 1, DRAFT, True))
    estimate, wanted = AcceptanceEstimate(2, 2), AcceptanceEstimate(2, 2)
    estimate.learn([RowResult(name, 1, 2, 1, 2, trials) for name in "abd"], [joined, named, plain])
    behind, unknown = RowResult("a", 1, 1, 1, 2, (Trial(1, 0, DRAFT, True),)), RowResult("d", 1, 2, 1, 2, trials)
    wanted.observe([behind, unknown], [evidence(joined), 0])
    assert evidence(joined) != evidence(plain) == 0
    assert len(estimate) == len(wanted) == 2
    for kind in (evidence(joined), 0):
        assert estimate.hazards(kind).tolist() == wanted.hazards(kind).tolist()
    assert estimate.sibling_shares().tolist() == wanted.sibling_shares().tolist()
