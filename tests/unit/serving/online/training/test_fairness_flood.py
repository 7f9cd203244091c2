"""One tenant floods the log with text that helps nobody: its weight is held, and the others lose nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from distillspec.evaluation import TargetStates
from distillspec.evaluation.bootstrap import interval
from distillspec.evaluation.positions import measure_positions
from distillspec.models import LanguageModel, load_draft, save_draft
from distillspec.serving.online.log.records import LoggedAnswer, LogKey
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.state.version import Version
from distillspec.serving.online.training.process import run_trainer
from distillspec.types import Interval

from ..conftest import ENTRIES, Answer

TENANTS = ("a", "b", "c", "d")
HONEST, FLOOD = 24, 240
SHARE = 0.4


def adversarial(answer: Answer, number: int) -> LoggedAnswer:
    """Text of two tokens alone: a tenant chooses its text, the signal is the target's own."""
    return answer(f"flood{number}", tenant="flood", vocabulary=(7, 8))


def trained(
    root: Path,
    settings: OnlineSettings,
    first: LanguageModel,
    target: LanguageModel,
    answer: Answer,
    *,
    flood: bool,
    share: float,
) -> tuple[Version, ReplayLog]:
    """A folder of its own: the traffic is logged, one update, its candidate."""
    settings = replace(
        settings,
        online=replace(settings.online, folder=str(root)),
        adapt=replace(settings.adapt, tenant_share=share),
    )
    registry = VersionRegistry(settings.layout.versions)
    registry.promote(registry.add(lambda folder: save_draft(first, folder, target)).name, "first draft")
    replay = ReplayLog(
        settings.layout.replay, LogKey.of(target.identity, ENTRIES), settings.replay, clock=lambda: 2000.0
    )
    traffic: list[LoggedAnswer] = []
    for i in range(FLOOD):
        if i % (FLOOD // HONEST) == 0:
            traffic.append(answer(f"r{i}", tenant=TENANTS[len(traffic) % len(TENANTS)]))
        if flood:
            traffic.append(adversarial(answer, i))
    replay.append(traffic)
    (version,) = run_trainer(settings, lambda: False, once=True)
    return version, replay


def test_a_flood_of_adversarial_text_keeps_to_its_share_and_costs_the_others_nothing(
    settings: OnlineSettings, small_draft: LanguageModel, answer: Answer, target: LanguageModel, tmp_path: Path
) -> None:
    """Held against the same traffic without the flood, and against the same flood without the caps."""
    settings = replace(settings, adapt=replace(settings.adapt, max_steps=40, epochs=10, replay_share=0.0))
    states, answers = TargetStates(target), [answer(f"sample{i}") for i in range(48)]

    def measured(draft: LanguageModel) -> Interval:
        found = [measure_positions(draft, target, a.sample(), a.policy, states=states) for a in answers]
        return interval([float(own.alpha.sum()) for own in found], list(map(len, found)), 500, 0)

    def learnt(*, flood: bool, share: float = SHARE) -> tuple[Interval, dict[str, int]]:
        root = tmp_path / f"flood-{flood}-{share}"
        version, replay = trained(root, settings, small_draft, target, answer, flood=flood, share=share)
        return measured(load_draft(version.path, target)), replay.tenants()

    before, (alone, _) = measured(small_draft), learnt(flood=False)
    flooded, logged = learnt(flood=True)
    uncapped, _ = learnt(flood=True, share=1.0)
    assert alone.low > before.mean  # the others gain something that could be lost
    assert sum(logged[tenant] for tenant in TENANTS) == HONEST  # not one of theirs was left out
    assert logged["flood"] == FLOOD  # nor of the flood's: it counts for less
    assert alone.low <= flooded.mean <= alone.high, f"{flooded} against {alone} without the flood"
    assert uncapped.mean < alone.low, f"{uncapped} without caps, {alone} without the flood: it is harmless as it is"
