"""The offline distillation set beside live traffic: an update learns from it, the gate protects it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distillspec.cli import main
from distillspec.config import AdaptConfig
from distillspec.data.folder import find_data_folder
from distillspec.errors import ConfigError
from distillspec.evaluation import TargetStates
from distillspec.models import LanguageModel
from distillspec.serving.online.gate.decision import GateDecision
from distillspec.serving.online.gate.gatekeeper import Gatekeeper
from distillspec.serving.online.gate.judge import CandidateJudge
from distillspec.serving.online.gate.shadow import Shadow
from distillspec.serving.online.log.records import LogEntry
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.training.selection import offline_samples, select
from distillspec.serving.online.training.trainer import OnlineTrainer

from ..conftest import ENTRIES, Answer

GENERATE = (
    *("generate", "target=tiny", "target.dtype=float32", "target.device=cpu", "hydra.run.dir=run"),
    *("data.num_prompts=40", "data.eval_prompts=8", "data.max_new_tokens=24", "data.max_prompt_tokens=64"),
    *(f"data.signal_entries={ENTRIES}", "sampling.temperature=0.7"),
)
FEW = (7, 8)  # the only ids of the live traffic here


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `distill generate`."""
    here, folder = os.getcwd(), tmp_path_factory.mktemp("offline")
    os.chdir(folder)
    try:
        assert main(GENERATE) == 0
    finally:
        os.chdir(here)
    return folder / "run"


def with_set(settings: OnlineSettings, made: Path, **adapt: object) -> OnlineSettings:
    return replace(settings, adapt=replace(settings.adapt, offline=str(made), **adapt))  # type: ignore[arg-type]


def test_what_distill_generate_made_has_the_logs_kind_of_signal(made: Path, target: LanguageModel) -> None:
    config = AdaptConfig(offline=str(made), offline_share=0.25)
    samples = offline_samples(config, target.identity, ENTRIES)
    assert len(samples) == json.loads((made / "summary.json").read_text())["samples"] > 20
    for sample in samples:
        assert sample.signal is not None
        assert sample.signal.ids.shape == (len(sample.response_ids), ENTRIES)
    prompts = find_data_folder(str(made)).read_prompts()
    assert {sample.prompt_id for sample in samples} <= {prompt.id for prompt in prompts.train}
    assert offline_samples(replace(config, offline_share=0.0), target.identity, ENTRIES) == []
    with pytest.raises(ConfigError, match=r"has no top-64 signals; .* data.signal_entries=64"):
        offline_samples(config, target.identity, 64)
    with pytest.raises(ConfigError, match="made with another target"):
        offline_samples(config, replace(target.identity, weights_hash="0" * 64), ENTRIES)


def test_an_update_takes_its_share_of_the_set_by_tokens(made: Path, target: LanguageModel) -> None:
    config = AdaptConfig(offline=str(made), offline_share=0.25, replay_share=0.25)
    samples = offline_samples(config, target.identity, ENTRIES)
    new, old = (
        [LogEntry(n, 1, 0, f"r{n}", "t", "d", "train", 20, 5, 2, 0.0) for n in r] for r in (range(50, 70), range(50))
    )
    chosen = select(new, old, samples, config, seed=0)
    tokens = [sum(e.tokens for e in chosen.new), sum(e.tokens for e in chosen.old)]
    offline = sum(len(s.response_ids) for s in chosen.offline)
    assert tokens == [400, 200]
    assert 200 <= offline < 200 + 24  # up to the share, and over it by less than the last one
    assert len({id(s) for s in chosen.offline}) == len(chosen.offline)
    assert select(new, old, samples, config, seed=1).offline != chosen.offline
    flush = replace(config, mode="flush")
    assert select(new, old, samples, flush, seed=0).offline == []


KeeperOf = Callable[[OnlineSettings], Gatekeeper]


@pytest.fixture
def keeper_of(target: LanguageModel) -> KeeperOf:
    def make(settings: OnlineSettings) -> Gatekeeper:
        shadow = Shadow(target, TargetStates(target), settings.gate.max_gamma)
        registry = VersionRegistry(settings.layout.versions)
        judge = CandidateJudge(settings, registry, ReplayLog(settings.layout.replay), shadow)
        return Gatekeeper(settings, registry, judge)

    return make


def test_the_gate_reads_the_sets_held_out_answers_as_they_were_sampled(
    settings: OnlineSettings,
    registry: VersionRegistry,
    replay: ReplayLog,
    made: Path,
    keeper_of: KeeperOf,
) -> None:
    samples = keeper_of(with_set(settings, made)).judge.offline_samples()
    prompts = find_data_folder(str(made)).read_prompts()
    assert 0 < len(samples) <= len(prompts.held_out) == 8
    assert {sample.sample.prompt_id for sample in samples} <= {prompt.id for prompt in prompts.held_out}
    assert {sample.policy.temperature for sample in samples} == {0.7}
    few = replace(with_set(settings, made), gate=replace(settings.gate, offline_samples=3))
    assert [sample.sample.prompt_id for sample in keeper_of(few).judge.offline_samples()] == [
        sample.sample.prompt_id for sample in samples[:3]
    ]
    assert keeper_of(settings).judge.offline_samples() == []


def test_a_draft_that_forgets_the_set_is_refused_and_one_that_learns_it_too_is_not(
    settings: OnlineSettings,
    registry: VersionRegistry,
    replay: ReplayLog,
    answer: Answer,
    made: Path,
    keeper_of: KeeperOf,
    tmp_path: Path,
) -> None:
    """Traffic of two ids only. An update on it forgets all other text, unless the offline set is mixed in."""
    settings = with_set(
        settings,
        made,
        replay_share=0.0,
        learning_rate=1.5e-2,
        epochs=12,
        max_steps=60,
        batch_tokens=256,
        row_tokens=256,
    )
    records: list[dict[str, Any]] = []

    def updated(root: Path, offline_share: float) -> Gatekeeper:
        """Return the candidate of an update over the new answers."""
        own = with_set(settings, made, offline_share=offline_share)
        own = replace(own, online=replace(own.online, folder=str(root)))
        assert OnlineTrainer(own, report=records.append).update("asked") is not None
        return keeper_of(own)

    replay.append([answer(f"r{i}") for i in range(24)])
    updated(settings.layout.root, 0.6)
    registry.promote(registry.versions()[-1].name, "it knows the set: something that can be lost")
    replay.append([answer(f"h{i}", vocabulary=FEW, split="held_out") for i in range(12)])
    replay.append([answer(f"few{i}", vocabulary=FEW) for i in range(24)])
    verdicts: list[GateDecision] = []
    for share in (0.0, 0.6):
        shutil.copytree(settings.layout.root, tmp_path / f"share-{share}")
        verdict = updated(tmp_path / f"share-{share}", share).judge_newest()
        assert verdict is not None
        verdicts.append(verdict)
    forgot, kept = verdicts
    assert [record["offline"] > 0 for record in records] == [True, False, True]
    assert forgot.decision == "refused"
    assert forgot.reason.endswith("on the offline set")
    assert forgot.gain is not None
    assert forgot.gain.low > 0  # without the set it would have been let in
    assert kept.decision == "promoted", kept.reason


def test_a_set_that_is_none_is_said_before_anything_begins(
    settings: OnlineSettings,
    replay: ReplayLog,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        main(["adapt", "target=tiny", f"online.folder={settings.online.folder}", "adapt.offline=nowhere", "once=true"])
        == 2
    )
    said = capsys.readouterr().err
    assert said.startswith("distill: adapt.offline=nowhere is not a data folder; make one with distill generate")
    assert said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["online"]
