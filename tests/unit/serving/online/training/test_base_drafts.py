"""Drafts that read the target's states or embeddings learn online: the trainer loads the target, and only for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from distillspec.config import DraftConfig, TargetConfig
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel, initialise_draft, load_draft, read_metadata, save_draft
from distillspec.models.checkpoint import TargetRecord
from distillspec.models.stop_head import StopHead
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.training.process import run_trainer

from ..conftest import Answer
from .conftest import changed, fill

TINY = TargetConfig(path="tiny", dtype="float32", device="cpu")


@pytest.fixture
def served(settings: OnlineSettings, target: LanguageModel, replay: ReplayLog, answer: Answer) -> VersionRegistry:
    """Return a registry whose promoted version is an EAGLE draft, beside a log of six answers."""
    registry = VersionRegistry(settings.layout.versions)
    eagle = initialise_draft(DraftConfig(kind="eagle"), target)
    registry.promote(registry.add(lambda folder: save_draft(eagle, folder, target)).name, "first draft")
    fill(replay, answer, 6)
    return registry


def test_an_update_of_a_draft_that_reads_states(
    settings: OnlineSettings, served: VersionRegistry, target: LanguageModel
) -> None:
    (version,) = run_trainer(replace(changed(settings, epochs=20), target=TINY), lambda: False, once=True)
    assert version.metrics["steps"] > 0
    assert version.metrics["loss_at_end"] < version.metrics["loss"]
    learnt = load_draft(version.path, target)
    assert learnt.state_ids == load_draft(served.newest(2)[-1].path, target).state_ids
    assert read_metadata(version.path)["embeddings"] == "target"


def test_another_target_is_refused(
    settings: OnlineSettings, served: VersionRegistry, random_model: Callable[..., LanguageModel], tmp_path
) -> None:
    other = random_model("llama")
    other.model.save_pretrained(tmp_path / "other")
    other.tokenizer.save_pretrained(tmp_path / "other")
    wrong = replace(changed(settings), target=replace(TINY, path=str(tmp_path / "other")))
    with pytest.raises(ConfigError, match=r"is not the target of the log.*set target\.path to the served model"):
        run_trainer(wrong, lambda: False, once=True)


def test_token_drafts_with_embeddings_of_their_own_need_no_target(
    settings: OnlineSettings, small_draft: LanguageModel, target: LanguageModel, replay: ReplayLog, answer: Answer
) -> None:
    registry, made_for = VersionRegistry(settings.layout.versions), TargetRecord(target.name, target.identity)
    registry.promote(registry.add(lambda folder: save_draft(small_draft, folder, made_for)).name, "first draft")
    fill(replay, answer, 6)
    nowhere = replace(changed(settings), target=replace(TINY, path="no-such-folder"))
    (version,) = run_trainer(nowhere, lambda: False, once=True)
    assert version.status == "candidate"


def test_versions_of_token_drafts_hold_no_embeddings(
    settings: OnlineSettings, registry: VersionRegistry, target: LanguageModel, replay: ReplayLog, answer: Answer
) -> None:
    fill(replay, answer, 6)
    (version,) = run_trainer(replace(changed(settings), target=TINY), lambda: False, once=True)
    assert not any("embed_tokens" in name for name in load_file(version.path / "model.safetensors"))
    embeddings = load_draft(version.path, target).model.get_input_embeddings().weight
    assert torch.equal(embeddings, target.model.get_input_embeddings().weight)


def test_updates_leave_out_what_was_taught_of_the_weights_before(
    settings: OnlineSettings, small_draft: LanguageModel, target: LanguageModel, replay: ReplayLog, answer: Answer
) -> None:
    taught = replace(small_draft, stop_head=StopHead("probs", 8, 8, small_draft.width).eval())
    registry = VersionRegistry(settings.layout.versions)
    first = registry.promote(registry.add(lambda folder: save_draft(taught, folder, target)).name, "first draft")
    fill(replay, answer, 6)
    (version,) = run_trainer(replace(changed(settings), target=TINY), lambda: False, once=True)
    assert "stop" in read_metadata(first.path)
    assert "stop" not in read_metadata(version.path)
