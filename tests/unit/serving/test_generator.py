"""The engine as a source of training data."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from distillspec.data.collect import score
from distillspec.data.prompts import stable_seed
from distillspec.errors import ConfigError, RunError
from distillspec.generation import SlotGenerator
from distillspec.models import LanguageModel
from distillspec.serving import EngineSettings
from distillspec.serving.generator import EngineGenerator
from distillspec.signals import SignalRequest
from distillspec.types import GenerationRequest, Generator, Prompt, Sample, SamplingPolicy

from .conftest import hf_greedy, prompts

PLAIN = SamplingPolicy()


def requests(count: int = 6, most: int = 12) -> list[GenerationRequest]:
    return [GenerationRequest(Prompt(f"p{i}", tuple(p)), most, seed=i) for i, p in enumerate(prompts(count))]


def settings(slots: int, length: int = 0) -> EngineSettings:
    return EngineSettings(max_slots=slots, controller="fixed", speculation_length=length, compile=False)


def write(generator: EngineGenerator, policy: SamplingPolicy, **extra: object) -> list[Sample]:
    found = dict(generator.generate(requests(), policy, stop_ids=generator.writer.stop_ids, **extra))  # type: ignore[arg-type]
    return [found[i] for i in sorted(found)]


def test_greedy_samples_are_transformers_own_and_the_models_are_given_back(
    target: LanguageModel, draft: LanguageModel
) -> None:
    before = target.model.config._attn_implementation
    samples = write(EngineGenerator(target, settings(2, 3), draft=draft), SamplingPolicy(temperature=0.0))
    assert target.model.config._attn_implementation == before
    assert [list(s.response_ids) for s in samples] == [hf_greedy(target, p, 12) for p in prompts(6)]


def test_samples_depend_on_seeds_alone(target: LanguageModel, draft: LanguageModel) -> None:
    plain = write(EngineGenerator(target, settings(1)), PLAIN)
    fast = write(EngineGenerator(target, settings(4, 3), draft=draft), PLAIN)
    assert [s.response_ids for s in plain] == [s.response_ids for s in fast]


@pytest.mark.parametrize("length", [0, 3])
def test_the_recorded_signal_is_the_plain_forward_pass(
    target: LanguageModel, draft: LanguageModel, length: int
) -> None:
    generator = EngineGenerator(target, settings(3, length), draft=draft)
    for sample in write(generator, PLAIN, signal=SignalRequest("topk", 6)):
        assert sample.signal is not None
        assert len(sample.signal) == len(sample.response_ids)
        ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
        logprobs = torch.log_softmax(target.logits(ids)[0, len(sample.prompt_ids) - 1 : -1].float(), -1)
        wanted = logprobs.gather(-1, sample.signal.ids.long())
        torch.testing.assert_close(sample.signal.logprobs.float(), wanted, atol=5e-3, rtol=0)


@pytest.mark.parametrize("length", [0, 3])
def test_draws_from_the_tail_are_those_that_scoring_the_text_gives(
    target: LanguageModel, draft: LanguageModel, length: int
) -> None:
    """And so the slot generator's, which are held to the same: who writes does not matter, nor in what company."""
    wanted = SignalRequest("topk", 6, tail_draws=3)
    asked = [replace(request, seed=stable_seed(5, request.prompt.id)) for request in requests()]
    generator = EngineGenerator(target, settings(3, length), draft=draft)
    written = dict(generator.generate(asked, PLAIN, stop_ids=(), signal=wanted))
    for sample in written.values():
        (scored,) = score([replace(sample, signal=None)], target, wanted, seed=5)
        assert sample.signal is not None
        assert scored.signal is not None
        assert sample.signal.tail_ids is not None
        assert scored.signal.tail_ids is not None
        assert torch.equal(sample.signal.tail_ids, scored.signal.tail_ids)
    plain = dict(EngineGenerator(target, settings(3, length), draft=draft).generate(asked, PLAIN, stop_ids=()))
    assert [plain[i].response_ids for i in plain] == [written[i].response_ids for i in plain]


def test_a_truncated_draft_writes_absolute_ids_of_its_own_vocabulary(
    target: LanguageModel, truncated_draft: LanguageModel
) -> None:
    samples = write(EngineGenerator(truncated_draft, settings(3), source="draft"), PLAIN)
    assert truncated_draft.kept_ids is not None
    kept = set(truncated_draft.kept_ids.tolist())
    assert {token for sample in samples for token in sample.response_ids} <= kept
    assert {sample.source for sample in samples} == {"draft"}
    greedy = write(EngineGenerator(truncated_draft, settings(3)), SamplingPolicy(temperature=0.0))
    first = greedy[0]
    logits = truncated_draft.full_width(truncated_draft.logits(torch.tensor([first.prompt_ids]))[0, -1])
    assert first.response_ids[0] == int(logits.argmax())


def test_a_deadline_hands_out_answers_as_they_stand(target: LanguageModel) -> None:
    whole = write(EngineGenerator(target, settings(2)), PLAIN)
    cut = write(EngineGenerator(target, settings(2)), PLAIN, deadline=time.monotonic() - 1)
    assert len(cut) == 2  # those that had a slot in the first step
    for sample in cut:
        (same,) = (s for s in whole if s.prompt_id == sample.prompt_id)
        assert sample.response_ids == same.response_ids[: len(sample.response_ids)]
        assert not sample.finished


def test_a_target_without_numbers_is_an_error_that_names_the_prompt(target: LanguageModel) -> None:
    broken = target.model.get_output_embeddings().weight
    saved = broken.detach().clone()
    with torch.no_grad():
        broken[7] = torch.nan
    try:
        with pytest.raises(RunError, match="prompt p0: the target's logits are not finite"):
            write(EngineGenerator(target, settings(1)), PLAIN)
    finally:
        with torch.no_grad():
            broken.copy_(saved)


def both(target: LanguageModel) -> list[Generator]:
    return [EngineGenerator(target, settings(3, 2)), SlotGenerator(target, slots=3)]


def test_engine_and_slots_are_one_kind_of_generator(target: LanguageModel) -> None:
    """The same greedy text, signals, sources, ends and counts of tokens."""
    found = []
    for generator in both(target):
        told: list[int] = []
        samples = dict(
            generator.generate(
                requests(),
                SamplingPolicy(temperature=0.0),
                stop_ids=(5, 9, 60, 180),
                signal=SignalRequest("topk", 4),
                on_tokens=told.append,
            )
        )
        written = {i: (s.prompt_id, s.prompt_ids, s.response_ids, s.source, s.finished) for i, s in samples.items()}
        found.append((written, {i: s.signal.ids.tolist() for i, s in samples.items() if s.signal}, sum(told)))
    assert found[0] == found[1]
    written, signals, told_in_all = found[0]
    assert set(written) == set(signals) == set(range(6))
    assert told_in_all == sum(len(response) for _, _, response, _, _ in written.values())


def test_engine_and_slots_hand_out_what_they_have_begun_at_a_deadline(target: LanguageModel) -> None:
    for generator in both(target):
        past = time.monotonic() - 1
        samples = dict(generator.generate(requests(), PLAIN, stop_ids=(), deadline=past))
        assert len(samples) == 3  # as many as have slots
        assert not any(sample.finished for sample in samples.values())
        assert all(sample.response_ids for sample in samples.values())


def test_engine_and_slots_refuse_an_empty_prompt_alike(target: LanguageModel) -> None:
    empty = [GenerationRequest(Prompt("p", ()), 4, seed=0)]
    for generator in both(target):
        with pytest.raises(ConfigError, match="an empty prompt cannot be answered; give at least one token"):
            list(generator.generate(empty, PLAIN, stop_ids=()))
        assert list(generator.generate([], PLAIN, stop_ids=())) == []
