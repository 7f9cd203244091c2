"""Making drafts: pretrained, truncated, from scratch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from distillspec.commands.untrained import prepare_draft
from distillspec.config import DraftConfig
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel, check_draft, initialise_draft, load_draft, save_draft
from distillspec.models.draft_head import truncate_head
from distillspec.types import Sample

from .draft_folders import plain_folder

IDS = torch.tensor([[1, 20, 30, 40, 50, 60]])


def test_a_pretrained_draft_comes_from_aplain_folder(target: LanguageModel, tmp_path: Path) -> None:
    folder = plain_folder(target, tmp_path / "plain", layers=1)
    draft = initialise_draft(DraftConfig(kind="pretrained", path=str(folder)), target)
    assert len(draft.layers) == 1
    assert draft.width == target.identity.vocab_size
    assert draft.dtype == torch.float32


def test_a_pretrained_draft_comes_from_an_earlier_draft(
    target: LanguageModel, truncated: LanguageModel, tmp_path: Path
) -> None:
    save_draft(truncated, tmp_path / "draft", target)
    draft = initialise_draft(DraftConfig(kind="pretrained", path=str(tmp_path / "draft")), target)
    assert draft.width == 40
    assert torch.equal(draft.logits(IDS), truncated.logits(IDS))


def test_a_pretrained_draft_comes_from_a_run_folder(
    target: LanguageModel, truncated: LanguageModel, tmp_path: Path
) -> None:
    save_draft(truncated, tmp_path / "run" / "draft", target)
    config = DraftConfig(kind="pretrained", path=str(tmp_path / "run"))
    check_draft(config, target)
    assert torch.equal(initialise_draft(config, target).logits(IDS), truncated.logits(IDS))


def test_a_truncated_draft_can_be_truncated_further(
    target: LanguageModel, truncated: LanguageModel, tmp_path: Path
) -> None:
    assert truncated.kept_ids is not None
    save_draft(truncated, tmp_path / "draft", target)
    config = DraftConfig(kind="pretrained", path=str(tmp_path / "draft"), vocabulary=20)
    check_draft(config, target)
    text = [Sample("a", "d", (1,), (100, 100, 101, 200, 200, 200, 200))]  # the draft has no row for 200
    draft = prepare_draft(config, target, lambda: text)
    assert draft.width == 20
    assert draft.kept_ids is not None
    assert {100, 101} <= set(draft.kept_ids.tolist()) <= set(truncated.kept_ids.tolist())
    columns = torch.searchsorted(truncated.kept_ids, draft.kept_ids)
    torch.testing.assert_close(draft.logits(IDS), truncated.logits(IDS)[..., columns])
    save_draft(draft, tmp_path / "smaller", target)
    assert torch.equal(load_draft(tmp_path / "smaller", target).logits(IDS), draft.logits(IDS))


def test_a_truncated_draft_cannot_grow(target: LanguageModel, truncated: LanguageModel, tmp_path: Path) -> None:
    save_draft(truncated, tmp_path / "draft", target)
    config = DraftConfig(kind="pretrained", path=str(tmp_path / "draft"), vocabulary=41)
    with pytest.raises(ConfigError, match=r"draft\.vocabulary=41: the draft .* keeps 40 tokens already; give fewer"):
        check_draft(config, target)


def test_a_scratch_draft_has_the_configured_shape_and_the_targets_ids(target: LanguageModel) -> None:
    config = DraftConfig(kind="scratch", layers=3, hidden_size=48, heads=3)
    draft = initialise_draft(config, target)
    assert len(draft.layers) == 3
    assert draft.model.config.hidden_size == 48
    assert draft.logits(IDS).shape[-1] == target.identity.vocab_size
    assert draft.stop_ids == target.stop_ids
    assert draft.model.config.max_position_embeddings == target.model.config.max_position_embeddings


def test_a_scratch_draft_can_be_truncated_and_saved(target: LanguageModel, kept_ids: Tensor, tmp_path: Path) -> None:
    draft = initialise_draft(DraftConfig(kind="scratch", layers=1, hidden_size=32, heads=2), target, kept_ids=kept_ids)
    save_draft(draft, tmp_path / "draft", target)
    assert torch.equal(load_draft(tmp_path / "draft", target).logits(IDS), draft.logits(IDS))


def test_a_tied_draft_keeps_its_embeddings_when_its_head_is_cut(random_model, kept_ids: Tensor, tmp_path: Path) -> None:
    """Gemma ties its head to the embeddings. Cutting one must not cut the other, on disk either."""
    target = random_model("gemma2")
    assert target.model.get_output_embeddings().weight is target.model.get_input_embeddings().weight
    draft = initialise_draft(DraftConfig(layers=2), target, kept_ids=kept_ids)
    whole = initialise_draft(DraftConfig(layers=2), target)
    torch.testing.assert_close(draft.logits(IDS), whole.logits(IDS)[..., kept_ids])
    save_draft(draft, tmp_path / "draft", target)
    assert torch.equal(load_draft(tmp_path / "draft", target).logits(IDS), draft.logits(IDS))


def test_a_truncated_head_cannot_get_back_what_it_lacks(target: LanguageModel) -> None:
    draft = initialise_draft(DraftConfig(layers=1), target, kept_ids=torch.arange(10))
    with pytest.raises(ConfigError, match="lacks some of the ids"):
        truncate_head(draft, torch.arange(11))
