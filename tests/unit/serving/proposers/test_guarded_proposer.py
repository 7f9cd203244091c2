"""A proposer that fails rests, longer after each step in which it did."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from distillspec.serving import Request
from distillspec.serving.base.backoff import FIRST_WAIT_STEPS
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.shape import chain_of
from distillspec.serving.base.tree import TokenTree
from distillspec.serving.proposers.base import EMPTY, ProposalRequest, Proposer
from distillspec.serving.proposers.draft_collapse import JUDGED_TOKENS, DraftCollapse
from distillspec.serving.proposers.guarded_proposer import ASIDE_STEPS, GuardedProposer


class Failing(Proposer):
    """Fails whenever it is told what was accepted."""

    def propose(self, requests: Sequence[Any]) -> list[TokenTree]:
        return [EMPTY] * len(requests)

    def committed(self, sequence: SequenceState, tree: TokenTree, path: Sequence[int]) -> None:
        raise RuntimeError("no such place")


def test_what_all_rows_of_a_step_share_is_one_failure(caplog: pytest.LogCaptureFixture) -> None:
    guarded = GuardedProposer(Failing(), "half", ["half"])
    rows = [SequenceState(str(i), Request(str(i), (5, 6)), 0, i, [5, 6], frozenset(), 64, slot=i) for i in range(8)]
    with caplog.at_level(logging.WARNING):
        for row in rows:
            guarded.committed(row, EMPTY, ())
    assert all(row.failed_sources == {"half"} for row in rows)
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"no speculation for {FIRST_WAIT_STEPS} steps" in line
    waited = 0
    while guarded.paused:
        guarded.step()
        waited += 1
    assert waited == FIRST_WAIT_STEPS
    guarded.committed(rows[0], EMPTY, ())
    for _ in range(2 * FIRST_WAIT_STEPS - 1):
        guarded.step()
        assert guarded.paused
    guarded.step()
    assert not guarded.paused


class Spoilt(Failing):
    """Gives NaN for some rows, in whose trees there may be tokens that were drafted before."""

    def __init__(self) -> None:
        self.not_finite: set[str] = set()

    def propose(self, requests: Sequence[Any]) -> list[TokenTree]:
        return [TokenTree.chain((5,))] * len(requests)

    def committed(self, sequence: SequenceState, tree: TokenTree, path: Sequence[int]) -> None: ...


def row(name: str) -> SequenceState:
    return SequenceState(name, Request(name, (5, 6)), 0, 0, [5, 6], frozenset(), 64, slot=0)


def test_a_draft_of_nan_answers_in_a_row_rests(caplog: pytest.LogCaptureFixture) -> None:
    proposer = Spoilt()
    guarded = GuardedProposer(proposer, "half", ["half"])

    def answer(name: str, broken: bool) -> None:
        proposer.not_finite = {name} if broken else set()
        guarded.propose([ProposalRequest(row(name), chain_of(1))])

    for number, broken in enumerate([True, True, False, True, True]):
        answer(str(number), broken)
    assert guarded.healthy
    assert not guarded.paused
    with caplog.at_level(logging.WARNING):
        answer("third", True)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "half failed (its logits were NaN or infinite for 3 answers in a row)" in line
    assert guarded.paused
    assert not guarded.healthy
    for _ in range(FIRST_WAIT_STEPS):
        guarded.step()
    assert not guarded.paused
    answer("fourth", True)
    assert guarded.paused, "one more says enough"
    for _ in range(2 * FIRST_WAIT_STEPS):
        guarded.step()
    for number in range(2 * FIRST_WAIT_STEPS):
        assert not guarded.healthy
        answer(f"sound {number}", False)
    assert guarded.healthy


def test_one_sound_row_of_a_step_speaks_for_the_draft() -> None:
    proposer = Spoilt()
    guarded = GuardedProposer(proposer, "half", ["half"])
    proposer.not_finite = {"0", "1", "2"}
    guarded.propose([ProposalRequest(row(str(number)), chain_of(1)) for number in range(4)])
    assert not guarded.paused
    guarded.propose([ProposalRequest(row(str(number)), chain_of(1)) for number in range(3)])
    assert guarded.paused


def test_a_draft_that_collapses_is_set_aside_and_comes_back_after_better_tokens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    guarded = GuardedProposer(Spoilt(), "half", ["half"], DraftCollapse(0.4))
    with caplog.at_level(logging.WARNING):
        for _ in range(JUDGED_TOKENS - 1):
            guarded.judge(False)
        assert guarded.healthy
        guarded.judge(False)
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"no speculation for {ASIDE_STEPS} steps: half failed (0.0% of its tokens were accepted, 40% before)" in line
    assert guarded.paused
    for _ in range(ASIDE_STEPS):
        guarded.step()
    assert not guarded.paused
    for _ in range(JUDGED_TOKENS):
        assert not guarded.healthy
        guarded.judge(True)
    assert guarded.healthy


def test_one_that_a_selection_leaves_by_itself_is_unhealthy_and_does_not_rest(caplog: pytest.LogCaptureFixture) -> None:
    guarded = GuardedProposer(Spoilt(), "half", ["half"], DraftCollapse(0.4), rests=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(3 * JUDGED_TOKENS):
            guarded.judge(False)
            assert not guarded.paused
    assert not guarded.healthy
    (line,) = [record.getMessage() for record in caplog.records]
    assert "left to the selection: half failed (0.0% of its tokens were accepted, 40% before)" in line
    for _ in range(JUDGED_TOKENS):
        assert not guarded.healthy
        guarded.judge(True)
    assert guarded.healthy


def test_what_is_not_watched_is_not_judged() -> None:
    guarded = GuardedProposer(Spoilt(), "half", ["half"])
    for _ in range(JUDGED_TOKENS):
        guarded.judge(False)
    assert guarded.healthy
