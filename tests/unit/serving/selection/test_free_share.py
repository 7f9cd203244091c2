"""The share of an answer's steps in which sources without a model draft in place of a draft."""

from __future__ import annotations

import pytest

from distillspec.serving.base.acceptance import Trial
from distillspec.serving.selection.free_share import SHARE, FreeShare

from .steps import row


def trials(*sources: str, accepted: bool = True) -> list[Trial]:
    return [Trial(depth, 0, source, accepted) for depth, source in enumerate(sources, 1)]


def test_without_such_sources_there_is_no_share() -> None:
    found = FreeShare(())
    assert not found.saw(row("1/0"), trials("lookup"))
    assert found.of(row("1/0"), 9, 9) == 0.0


def test_it_is_learnt_for_each_domain() -> None:
    found = FreeShare(("lookup",))
    for _ in range(400):
        assert found.saw(row("1/0", domain="code"), trials("lookup", "lookup"))
        assert not found.saw(row("2/0", domain="chat"), trials("a"))
        assert not found.saw(row("2/0", domain="chat"), [])
    assert found.of(row("3/0", domain="code"), 0, 0) > 0.9
    assert found.of(row("3/0", domain="chat"), 0, 0) < 0.05
    assert found.of(row("3/0", domain="unseen"), 0, 0) == pytest.approx(SHARE)


def test_an_answers_own_steps_count_beside_its_domains() -> None:
    found = FreeShare(("lookup",))
    assert found.of(row("1/0"), 1000, 1000) > 0.95
    assert found.of(row("1/0"), 1000, 0) < 0.02


def test_a_tree_behind_a_sources_nodes_is_the_drafts() -> None:
    assert not FreeShare(("ngram",)).saw(row("1/0"), trials("ngram", "a"))


def test_the_best_source_is_that_of_the_most_accepted_tokens() -> None:
    found = FreeShare(("lookup", "suffix"))
    assert found.best == "lookup"
    found.saw(row("1/0"), trials("suffix", "suffix"))
    found.saw(row("1/0"), trials("lookup", "lookup", "lookup", accepted=False))
    assert found.best == "suffix"
