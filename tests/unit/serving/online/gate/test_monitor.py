"""Acceptance in service: kept over restarts, weighted by domain, and watched for a collapse."""

from __future__ import annotations

import pytest

from distillspec.config import GateConfig
from distillspec.serving.base.requests import RequestOutput
from distillspec.serving.online.gate.monitor import CHECK_EVERY, FEWEST, ServedAcceptance, upper_end
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.state.registry import VersionRegistry

from .conftest import feed


def test_a_restart_knows_the_acceptance_that_was_served_before(
    settings: OnlineSettings, registry: VersionRegistry
) -> None:
    """A rollback compares with the predecessor, which may have served under an earlier process."""
    before = ServedAcceptance(settings.gate)
    for i in range(40):
        feed(before, "old", "a", 10, 8 + i % 2)
    registry.keep_served(before.take_changed())
    assert before.take_changed() == []
    after = ServedAcceptance(settings.gate)
    after.restore(VersionRegistry(settings.layout.versions).served())
    assert after.acceptance("old") == before.acceptance("old")
    assert after.figures()["versions"]["old"]["tried"] == 400
    for _ in range(10):
        feed(after, "new", "a", 10, 3)
    assert "with old" in str(after.regression("new", "old"))
    assert after.accepted_gain("old") == pytest.approx(30 - 0.85 * 100)
    registry.keep_served(after.take_changed())
    assert {record.version: record.totals["requests"] for record in registry.served()} == {"old": 40, "new": 10}
    registry.clear_away(keep=0)  # neither is a version here: their figures stay, what is compared with goes
    assert [(record.recent, record.totals["tried"]) for record in registry.served()] == [([], 400), ([], 100)]


def test_what_a_version_served_before_it_was_promoted_again_does_not_count(settings: OnlineSettings) -> None:
    served = ServedAcceptance(settings.gate)
    for version, accepted in (("old", 6), ("new", 1)):
        for _ in range(40):
            feed(served, version, "a", 10, accepted)
    assert served.regression("new", "old") is not None
    served.begin_service("new")
    served.begin_service("another")
    assert served.accepted_gain("old") == 40 * (1 - 6)  # what has served nothing gains nothing
    assert served.regression("new", "old") is None
    restarted = ServedAcceptance(settings.gate)
    restarted.restore(served.take_changed())
    for again in (served, restarted):
        for _ in range(10):
            feed(again, "new", "a", 10, 6)
        assert again.regression("new", "old") is None
        for _ in range(30):
            feed(again, "new", "a", 10, 1)
        assert again.regression("new", "old") is not None


def test_a_shift_of_traffic_is_no_regression() -> None:
    served = ServedAcceptance(GateConfig(rollback_requests=8, domain_requests=4, bootstrap_samples=200))
    for version, easy, hard in (("old", 40, 8), ("new", 8, 40)):
        for domain, accepted, times in (("easy", 9, easy), ("hard", 2, hard)):
            for i in range(times):
                feed(served, version, domain, 10, accepted + i % 2)
    assert served.regression("new", "old") is None
    for _ in range(40):
        feed(served, "worse", "hard", 10, 0)
    assert "acceptance 0.000" in str(served.regression("worse", "old"))


def test_a_collapse_is_a_regression_after_fewer_requests() -> None:
    served = ServedAcceptance(GateConfig(rollback_requests=32, collapse=0.5, bootstrap_samples=200))
    for i in range(40):
        feed(served, "old", "a", 10, 5 + i % 2)
    for version, accepted in (("broken", 0), ("worse", 3)):
        for i in range(FEWEST):
            assert served.regression(version, "old") is None
            feed(served, version, "a", 10, accepted + i % 2)
    assert served.regression("broken", "old") is not None
    assert served.regression("worse", "old") is None
    for i in range(32 - FEWEST):
        assert served.regression("worse", "old") is None
        feed(served, "worse", "a", 10, 3 + i % 2)
    assert served.regression("worse", "old") is not None


def test_requests_without_drafted_tokens_bring_the_next_check_nearer() -> None:
    """A draft that brings nothing is seldom tried."""
    served = ServedAcceptance(GateConfig())
    for _ in range(2):
        feed(served, "one", "a", 10, 5)
    assert served.checks_due == 0
    served.finish([RequestOutput(f"r{i}", (1,), ()) for i in range(CHECK_EVERY - 2)])
    assert served.checks_due == 1


@pytest.mark.parametrize(("accepted", "tried"), [(0, 9), (5, 10), (9, 9)])
def test_what_a_share_is_below(accepted: int, tried: int) -> None:
    """By the definition of Wilson's interval: at its end the share is 1.645 standard errors away."""
    end = upper_end(accepted, tried)
    assert (end - accepted / tried) ** 2 * tried == pytest.approx(1.645**2 * end * (1 - end))
    assert accepted / tried <= end <= 1.0


def test_a_collapse_raises_the_alarm_once() -> None:
    alarms: list[str] = []
    served = ServedAcceptance(GateConfig(collapse=0.5), alarms.append)
    for i in range(200):
        feed(served, "one", "a", 10, 6 if i < 150 else 0)
    assert len(alarms) == 1
    assert "collapsed" in alarms[0]


def test_answers_to_one_request_count_as_one(settings: OnlineSettings) -> None:
    served = ServedAcceptance(settings.gate)
    feed(served, "one", "a", *[(10, 4), (5, 1)])
    figures = served.figures()["versions"]["one"]
    assert (figures["requests"], figures["tried"], figures["accepted"]) == (1, 15, 5)
