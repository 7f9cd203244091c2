"""Counts of tokens, and the ids that a truncated vocabulary keeps."""

from __future__ import annotations

import copy

import torch
from tokenizers import AddedToken

from distillspec.models import LanguageModel
from distillspec.models.vocabulary import choose_kept_ids, count_tokens, expected_counts
from distillspec.signals import TeacherSignal
from distillspec.types import Sample


def test_the_most_frequent_ids_and_special_tokens_with_a_role_are_kept(target: LanguageModel) -> None:
    counts = count_tokens([[200, 200, 200, 150, 150, 90], []], target.identity.vocab_size)
    kept = choose_kept_ids(counts, 5, target.tokenizer)
    assert kept.tolist() == [1, 2, 90, 150, 200]  # the tiny tokenizer's were never counted, and token 0 has no role
    assert choose_kept_ids(counts, 1, target.tokenizer).tolist() == [1, 2]
    assert len(choose_kept_ids(counts, 10**6, target.tokenizer)) == target.identity.vocab_size


def test_reserved_tokens_without_a_role_count_as_often_as_they_occur(target: LanguageModel) -> None:
    """Gemma reserves 6,200: they left no room for words in a vocabulary of 2,048."""
    tokenizer = copy.deepcopy(target.text_tokenizer)
    tokenizer.add_tokens([AddedToken(f"<unused{i}>", special=True) for i in range(40)])
    counts = count_tokens([[200, 200, 200, 150, 150, 270]], len(tokenizer))
    assert choose_kept_ids(counts, 5, tokenizer).tolist() == [1, 2, 150, 200, 270]
    assert choose_kept_ids(counts, 5, tokenizer, [280, 10**6]).tolist() == [1, 2, 150, 200, 280], "it may end an answer"


def test_unseen_places_are_filled_from_the_lowest_ids(target: LanguageModel) -> None:
    kept = choose_kept_ids(count_tokens([[200]], target.identity.vocab_size), 20, target.tokenizer).tolist()
    assert kept == [*range(19), 200]


def test_recorded_signals_count_by_probability_and_unrecorded_responses_by_token(target: LanguageModel) -> None:
    probs = torch.tensor([[0.5, 0.25], [0.7, 0.2]])
    ids = torch.tensor([[7, 8], [7, 9]], dtype=torch.int32)
    topk = TeacherSignal("topk", ids, probs.log().half(), 1 - probs.sum(-1))
    sampled = TeacherSignal("sampled", torch.tensor([[3, 3, 4]], dtype=torch.int32), torch.zeros(1, 3), torch.zeros(1))
    samples = [
        Sample("a", "x", (1, 1), (7, 9), topk),
        Sample("b", "x", (2,), (3,), sampled),
        Sample("c", "x", (2,), (6, 6)),
    ]
    counts = expected_counts(samples, 12)
    wanted = {1: 2.0, 2: 2.0, 7: 1.2, 8: 0.25, 9: 0.2, 3: 2 / 3, 4: 1 / 3, 6: 2.0}
    expected = torch.zeros(12, dtype=torch.float64)
    expected[list(wanted)] = torch.tensor(list(wanted.values()), dtype=torch.float64)
    torch.testing.assert_close(counts, expected, atol=1e-3, rtol=0)
    before = counts.clone()
    choose_kept_ids(counts, 5, target.tokenizer)
    assert torch.equal(counts, before)
