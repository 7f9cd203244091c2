"""Acceptance of a draft by what is known of a request."""

from __future__ import annotations

from random import Random

import numpy
import pytest

from distillspec.serving.selection.accepting import Accepting, features, moved, sigmoid

from .steps import row


def test_features_have_a_place_for_everything_and_one_length() -> None:
    known = features(row("1/0", prompt=(5, 6, 6, 7), written=64, domain="sql"))
    assert numpy.isfinite(known).all()
    assert known[0] == 1.0
    assert known[1] == 0.25
    assert known[2] == 0.0
    assert float(known[35:] @ known[35:]) == pytest.approx(1.0)
    assert known[3:35].sum() == 1.0
    other = features(row("1/0", prompt=(5, 6, 7), written=64, domain="chat"))
    assert (other[35:] == known[35:]).all()
    assert (other[3:35] != known[3:35]).any()
    assert numpy.isfinite(features(row("1/0", prompt=()))).all()


@pytest.mark.parametrize(("expected", "chance"), [(0.3, 0.3), (None, 0.5), (0.0, 0.05), (1.0, 0.95)])
def test_a_new_draft_is_taken_for_what_its_run_measured(expected: float | None, chance: float) -> None:
    mean, deviation = Accepting.expecting(expected).log_odds(features(row("1/0")))
    assert sigmoid(mean) == pytest.approx(chance)
    assert 0.5 < deviation < 1.5


def test_it_learns_what_is_so_and_grows_sure() -> None:
    estimate, draws = Accepting.expecting(0.8), Random(0)
    kinds = {"a": (features(row("1/0", domain="a")), 0.3), "b": (features(row("1/0", domain="b")), 0.7)}
    start = estimate.log_odds(kinds["a"][0])[1]
    for _ in range(600):
        for known, chance in kinds.values():
            accepted = draws.random() < chance
            estimate.learn(known, 1, int(accepted))
    for known, chance in kinds.values():
        mean, deviation = estimate.log_odds(known)
        assert sigmoid(mean) == pytest.approx(chance, abs=0.12)
        assert deviation < 0.6 * start


def test_a_sudden_change_takes_most_of_the_evidence_away() -> None:
    estimate, known = Accepting(), features(row("1/0"))
    draws = Random(1)
    for _ in range(800):
        estimate.learn(known, 1, int(draws.random() < 0.8))
    sure = estimate.log_odds(known)[1]
    widest = 0.0
    for _ in range(120):
        estimate.learn(known, 1, 0)
        widest = max(widest, estimate.log_odds(known)[1])
    assert widest > 1.5 * sure
    assert sigmoid(estimate.log_odds(known)[0]) < 0.2


def test_many_trials_at_once_say_what_they_say_one_by_one() -> None:
    """Sixteen steps of an answer, learnt from together, do not overshoot what was seen."""
    known = features(row("r", ("a",), written=0, prompt=tuple(range(40))))
    for share in (0.1, 0.8, 0.9):
        at_once, one_by_one = Accepting(), Accepting()
        for _ in range(4):
            at_once.learn(known, 50, round(50 * share), 16)
        for step in range(200):
            one_by_one.learn(known, 1, step % 10 < 10 * share)
        assert abs(at_once.chance(known) - share) < 0.06
        assert abs(at_once.chance(known) - one_by_one.chance(known)) < 0.08


@pytest.mark.parametrize(("ratio", "chance"), [(1.2, 0.6), (0.2, 0.1), (5.0, 0.95)])
def test_another_draft_starts_from_the_ratio_that_was_judged(ratio: float, chance: float) -> None:
    estimate = Accepting.expecting(0.5)
    known = Accepting.expecting(0.5)
    nothing = features(row("r", prompt=()))
    for each in (estimate, known):
        for _ in range(200):
            each.learn(nothing, 2, 1)
    estimate.change(ratio)
    bare = numpy.zeros_like(nothing)
    bare[0] = 1.0
    assert estimate.chance(bare) == pytest.approx(chance, abs=0.01)
    assert estimate.log_odds(nothing)[1] > known.log_odds(nothing)[1]


@pytest.mark.parametrize(
    ("free", "value"), [((), 0.0), (("lookup",), 0.26), (("ngram",), 0.0), (("ngram", "suffix"), 0.26)]
)
def test_the_match_is_that_of_a_lookup(free: tuple[str, ...], value: float) -> None:
    known = features(row("1/0", free=free))
    assert known[2] == pytest.approx(value, abs=0.01)
    later = row("1/0", free=free, written=128)
    assert (moved(known, later) == features(later)).all()
    assert known[1] == 0.0
