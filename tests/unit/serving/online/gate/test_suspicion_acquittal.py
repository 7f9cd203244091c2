"""A suspected version that is as good as its predecessor: text became harder."""

from __future__ import annotations

from distillspec.models import LanguageModel
from distillspec.serving.online.gate.decision import ROLLBACK_ERROR, is_worse
from distillspec.serving.online.gate.monitor import ServedAcceptance
from distillspec.serving.online.judging.confidence import spent
from distillspec.serving.online.judging.question import ACQUITTED, SUSPICIONS
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.state.registry import VersionRegistry

from ..conftest import Answer
from .conftest import CONFIG, candidate, evidence, feed, keeper_of, nearly_the_target, pairs, promote_as_judged, scored


def test_a_version_as_good_as_its_predecessor_is_asked_about_again_by_other_answers(
    settings: OnlineSettings, logged: ReplayLog, target: LanguageModel, answer: Answer
) -> None:
    registry = VersionRegistry(settings.layout.versions, clock=lambda: 500.0)  # the answers are of its time
    served, events = ServedAcceptance(settings.gate), list[str]()
    first = candidate(registry, nearly_the_target(target), target)
    registry.promote(first.name, "first draft")
    keeper = keeper_of(settings, registry, logged, served=served, report=lambda record: events.append(record["event"]))
    for _ in range(32):
        feed(served, first.served_as, "a", 10, 8)
    second = candidate(registry, nearly_the_target(target), target)
    promote_as_judged(registry, second)
    keeper.follow()

    def is_suspected_where_less_is_accepted() -> bool:
        for _ in range(32):
            feed(served, second.served_as, "a", 10, 3)
        keeper.work()
        return keeper.suspicion is not None

    assert is_suspected_where_less_is_accepted()
    scored(settings, suspected=True)
    assert not is_suspected_where_less_is_accepted(), "it is as good on all answers of the question"
    assert registry.get(second.name).reason == ""
    assert not is_suspected_where_less_is_accepted(), "the same answers say the same"
    logged.append([answer(f"later{i}") for i in range(settings.gate.requests)])
    assert is_suspected_where_less_is_accepted()
    assert registry.get(second.name).verdict[SUSPICIONS] == 2
    assert events == ["suspicion", "acquittal", "suspicion"]


def test_an_acquittal_is_of_one_promotion(settings: OnlineSettings, logged: ReplayLog, target: LanguageModel) -> None:
    """Promoted again by hand, over another version, it is suspected like any other."""
    registry = VersionRegistry(settings.layout.versions, clock=lambda: 500.0)
    served = ServedAcceptance(settings.gate)
    first = candidate(registry, nearly_the_target(target), target)
    registry.promote(first.name, "first draft")
    keeper = keeper_of(settings, registry, logged, served=served)
    second = candidate(registry, nearly_the_target(target), target)
    registry.promote(second.name, "by hand")
    acquitted = registry.promotions()[-1]["id"], logged.newest_number()
    registry.judged(second.name, "promoted", {ACQUITTED: acquitted}, "")
    registry.promote(candidate(registry, nearly_the_target(target), target).name, "another")
    registry.promote(second.name, "by hand again")
    keeper.follow()
    for _ in range(32):
        feed(served, second.served_as, "a", 10, 8)
    keeper.work()
    assert keeper.suspicion is not None


def test_each_suspicion_spends_a_part_of_the_error() -> None:
    before = [0.4, 0.5, 0.6] * 20
    found = evidence(pairs(before, [alpha - 0.01 * (1 + 9 * (i % 2)) for i, alpha in enumerate(before)]))
    shown = [is_worse(found, CONFIG, place) for place in (1, 10, 100, 10**6, 10**12)]
    assert shown[0]
    assert shown == sorted(shown, reverse=True), "the later, the more evidence is needed"
    assert not shown[-1]
    assert 0.99 * ROLLBACK_ERROR < sum(spent(ROLLBACK_ERROR, k) for k in range(1, 10_000)) <= ROLLBACK_ERROR
