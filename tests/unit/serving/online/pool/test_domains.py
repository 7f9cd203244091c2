"""Which draft of a pool learns from which answers."""

from __future__ import annotations

from dataclasses import replace

from distillspec.serving.online.log.manifest import DraftedText
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.pool.domains import log_of, owners, owners_now
from distillspec.serving.online.state.pool import Member
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.state.version import ONLY

from .conftest import Drafted, domains_of

MEMBERS = [Member("a"), Member("b"), Member("c", "withdrawn")]
VERSIONS = {"1a": "a", "2a": "a", "1b": "b"}


def text(domain: str, draft: str, tokens: int) -> DraftedText:
    return DraftedText(domain, draft, 1, tokens, tokens, 0)


def test_a_domain_is_learnt_by_the_draft_of_most_of_its_tokens() -> None:
    texts = [text("x", "1a", 30), text("x", "1b", 50), text("x", "2a", 30), text("y", "1b", 5)]
    assert owners(MEMBERS, texts, VERSIONS) == {"x": "a", "y": "b"}


def test_a_domain_that_nobody_drafts_for_is_the_first_drafts() -> None:
    assert owners(MEMBERS, [text("x", "", 30), text("x", "gone", 5)], VERSIONS) == {"x": "a"}


def test_a_specialist_on_trial_learns_in_the_place_of_its_owner() -> None:
    texts = [text("x", "1a", 30), text("y", "1a", 30)]
    trial = Member("y-specialist", "on trial", "y", "a")
    assert owners([*MEMBERS, trial], texts, VERSIONS) == {"x": "a", "y": "y-specialist"}
    withdrawn = replace(trial, status="withdrawn")
    assert owners([*MEMBERS, withdrawn], texts, VERSIONS) == {"x": "a", "y": "a"}


def test_each_draft_sees_the_answers_of_its_domains(
    replay: ReplayLog, pooled: VersionRegistry, drafted: Drafted
) -> None:
    replay.append([*drafted("general", "chat", 3), *drafted("maths", "sums", 2), *drafted("general", "code", 1)])
    assert owners_now(replay, pooled.pool) == {"chat": "general", "sums": "maths", "code": "general"}
    general, maths = (log_of(name, replay, pooled) for name in ("general", "maths"))
    assert domains_of(general.entries()) == {"chat", "code"}
    assert (general.count(), maths.count(), replay.count()) == (4, 2, 6)
    assert [entry.number for entry in maths.entries(after=4)] == [5]
    assert {entry.draft for entry in maths.entries()} == {pooled.of("maths").versions()[0].served_as}
    assert log_of(ONLY, replay, pooled) is replay


def test_domains_pass_to_the_draft_that_serves_them_now(
    replay: ReplayLog, pooled: VersionRegistry, drafted: Drafted
) -> None:
    replay.append(drafted("general", "sums", 2))
    maths = log_of("maths", replay, pooled)
    assert maths.count() == 0
    replay.append(drafted("maths", "sums", 3, first=2))
    assert maths.count() == 5
