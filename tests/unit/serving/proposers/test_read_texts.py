"""A text that two sequences begin with is read once by a draft, as long as the one that read it keeps its slot."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from distillspec.models import LanguageModel
from distillspec.models.slot_attention import slot_attention_in
from distillspec.models.slot_cache import SlotCache
from distillspec.serving import Request, SamplingParams
from distillspec.serving.base.catch_up import CATCH_UP_TOKENS_A_STEP
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.execution.runner import ModelRunner
from distillspec.serving.execution.slot_pool import Prefix
from distillspec.serving.proposers.read_texts import ReadTexts

HEAD = [(7 * place) % 200 + 3 for place in range(600)]


def sequence_of(name: str, slot: int, text: list[int]) -> SequenceState:
    return SequenceState(name, Request(name, tuple(text), SamplingParams()), 0, 0, text, frozenset(), 64, slot=slot)


@pytest.fixture
def texts(draft: LanguageModel) -> Iterator[ReadTexts]:
    with torch.no_grad(), slot_attention_in(draft.model):
        yield ReadTexts(ModelRunner(draft, SlotCache(3, 700)))


def both(texts: ReadTexts, length: int) -> tuple[SequenceState, SequenceState]:
    """Two sequences that begin with `length` tokens, the second of which found the first in its slot."""
    one, other = sequence_of("one", 0, HEAD[:length]), sequence_of("other", 1, [*HEAD[: length - 1], 5])
    texts.enter_slot(one, None)
    texts.enter_slot(other, Prefix(0, length - 1))
    return one, other


def test_both_can_draft_after_one_has_read(texts: ReadTexts) -> None:
    one, other = both(texts, 100)
    assert texts.catch_up([one, other]) == {"one", "other"}
    assert (texts.state("one").computed, texts.state("other").computed) == (99, 99)
    for held in texts.runner.cache.tensors():
        assert held[0, :, :99].abs().amin(dim=(0, 2)).gt(0).all()
        assert held[1, :, :99].equal(held[0, :, :99])
        assert not held[1, :, 99:].any()
    assert texts.runner.passes == 1


def test_a_text_of_several_steps_is_copied_as_it_is_read(texts: ReadTexts) -> None:
    one, other = both(texts, 600)
    assert texts.catch_up([one, other]) == set()
    assert (texts.state("one").computed, texts.state("other").computed) == (
        CATCH_UP_TOKENS_A_STEP,
        CATCH_UP_TOKENS_A_STEP,
    )
    assert texts.state("other").unchecked
    assert texts.catch_up([one, other]) == {"one", "other"}
    assert texts.state("other").unchecked, "it has not drafted"
    texts.leave_slot(other)
    assert not any(held[1].any() for held in texts.runner.cache.tensors())


def test_one_that_does_not_draft_is_not_waited_for(texts: ReadTexts) -> None:
    _, other = both(texts, 100)
    assert texts.catch_up([other]) == {"other"}


@pytest.mark.parametrize("event", ["left and dropped", "left", "distrusted", "not sound"])
def test_what_is_no_longer_there_is_not_copied(texts: ReadTexts, event: str) -> None:
    one, other = both(texts, 100)
    texts.catch_up([one])
    for held in texts.runner.cache.tensors():
        held[0] = float("nan")
    if event == "left and dropped":
        texts.leave_slot(one)
    elif event == "left":
        texts.leave_slot(one)
        texts.enter_slot(sequence_of("third", 0, [9] * 50), None)
    elif event == "distrusted":
        texts.distrust(one)
    else:
        texts.state("one").sound = False
    assert texts.catch_up([other]) == {"other"}
    assert all(held[1].isfinite().all() for held in texts.runner.cache.tensors())
    assert texts.runner.passes == 2
