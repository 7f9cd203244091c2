"""Drafts with tables of other sizes than the target's: they draft its ids, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distillspec.commands.untrained import prepare_draft
from distillspec.config import DraftConfig, TargetConfig
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel, initialise_draft, load_draft, load_target, save_draft
from distillspec.models.checkpoint import matched
from distillspec.models.draft import load_pretrained
from distillspec.models.table_sizes import require_same_ids, with_ids
from distillspec.models.tiny import tiny_model
from distillspec.types import Sample

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


def test_a_draft_with_fewer_ids_may_be_truncated(target: LanguageModel, narrow: Path) -> None:
    config = DraftConfig(kind="pretrained", path=str(narrow), vocabulary=60)
    text = [Sample("a", "d", (1, 20, 258), (40, 50, 257, 70))]
    draft = prepare_draft(config, target, lambda: text)
    assert draft.kept_ids is not None
    assert len(draft.kept_ids) == 60
    assert int(draft.kept_ids.max()) < FEWER, "ids that it lacks are not chosen, frequent or special"
    assert {20, 40, 50, 70} <= set(draft.kept_ids.tolist())


def test_a_short_head_under_a_target_without_tokenizer_is_kept_short(target: LanguageModel, narrow: Path) -> None:
    """The target's own head is padded, and a draft that was made with its tokenizer has a row for each id."""
    bare = replace(target, tokenizer=None, identity=replace(target.identity, vocab_size=264))
    draft = initialise_draft(DraftConfig(kind="eagle"), target)
    found = matched(replace(draft, tokenizer=None), bare)
    assert found.kept_ids is not None
    assert found.width == len(found.head.weight) == target.identity.vocab_size
    require_same_ids(found, bare)


def test_drafts_that_were_not_loaded_with_the_target_are_refused(target: LanguageModel, narrow: Path) -> None:
    alone = load_target(TargetConfig(path=str(narrow), dtype="float32", device="cpu"))
    with pytest.raises(ConfigError, match=f"reads {FEWER} token ids and proposes {FEWER}, target tiny has 259"):
        require_same_ids(alone, target)
    with pytest.raises(ConfigError, match="load_draft"):
        require_same_ids(initialise_draft(DraftConfig(layers=2), target), alone)
    require_same_ids(initialise_draft(DraftConfig(layers=2), target), target)


def test_a_draft_of_another_width_may_begin_to_read_states(target: LanguageModel, tmp_path: Path) -> None:
    assert target.tokenizer is not None
    tiny_model(264, layers=2, hidden=32, seed=5).save_pretrained(tmp_path / "small")
    target.tokenizer.save_pretrained(tmp_path / "small")
    draft = initialise_draft(DraftConfig(kind="pretrained", path=str(tmp_path / "small"), features=True), target)
    save_draft(draft, tmp_path / "draft", target)
    again = load_draft(tmp_path / "draft", target)
    ours, theirs = draft.model.state_dict(), again.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
