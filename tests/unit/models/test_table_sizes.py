"""Drafts with tables of other sizes than the target's: they draft its ids, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distillspec.config import DraftConfig, TargetConfig
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel, initialise_draft, load_draft, load_target, save_draft
from distillspec.models.draft import load_pretrained
from distillspec.models.table_sizes import with_ids
from distillspec.models.tiny import tiny_model

FEWER = 250  # ids, below the 259 of the tiny tokenizer
IDS = torch.tensor([[1, 20, 30, 249, 258]])


@pytest.fixture
def narrow(target: LanguageModel, tmp_path: Path) -> Path:
    """A model with the tiny tokenizer, whose tables lack its last ids."""
    assert target.tokenizer is not None
    tiny_model(FEWER, layers=1, seed=3).save_pretrained(tmp_path / "narrow")
    target.tokenizer.save_pretrained(tmp_path / "narrow")
    return tmp_path / "narrow"


def test_a_draft_with_fewer_ids_reads_all_and_proposes_its_own(
    target: LanguageModel, narrow: Path, tmp_path: Path
) -> None:
    draft = load_pretrained(str(narrow), target)
    assert draft.identity.vocab_size == target.identity.vocab_size
    assert draft.kept_ids is not None
    assert draft.kept_ids.tolist() == list(range(FEWER))
    logits = draft.logits(IDS)
    assert logits.shape == (1, 5, FEWER)
    own = load_target(TargetConfig(path=str(narrow), dtype="float32", device="cpu"))
    torch.testing.assert_close(logits[:, :4], own.logits(IDS[:, :4]), msg="ids that it has are read as before")
    save_draft(draft, tmp_path / "draft", target)
    again = load_draft(tmp_path / "draft", target)
    assert torch.equal(again.logits(IDS), logits)
    assert again.width == FEWER


def test_a_draft_with_more_ids_is_cut_to_the_targets(target: LanguageModel, narrow: Path) -> None:
    smaller = load_target(TargetConfig(path=str(narrow), dtype="float32", device="cpu"))
    draft = initialise_draft(DraftConfig(layers=2), target)
    cut = with_ids(draft, smaller)
    assert cut.width == cut.identity.vocab_size == FEWER
    torch.testing.assert_close(cut.logits(IDS[:, :4]), draft.logits(IDS[:, :4])[..., :FEWER])
    assert with_ids(cut, smaller) is cut


def test_a_draft_that_keeps_an_id_that_the_target_lacks_is_refused(
    target: LanguageModel, truncated: LanguageModel, narrow: Path
) -> None:
    smaller = load_target(TargetConfig(path=str(narrow), dtype="float32", device="cpu"))
    ids = torch.tensor([*range(39), FEWER])
    with pytest.raises(ConfigError, match=f"proposes token id {FEWER}.*ids below {FEWER}"):
        with_ids(replace(truncated, kept_ids=ids), smaller)
