"""A better candidate is swapped in and promoted, and whatever goes wrong on the way leaves the old one in service."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.state.version import Version
from distillspec.serving.online.training.process import write_settings

from ..conftest import Answer
from .conftest import candidate, keeper_of, nearly_the_target


def test_a_better_candidate_is_swapped_in_and_promoted_with_its_numbers(
    settings: OnlineSettings, registry: VersionRegistry, held_out: ReplayLog, target: LanguageModel
) -> None:
    overtaken = candidate(registry, nearly_the_target(target), target)
    better = candidate(registry, nearly_the_target(target), target)
    swapped: list[str] = []
    keeper = keeper_of(settings, registry, held_out, target, swap=lambda version: swapped.append(version.name))
    verdict = keeper.judge_newest()
    assert verdict is not None
    assert verdict.decision == "promoted"
    assert verdict.alpha is not None
    assert verdict.alpha[1].mean > verdict.alpha[0].mean + 0.1
    assert swapped == [better.name]
    recorded = registry.get(better.name)
    assert recorded.status == "promoted"
    assert recorded.verdict["gain"]["low"] > 0
    assert json.dumps(recorded.verdict)
    assert registry.get(overtaken.name).status == "inconclusive"
    assert keeper.judge_newest() is None


def test_versions_out_of_service_do_not_fill_the_disk(
    settings: OnlineSettings, registry: VersionRegistry, held_out: ReplayLog, target: LanguageModel
) -> None:
    few = replace(settings, online=replace(settings.online, keep_versions=1))
    keeper = keeper_of(few, registry, held_out, target)
    made = []
    for _ in range(4):
        made.append(candidate(registry, nearly_the_target(target), target))
        keeper.judge_newest()
    assert [v.status for v in registry.versions()] == ["retired", "promoted", *["inconclusive"] * 3]
    assert [v.present for v in registry.versions()] == [True, True, False, False, True]
    assert [v.path.is_dir() for v in made] == [True, False, False, True]


def test_without_held_out_requests_a_candidate_waits(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, target: LanguageModel, answer: Answer
) -> None:
    replay.append([answer(f"r{i}") for i in range(12)])  # of the training split: not to be judged on
    waiting = candidate(registry, nearly_the_target(target), target)
    keeper = keeper_of(settings, registry, replay, target)
    assert keeper.judge_newest() is None
    assert keeper.waiting_for == "0 of 4 held-out requests"
    assert registry.get(waiting.name).status == "candidate"


def test_a_candidate_that_the_engine_refuses_is_not_promoted(
    settings: OnlineSettings, registry: VersionRegistry, held_out: ReplayLog, target: LanguageModel
) -> None:
    serving = registry.current()
    refused = candidate(registry, nearly_the_target(target), target)

    def swap(version: Version) -> None:
        raise ConfigError("no room for it")

    verdict = keeper_of(settings, registry, held_out, target, swap=swap).judge_newest()
    assert verdict is not None
    assert registry.get(refused.name).status == "refused"
    assert registry.current() == serving


def test_a_server_killed_in_mid_swap_boots_what_was_promoted_last(
    settings: OnlineSettings, registry: VersionRegistry, held_out: ReplayLog, target: LanguageModel
) -> None:
    first = registry.current()
    assert first is not None
    better = candidate(registry, nearly_the_target(target), target)
    write_settings(replace(settings, gate=replace(settings.gate, requests=4, bootstrap_samples=100)))
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


def test_answers_to_one_request_count_as_one_held_out_request(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, target: LanguageModel, answer: Answer
) -> None:
    answers = [answer(f"r{i}-{j}", request_id=f"r{i}", index=j, split="held_out") for i in range(3) for j in range(4)]
    replay.append(answers)
    candidate(registry, nearly_the_target(target), target)
    keeper = keeper_of(settings, registry, replay, target)
    assert keeper.judge_newest() is None
    assert keeper.waiting_for == "3 of 4 held-out requests"
    replay.append([answer("r3", split="held_out")])
    verdict = keeper.judge_newest()
    assert verdict is not None
    assert verdict.requests == 4
