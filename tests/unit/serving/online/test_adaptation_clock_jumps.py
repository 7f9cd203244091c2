"""The machine's clock is set by hours, forward and back, while everything runs: nothing takes notice."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise

import pytest

from distillspec.config import AdaptConfig, GateConfig
from distillspec.models import LanguageModel, save_draft
from distillspec.serving.online.gate.monitor import ServedAcceptance
from distillspec.serving.online.log.records import LogKey
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.training import supervisor as module
from distillspec.serving.online.training.supervisor import Supervisor
from distillspec.serving.online.training.trainer import OnlineTrainer

from .conftest import Answer
from .gate.conftest import feed

HOUR = 3600.0


class Wall:
    """The machine's clock, as far as it has been set wrong."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.off_s = 0.0
        true = time.time
        patch.setattr(time, "time", lambda: true() + self.off_s)


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Wall:
    return Wall(monkeypatch)


def test_retention_and_order_go_by_time_that_passed(
    settings: OnlineSettings, key: LogKey, answer: Answer, wall: Wall
) -> None:
    short = replace(settings.replay, retention_days=2 * HOUR / 86400)
    replay = ReplayLog(settings.layout.replay, key, short)
    for number, jump in enumerate((0.0, 5 * HOUR, -8 * HOUR, 0.0)):
        wall.off_s = jump
        replay.append([answer(f"r{number}", time_s=replay.clock())])
    assert [entry.request_id for entry in replay.entries()] == ["r0", "r1", "r2", "r3"]
    wall.off_s = -8 * HOUR
    again = ReplayLog(settings.layout.replay, key, short)  # a restart with the clock set back
    again.append([answer("r4", time_s=again.clock())])
    entries = again.entries()
    assert [entry.request_id for entry in entries] == ["r0", "r1", "r2", "r3", "r4"]
    assert all(a.time_s <= b.time_s for a, b in pairwise(entries))


@pytest.mark.parametrize("off", [5 * HOUR, -5 * HOUR])
def test_a_deletion_by_a_process_with_another_time_holds_for_what_waited_and_no_longer(
    settings: OnlineSettings, key: LogKey, answer: Answer, wall: Wall, off: float
) -> None:
    serving = ReplayLog(settings.layout.replay, key, settings.replay)
    waiting = answer("waiting", tenant="acme", time_s=serving.clock())
    wall.off_s = off
    command = ReplayLog(settings.layout.replay)  # distill replay action=delete tenant=acme
    command.delete_tenant("acme")
    assert serving.append([waiting]) == 0
    assert serving.append([answer("later", tenant="acme", time_s=serving.clock())]) == 1
    wall.off_s = 0.0
    restarted = ReplayLog(settings.layout.replay, key, settings.replay)
    assert restarted.append([answer("again", tenant="acme", time_s=restarted.clock())]) == 1


def test_no_update_no_drift_and_no_alarm_comes_of_it(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, answer: Answer, wall: Wall
) -> None:
    adapt = AdaptConfig(every_requests=None, every_s=HOUR, min_requests=4, on_drift=True)
    trainer = OnlineTrainer(replace(settings, adapt=adapt))
    alarms: list[str] = []
    served = ServedAcceptance(GateConfig(rollback_requests=8, bootstrap_samples=100), alarms.append)
    for lot, jump in enumerate((0.0, 5 * HOUR, -8 * HOUR, 20 * HOUR)):
        wall.off_s = jump
        replay.append([answer(f"r{lot}-{i}") for i in range(60)])
        for version in ("old", "new"):
            for _ in range(30):
                feed(served, version, "a", 10, 5)
        assert trainer.due() is None
    assert alarms == []
    assert served.regression("new", "old") is None
    short, long = trainer.drift.detector.averages()[""]
    assert short == pytest.approx(long) == pytest.approx(0.5)


def test_the_wait_before_the_next_start_of_a_trainer_is_as_long_as_ever(
    settings: OnlineSettings, registry: VersionRegistry, wall: Wall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait is longer than this test may take, and shorter than the first jump."""
    monkeypatch.setattr(module, "FIRST_WAIT_S", HOUR)
    supervisor = Supervisor(settings, command=["false"])
    supervisor.poll()
    assert supervisor.process is not None
    supervisor.process.wait()
    supervisor.poll()
    for wall.off_s in (5 * HOUR, -8 * HOUR):
        supervisor.poll()
        assert supervisor.process is None


def test_a_version_made_before_its_parent_is_still_its_child(
    settings: OnlineSettings, small_draft: LanguageModel, target: LanguageModel
) -> None:
    """Order in the registry is that of its rows, never that of its times."""
    times = iter((9e9, 8e9, 7e9, 6e9, 5e9))
    registry = VersionRegistry(settings.layout.versions, clock=lambda: next(times))
    made = [registry.add(lambda folder: save_draft(small_draft, folder, target)) for _ in range(2)]
    for version in made:
        registry.promote(version.name, "by hand")
    assert registry.current() == registry.get(made[1].name)
    assert [v.name for v in registry.versions()] == [v.name for v in made]
    assert registry.rollback("worse").name == made[0].name
    assert registry.boot() == registry.get(made[0].name)
