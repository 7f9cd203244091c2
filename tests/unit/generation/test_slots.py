"""Slot decoding is plain decoding: same logits, same tokens, whatever the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from distillspec.config import DraftConfig
from distillspec.errors import ConfigError
from distillspec.generation import SlotGenerator
from distillspec.generation import slots as generator_module
from distillspec.generation.decoder import SlotDecoder
from distillspec.models import LanguageModel, initialise_draft, native_layers, packed_linear, product_trial
from distillspec.models.features import read_states
from distillspec.models.few_queries import why_not
from distillspec.models.native_layers import NativeLayers
from distillspec.models.native_rows import NativeRows
from distillspec.models.packed_linear import PackedLinear
from distillspec.models.packed_products import OneDnnProduct
from distillspec.models.slot_attention import IMPLEMENTATION, slot_attention_in
from distillspec.models.slot_cache import SlotCache
from distillspec.sampling import NonFiniteLogits
from distillspec.signals import SignalRequest, TeacherSignal
from distillspec.types import GenerationRequest, Prompt, Sample, SamplingPolicy, StateRequest

from ..models.middle_llama import llama

GREEDY, PLAIN = SamplingPolicy(temperature=0.0), SamplingPolicy()
LENGTHS = (3, 17, 1, 8, 70, 5, 29, 2, 11, 40, 6)


def requests(max_new_tokens: int = 20, count: int = len(LENGTHS)) -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(3)
    prompts = [tuple(torch.randint(3, 250, (n,), generator=generator).tolist()) for n in LENGTHS[:count]]
    return [GenerationRequest(Prompt(f"p{i}", ids), max_new_tokens, seed=i) for i, ids in enumerate(prompts)]


def write(
    generator: SlotGenerator, asked: list[GenerationRequest], policy: SamplingPolicy, **extra: Any
) -> list[Sample]:
    extra.setdefault("stop_ids", generator.models[0].stop_ids)
    answers = dict(generator.generate(asked, policy, **extra))
    assert sorted(answers) == list(range(len(asked)))
    return [answers[i] for i in range(len(asked))]


def plain_greedy(model: LanguageModel, request: GenerationRequest) -> tuple[int, ...]:
    """transformers' own greedy continuation, the prompt left out."""
    ids = torch.tensor([request.prompt.token_ids])
    out = model.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=request.max_new_tokens,
        eos_token_id=list(model.stop_ids),
        suppress_tokens=list(range(model.identity.vocab_size, model.model.config.vocab_size)),
    )
    return tuple(out[0, ids.shape[1] :].tolist())


@pytest.mark.numerics
@pytest.mark.skipif(why_not() is not None, reason=f"no kernel here: {why_not()}")
def test_what_layers_in_one_call_record_is_what_the_model_says_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    model, passes = llama(), list[int]()
    monkeypatch.setattr(generator_module, "PACKED_STEPS", 1)
    monkeypatch.setattr(native_layers, "MOST_TOKENS", 64)  # so that prompts are read in parts
    hidden_of = NativeLayers.hidden_of

    def counted(native: NativeLayers, cache: SlotCache, rows: NativeRows, *given: Tensor | None) -> Tensor:
        passes.append(rows.total)
        return hidden_of(native, cache, rows, *given)

    monkeypatch.setattr(NativeLayers, "hidden_of", counted)
    generator = SlotGenerator(model, slots=3, states=StateRequest((1, 2)))
    samples = write(generator, requests(), PLAIN, signal=SignalRequest("topk", 16), stop_ids=())
    native = NativeLayers.of(model)
    assert native is not None
    assert sum(passes) >= 200 + sum(LENGTHS) * native.takes_all_chains, "answers, and prompts where it takes all"
    assert max(passes) <= 64
    for sample in samples:
        ids, first = torch.tensor([[*sample.prompt_ids, *sample.response_ids]]), len(sample.prompt_ids) - 1
        with torch.no_grad():
            told = model.model(ids, output_hidden_states=True)
        logprobs = told.logits[0, first:-1].log_softmax(-1)
        assert isinstance(sample.signal, TeacherSignal)
        known = logprobs.gather(1, sample.signal.ids.long())
        assert torch.allclose(sample.signal.logprobs.float(), known, atol=0.02)
        states = torch.cat([told.hidden_states[i][0, :-1] for i in (1, 2)], -1)
        assert sample.states is not None
        assert torch.allclose(sample.states.values.float(), states, rtol=0.02, atol=0.02 * float(states.abs().max()))


@pytest.mark.numerics
def test_greedy_text_is_transformers_own_token_by_token(target: LanguageModel) -> None:
    # Different limits, so that rows end at different times and move about the slots.
    asked = [GenerationRequest(r.prompt, 4 + 5 * i % 17, r.seed) for i, r in enumerate(requests())]
    samples = write(SlotGenerator(target, slots=4), asked, GREEDY)
    assert [s.response_ids for s in samples] == [plain_greedy(target, request) for request in asked]


@pytest.mark.parametrize("policy", [PLAIN, SamplingPolicy(temperature=0.7, top_k=20, top_p=0.9, min_p=0.02)])
def test_sampled_text_is_the_same_in_any_number_of_slots(target: LanguageModel, policy: SamplingPolicy) -> None:
    asked = requests()
    alone = [write(SlotGenerator(target), [request], policy)[0].response_ids for request in asked]
    for slots in (3, 64):
        assert [s.response_ids for s in write(SlotGenerator(target, slots=slots), asked, policy)] == alone
    reseeded = [GenerationRequest(r.prompt, r.max_new_tokens, r.seed + 100) for r in asked]
    assert [s.response_ids for s in write(SlotGenerator(target), reseeded, policy)] != alone


def test_sampled_text_follows_the_policy(target: LanguageModel) -> None:
    """First tokens of many seeds against the softmax (coarse chi-square: 40 bins of the most probable)."""
    prompt, count = requests(1)[1].prompt, 4000
    asked = [GenerationRequest(prompt, 1, seed) for seed in range(count)]
    drawn = [s.response_ids[0] for s in write(SlotGenerator(target, slots=512), asked, PLAIN)]
    probs = torch.softmax(target.logits(torch.tensor([prompt.token_ids]))[0, -1], -1)
    assert chi_square(torch.tensor(drawn), probs) < 80  # 40 degrees of freedom: p ≈ 2e-4


def chi_square(drawn: Tensor, probs: Tensor, bins: int = 40) -> float:
    top = probs.topk(bins).indices
    expected = torch.cat([probs[top], 1 - probs[top].sum(dim=0, keepdim=True)]) * len(drawn)
    counts = torch.bincount(drawn, minlength=len(probs))
    seen = torch.cat([counts[top], (len(drawn) - counts[top].sum())[None]])
    return float(((seen - expected) ** 2 / expected.clamp(min=1e-9)).sum())


@pytest.mark.numerics
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "smollm3", "gpt2"])
@torch.no_grad()
def test_prefill_and_steps_give_the_plain_forward(kind: str, random_model) -> None:
    """Ragged rows, one moved to another slot half way. Windows are shorter than the prompts."""
    model = random_model(kind, torch.float64)  # kernels of one machine and another differ by 3.6e-5 in float32
    sequences = [[5 + (13 * r + 7 * i) % 240 for i in range(n + 6)] for r, n in enumerate((4, 19, 9))]
    prompts = [ids[:-6] for ids in sequences]
    plain = [model.logits(torch.tensor([ids]))[0] for ids in sequences]
    decoder = SlotDecoder(model, 3, 40)
    with slot_attention_in(model.model):
        got = [list(row) for row in decoder.prefill([0, 1, 2], prompts).split(1)]
        order = [0, 1, 2]
        for step in range(5):
            if step == 2:  # the first row ends, the last takes its slot
                decoder.move(2, 0)
                order = [2, 1]
            tokens = torch.tensor([sequences[row][len(prompts[row]) + step] for row in order])
            for row, logits in zip(order, decoder.step(tokens), strict=True):
                got[row].append(logits)
    for row, logits in enumerate(got):
        first = len(prompts[row]) - 1
        wanted = plain[row][first : first + len(logits)].float()  # the decoder's logits are float32 always
        torch.testing.assert_close(torch.stack(logits), wanted, atol=1e-5, rtol=1e-5)  # gemma2's own softmax is float32
    assert [len(logits) for logits in got] == [3, 6, 6]


@pytest.mark.numerics
def test_the_top_k_signal_is_the_plain_forward_at_every_position(target: LanguageModel) -> None:
    for sample in write(SlotGenerator(target, slots=4), requests(), PLAIN, signal=SignalRequest("topk", 8)):
        signal = sample.signal
        assert signal is not None
        assert len(signal) == len(sample.response_ids)
        logits = target.logits(torch.tensor([sample.prompt_ids + sample.response_ids]))[0]
        logprobs = torch.log_softmax(logits[len(sample.prompt_ids) - 1 : -1], -1)
        values = logprobs.topk(8).values
        torch.testing.assert_close(signal.logprobs.float(), values, atol=5e-3, rtol=1e-3)
        torch.testing.assert_close(logprobs.gather(-1, signal.ids.long()), values, atol=1e-4, rtol=0)
        whole = signal.logprobs.float().exp().sum(-1) + signal.tail
        torch.testing.assert_close(whole, torch.ones(len(signal)), atol=1e-6, rtol=0)
        assert signal.logprobs.dtype == torch.float16


def test_the_signal_is_raw_whatever_the_policy(target: LanguageModel) -> None:
    """Greedy text, temperature-1 log-probabilities."""
    (sample,) = write(SlotGenerator(target), requests(4, 1), GREEDY, signal=SignalRequest("topk", 3))
    logits = target.logits(torch.tensor([sample.prompt_ids]))[0, -1]
    assert sample.signal is not None
    torch.testing.assert_close(
        sample.signal.logprobs[0].float(), torch.log_softmax(logits, -1).topk(3).values, atol=5e-3, rtol=1e-3
    )


def test_sampled_signal_ids_are_drawn_from_the_raw_distribution(target: LanguageModel) -> None:
    prompt = requests(1)[1].prompt
    asked = [GenerationRequest(prompt, 1, seed) for seed in range(64)]
    samples = write(SlotGenerator(target), asked, GREEDY, signal=SignalRequest("sampled", 64))
    logprobs = torch.log_softmax(target.logits(torch.tensor([prompt.token_ids]))[0, -1], -1)
    signals = [s.signal for s in samples if s.signal is not None]
    ids = torch.cat([s.ids.flatten() for s in signals]).long()
    assert len(ids) == 4096
    assert chi_square(ids, logprobs.exp()) < 80
    torch.testing.assert_close(
        torch.cat([s.logprobs.flatten() for s in signals]).float(), logprobs[ids], atol=5e-3, rtol=1e-3
    )
    assert all(float(s.tail.sum()) == 0 for s in signals)
    assert len({tuple(s.ids.flatten().tolist()) for s in signals}) == 64  # each request draws its own


def test_a_signal_does_not_change_the_text(target: LanguageModel) -> None:
    asked = requests()
    plain = [s.response_ids for s in write(SlotGenerator(target), asked, PLAIN)]
    for kind in ("topk", "sampled"):
        signal = SignalRequest(kind, 4)  # type: ignore[arg-type]
        assert [s.response_ids for s in write(SlotGenerator(target, slots=5), asked, PLAIN, signal=signal)] == plain


def test_the_stop_token_is_part_of_the_answer_and_ends_it(target: LanguageModel) -> None:
    asked = requests()
    whole = [s.response_ids for s in write(SlotGenerator(target), asked, PLAIN, stop_ids=())]
    assert {len(ids) for ids in whole} == {20}
    stop = whole[4][7]
    samples = write(SlotGenerator(target, slots=4), asked, PLAIN, stop_ids=(stop,))
    for ids, sample in zip(whole, samples, strict=True):
        end = ids.index(stop) + 1 if stop in ids else 20
        assert sample.response_ids == ids[:end]
        assert sample.finished == (stop in ids)
    assert any(s.finished for s in samples)
    assert not all(s.finished for s in samples)


def test_every_token_is_counted_once(target: LanguageModel) -> None:
    counted: list[int] = []
    samples = write(SlotGenerator(target, slots=4), requests(), PLAIN, on_tokens=counted.append)
    assert sum(counted) == sum(len(s.response_ids) for s in samples)


@pytest.fixture(scope="module")
def draft(target: LanguageModel) -> LanguageModel:
    return initialise_draft(DraftConfig(keep=[0, 3]), target)


@pytest.mark.parametrize("policy", [PLAIN, GREEDY])
def test_a_truncated_draft_never_writes_outside_its_vocabulary(target: LanguageModel, policy: SamplingPolicy) -> None:
    kept = torch.tensor([i for i in range(target.identity.vocab_size) if i % 3 != 1])
    draft = initialise_draft(DraftConfig(keep=[0, 3]), target, kept_ids=kept)
    samples = write(SlotGenerator(draft, source="draft"), requests(), policy, stop_ids=target.stop_ids)
    assert {i for s in samples for i in s.response_ids} <= set(kept.tolist())
    assert {s.source for s in samples} == {"draft"}
    first = torch.stack([draft.logits(torch.tensor([s.prompt_ids]))[0, -1] for s in samples])
    if policy.is_greedy:
        assert [s.response_ids[0] for s in samples] == draft.absolute_ids(first.argmax(-1)).tolist()


def test_a_mixture_runs_from_the_target_alone_to_the_draft_alone(target: LanguageModel, draft: LanguageModel) -> None:
    asked = requests()

    def mixed(share: float) -> list[tuple[int, ...]]:
        generator = SlotGenerator(target, slots=5, source="mixed", other=draft, other_share=share)
        return [s.response_ids for s in write(generator, asked, PLAIN)]

    teacher = [s.response_ids for s in write(SlotGenerator(target), asked, PLAIN)]
    student = [s.response_ids for s in write(SlotGenerator(draft), asked, PLAIN)]
    assert teacher != student
    assert mixed(0.0) == teacher
    assert mixed(1.0) == student
    assert mixed(0.5) not in (teacher, student)


def test_a_mixtures_signal_is_the_targets(target: LanguageModel, draft: LanguageModel) -> None:
    generator = SlotGenerator(target, source="mixed", other=draft, other_share=1.0)
    (sample,) = write(generator, requests(5, 1), PLAIN, signal=SignalRequest("topk", 4))
    ids = torch.tensor([sample.prompt_ids + sample.response_ids])
    expected = torch.log_softmax(target.logits(ids)[0, len(sample.prompt_ids) - 1 : -1], -1).topk(4).values
    assert sample.signal is not None
    torch.testing.assert_close(sample.signal.logprobs.float(), expected, atol=5e-3, rtol=1e-3)


def test_more_than_the_model_can_read_is_refused_before_anything_runs(target: LanguageModel) -> None:
    asked = [GenerationRequest(Prompt("long", (5,) * 2000), 100, 0)]
    with pytest.raises(ConfigError, match=r"need 2100 tokens, but tiny reads at most 2048; lower data\.max_new_tokens"):
        write(SlotGenerator(target), asked, PLAIN)
    with pytest.raises(ConfigError, match="empty prompt"):
        write(SlotGenerator(target), [GenerationRequest(Prompt("none", ()), 1, 0)], PLAIN)


def test_no_requests_give_no_samples(target: LanguageModel) -> None:
    assert write(SlotGenerator(target), [], PLAIN) == []


@pytest.mark.parametrize("end", ["finished", "closed", "failed"])
def test_the_model_is_as_it_was_afterwards(target: LanguageModel, draft: LanguageModel, end: str) -> None:
    draft.model.train()
    before = draft.model.config._attn_implementation
    ids = torch.tensor([[1, 2, 3, 4]])
    logits = draft.logits(ids)
    stream = SlotGenerator(draft, slots=2, other=target, other_share=0.5).generate(requests(), PLAIN, stop_ids=())
    next(stream)
    assert draft.model.config._attn_implementation == IMPLEMENTATION
    assert not draft.model.training
    if end == "finished":
        assert len(list(stream)) == len(LENGTHS) - 1
    elif end == "closed":
        stream.close()
    else:
        with pytest.raises(ValueError, match="from outside"):
            stream.throw(ValueError("from outside"))
    assert draft.model.config._attn_implementation == before
    assert target.model.config._attn_implementation != IMPLEMENTATION
    assert draft.model.training
    assert not target.model.training
    assert torch.is_grad_enabled()
    assert torch.equal(draft.logits(ids), logits)
    draft.model.eval()


def test_a_model_that_breaks_is_reported_and_left_as_it_was(target: LanguageModel) -> None:
    broken = initialise_draft(DraftConfig(keep=[0]), target)
    before = broken.model.config._attn_implementation
    with torch.no_grad():
        broken.model.get_output_embeddings().weight.fill_(float("nan"))
    with pytest.raises(NonFiniteLogits):
        write(SlotGenerator(broken), requests(2, 1), PLAIN)
    assert broken.model.config._attn_implementation == before


@pytest.mark.numerics
@pytest.mark.parametrize("deadline", [None, 0.0])
def test_recorded_states_are_those_of_a_pass_over_the_text(target: LanguageModel, deadline: float | None) -> None:
    asked = [GenerationRequest(r.prompt, 4 + 5 * i % 17, r.seed) for i, r in enumerate(requests())]
    generator = SlotGenerator(target, slots=4, states=StateRequest((3, 1)))
    answers = dict(generator.generate(asked, PLAIN, stop_ids=target.stop_ids, deadline=deadline))
    assert len(answers) == (len(asked) if deadline is None else 4)
    for sample in answers.values():
        text = torch.tensor([[*sample.prompt_ids, *sample.response_ids][:-1]])
        expected = read_states(target, text, torch.arange(text.shape[1])[None], (3, 1))[0]
        assert sample.states is not None
        assert sample.states.ids == (3, 1)
        torch.testing.assert_close(sample.states.values, expected.bfloat16(), atol=1e-3, rtol=1e-2)  # one rounding
    assert all(not layer._forward_hooks and not layer._forward_pre_hooks for layer in target.layers)


def test_texts_do_not_depend_on_what_is_recorded(target: LanguageModel) -> None:
    plain, recording = (
        write(
            SlotGenerator(target, slots=4, states=StateRequest(ids)), requests(), PLAIN, signal=SignalRequest("topk", 5)
        )
        for ids in ((), (1, 2))
    )
    assert [s.response_ids for s in plain] == [s.response_ids for s in recording]
    assert all(s.states is None for s in plain)


@pytest.mark.parametrize("least", [20, 21])
def test_packed_weights_write_the_same_text(target: LanguageModel, monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    """They are packed where as many steps follow, and put back."""
    wanted = write(SlotGenerator(target), requests(20), SamplingPolicy())
    used: list[int] = []
    multiply = OneDnnProduct.__call__

    def watched(product: OneDnnProduct, *args: Any) -> Tensor:
        used.append(1)
        return multiply(product, *args)

    monkeypatch.setattr(OneDnnProduct, "__call__", watched)
    monkeypatch.setattr(product_trial, "ranked", lambda dtype, weights, tokens: (OneDnnProduct,))
    monkeypatch.setattr(packed_linear, "SMALLEST", 1)
    monkeypatch.setattr(generator_module, "PACKED_STEPS", least)
    found = write(SlotGenerator(target, slots=len(LENGTHS)), requests(20), SamplingPolicy())
    assert [sample.response_ids for sample in found] == [sample.response_ids for sample in wanted]
    assert bool(used) == (least == 20)
    assert not any(isinstance(layer, PackedLinear) for layer in target.decoder.modules()), "all are plain again"
