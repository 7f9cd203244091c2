"""A better candidate is swapped in and promoted, and whatever goes wrong on the way leaves the old one in service."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel, save_draft
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.database import DatabaseFailed
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.state.version import Version
from distillspec.serving.online.training.process import write_settings

from ..conftest import Answer
from .conftest import candidate, keeper_of, nearly_the_target, scored


def test_a_better_candidate_is_swapped_in_and_promoted_with_its_numbers(
    settings: OnlineSettings, registry: VersionRegistry, logged: ReplayLog, target: LanguageModel
) -> None:
    overtaken = candidate(registry, nearly_the_target(target), target)
    better = candidate(registry, nearly_the_target(target), target)
    swapped: list[tuple[str, float]] = []
    keeper = keeper_of(
        settings, registry, logged, swap=lambda version, acceptance: swapped.append((version.name, acceptance))
    )
    keeper.work()
    assert keeper.waiting_for == "0 of 4 conversations"
    scored(settings)
    verdict = keeper.judge_newest()
    assert verdict is not None
    assert verdict.decision == "promoted"
    assert verdict.alpha is not None
    assert verdict.alpha[1] > verdict.alpha[0] + 0.1
    assert swapped == [(better.name, verdict.alpha[1] / verdict.alpha[0])]
    recorded = registry.get(better.name)
    assert recorded.status == "promoted"
    assert recorded.verdict["gain"]["low"] > 0
    assert json.dumps(recorded.verdict)
    assert registry.get(overtaken.name).status == "inconclusive"
    assert keeper.judge_newest() is None


def test_versions_out_of_service_do_not_fill_the_disk(
    settings: OnlineSettings, registry: VersionRegistry, logged: ReplayLog, target: LanguageModel
) -> None:
    few = replace(settings, online=replace(settings.online, keep_versions=1))
    keeper = keeper_of(few, registry, logged)
    made = []
    for _ in range(4):
        made.append(candidate(registry, nearly_the_target(target), target))
        table = scored(few).table
        keeper.work()
    assert [v.status for v in registry.versions()] == ["retired", "promoted", *["inconclusive"] * 3]
    assert [v.present for v in registry.versions()] == [True, True, False, False, True]
    assert [v.path.is_dir() for v in made] == [True, False, False, True]
    assert [bool(table.of(v.name)) for v in made] == [True, False, False, True]


def test_a_candidate_waits_for_answers_that_it_did_not_learn_from(
    settings: OnlineSettings, registry: VersionRegistry, logged: ReplayLog, target: LanguageModel, answer: Answer
) -> None:
    draft, current = nearly_the_target(target), registry.current()
    assert current is not None
    waiting = registry.add(lambda f: save_draft(draft, f, target), parent=current.name, requests=(1, 48))
    keeper = keeper_of(settings, registry, logged)
    for more, words in ((0, "0 of 4"), (3, "3 of 4")):
        logged.append([answer(f"new{i}") for i in range(more)])
        scored(settings)
        keeper.work()
        assert keeper.waiting_for == f"{words} conversations"
        assert registry.get(waiting.name).status == "candidate"
    logged.append([answer(f"newer{i}") for i in range(45)])
    scored(settings)
    keeper.work()
    assert registry.get(waiting.name).status == "promoted", registry.get(waiting.name).reason
    assert keeper.waiting_for is None
    assert registry.get(waiting.name).verdict["requests"] == 48


def test_a_candidate_that_the_engine_refuses_is_not_promoted(
    settings: OnlineSettings, registry: VersionRegistry, logged: ReplayLog, target: LanguageModel
) -> None:
    serving = registry.current()
    refused = candidate(registry, nearly_the_target(target), target)

    def swap(version: Version, acceptance: float | None) -> None:
        raise ConfigError("no room for it")

    scored(settings)
    verdict = keeper_of(settings, registry, logged, swap=swap).judge_newest()
    assert verdict is not None
    assert registry.get(refused.name).status == "refused"
    assert registry.current() == serving


def test_a_server_killed_in_mid_swap_boots_what_was_promoted_last(
    settings: OnlineSettings, registry: VersionRegistry, logged: ReplayLog, target: LanguageModel
) -> None:
    first = registry.current()
    assert first is not None
    better = candidate(registry, nearly_the_target(target), target)
    scored(settings)
    write_settings(settings)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("kill_in_swap.py")), settings.online.folder],
        capture_output=True,
        text=True,
        check=True,
        timeout=250,
    )
    said = [line.removeprefix("server: ") for line in done.stdout.splitlines() if line.startswith("server: ")]
    assert said == [
        f"loaded killed {first.name}",
        f"promoting killed {first.name}",
        f"promoted killed {better.name}",
        f"None 0 {better.name}",
    ], done.stderr


def test_answers_to_one_prompt_count_as_one_conversation(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, target: LanguageModel, answer: Answer
) -> None:
    prompts = [answer(f"r{i}").prompt_ids for i in range(3)]
    answers = [answer(f"r{i}-{j}", prompt_ids=prompt, index=j) for i, prompt in enumerate(prompts) for j in range(4)]
    replay.append(answers)
    candidate(registry, nearly_the_target(target), target)
    scored(settings)
    keeper = keeper_of(settings, registry, replay)
    assert keeper.judge_newest() is None
    assert keeper.waiting_for == "3 of 4 conversations"
    replay.append([answer("r3")])
    scored(settings)
    keeper.judge_newest()
    assert keeper.waiting_for is None


def test_what_is_promoted_elsewhere_is_followed(
    settings: OnlineSettings, registry: VersionRegistry, logged: ReplayLog, target: LanguageModel
) -> None:
    chosen = candidate(registry, nearly_the_target(target), target)
    swapped: list[str] = []
    keeper = keeper_of(settings, registry, logged, swap=lambda version, acceptance: swapped.append(version.name))
    registry.promote(chosen.name, "by hand, elsewhere")
    keeper.work()
    assert keeper.serving == registry.current() == registry.get(chosen.name)
    assert swapped == [chosen.name]


def test_a_rollback_by_hand_ends_a_trial_and_demotes_nothing(
    settings: OnlineSettings, registry: VersionRegistry, logged: ReplayLog, target: LanguageModel
) -> None:
    first = registry.current()
    assert first is not None
    good, bad = (candidate(registry, nearly_the_target(target), target) for _ in range(2))
    swapped: list[str] = []
    keeper = keeper_of(settings, registry, logged, swap=lambda version, _: swapped.append(version.name))
    for serving in (first, good):  # the first has no predecessor
        if serving is good:
            keeper.promote_by_hand(good.name)
        keeper.try_out(bad.name)
        before = registry.versions(), registry.promotions()
        assert keeper.roll_back_by_hand() == registry.get(serving.name) == keeper.serving
        assert (registry.versions(), registry.promotions()) == before
    assert swapped == [bad.name, first.name, good.name, bad.name, good.name]
    assert keeper.roll_back_by_hand().name == first.name
    assert registry.get(good.name).status == "rolled_back"


def test_a_version_that_is_promoted_is_tried_out_no_longer(
    settings: OnlineSettings, registry: VersionRegistry, logged: ReplayLog, target: LanguageModel
) -> None:
    first, chosen = registry.current(), candidate(registry, nearly_the_target(target), target)
    assert first is not None
    keeper = keeper_of(settings, registry, logged, swap=lambda version, acceptance: None)
    keeper.try_out(chosen.name)
    keeper.promote_by_hand(chosen.name)
    assert keeper.roll_back_by_hand().name == first.name
    assert registry.get(chosen.name).status == "rolled_back"


def _full(*words: object, **named: object) -> Version:
    raise DatabaseFailed("cannot read or write registry.sqlite: database or disk is full")


def test_a_registry_that_cannot_be_written_costs_no_candidate(
    settings: OnlineSettings,
    registry: VersionRegistry,
    logged: ReplayLog,
    target: LanguageModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    better = candidate(registry, nearly_the_target(target), target)
    scored(settings)
    keeper = keeper_of(settings, registry, logged)
    with monkeypatch.context() as full:
        full.setattr(registry, "promote", _full)
        with pytest.raises(DatabaseFailed):
            keeper.work()
    assert registry.get(better.name).status == "candidate"
    keeper.work()
    assert registry.get(better.name).status == "promoted"


def test_a_refused_version_goes_back_once_the_registry_can_be_written(
    settings: OnlineSettings,
    registry: VersionRegistry,
    logged: ReplayLog,
    target: LanguageModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, refused = registry.current(), candidate(registry, nearly_the_target(target), target)

    def swap(version: Version, acceptance: float | None) -> None:
        if version.name == refused.name:
            raise ConfigError("no room for it")

    keeper = keeper_of(settings, registry, logged, swap=swap)
    registry.promote(refused.name, "by hand, elsewhere")
    with monkeypatch.context() as full:
        full.setattr(registry, "rollback", _full)
        with pytest.raises(DatabaseFailed):
            keeper.follow()
    keeper.follow()
    assert first is not None
    assert keeper.serving == registry.current() == registry.get(first.name)
    assert registry.get(refused.name).status == "rolled_back"


def test_scores_are_read_again_only_where_there_are_new_ones(
    settings: OnlineSettings,
    registry: VersionRegistry,
    logged: ReplayLog,
    target: LanguageModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    candidate(registry, nearly_the_target(target), target)
    keeper, reads = keeper_of(settings, registry, logged), []
    evidence = keeper.judge.evidence
    monkeypatch.setattr(keeper.judge, "evidence", lambda question: (reads.append(1), evidence(question))[1])
    for _ in range(5):
        keeper.work()
    looked = len(reads)
    assert looked <= 2
    scored(settings)
    keeper.work()
    assert len(reads) > looked


def test_a_candidate_that_another_server_promoted_first_stays_promoted(
    settings: OnlineSettings, registry: VersionRegistry, logged: ReplayLog, target: LanguageModel
) -> None:
    """Two servers read the same scores. While this one loads the draft, the other one has done so."""
    better = candidate(registry, nearly_the_target(target), target)
    elsewhere = keeper_of(settings, VersionRegistry(settings.layout.versions), logged)
    told: list[dict[str, object]] = []

    def swap(version: Version, acceptance: float | None) -> None:
        elsewhere.judge_newest()

    scored(settings)
    keeper = keeper_of(settings, registry, logged, swap=swap, report=told.append)
    keeper.judge_newest()
    found = registry.get(better.name)
    assert (found.status, found.verdict["decision"]) == ("promoted", "promoted")
    assert keeper.serving == found
    assert told == [], "the other server has told of it"


@pytest.mark.parametrize("drafting", [None, "the version in service", "an earlier one"])
def test_what_was_promoted_while_the_server_loaded_is_taken_up(
    settings: OnlineSettings, registry: VersionRegistry, logged: ReplayLog, drafting: str | None
) -> None:
    serving = registry.current()
    assert serving is not None
    known, swapped = serving.served_as if drafting == "the version in service" else drafting, list[str]()
    keeper = keeper_of(settings, registry, logged, swap=lambda version, _: swapped.append(version.name), drafting=known)
    keeper.follow()
    assert swapped == ([serving.name] if drafting == "an earlier one" else [])
    assert keeper.serving == serving
