"""Acceptance of several drafts: shared difficulty, own trials, positions, changes."""

from __future__ import annotations

import numpy
import pytest

from distillspec.serving.base.acceptance import Trial
from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.selection.accepting import features
from distillspec.serving.selection.estimate import DraftsAcceptance, Tried
from distillspec.types import Floats

from .steps import row

MATHS, SQL = (features(row("1/0", domain=domain)) for domain in ("maths", "sql"))


def learnt(chances: dict[tuple[str, str], float]) -> DraftsAcceptance:
    """Return what is known after forty requests of each draft and domain."""
    found, known = DraftsAcceptance({}, 4), {"maths": MATHS, "sql": SQL}
    for _ in range(40):
        for (draft, domain), chance in chances.items():
            found.learn(draft, known[domain], 20, 60, round(60 * chance))
    return found


def test_it_learns_each_draft_on_each_domain() -> None:
    truth = {("a", "maths"): 0.7, ("a", "sql"): 0.3, ("b", "maths"): 0.4, ("b", "sql"): 0.6}
    found = learnt(truth)
    for (draft, domain), chance in truth.items():
        assert found.chance(draft, MATHS if domain == "maths" else SQL) == pytest.approx(chance, abs=0.06)


def test_text_that_is_hard_for_one_draft_is_expected_to_be_hard_for_another() -> None:
    found = learnt({("a", "maths"): 0.7, ("b", "maths"): 0.7, ("a", "sql"): 0.3})
    assert found.chance("b", SQL) < found.chance("b", MATHS) - 0.1, "it was never tried on SQL"


def test_an_evaluation_is_where_a_draft_starts() -> None:
    found = DraftsAcceptance({"a": 0.7}, 4)
    assert found.chance("a", MATHS) == pytest.approx(0.7)
    assert found.chance("b", MATHS) == pytest.approx(0.5)


@pytest.mark.parametrize(("accepted", "above"), [(55, True), (5, False)])
def test_a_requests_trials_of_one_draft_say_a_part_for_the_others(accepted: int, above: bool) -> None:
    found = learnt({("a", "maths"): 0.5, ("b", "maths"): 0.5})
    alone, (own, other) = found.chance("b", MATHS), found.chances(MATHS, {"a": Tried(60, accepted, MATHS)}, ["a", "b"])
    assert (own > other > alone) if above else (own < other < alone)
    assert abs(other - alone) < 0.5 * abs(own - alone)


def survival(found: DraftsAcceptance, chance: float = 0.6) -> Floats:
    return found.survival("a", chance)


def test_survival_follows_the_positions_that_were_seen() -> None:
    found = DraftsAcceptance({}, 3)
    assert survival(found) == pytest.approx([0.6, 0.36, 0.216])
    for number in range(600):
        found.saw("a", [Trial(1, 0, "a", number % 10 < 6), Trial(2, 0, "a", number % 10 < 3)])
    found.learn("a", MATHS, 100, 1200, 540)
    first, second, third = survival(found, 0.45)
    assert first == pytest.approx(0.6, abs=0.03)
    assert second / first == pytest.approx(0.3, abs=0.03)
    assert third < second


def test_another_draft_under_a_name_is_learnt_anew() -> None:
    found = learnt({("a", "maths"): 0.9})
    found.saw("a", [Trial(1, 0, "a", True)] * 300)
    found.changed(DraftChange("a"))
    assert numpy.diff(numpy.log(survival(found))) == pytest.approx([numpy.log(0.6)] * 3), "positions are forgotten"
    for _ in range(4):
        found.learn("a", MATHS, 20, 60, 12)
    assert found.chance("a", MATHS) < 0.6


def test_trials_are_compared_with_what_was_expected_where_they_were_made() -> None:
    found = learnt({("a", "maths"): 0.8, ("a", "sql"): 0.2})
    expected = found.chance("a", SQL)
    as_usual = Tried(60, round(60 * found.chance("a", MATHS)), MATHS)
    assert found.chances(SQL, {"a": as_usual}, ["a"]) == [pytest.approx(expected, abs=0.02)]
    (better,) = found.chances(SQL, {"a": Tried(60, 60, MATHS)}, ["a"])
    assert better > expected + 0.05
    mean = Tried.more(Tried.more(None, 20, 10, MATHS), 60, 30, SQL)
    assert mean[:2] == (80, 40)
    assert mean.known == pytest.approx(MATHS / 4 + SQL * 3 / 4)


def fell(estimate: DraftsAcceptance, *, answers: int = 12) -> int:
    """Let draft a be accepted no more. Return the answer at which this is seen."""
    seen = [estimate.learn("a", MATHS, 16, 16, 0) for _ in range(answers)]
    assert seen.count(True) == 1
    return seen.index(True) + 1


def test_a_collapse_is_put_down_to_the_draft_and_not_to_the_text() -> None:
    found = learnt({("a", "maths"): 0.8, ("b", "maths"): 0.7})
    before = found.chance("b", MATHS)
    assert fell(found) <= 4
    assert found.chance("b", MATHS) == pytest.approx(before, abs=0.06)
    assert found.chance("a", MATHS) < 0.2
    assert found.usual("a") == pytest.approx(0.8, abs=0.1)


def test_the_others_are_known_less_surely_after_a_collapse() -> None:
    found = learnt({("a", "maths"): 0.8, ("b", "maths"): 0.7})
    _, before = found.log_odds("b", MATHS)
    fell(found)
    assert found.log_odds("b", MATHS)[1] > 1.5 * before


def test_trials_of_a_collapsed_draft_say_nothing_of_the_others() -> None:
    found = learnt({("a", "maths"): 0.8, ("b", "maths"): 0.7})
    fell(found)
    rejected = {"a": Tried(60, 0, MATHS)}
    assert found.chances(MATHS, rejected, ["b"]) == [pytest.approx(found.chance("b", MATHS))]


def test_a_draft_that_is_accepted_again_counts_for_the_text_again() -> None:
    found = learnt({("a", "maths"): 0.8, ("b", "maths"): 0.7})
    fell(found)
    before = found.chance("b", MATHS)
    for _ in range(8):
        found.learn("a", MATHS, 16, 48, 40)
    assert found.chance("a", MATHS) > 0.5
    assert found.chance("b", MATHS) > before


def test_another_version_of_a_collapsed_draft_may_collapse_again() -> None:
    found = learnt({("a", "maths"): 0.8, ("b", "maths"): 0.7})
    fell(found)
    found.changed(DraftChange("a"))
    for _ in range(20):
        found.learn("a", MATHS, 20, 60, 48)
    assert fell(found) <= 4
