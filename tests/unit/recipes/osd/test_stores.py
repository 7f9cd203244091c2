"""Stores as arms: they name what followed before, learn from whole answers, and forget what they only looked at."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distillspec.models import LanguageModel
from distillspec.recipes.osd.beside import NOTHING
from distillspec.recipes.osd.stores import STORES, Store

from .conftest import TOKENS, logged


@pytest.mark.parametrize("name", sorted(STORES))
def test_a_text_that_was_learnt_is_named_when_it_comes_again(target: LanguageModel, name: str) -> None:
    answer = logged(target, entries=8)
    store = Store(name, target.identity.vocab_size)
    before = store.named(answer)
    assert before.shape == (TOKENS,)
    assert store.named(answer).tolist() == before.tolist()  # it has learnt nothing by looking
    store.learn([answer])
    again = store.named(replace(answer, request_id="0/a/2")).tolist()
    right = sum(token == own for token, own in zip(again, answer.response_ids, strict=True))
    assert right > 0.8 * TOKENS
    assert right > 3 * sum(token == own for token, own in zip(before.tolist(), answer.response_ids, strict=True))


@pytest.mark.parametrize("name", sorted(STORES))
def test_tenants_are_apart(target: LanguageModel, name: str) -> None:
    answer = logged(target, entries=8)
    store = Store(name, target.identity.vocab_size)
    alone = store.named(answer).tolist()
    store.learn([replace(answer, tenant="another")])
    assert store.named(answer).tolist() == alone
    assert alone[0] == NOTHING
