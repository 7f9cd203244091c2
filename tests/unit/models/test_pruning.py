"""Drafts made of the target's own layers."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from distillspec.config import DraftConfig
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel, initialise_draft
from distillspec.models.pruning import evenly_spaced, only_layers, prune, select_by_acceptance
from distillspec.models.target import wrap

IDS = torch.tensor([[1, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120]])


@given(st.integers(2, 120).flatmap(lambda total: st.tuples(st.just(total), st.integers(2, total))))
def test_evenly_spaced_keeps_the_ends_and_even_gaps(sizes: tuple[int, int]) -> None:
    total, count = sizes
    kept = evenly_spaced(total, count)
    gaps = [b - a for a, b in itertools.pairwise(kept)]
    assert len(kept) == count
    assert (kept[0], kept[-1]) == (0, total - 1)
    assert min(gaps) >= 1
    assert max(gaps) - min(gaps) <= 1


def test_a_single_layer_is_the_first() -> None:
    assert evenly_spaced(30, 1) == [0]


@pytest.mark.parametrize("count", [0, 5, -1])
def test_a_count_the_target_does_not_have_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=rf"draft.layers={count} .* 4 layers"):
        evenly_spaced(4, count)


def test_more_layers_than_the_target_has_are_refused_by_name(target: LanguageModel) -> None:
    with pytest.raises(ConfigError, match=r"draft\.layers=9"):
        initialise_draft(DraftConfig(layers=9), target)


def test_layers_out_of_range_are_refused_by_name(target: LanguageModel) -> None:
    with pytest.raises(ConfigError, match=r"draft.keep=\[0, 7\] names layer 7.*0\.\.3"):
        initialise_draft(DraftConfig(keep=[0, 7]), target)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "smollm3", "gpt2"])
def test_keeping_all_layers_reproduces_the_target_exactly(kind: str, random_model) -> None:
    target = random_model(kind)
    draft = wrap(prune(target, range(4)), target.tokenizer, "all")
    assert torch.equal(draft.logits(IDS), target.logits(IDS))


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma2", "gemma3_text", "smollm3", "gpt2"])
def test_a_pruned_model_computes_what_its_layers_compute_in_the_target(kind: str, random_model) -> None:
    """Sliding windows, rotary choices and the like must follow the layers they belong to."""
    target, keep = random_model(kind, torch.float64), [1, 2]
    draft = wrap(prune(target, keep).double(), target.tokenizer, "pruned").logits(IDS)
    with only_layers(target, keep):
        inside = target.logits(IDS)
    torch.testing.assert_close(draft, inside, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "gemma3_text"])
def test_layers_are_chosen_by_what_the_pruned_models_compute(kind: str, random_model) -> None:
    """A layer behind one that was dropped keeps its own sliding window and rotary frequencies."""
    target = random_model(kind, torch.float64)
    before = target.model.config.to_dict()
    measured: list[torch.Tensor] = []
    select_by_acceptance(target, 3, lambda: measured.append(target.logits(IDS)) or 0.0)
    assert len(measured) == 4
    for drop, found in enumerate(measured):
        pruned = wrap(prune(target, [i for i in range(4) if i != drop]).double(), target.tokenizer, "pruned")
        torch.testing.assert_close(found, pruned.logits(IDS), atol=1e-6, rtol=1e-6)
    assert target.model.config.to_dict() == before


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "smollm3"])
def test_per_layer_settings_follow_and_survive_saving(kind: str, random_model, tmp_path) -> None:
    target = random_model(kind)
    draft = prune(target, [3, 0])
    for name in ("layer_types", "no_rope_layers"):
        theirs = getattr(target.model.config, name, None)
        if theirs is not None:
            assert getattr(draft.config, name) == [theirs[3], theirs[0]]
    draft.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    torch.testing.assert_close(again(IDS).logits, draft.eval()(IDS).logits, atol=1e-6, rtol=1e-6)


def test_an_explicit_list_takes_those_layers_in_that_order(target: LanguageModel) -> None:
    draft = initialise_draft(DraftConfig(keep=[3, 1]), target)
    assert draft.lineage["target_layers"] == [3, 1]
    for ours, theirs in zip(draft.layers, (3, 1), strict=True):
        expected = target.layers[theirs].state_dict()
        assert all(torch.equal(value, expected[key]) for key, value in ours.state_dict().items())


def test_a_draft_shares_no_weight_with_the_target(target: LanguageModel) -> None:
    draft = initialise_draft(DraftConfig(layers=2), target)
    storages = {p.data_ptr() for p in target.model.parameters()}
    assert not storages & {p.data_ptr() for p in draft.model.parameters()}


@torch.no_grad()
def overlap(target: LanguageModel, whole: torch.Tensor) -> float:
    return float(torch.minimum(torch.softmax(target.logits(IDS), -1), whole).sum(-1).mean())


def test_selection_by_acceptance_finds_the_best_single_layer_to_drop(target: LanguageModel) -> None:
    whole = torch.softmax(target.logits(IDS), -1)
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    by_hand = {
        drop: overlap(wrap(prune(target, [i for i in range(4) if i != drop]), target.tokenizer, ""), whole)
        for drop in range(4)
    }
    best = max(by_hand, key=lambda drop: by_hand[drop])
    assert sorted(by_hand.values())[-1] > sorted(by_hand.values())[-2] + 1e-3
    kept = select_by_acceptance(target, 3, lambda: overlap(target, whole))
    assert kept == [i for i in range(4) if i != best]
    after = target.model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(torch.softmax(target.logits(IDS), -1), whole)


def test_the_target_is_whole_again_when_measuring_fails(target: LanguageModel) -> None:
    def fail() -> float:
        raise RuntimeError("probe")

    with pytest.raises(RuntimeError, match="probe"):
        select_by_acceptance(target, 2, fail)
    assert len(target.layers) == 4
    assert target.model.config.num_hidden_layers == 4


def test_greedy_dropping_goes_on_to_the_wanted_count(target: LanguageModel) -> None:
    whole = torch.softmax(target.logits(IDS), -1)
    left: list[int] = []
    draft = initialise_draft(
        DraftConfig(layers=1, select="acceptance"),
        target,
        acceptance=lambda: overlap(target, whole),
        on_step=left.append,
    )
    assert left == [3, 2, 1]
    assert len(draft.layers) == 1
