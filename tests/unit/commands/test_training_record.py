"""What a draft's folder says of its training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from distillspec.commands.training_record import POLICY, with_policy
from distillspec.config import DataConfig, DraftConfig, LossConfig, TargetConfig, TrainCommand, TrainConfig
from distillspec.data.folder import DataFolder
from distillspec.data.shards import ShardWriter
from distillspec.models import LanguageModel, initialise_draft

CONFIG = TrainCommand(
    target=TargetConfig(path="tiny"),
    train=TrainConfig(max_steps=1, unroll=2, dtype="float32"),
    loss=LossConfig(name="fkl"),
    data=DataConfig(temperature=0.7, state_precision="fp8"),
)


def test_the_policy_of_the_text_and_the_loss_are_in_the_lineage(target: LanguageModel, tmp_path: Path) -> None:
    draft = with_policy(initialise_draft(DraftConfig(layers=1), target), CONFIG, DataFolder(tmp_path))
    policy = draft.lineage[POLICY]
    assert draft.lineage["kind"] == "pruned"
    assert (policy["source"], policy["temperature"], policy["top_p"]) == ("teacher", 0.7, 1.0)
    assert policy["loss"] == {"fkl": {"weight": 1.0}}
    assert "unroll" not in policy


def test_a_caches_text_is_not_as_the_settings_say(target: LanguageModel, tmp_path: Path) -> None:
    data, draft = DataFolder(tmp_path), initialise_draft(DraftConfig(layers=1), target)
    ShardWriter(data.samples, {"source": "teacher", "policy": {"temperature": 0.2}}, 4).flush(complete=True)
    policy = with_policy(draft, CONFIG, data).lineage[POLICY]
    assert policy["temperature"] == 0.2
    mixed = replace(CONFIG, data=DataConfig(source="mixed"))
    assert with_policy(draft, mixed, data).lineage[POLICY]["source"] == "mixed"


def test_a_files_text_has_an_unknown_temperature(target: LanguageModel, tmp_path: Path) -> None:
    config = replace(CONFIG, data=DataConfig(source="fixed", prompts="a.jsonl"))
    draft = with_policy(initialise_draft(DraftConfig(layers=1), target), config, DataFolder(tmp_path))
    assert draft.lineage[POLICY]["source"] == "fixed"
    assert "temperature" not in draft.lineage[POLICY]


@pytest.mark.parametrize(
    ("settings", "dtype", "precision"),
    [
        (DraftConfig(kind="eagle"), "float32", "fp8"),
        (DraftConfig(kind="medusa", train_target=True), "float32", "float32"),
        (DraftConfig(kind="medusa", train_target=True), "bfloat16", "bf16"),
    ],
)
def test_the_precision_of_the_states_is_that_of_training(
    target: LanguageModel, tmp_path: Path, settings: DraftConfig, dtype: str, precision: str
) -> None:
    config = replace(CONFIG, draft=settings, train=TrainConfig(max_steps=1, unroll=2, dtype=dtype))
    draft = with_policy(initialise_draft(settings, target), config, DataFolder(tmp_path))
    assert draft.state_input is not None
    assert draft.state_input.precision == precision
    assert draft.lineage[POLICY]["unroll"] == 2
