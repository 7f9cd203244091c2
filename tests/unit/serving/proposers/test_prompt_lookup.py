"""Prompt lookup: the longest match wins, and of equal ones the latest."""

from __future__ import annotations

from distillspec.serving import Request
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.shape import chain_of
from distillspec.serving.proposers.base import ProposalRequest
from distillspec.serving.proposers.prompt_lookup import PromptLookup


def proposals(tokens: list[int], length: int = 4) -> tuple[int, ...]:
    sequence = SequenceState("a", Request("a", tuple(tokens)), 0, 0, list(tokens), frozenset(), 64)
    (tree,) = PromptLookup(longest=3, shortest=1).propose([ProposalRequest(sequence, chain_of(length, "lookup"))])
    return tree.tokens


def test_the_longest_match_wins_and_of_equal_ones_the_latest() -> None:
    assert proposals([1, 2, 3, 9, 9, 5, 3, 7, 1, 2, 3]) == (9, 9, 5, 3)
    assert proposals([3, 7, 3, 8, 3], length=2) == (8, 3)
    assert proposals([1, 2, 3, 4]) == ()
    assert proposals([4, 4, 4]) == (4,)


def test_lookups_find_what_was_written_meanwhile() -> None:
    lookup = PromptLookup(longest=2, shortest=2)
    sequence = SequenceState("a", Request("a", (1, 2)), 0, 0, [1, 2], frozenset(), 64)
    assert len(lookup.propose([ProposalRequest(sequence, chain_of(3, "lookup"))])[0]) == 0
    sequence.tokens += [5, 6, 7, 1, 2]
    assert lookup.propose([ProposalRequest(sequence, chain_of(3, "lookup"))])[0].tokens == (5, 6, 7)
