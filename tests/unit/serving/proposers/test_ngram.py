"""The n-gram proposer: what it learns from, its trees, and its walls."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distillspec.errors import ConfigError
from distillspec.serving.base.requests import Request, SequenceState
from distillspec.serving.base.shape import PlannedTree, TreeShape
from distillspec.serving.base.tree import NGRAM, TokenTree
from distillspec.serving.proposers.base import ProposalRequest
from distillspec.serving.proposers.ngram import OF_PROMPT, Ngram


def sequence(
    tokens: list[int], tenant: str = "a", stop: frozenset[int] = frozenset(), prompt: int = 1, name: str = ""
) -> SequenceState:
    request = Request(name or f"{tenant}{tokens}", tuple(tokens[:prompt]), tenant=tenant)
    return SequenceState(request.id, request, 0, 0, list(tokens), stop, 20)


def tree(proposer: Ngram, text: SequenceState, *widths: int) -> TokenTree:
    (found,) = proposer.propose([ProposalRequest(text, (PlannedTree(NGRAM, TreeShape.full(widths)),))])
    return found


def test_the_most_probable_tokens_are_proposed_in_trees() -> None:
    proposer = Ngram(longest=2)
    proposer.prospect(sequence([1, 2, 3, 9, 1, 2, 3, 9, 1, 2, 4]))
    found = tree(proposer, sequence([5, 1, 2]), 2, 1)
    assert found.tokens == (3, 9, 4)
    assert found.parents == (-1, 0, -1)
    assert {(group.source, group.kind) for group in found.groups} == {(NGRAM, "deterministic")}
    assert tree(proposer, sequence([5, 1, 2], stop=frozenset([3])), 1, 1).tokens == (3,)


def test_each_token_of_a_text_is_learnt_from_once() -> None:
    proposer, text = Ngram(longest=1, least=0.0), sequence([1, 2])
    for _ in range(3):
        before = proposer.prospect(text)
    text.tokens += [1, 2]
    proposer.leave_slot(text)  # preempted
    after = proposer.prospect(sequence([7, 1], name="other"))
    assert (before.most, after.match) == (0, 1 + int(2 / 3 * 10)), "behind 1 comes 2, seen twice"


def test_nothing_is_proposed_that_is_not_probable_enough() -> None:
    proposer = Ngram(longest=1, least=0.5)
    proposer.prospect(sequence([1, 2, 1, 3, 1, 4]))
    assert proposer.prospect(sequence([9, 1])).most == 0
    assert tree(proposer, sequence([9, 1]), 2).tokens == ()


def test_surer_proposals_are_told_apart() -> None:
    proposer = Ngram(longest=1)
    proposer.prospect(sequence([1, 2] * 20 + [5, 6]))
    sure, unsure = proposer.prospect(sequence([9, 1])), proposer.prospect(sequence([9, 5]))
    assert sure.match > unsure.match > 0
    assert not sure.by_model


def test_of_long_prompts_the_end_is_learnt_from() -> None:
    text = sequence([1, 2] + [3] * OF_PROMPT, prompt=OF_PROMPT + 2)
    proposer = Ngram(longest=1)
    proposer.prospect(text)
    assert proposer.prospect(sequence([9, 1])).most == 0
    assert proposer.prospect(sequence([9, 3])).most > 0


def test_tenants_learn_apart_and_can_be_forgotten() -> None:
    proposer, text = Ngram(longest=1), sequence([1, 2, 1, 2])
    proposer.prospect(text)
    assert proposer.prospect(sequence([9, 1], "b")).most == 0
    proposer.forget_tenant("a")
    assert proposer.prospect(sequence([9, 1])).most == 0
    text.tokens += [8, 8]
    proposer.prospect(text)
    assert proposer.prospect(sequence([9, 1])).most == 0, "what was forgotten is not read again"
    assert proposer.prospect(sequence([9, 8])).most > 0


def test_requests_that_are_not_logged_teach_nothing() -> None:
    proposer, text = Ngram(longest=1), sequence([1, 2, 1, 2])
    text.request = replace(text.request, log=False)
    proposer.prospect(text)
    proposer.leave_slot(text)
    assert proposer.prospect(sequence([9, 1])).most == 0


def test_impossible_options_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="contexts=0 must be at least 1"):
        Ngram(contexts=0)
