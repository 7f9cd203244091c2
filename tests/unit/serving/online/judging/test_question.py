"""What a version is judged by: conversations that neither draft has seen any part of, in the order they came."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distillspec.models import LanguageModel, save_draft
from distillspec.serving.online.judging.question import Question, candidate_question, open_questions
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.registry import VersionRegistry

from ..conftest import Answer


@pytest.fixture
def question(registry: VersionRegistry, small_draft: LanguageModel, target: LanguageModel) -> Question:
    """Ask about a candidate that has learnt from answers 2 to 4."""
    registry.add(lambda folder: save_draft(small_draft, folder, target), requests=(2, 4))
    found = candidate_question(registry)
    assert found is not None
    return found


def test_answers_up_to_the_last_one_learnt_from_judge_nobody(
    question: Question, replay: ReplayLog, answer: Answer
) -> None:
    replay.append([answer(f"r{i}") for i in range(1, 8)])
    assert [entry.request_id for entry in question.unseen(replay, 10)] == ["r5", "r6", "r7"]
    assert [entry.request_id for entry in question.unseen(replay, 2)] == ["r5", "r6"]
    late = replace(question, since_s=1000.0)
    replay.append([answer("later", time_s=1001.0)])
    assert [entry.request_id for entry in late.unseen(replay, 10)] == ["later"]


def test_what_goes_on_from_a_conversation_that_was_learnt_from_judges_nobody(
    question: Question, replay: ReplayLog, answer: Answer
) -> None:
    seen = [answer(f"r{i}", tenant="a", prompt_ids=tuple(range(10 * i, 10 * i + 9))) for i in range(1, 5)]
    replay.append(seen)
    first = seen[2]
    turn = (*first.prompt_ids, *first.response_ids, 7, 8, 9)
    again = [
        answer("repeated", tenant="a", prompt_ids=first.prompt_ids),
        answer("next turn", tenant="a", prompt_ids=turn),
        answer("of another tenant", tenant="b", prompt_ids=first.prompt_ids),
        answer("new", tenant="a"),
        answer("new again", tenant="a", prompt_ids=answer("new").prompt_ids),
    ]
    replay.append(again[:2])
    replay.append(again[2:])
    unseen = question.unseen(replay, 10)
    assert [entry.request_id for entry in unseen] == ["of another tenant", "new", "new again"]
    assert unseen[1].conversation == unseen[2].conversation != unseen[0].conversation
    assert [entry.request_id for entry in question.unseen(replay, 1)] == ["of another tenant"]


def test_a_suspicion_is_asked_about_first(
    registry: VersionRegistry, small_draft: LanguageModel, target: LanguageModel
) -> None:
    first = registry.current()
    second = registry.add(lambda folder: save_draft(small_draft, folder, target))
    assert open_questions(registry, suspected=True) == [Question(second, first)], "nothing to go back to"  # type: ignore[arg-type]
    registry.promote(second.name, "better")
    assert open_questions(registry, suspected=False) == []
    (asked,) = open_questions(registry, suspected=True)
    assert (asked.version.name, asked.against.name) == (second.name, first.name)  # type: ignore[union-attr]
    assert asked.since_s == registry.promotions()[-1]["time_s"]
