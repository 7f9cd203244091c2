"""Whose states a draft reads: those of the very target it learnt from, in the precision that serves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel, load_draft, save_draft
from distillspec.models.features import read_states
from distillspec.models.few_queries import why_not
from distillspec.models.own_weights import own_embeddings
from distillspec.models.target import wrap
from distillspec.serving import Engine, EngineSettings, Request, SamplingParams

from .middle_llama import llama
from .state_drafts import state_draft

TEXT = torch.tensor([[1, 40, 7, 99, 3, 120, 55, 8]])
PLACES = torch.arange(TEXT.shape[1])[None]
IDS = [1, 2]


@torch.no_grad()
def rotated(target: LanguageModel) -> LanguageModel:
    """Return the same function of text in another basis of its hidden states, as QuaRot makes it."""
    model = copy.deepcopy(target.model)
    width = model.config.hidden_size
    noise = torch.randn(width, width, dtype=target.dtype, generator=torch.Generator().manual_seed(5))
    basis = torch.linalg.qr(noise)[0]

    def read(part: nn.Linear, scale: Tensor) -> None:  # its norm's scale goes into it: only 1 commutes with a rotation
        part.weight.copy_((part.weight * scale) @ basis)

    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for part in (attention.q_proj, attention.k_proj, attention.v_proj):
            read(part, layer.input_layernorm.weight)
        for part in (mlp.gate_proj, mlp.up_proj):
            read(part, layer.post_attention_layernorm.weight)
        for part in (attention.o_proj, mlp.down_proj):
            part.weight.copy_(basis.T @ part.weight)
        layer.input_layernorm.weight.fill_(1)
        layer.post_attention_layernorm.weight.fill_(1)
    read(model.lm_head, model.model.norm.weight)
    model.model.norm.weight.fill_(1)
    model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight @ basis)
    return wrap(model, target.tokenizer, "rotated")


@pytest.mark.numerics
@pytest.mark.parametrize("trained_embeddings", [False, True])
def test_a_target_of_another_basis_is_refused(
    random_model: Callable[..., LanguageModel], tmp_path: Path, trained_embeddings: bool
) -> None:
    """It writes the same text, and its states would be noise to the draft."""
    target = random_model("llama", torch.float64)
    other = rotated(target)
    torch.testing.assert_close(other.logits(TEXT), target.logits(TEXT), atol=1e-4, rtol=1e-4)
    ours, theirs = (read_states(model, TEXT, PLACES, IDS) for model in (target, other))
    assert (ours - theirs).abs().max() > 0.1 * ours.abs().max()
    draft = state_draft("eagle", target)
    if trained_embeddings:
        own_embeddings(draft.model)
        with torch.no_grad():
            draft.model.get_input_embeddings().weight.add_(0.1)
    save_draft(draft, tmp_path / "draft", target)
    load_draft(tmp_path / "draft", target)
    with pytest.raises(ConfigError, match=r"was made for llama, whose weights differ from rotated's"):
        load_draft(tmp_path / "draft", other)


def read_by_engine(
    target: LanguageModel, draft: LanguageModel | None, prompts: list[list[int]]
) -> dict[str, tuple[list[int], Tensor]]:
    """Return texts and kept states at the end of greedy answers, by request."""
    settings = EngineSettings(
        max_slots=8, max_model_len=64, prefill_chunk=32, feature_ids=IDS, controller="fixed", speculation_length=2,
        proposer=None if draft is None else "draft_model", compile=False, measure_costs_s=0,
    )  # fmt: skip
    engine, found = Engine(target, draft, settings), {}
    for number, prompt in enumerate(prompts):
        engine.submit(Request(str(number), tuple(prompt), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)))
    while engine.has_work:
        engine.step()
        for s in engine.sequences.running:
            found[s.request.id] = s.tokens[: s.computed], engine.features(s.id).clone()
    engine.close()
    return found


@pytest.mark.numerics
@pytest.mark.skipif(why_not() is not None, reason=f"no kernel here: {why_not()}")
@pytest.mark.skipif(torch.cuda.is_available(), reason="for CPUs")
def test_states_of_a_batch_are_those_of_single_rows_bit_for_bit() -> None:
    """In float32, with and without a draft whose weights are rounded to 8 bits beside it."""
    target = llama()
    draft = state_draft("eagle", target)
    prompts = [[1, *range(20 + 9 * row, 22 + 9 * row + row)] for row in range(5)]
    together = read_by_engine(target, None, prompts)
    for number, prompt in enumerate(prompts):
        (text, alone) = read_by_engine(target, None, [prompt])["0"]
        beside, states = together[str(number)]
        assert beside == text
        assert states.dtype == torch.float32
        assert torch.equal(states, alone)
    width = len(IDS) * target.head.weight.shape[1]  # the draft reads another state too
    for name, (text, states) in read_by_engine(target, draft, prompts).items():
        common = min(len(text), len(together[name][0]))
        assert text[:common] == together[name][0][:common]
        assert torch.equal(states[:common, :width], together[name][1][:common])


@pytest.mark.numerics
def test_states_have_the_precision_that_serves(random_model: Callable[..., LanguageModel]) -> None:
    wide = random_model("llama", torch.float32)
    target = replace(wide, model=copy.deepcopy(wide.model).bfloat16())
    text, states = read_by_engine(target, None, [TEXT[0].tolist()])["0"]
    assert states.dtype == torch.bfloat16
    ids, places = torch.tensor([text]), torch.arange(len(text))[None]
    served, exact = (read_states(model, ids, places, IDS)[0].float() for model in (target, wide))
    off = [float((states.float() - each).abs().mean()) for each in (served, exact)]
    assert off[0] < 0.5 * off[1], "those of the weights that serve, not of the wider ones"
