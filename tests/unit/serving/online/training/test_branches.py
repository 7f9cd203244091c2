"""Text behind rejected tokens: prefixes, weights and bounds, and that a draft learns from it."""

from __future__ import annotations

from dataclasses import replace

import torch

from distillspec.config import AdaptConfig, LossConfig
from distillspec.models import LanguageModel
from distillspec.recording import top_signal
from distillspec.serving.online.log.records import LogEntry, LoggedAnswer
from distillspec.serving.online.log.rejected_nodes import RejectedNode, collected
from distillspec.serving.online.training.branches import branch_sample, branches_of
from distillspec.serving.online.training.examples import TrainingExample, examples_of
from distillspec.serving.online.training.learning import learn
from distillspec.serving.online.training.selection import Selection
from distillspec.serving.online.training.vocabulary import ceilings, needed_counts
from distillspec.signals import TeacherSignal

from ..conftest import ENTRIES, Answer
from .drafts import CONFIG


def with_nodes(answer: LoggedAnswer, target: LanguageModel, entries: int = 4) -> LoggedAnswer:
    """Give an answer three rejected nodes behind its fifth token, in two branches, with the target's true signal."""
    nodes = [RejectedNode(5, -1, 40, 0), RejectedNode(5, 0, 41, 1), RejectedNode(5, 0, 42, 2)]
    rows = []
    for tail in ((40,), (40, 41), (40, 42)):
        with torch.no_grad():
            rows.append(target.logits(torch.tensor([[*answer.prompt_ids, *answer.response_ids[:5], *tail]]))[0, -1])
    ids, logprobs, tail_mass, *_ = top_signal(torch.stack(rows), entries)
    return replace(answer, nodes=collected(nodes, TeacherSignal("topk", ids.int(), logprobs.half(), tail_mass)))


def test_a_branch_is_text_that_the_target_gave_its_distribution_for(answer: Answer, target: LanguageModel) -> None:
    own = with_nodes(answer("a"), target)
    assert own.nodes is not None
    second = branch_sample(own, own.nodes.branches()[1])
    assert second.prompt_ids == (*own.prompt_ids, *own.response_ids[:5], 40)
    assert second.response_ids[0] == 42
    assert len(second.response_ids) == 2
    assert isinstance(second.signal, TeacherSignal)
    assert second.signal.ids.shape == (2, ENTRIES)
    ids = torch.tensor([[*second.prompt_ids, *second.response_ids]])
    with torch.no_grad():
        logprobs = target.logits(ids)[0, len(second.prompt_ids) - 1 : -1].log_softmax(-1)
    for row, (best, values) in enumerate(zip(second.signal.ids, second.signal.logprobs, strict=True)):
        known = best >= 0
        assert int(known.sum()) == 4
        torch.testing.assert_close(values[known].float(), logprobs[row, best[known].long()], atol=5e-3, rtol=0)
        assert int(logprobs[row].argmax()) == second.response_ids[row] or row == 0


def test_each_node_has_a_weight_once_and_the_cost_is_bounded(answer: Answer, target: LanguageModel) -> None:
    own, plain = with_nodes(answer("a"), target), answer("b")
    found = list(branches_of([own, plain], {"default": 0.5}, seed=0))
    assert sum(float(weights.sum()) for _, weights, _ in found) == 3
    assert {scale for *_, scale in found} == {0.5}
    long = [with_nodes(answer(f"r{i}", tokens=6), target) for i in range(6)]
    read = sum(len(sample) for sample, *_ in branches_of(long, {"default": 1.0}, seed=0))
    assert 0 < read <= sum(len(own.prompt_ids) + len(own) for own in long)


def examples(answers: list[LoggedAnswer], positions: str) -> list[TrainingExample]:
    named = ("default", "default")
    entries = [LogEntry(i, 0, 0, own.request_id, *named, i, len(own), 0, 0, 0.0) for i, own in enumerate(answers)]
    chosen = Selection(entries, [], [], 0, {"default": 1.0})
    return examples_of(chosen, answers, replace(CONFIG, positions=positions))


def test_they_are_learnt_by_choice_and_count_for_no_figure_of_the_text(answer: Answer, target: LanguageModel) -> None:
    answers = [with_nodes(answer(f"r{i}", tokens=40), target) for i in range(3)]
    usual, more = examples(answers, "all"), examples(answers, "verified")
    assert [example.is_text for example in more] == [True] * 3 + [False] * 6
    assert ceilings(more, None) == ceilings(usual, None)
    vocabulary = target.identity.vocab_size
    assert torch.equal(needed_counts(more, vocabulary), needed_counts(usual, vocabulary))
    assert AdaptConfig().positions == "all"


def test_a_draft_learns_what_follows_rejected_tokens(
    answer: Answer, target: LanguageModel, small_draft: LanguageModel
) -> None:
    answers = [with_nodes(answer(f"r{i}"), target, ENTRIES) for i in range(4)]
    config = replace(CONFIG, positions="verified", epochs=10, max_steps=60)
    apart = [example for example in examples(answers, "verified") if not example.is_text]

    def distance() -> float:
        sums = []
        for example in apart:
            sample = example.sample
            assert isinstance(sample.signal, TeacherSignal)
            ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
            with torch.no_grad():
                q = small_draft.logits(ids)[0, len(sample.prompt_ids) - 1 : -1].float().log_softmax(-1)
            p = sample.signal.logprobs.float()
            known = q.gather(-1, sample.signal.ids.clamp(min=0).long())
            sums.append(float((p.exp() * (p - known)).sum()))
        return sum(sums)

    before = distance()
    result, _ = learn(small_draft, examples(answers, "verified"), config, LossConfig(name="fkl"))
    assert result.problem == ""
    assert distance() < before
