"""The offline distillation set beside live traffic: an update learns from it."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distillspec.cli import main
from distillspec.config import AdaptConfig
from distillspec.data.folder import find_data_folder
from distillspec.data.shards import read_samples
from distillspec.errors import ConfigError
from distillspec.evaluation import TargetStates
from distillspec.evaluation.positions import measure_positions
from distillspec.models import LanguageModel, load_draft
from distillspec.serving.online.log.records import LogEntry
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.training.selection import offline_samples, select
from distillspec.serving.online.training.trainer import OnlineTrainer
from distillspec.types import SamplingPolicy

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
    new, old = ([LogEntry(n, 1, 0, f"r{n}", "t", "d", n, 20, 5, 2, 0.0) for n in r] for r in (range(50, 70), range(50)))
    chosen = select(new, old, samples, config, seed=0)
    tokens = [sum(e.tokens for e in chosen.new), sum(e.tokens for e in chosen.old)]
    offline = sum(len(s.response_ids) for s in chosen.offline)
    assert tokens == [400, 200]
    assert 200 <= offline < 200 + 24  # up to the share, and over it by less than the last one
    assert len({id(s) for s in chosen.offline}) == len(chosen.offline)
    assert select(new, old, samples, config, seed=1).offline != chosen.offline
    flush = replace(config, mode="flush")
    assert select(new, old, samples, flush, seed=0).offline == []


def test_a_set_that_is_learnt_too_is_not_forgotten(
    settings: OnlineSettings,
    registry: VersionRegistry,
    replay: ReplayLog,
    answer: Answer,
    made: Path,
    target: LanguageModel,
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
    data = find_data_folder(str(made))
    held_out = [s for s in read_samples(min((data.root / "held_out").iterdir()), target.identity) if s.response_ids]
    states = TargetStates(target)

    def updated(root: Path, offline_share: float) -> float:
        """Return the acceptance on the set's held-out answers, of the candidate of an update over the new answers."""
        own = with_set(settings, made, offline_share=offline_share)
        own = replace(own, online=replace(own.online, folder=str(root)))
        version = OnlineTrainer(own, report=records.append).update("asked")
        assert version is not None
        draft = load_draft(version.path, target)
        found = [measure_positions(draft, target, s, SamplingPolicy(0.7), states=states).alpha for s in held_out]
        return float(torch.cat(found).mean())

    replay.append([answer(f"r{i}") for i in range(24)])
    known = updated(settings.layout.root, 0.6)
    registry.promote(registry.versions()[-1].name, "it knows the set: something that can be lost")
    replay.append([answer(f"few{i}", vocabulary=FEW) for i in range(24)])
    after = {}
    for share in (0.0, 0.6):
        shutil.copytree(settings.layout.root, tmp_path / f"share-{share}")
        after[share] = updated(tmp_path / f"share-{share}", share)
    assert [record["offline"] > 0 for record in records] == [True, False, True]
    assert after[0.0] < known - 0.03
    assert after[0.6] > after[0.0] + 0.03


def test_a_set_that_is_none_is_said_before_anything_begins(
    settings: OnlineSettings,
    replay: ReplayLog,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        main(
            [
                "adapt",
                "target=tiny",
                f"online.folder={settings.online.folder}",
                "adapt.offline=nowhere",
                "adapt.offline_share=0.2",
                "once=true",
            ]
        )
        == 2
    )
    said = capsys.readouterr().err
    assert said.startswith("distill: adapt.offline=nowhere is not a data folder; make one with distill generate")
    assert said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["online"]
