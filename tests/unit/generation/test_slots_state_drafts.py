"""Text of drafts that read the target's states: each token is the first that they draft behind the target's reading."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from distillspec.data.collect import response_logits, with_writer_logprobs
from distillspec.generation import SlotGenerator
from distillspec.generation import slots as generator_module
from distillspec.models import LanguageModel, native_layers
from distillspec.models.few_queries import why_not
from distillspec.signals import SignalRequest, TeacherSignal
from distillspec.types import GenerationRequest, Sample, SamplingPolicy

from ..models.middle_llama import llama
from ..models.state_drafts import KINDS, drafted_logits, state_draft
from .test_slots import GREEDY, PLAIN, requests, write


def own_text(draft: LanguageModel, target: LanguageModel, slots: int = 4) -> SlotGenerator:
    return SlotGenerator(target, slots=slots, source="draft", other=draft, other_share=1.0)


def uneven(most: int = 9) -> list[GenerationRequest]:
    """Return requests whose rows end at different times and move about the slots."""
    return [GenerationRequest(r.prompt, 3 + 5 * i % most, r.seed) for i, r in enumerate(requests())]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_each_token_is_drafted_behind_what_the_target_has_read(
    random_model: Callable[..., LanguageModel], kind: str
) -> None:
    target = random_model("llama", torch.float64)
    kept = torch.tensor([i for i in range(target.identity.vocab_size) if i % 5 != 1])
    draft = state_draft(kind, target, kept if kind == "eagle" else None)
    samples = write(own_text(draft, target), uneven(), GREEDY, stop_ids=())
    assert {s.source for s in samples} == {"draft"}
    for sample in samples[:4]:
        text = [*sample.prompt_ids, *sample.response_ids]
        for place in range(len(sample.prompt_ids), len(text)):
            (logits,) = drafted_logits(draft, target, text[:place], [0])
            assert text[place] == int(draft.absolute_ids(logits.argmax()))


def test_sampled_text_is_the_same_in_any_number_of_slots(random_model: Callable[..., LanguageModel]) -> None:
    target = random_model("llama", torch.float64)
    draft = state_draft("eagle", target)
    alone, many = (
        [s.response_ids for s in write(own_text(draft, target, slots), uneven(), PLAIN, stop_ids=())]
        for slots in (1, 64)
    )
    assert alone == many
    mixed = SlotGenerator(target, source="mixed", other=draft, other_share=0.5)
    teacher = [s.response_ids for s in write(SlotGenerator(target), uneven(), PLAIN, stop_ids=())]
    assert [s.response_ids for s in write(mixed, uneven(), PLAIN, stop_ids=())] not in (teacher, alone)


def test_the_signal_is_the_targets_and_nothing_stays_behind(target: LanguageModel) -> None:
    draft = state_draft("features", target)
    (sample,) = write(own_text(draft, target), requests(5, 1), PLAIN, signal=SignalRequest("topk", 4))
    ids = torch.tensor([sample.prompt_ids + sample.response_ids])
    expected = torch.log_softmax(target.logits(ids)[0, len(sample.prompt_ids) - 1 : -1], -1).topk(4).values
    assert isinstance(sample.signal, TeacherSignal)
    torch.testing.assert_close(sample.signal.logprobs.float(), expected, atol=5e-3, rtol=1e-3)
    assert sample.states is None
    assert all(not layer._forward_hooks and not layer._forward_pre_hooks for layer in target.layers)


@pytest.mark.parametrize("kind", ["eagle", "block", "medusa"])
@torch.no_grad()
def test_how_likely_its_tokens_were_is_known(random_model: Callable[..., LanguageModel], kind: str) -> None:
    target = random_model("llama", torch.float64)
    draft, policy = state_draft(kind, target), SamplingPolicy(temperature=0.7)
    written = Sample("a", "d", (1, 30, 31), (40, 50, 60), source="draft")
    (sample,) = with_writer_logprobs([written], draft, policy, target)
    text = [*written.prompt_ids, *written.response_ids]
    wanted = [drafted_logits(draft, target, text[:n], [0])[0].div(0.7).log_softmax(-1)[text[n]] for n in (3, 4, 5)]
    assert sample.writer_logprobs is not None
    torch.testing.assert_close(sample.writer_logprobs.double(), torch.stack(wanted), atol=1e-5, rtol=1e-5)


@pytest.mark.numerics
@pytest.mark.skipif(why_not() is not None, reason=f"no kernel here: {why_not()}")
@pytest.mark.parametrize("kind", ["eagle", "block"])
@torch.no_grad()
def test_layers_in_one_call_read_the_states_too(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    model = llama()
    draft = state_draft(kind, model, noise=0.02)
    monkeypatch.setattr(generator_module, "PACKED_STEPS", 1)
    monkeypatch.setattr(native_layers, "MOST_TOKENS", 64)  # so that prompts are read in parts
    for sample in write(own_text(draft, model, 3), requests(), GREEDY, stop_ids=()):
        logits = torch.cat(list(response_logits(sample, draft, model)))
        chosen = logits.gather(-1, torch.tensor(sample.response_ids)[:, None])[:, 0]
        spread = float(logits.std())
        assert bool((logits.max(-1).values - chosen <= 0.02 * spread).all())
