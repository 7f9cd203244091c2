"""Token recycling: what it learns from logits, and the trees that it proposes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from distillspec.errors import ConfigError
from distillspec.serving.base.requests import Request, SequenceState
from distillspec.serving.base.shape import PlannedTree, TreeShape
from distillspec.serving.base.tree import RECYCLED, ROOT, TokenTree
from distillspec.serving.decoding.windows import VerificationWindow
from distillspec.serving.proposers.base import EMPTY, ProposalRequest
from distillspec.serving.proposers.recycling import TokenRecycling

from .foreseen import foreseen

VOCAB = 12


def sequence(tokens: list[int], tenant: str = "a", stop: frozenset[int] = frozenset()) -> SequenceState:
    request = Request(f"{tenant}{tokens}", tuple(tokens), tenant=tenant)
    return SequenceState(request.id, request, 0, 0, list(tokens), stop, 20)


def logits_for(*best: list[int]) -> torch.Tensor:
    """A row of logits for each list, its tokens the most probable ones in order."""
    rows = torch.zeros(len(best), VOCAB)
    for row, tokens in enumerate(best):
        for rank, token in enumerate(tokens):
            rows[row, token] = 9.0 - rank
    return rows


def asked(own: SequenceState, *widths: int) -> list[ProposalRequest]:
    return [ProposalRequest(own, (PlannedTree(RECYCLED, TreeShape.full(widths)),))]


def test_children_are_what_was_most_probable_behind_their_parents_token() -> None:
    proposer, text = TokenRecycling(VOCAB, best=3), sequence([1, 2])
    tree = TokenTree.of_parents([3, 4], [ROOT, 0])
    proposer.see([VerificationWindow(text, tree)], logits_for([3, 5, 7], [4, 6, 8], [2, 1, 0]))
    (found,) = proposer.propose(asked(text, 2, 2))
    assert found.tokens == (3, 4, 5, 6), "first children first; 5 is not known"
    assert found.parents == (ROOT, 0, ROOT, 0)
    assert {group.source for group in found.groups} == {RECYCLED}
    assert {group.kind for group in found.groups} == {"deterministic"}
    (chain,) = proposer.propose(asked(text, 1, 1, 1, 1))
    assert chain.tokens == (3, 4, 2, 3)
    assert chain.is_chain


def test_newer_rows_replace_older_ones_and_nan_rows_do_not() -> None:
    proposer, text = TokenRecycling(VOCAB, best=2), sequence([2])
    for rows in (logits_for([3, 4]), logits_for([5, 6]), torch.full((1, VOCAB), torch.nan)):
        proposer.see([VerificationWindow(text, EMPTY)], rows)
    assert proposer.propose(asked(text, 2))[0].tokens == (5, 6)


def test_tokens_that_end_the_answer_have_no_children() -> None:
    proposer, text = TokenRecycling(VOCAB, best=1), sequence([2], stop=frozenset([3]))
    proposer.see([VerificationWindow(text, TokenTree.chain([3]))], logits_for([3], [4]))
    assert proposer.propose(asked(text, 1, 1))[0].tokens == (3,)


def test_nothing_is_proposed_before_anything_is_known() -> None:
    proposer, text = TokenRecycling(VOCAB), sequence([2])
    assert foreseen(proposer, text).limit == 0
    assert proposer.propose(asked(text, 2)) == [EMPTY]
    proposer.see([VerificationWindow(text, EMPTY)], logits_for([3]))
    found = foreseen(proposer, text)
    assert (found.limit > 0, found.wide, found.drafted_by_model, found.source) == (True, True, False, RECYCLED)


def test_tenants_learn_apart_and_can_be_forgotten() -> None:
    proposer = TokenRecycling(VOCAB, best=1)
    proposer.see([VerificationWindow(sequence([2]), EMPTY)], logits_for([3]))
    assert foreseen(proposer, sequence([2], "b")).limit == 0
    proposer.forget_tenant("a")
    assert foreseen(proposer, sequence([2])).limit == 0


def test_requests_that_are_not_logged_teach_nothing() -> None:
    proposer, private = TokenRecycling(VOCAB, best=1), sequence([2])
    private.request = replace(private.request, log=False)
    windows = [VerificationWindow(private, TokenTree.chain([5])), VerificationWindow(sequence([4]), EMPTY)]
    proposer.see(windows, logits_for([3], [6], [7]))
    assert [foreseen(proposer, sequence([token])).limit > 0 for token in (2, 5, 4)] == [False, False, True]


@pytest.mark.parametrize("options", [{"best": 0}])
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="best=0 must be at least 1"):
        TokenRecycling(VOCAB, **options)
