"""Changes of many rows at once are those of each row alone, in vLLM's order, bit for bit."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from distillspec.serving import SamplingParams
from distillspec.serving.base.requests import Request, SequenceState
from distillspec.serving.decoding.logits import Columns, Place, transform

VOCAB = 60


def one_by_one(row: Tensor, place: Place, ids: list[int]) -> None:
    """The definition: change the logits `row` of token `ids` in place, token by token."""
    sequence, params = place.sequence, place.sequence.params
    written = [*sequence.output_ids, *place.drafted]
    counts, seen = Counter(written), {*sequence.tokens, *place.drafted}
    ended = {w[-1] for w in sequence.bad_words if len(w) == 1 or written[-(len(w) - 1) :] == list(w[:-1])}
    too_early = sequence.stop_ids if len(written) < params.min_tokens else frozenset[int]()
    for column, token in enumerate(ids):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            row[column] = -torch.inf
        if token in ended or token in too_early:
            row[column] = -torch.inf
        if token in params.logit_bias:
            row[column] += torch.tensor(params.logit_bias[token])
        if token in seen and params.repetition_penalty != 1.0:
            penalty = torch.tensor(params.repetition_penalty)
            row[column] = row[column] / penalty if row[column] > 0 else row[column] * penalty
        if counts[token] and (params.presence_penalty or params.frequency_penalty):
            row[column] -= torch.tensor(params.presence_penalty + params.frequency_penalty * counts[token])


def any_params(dice: random.Random) -> SamplingParams:
    offers: dict[str, Any] = {
        "repetition_penalty": dice.choice([0.7, 1.3]),
        "presence_penalty": dice.choice([0.5, -1.0]),
        "frequency_penalty": dice.choice([0.3, -0.4]),
        "logit_bias": {dice.randrange(VOCAB): dice.uniform(-3, 3) for _ in range(4)},
        "allowed_token_ids": dice.sample(range(VOCAB), 10),
        "min_tokens": 6,
        "bad_word_ids": [[3], [4, 5]],
    }
    return SamplingParams(max_tokens=99, **{name: value for name, value in offers.items() if dice.random() < 0.4})


def window(name: str, dice: random.Random) -> list[Place]:
    params = any_params(dice)
    text = [1, 2, 3, *(dice.randrange(8) for _ in range(dice.randrange(10)))]
    words = tuple(tuple(word) for word in params.bad_word_ids)
    sequence = SequenceState(name, Request(name, (1, 2, 3), params), 0, 0, text, frozenset({7, 8}), 64, bad_words=words)
    drafted = tuple(dice.randrange(8) for _ in range(3))
    return [Place(sequence, drafted[:count]) for count in range(dice.randint(1, 4))]


@pytest.mark.parametrize("truncated", [True, False])
def test_many_rows_are_changed_as_each_is_alone(truncated: bool) -> None:
    changed = 0
    for seed in range(150):
        dice = random.Random(seed)
        ids = sorted(dice.sample(range(VOCAB), 25)) if truncated else list(range(VOCAB))
        places = [place for name in "abcd" for place in window(name, dice)]
        logits = torch.randn(len(places), len(ids), generator=torch.Generator().manual_seed(seed))
        found, wanted = logits.clone(), logits.clone()
        transform(found, places, Columns(VOCAB, torch.tensor(ids) if truncated else None))
        for row, place in zip(wanted, places, strict=True):
            one_by_one(row, place, ids)
        assert torch.equal(found, wanted)
        changed += int((found != logits).any())
    assert changed > 100


def test_ids_that_the_head_lacks_change_no_other_row() -> None:
    """A tokenizer may have more ids than the head has rows, and bad words are encoded by it."""
    request = Request("a", (1,), SamplingParams(bad_words=("x",)))
    words = ((VOCAB,), (VOCAB + 3,), (2,))
    sequence = SequenceState("a", request, 0, 0, [1], frozenset(), 64, bad_words=words)
    logits, columns = torch.zeros(2, VOCAB), Columns(VOCAB)
    transform(logits, [Place(sequence, ()), Place(sequence, (5,))], columns)
    assert logits.isinf().nonzero().tolist() == [[0, 2], [1, 2]]
    assert columns.of_values({VOCAB: 1.0, 3: 2.0}) == {3: 2.0}
