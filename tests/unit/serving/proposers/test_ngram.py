"""The n-gram proposer: what it learns from, its trees, and its walls."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distillspec.errors import ConfigError
from distillspec.serving.base.likely import FEW_ROWS
from distillspec.serving.base.requests import Request, SequenceState
from distillspec.serving.base.shape import PlannedTree, TreeShape
from distillspec.serving.base.tree import NGRAM, TokenTree, merged
from distillspec.serving.proposers.base import ProposalRequest
from distillspec.serving.proposers.ngram import IDLE_AFTER, IDLE_EVERY, IDLE_EVERY_OF_FEW, LEARN_BATCH, OF_PROMPT, Ngram

from .foreseen import foreseen


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
    foreseen(proposer, sequence([1, 2, 3, 9, 1, 2, 3, 9, 1, 2, 4]))
    found = tree(proposer, sequence([5, 1, 2]), 2, 1)
    assert found.tokens == (3, 9, 4)
    assert found.parents == (-1, 0, -1)
    assert {(group.source, group.kind) for group in found.groups} == {(NGRAM, "deterministic")}
    assert tree(proposer, sequence([5, 1, 2], stop=frozenset([3])), 1, 1).tokens == (3,)


def test_each_token_of_a_text_is_learnt_from_once() -> None:
    proposer, text = Ngram(longest=1, least=0.0), sequence([1, 2])
    for _ in range(3):
        before = foreseen(proposer, text)
    text.tokens += [1, 2]
    proposer.leave_slot(text)  # preempted
    after = foreseen(proposer, sequence([7, 1], name="other"))
    assert (before.limit, after.match) == (0, 1 + int(2 / 3 * 10)), "behind 1 comes 2, seen twice"


def test_nothing_is_proposed_that_is_not_probable_enough() -> None:
    proposer = Ngram(longest=1, least=0.5)
    foreseen(proposer, sequence([1, 2, 1, 3, 1, 4]))
    assert foreseen(proposer, sequence([9, 1])).limit == 0
    assert tree(proposer, sequence([9, 1]), 2).tokens == ()


def test_surer_proposals_are_told_apart() -> None:
    proposer = Ngram(longest=1)
    foreseen(proposer, sequence([1, 2] * 20 + [5, 6]))
    sure, unsure = foreseen(proposer, sequence([9, 1])), foreseen(proposer, sequence([9, 5]))
    assert sure.match > unsure.match > 0
    assert not sure.drafted_by_model


def test_of_long_prompts_the_end_is_learnt_from() -> None:
    text = sequence([1, 2] + [3] * OF_PROMPT, prompt=OF_PROMPT + 2)
    proposer = Ngram(longest=1)
    foreseen(proposer, text)
    assert foreseen(proposer, sequence([9, 1])).limit == 0
    assert foreseen(proposer, sequence([9, 3])).limit > 0


def test_a_long_prompt_is_learnt_from_over_several_steps_or_at_its_end() -> None:
    tokens = [1, 2, *[3] * LEARN_BATCH, 4, 5, *[3] * LEARN_BATCH, 6, 7]
    proposer, text = Ngram(longest=1), sequence(tokens, prompt=len(tokens))
    known = list[list[bool]]()
    for step in range(3):
        foreseen(proposer, text)
        ends = [sequence([9, first], name=f"{step} {first}") for first in (1, 4, 6)]
        known.append([foreseen(proposer, end).limit > 0 for end in ends])
    assert known == [[True, False, False], [True, True, False], [True, True, True]]
    left = Ngram(longest=1)
    foreseen(left, text)
    left.leave_slot(text)
    assert foreseen(left, sequence([9, 6], name="later")).limit > 0


def test_tenants_learn_apart_and_can_be_forgotten() -> None:
    proposer, text = Ngram(longest=1), sequence([1, 2, 1, 2])
    foreseen(proposer, text)
    assert foreseen(proposer, sequence([9, 1], "b")).limit == 0
    proposer.forget_tenant("a")
    assert foreseen(proposer, sequence([9, 1])).limit == 0
    text.tokens += [8, 8]
    foreseen(proposer, text)
    assert foreseen(proposer, sequence([9, 1])).limit == 0, "what was forgotten is not read again"
    assert foreseen(proposer, sequence([9, 8])).limit > 0


def test_requests_that_are_not_logged_teach_nothing() -> None:
    proposer, text = Ngram(longest=1), sequence([1, 2, 1, 2])
    text.request = replace(text.request, log=False)
    foreseen(proposer, text)
    proposer.leave_slot(text)
    assert foreseen(proposer, sequence([9, 1])).limit == 0


def test_impossible_options_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="contexts=0 must be at least 1"):
        Ngram(contexts=0)


def repeating(proposer: Ngram, count: int = 20) -> SequenceState:
    """A text behind whose last token 2 came often, then 3, and seldom 9."""
    text = sequence([1, 2, 3] * count + [1, 9, 1, 2, 3, 1], name="r")
    foreseen(proposer, text)
    return text


def test_nodes_are_named_the_likeliest_first() -> None:
    proposer = Ngram(longest=2)
    likely = foreseen(proposer, repeating(proposer)).likely
    assert likely is not None
    assert list(likely.chances) == sorted(likely.chances, reverse=True)
    found = tree(proposer, repeating(proposer), 1, 1, 1)
    assert found.tokens == (2, 3, 1)
    assert likely.parents[:3] == (-1, 0, 1)
    for count in range(1, len(likely.chances) + 1):
        shape = likely.first(count).shape
        (grown,) = proposer.propose([ProposalRequest(repeating(proposer), (PlannedTree(NGRAM, shape),))])
        assert len(grown) == count, "what is named is what is proposed"


def test_chances_follow_what_is_accepted() -> None:
    proposer = Ngram(longest=2)
    text = repeating(proposer)
    before = foreseen(proposer, text).likely
    for _ in range(10):
        found = tree(proposer, text, 1)
        proposer.committed(text, found, ())
    after = foreseen(proposer, text).likely
    assert before is not None
    assert after is not None
    assert max(after.chances, default=0.0) < 0.7 * before.chances[0]


def test_tokens_of_others_are_no_evidence_against_what_follows() -> None:
    """A path that another source's token led to ends what is compared."""
    proposer = Ngram(longest=2)
    text = repeating(proposer)
    joined = merged([tree(proposer, text, 1, 1), TokenTree.chain([7, 8], source="draft")])
    proposer.committed(text, joined, (2, 3))
    proposer.committed(text, TokenTree.chain([7, 8], source="draft"), (0, 1))
    likely = foreseen(proposer, text).likely
    assert likely is not None
    assert likely.chances[0] > 0.3, "one rejection, of one token"


def busy() -> Ngram:
    """A proposer for many rows."""
    proposer = Ngram(longest=2)
    for row in range(FEW_ROWS):
        foreseen(proposer, sequence([7, 8], name=f"row {row}"))
    return proposer


def names(proposer: Ngram, text: SequenceState) -> int:
    """Return how many nodes are named for a text."""
    likely = foreseen(proposer, text).likely
    assert likely is not None
    return len(likely.chances)


def test_one_row_has_all_nodes_named_whatever_is_drafted() -> None:
    proposer = Ngram(longest=2)
    text = repeating(proposer)
    counts = []
    for _ in range(30):
        counts.append(names(proposer, text))
        tree(proposer, text, 1)
    assert len(set(counts)) == 1


def test_fewer_nodes_are_named_where_few_are_drafted() -> None:
    proposer = busy()
    text = repeating(proposer)
    counts = []
    for _ in range(40):
        counts.append(names(proposer, text))
        tree(proposer, text, 1)
    assert counts[-1] < counts[0]
    for _ in range(60):
        likely = foreseen(proposer, text).likely
        assert likely is not None
        proposer.propose([ProposalRequest(text, (PlannedTree(NGRAM, likely.shape),))])
    assert len(likely.chances) == counts[0], "and more again where all are"


def test_chains_alone_are_named_without_siblings() -> None:
    proposer = Ngram(longest=2, wide=False, depth=3)
    likely = foreseen(proposer, repeating(proposer)).likely
    assert likely is not None
    assert likely.parents == (-1, 0, 1)


def test_chances_that_have_fallen_are_named_again() -> None:
    """What is named follows what is drafted, also where nothing that is likely enough has come for a while."""
    proposer = busy()
    text = repeating(proposer)
    for _ in range(20):
        foreseen(proposer, text)  # nothing is drafted
        foreseen(proposer, sequence([1, 9], name="other"))
    for _ in range(60):
        likely = foreseen(proposer, sequence([1, 9], name="other")).likely
        assert likely is not None
        shape = likely.shape
        proposer.propose([ProposalRequest(sequence([1, 9], name="other"), (PlannedTree(NGRAM, shape),))])
    assert likely.chances


def test_where_nothing_is_drafted_nodes_are_seldom_grown() -> None:
    proposer = busy()
    text = repeating(proposer)
    before = 1 + FEW_ROWS  # rows that were asked for
    able = [foreseen(proposer, text).limit > 0 for _ in range(IDLE_AFTER + 10 * IDLE_EVERY)]
    assert all(able[: IDLE_AFTER - before])
    assert sum(able[IDLE_AFTER - before :]) == 10
    tree(proposer, text, 1)
    assert all(foreseen(proposer, text).limit > 0 for _ in range(IDLE_AFTER))


def test_for_one_row_nodes_are_grown_more_often() -> None:
    proposer = Ngram(longest=2)
    text = repeating(proposer)
    able = [foreseen(proposer, text).limit > 0 for _ in range(IDLE_AFTER + 10 * IDLE_EVERY_OF_FEW)]
    assert 10 <= sum(able[IDLE_AFTER:]) <= 11


def test_an_answer_that_ends_while_it_waits_teaches_nothing_more() -> None:
    proposer, text = Ngram(longest=1), sequence([1, 2, 1, 2])
    foreseen(proposer, text)
    text.tokens += [7, 8, 7, 8]
    text.finish_reason = "abort"
    proposer.leave_slot(text)
    assert foreseen(proposer, sequence([9, 7], name="other")).limit == 0
