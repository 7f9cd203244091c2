"""Packed sequences, attended to one at a time, get what masks over whole rows give them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from distillspec.models import LanguageModel
from distillspec.models.sequence_attention import (
    IMPLEMENTATION,
    REPLACED,
    can_attend_by_sequence,
    counts_of,
    reading_by_sequence,
)

LENGTHS = ([5, 9, 2], [12, 4], [16])  # of the sequences of each row


def packed() -> tuple[Tensor, Tensor]:
    """Return ids and places `[3, 16]` of packed rows."""
    ids = torch.arange(48).view(3, 16) % 37 + 3
    return ids, torch.tensor([[place for length in row for place in range(length)] for row in LENGTHS])


def test_counts_are_of_each_sequence_and_of_the_rest() -> None:
    sequence = torch.tensor([[1, 1, 2, 2, 2], [1, 3, 3, 1, 1]])
    there = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    assert counts_of(sequence) == [[2, 3, 0, 0], [3, 0, 2, 0]]
    assert counts_of(sequence, there, most=4) == [[2, 3, 0, 0, 0], [1, 0, 2, 0, 2]]


@pytest.mark.numerics
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3", "mistral"])
def test_values_and_gradients_are_those_of_masks(random_model: Callable[..., LanguageModel], family: str) -> None:
    model = random_model(family, torch.float64)
    model.model.requires_grad_(True)
    ids, places = packed()
    found = []
    for by_sequence in (False, True):
        model.model.zero_grad()
        with reading_by_sequence(model.model, places) if by_sequence else nullcontext():
            hidden = model.hidden(ids, places)
        hidden.square().sum().backward()
        found.append([hidden.detach(), *(p.grad.clone() for p in model.layers.parameters() if p.grad is not None)])
    model.model.zero_grad()
    model.model.requires_grad_(False)
    assert len(found[0]) > 5
    for masked, apart in zip(*found, strict=True):
        torch.testing.assert_close(apart, masked, atol=1e-9, rtol=1e-9)


def test_no_sequence_reads_another(random_model: Callable[..., LanguageModel]) -> None:
    model = random_model("llama", torch.float32)
    ids, places = packed()
    changed = ids.clone()
    changed[0, 6] += 1  # the second sequence of the first row
    with torch.no_grad(), reading_by_sequence(model.model, places):
        before, after = model.hidden(ids, places), model.hidden(changed, places)
    assert (before != after).any(-1).nonzero().tolist() == [[0, place] for place in range(6, 14)]


def test_the_model_attends_as_before_behind_the_block(random_model: Callable[..., LanguageModel]) -> None:
    model, (_, places) = random_model("llama", torch.float32), packed()
    assert can_attend_by_sequence(model.model)

    def fail_inside() -> None:
        with reading_by_sequence(model.model, places):
            assert model.model.config._attn_implementation == IMPLEMENTATION
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    assert model.model.config._attn_implementation == REPLACED


def test_attention_of_another_kind_stays(random_model: Callable[..., LanguageModel]) -> None:
    model, (_, places) = random_model("llama", torch.float32), packed()
    model.model.set_attn_implementation("eager")
    assert not can_attend_by_sequence(model.model)
    with reading_by_sequence(model.model, places):
        assert model.model.config._attn_implementation == "eager"
