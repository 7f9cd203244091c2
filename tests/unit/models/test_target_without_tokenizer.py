"""A model folder without a tokenizer loads. Text is refused in one line, and drafts are matched by size."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from distillspec.config import DraftConfig, TargetConfig
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel, initialise_draft, load_draft, load_target, save_draft
from distillspec.models.draft import load_pretrained
from distillspec.models.tiny import tiny_model


def loaded(folder: Path, rows: int = 264) -> LanguageModel:
    tiny_model(rows).save_pretrained(folder)
    return load_target(TargetConfig(path=str(folder), dtype="float32", device="cpu"))


@pytest.fixture
def bare(tmp_path: Path) -> LanguageModel:
    """The tiny target's weights, alone in a folder."""
    return loaded(tmp_path / "bare")


def test_it_loads_with_the_heads_vocabulary(bare: LanguageModel) -> None:
    assert bare.tokenizer is None
    assert (bare.identity.tokenizer_hash, bare.identity.vocab_size) == ("", 264)
    assert bare.stop_ids == (2,)
    with pytest.raises(ConfigError, match="bare has no tokenizer, so it cannot read text; add its tokenizer files"):
        _ = bare.text_tokenizer


@pytest.mark.parametrize("kind", ["pruned", "scratch"])
def test_its_drafts_have_no_tokenizer_either(kind: str, bare: LanguageModel, tmp_path: Path) -> None:
    save_draft(initialise_draft(DraftConfig(kind=kind, layers=1), bare), tmp_path / "draft", bare)
    draft = load_draft(tmp_path / "draft", bare)
    assert draft.tokenizer is None
    assert draft.identity.vocab_size == 264


def test_beside_a_model_with_one_the_sizes_decide(
    bare: LanguageModel, target: LanguageModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded(tmp_path / "other", rows=300)
    with caplog.at_level(logging.WARNING):
        draft = load_pretrained(str(tmp_path / "bare"), target)
    assert "bare has no tokenizer: draft and target are taken to share one, for both have 264 ids" in caplog.text
    assert draft.tokenizer is target.tokenizer
    assert draft.identity.vocab_size == target.identity.vocab_size == 259
    assert draft.logits(torch.tensor([[1, 2]])).shape[-1] == 259
    save_draft(initialise_draft(DraftConfig(layers=1), target), tmp_path / "draft", target)
    assert load_draft(tmp_path / "draft", bare).identity.vocab_size == 264
    with pytest.raises(ConfigError, match="other reads 300 token ids and target tiny 264"):
        load_pretrained(str(tmp_path / "other"), target)


def test_a_broken_tokenizer_is_not_a_missing_one(tmp_path: Path) -> None:
    loaded(tmp_path / "folder")
    (tmp_path / "folder" / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot load"):
        load_target(TargetConfig(path=str(tmp_path / "folder"), device="cpu"))


def test_a_scratch_draft_pads_with_the_first_of_several_ends(bare: LanguageModel) -> None:
    bare.model.config.eos_token_id, bare.model.config.pad_token_id = [2, 3], None
    draft = initialise_draft(DraftConfig(kind="scratch", layers=1), bare)
    assert draft.model.config.pad_token_id == 2
