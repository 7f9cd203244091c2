"""Renewed heads: rows that stay are the draft's own, rows that come are the target's, and the draft stays whole."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from distillspec.config import DraftConfig
from distillspec.models import LanguageModel, initialise_draft, load_draft, save_draft
from distillspec.models.draft_head import HeadRows, can_renew, renew_head

from .state_drafts import state_draft

BEFORE, AFTER = torch.tensor([0, 1, 2, 9, 40, 77]), torch.tensor([0, 1, 2, 5, 40, 90, 200])


def trained(draft: LanguageModel) -> torch.Tensor:
    """Change the head's rows, as training does, and return them."""
    head = draft.model.get_output_embeddings()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    return head.weight.detach().clone()


@pytest.mark.parametrize("kind", ["tokens", "eagle", "block", "medusa"])
def test_a_renewed_head_has_its_own_rows_and_the_targets(target: LanguageModel, kind: str, tmp_path: Path) -> None:
    if kind == "tokens":
        draft = initialise_draft(DraftConfig(layers=2), target, kept_ids=BEFORE)
    else:
        draft = state_draft(kind, target, kept_ids=BEFORE)
    before, width = trained(draft), target.head.weight.shape[1]
    assert can_renew(draft, target)
    renewed = renew_head(draft, AFTER, target)
    rows = renewed.model.get_output_embeddings().weight
    assert torch.equal(rows[[0, 1, 2, 4]], before[[0, 1, 2, 4]])
    assert torch.equal(rows[[3, 5, 6], :width], target.head.weight[[5, 90, 200]])
    assert not rows[[3, 5, 6], width:].any()
    assert renewed.width == len(AFTER)
    assert renewed.kept_ids is not None
    assert renewed.kept_ids.tolist() == AFTER.tolist()
    assert rows.requires_grad
    save_draft(renewed, tmp_path / "draft", target)
    loaded = load_draft(tmp_path / "draft", target)
    assert loaded.kept_ids is not None
    assert loaded.kept_ids.tolist() == AFTER.tolist()
    stored = loaded.model.get_output_embeddings().weight
    torch.testing.assert_close(stored, rows, atol=0, rtol=2**-8)  # the folder may have 16 bits


def test_rows_of_a_target_with_a_scale_come_scaled(target: LanguageModel) -> None:
    """Granite divides its logits, and a draft's head that was copied has that in its rows."""
    scaled = replace(target, model=copy.deepcopy(target.model))
    scaled.model.config.logits_scaling = 4.0
    draft = state_draft("eagle", scaled, kept_ids=BEFORE)
    rows = renew_head(draft, AFTER, scaled).model.get_output_embeddings().weight
    width = target.head.weight.shape[1]
    torch.testing.assert_close(rows[[3, 5, 6], :width], target.head.weight[[5, 90, 200]] / 4)


def test_a_head_narrower_than_the_targets_states_cannot_take_its_rows(target: LanguageModel) -> None:
    narrow = initialise_draft(DraftConfig(layers=2), target, kept_ids=BEFORE)
    narrow.model.set_output_embeddings(nn.Linear(target.head.weight.shape[1] - 1, len(BEFORE)))
    assert not can_renew(narrow, target)


def test_rows_say_where_they_were() -> None:
    rows = HeadRows.between(BEFORE, AFTER)
    assert rows.old_rows.tolist() == [0, 1, 2, -1, 4, -1, -1]
    assert (len(rows), rows.new) == (7, 3)
    moved = rows.moved(torch.arange(6.0), torch.full((7,), -5.0))
    assert moved.tolist() == [0.0, 1.0, 2.0, -5.0, 4.0, -5.0, -5.0]
    assert HeadRows.between(BEFORE, BEFORE).old_rows.tolist() == list(range(6))
