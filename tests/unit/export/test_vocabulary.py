"""Rows of embeddings and head of a draft that is to be exported."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from distillspec.export.vocabulary import align_rows
from distillspec.models import LanguageModel

TOKENS = 259  # of the tiny tokenizer. The models have 264 rows
IDS = torch.tensor([[1, 72, 80, 91, 40, 3], [5, 9, 200, 17, 33, 250]])


@torch.no_grad()
def logits_of(model: PreTrainedModel) -> Tensor:
    return model(input_ids=IDS).logits


@pytest.mark.parametrize("rows", [TOKENS, 264, 300])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_logits_of_ids_that_stay_are_the_same(
    kind: str, rows: int, random_model: Callable[[str], LanguageModel]
) -> None:
    """Gemma's embeddings scale what they give out."""
    model = copy.deepcopy(random_model(kind).model)
    before = logits_of(model)
    align_rows(model, rows, TOKENS)
    after = logits_of(model)
    assert after.shape[-1] == rows == model.get_input_embeddings().num_embeddings
    kept = min(rows, 264)
    torch.testing.assert_close(after[..., :kept], before[..., :kept], atol=1e-5, rtol=1e-5)
    assert not after[..., kept:].any()


def test_a_padding_row_past_the_end_may_be_cut_off(random_model: Callable[[str], LanguageModel]) -> None:
    model = copy.deepcopy(random_model("llama").model)
    before = logits_of(model)
    model.get_input_embeddings().padding_idx = 263
    align_rows(model, TOKENS, TOKENS)
    torch.testing.assert_close(logits_of(model), before[..., :TOKENS], atol=1e-5, rtol=1e-5)
