from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessorList, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper
from transformers.generation.logits_process import TopPLogitsWarper

from distillspec.errors import ConfigError
from distillspec.sampling import NonFiniteLogits, best_ids, draw, policy_probs
from distillspec.sampling.checks import HOTTEST
from distillspec.sampling.nucleus import keep_nucleus, largest_probs, mask_nucleus
from distillspec.types import SamplingPolicy

INF = math.inf


def noise(*shape: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def transformers_probs(logits: Tensor, policy: SamplingPolicy) -> Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(policy.temperature)])
    if policy.top_k:
        warpers.append(TopKLogitsWarper(policy.top_k))
    if policy.top_p < 1:
        warpers.append(TopPLogitsWarper(policy.top_p))
    if policy.min_p > 0:
        warpers.append(MinPLogitsWarper(policy.min_p))
    return torch.softmax(warpers(torch.zeros(logits.shape[0], 1, dtype=torch.long), logits), -1)


@settings(max_examples=40, deadline=None)
@given(
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.9]),
    top_k=st.sampled_from([0, 1, 5, 40, 100]),
    top_p=st.sampled_from([0.05, 0.5, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.6]),
    seed=st.integers(0, 1000),
)
def test_transforms_are_those_of_transformers(
    temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    policy = SamplingPolicy(temperature, top_k, top_p, min_p)
    logits = noise(4, 60, seed=seed)
    torch.testing.assert_close(policy_probs(logits, policy), transformers_probs(logits, policy))


def sorted_nucleus(probs: Tensor, top_p: float) -> Tensor:
    """The definition as bool `[R, V]`, one row after another, sums in float64."""
    found = torch.zeros_like(probs, dtype=torch.bool)
    for row, inside in zip(probs.tolist(), found, strict=True):
        mass = 0.0
        for token in sorted(range(len(row)), key=lambda i: (-row[i], i)):
            if mass < top_p:
                inside[token] = True
            mass += row[token]
    return found


@settings(max_examples=60, deadline=None)
@given(top_p=st.floats(0.01, 0.999), scale=st.sampled_from([0.0, 0.3, 2.0, 9.0]), seed=st.integers(0, 1000))
def test_every_way_to_a_nucleus_gives_the_definition(top_p: float, scale: float, seed: int) -> None:
    """By a prefix, in place, and by bisection. Rounded logits tie often."""
    probs = torch.softmax((noise(4, 90, seed=seed) * scale).round(), -1)
    wanted = sorted_nucleus(probs, top_p)
    assert torch.equal(mask_nucleus(probs, top_p, prefix=4), wanted)
    assert torch.equal(keep_nucleus(probs.clone(), top_p, reads_are_free=True), probs * wanted)
    assert torch.equal(keep_nucleus(probs.clone(), top_p, reads_are_free=False), probs * wanted)


@pytest.mark.parametrize(("top_p", "inside"), [(0.5, 4), (0.500001, 5), (0.125, 1), (0.9999999, 8)])
def test_bisection_counts_equal_tokens_as_sums_do(top_p: float, inside: int) -> None:
    kept = keep_nucleus(torch.full((1, 8), 0.125), top_p, reads_are_free=False)
    assert (kept > 0).tolist() == [[token < inside for token in range(8)]]


@settings(max_examples=25, deadline=None)
@given(top_p=st.floats(0.01, 0.999), scale=st.sampled_from([0.0, 0.3, 2.0]), seed=st.integers(0, 1000))
def test_nucleus_found_from_a_prefix_equals_the_one_from_a_full_sort(top_p: float, scale: float, seed: int) -> None:
    # Rounded logits tie often. A scale of 0 ties everything, and needs more than the prefix.
    probs = torch.softmax((noise(5, 40, seed=seed) * scale).round(), -1)
    full, short = (mask_nucleus(probs, top_p, prefix) for prefix in (40, 4))
    assert torch.equal(full, short)
    assert torch.equal(keep_nucleus(probs.clone(), top_p, reads_are_free=True), probs * full)
    mass = torch.where(full, probs, 0).sum(-1)
    smallest = torch.where(full, probs, INF).amin(-1)
    assert (mass > top_p - 1e-5).all()
    assert (mass - smallest < top_p + 1e-5).all()


@pytest.mark.parametrize(("width", "count"), [(49152, 256), (5007, 64), (300, 64)])
def test_the_largest_found_by_blocks_are_the_largest(width: int, count: int) -> None:
    rows = torch.rand(3, width, generator=torch.Generator().manual_seed(width)).mul(1000).floor()  # many ties
    rows[0, -1] = 5000.0  # past the last whole block
    rows[1, :count] = 2000.0  # all in a few blocks
    assert torch.equal(largest_probs(rows, count), rows.topk(count, -1).values)


def test_ties_in_the_nucleus_go_to_the_lowest_ids() -> None:
    probs = policy_probs(torch.zeros(1, 8), SamplingPolicy(top_p=0.5))
    torch.testing.assert_close(probs, torch.tensor([[0.25] * 4 + [0.0] * 4]))


def test_ties_with_the_kth_logit_stay() -> None:
    probs = policy_probs(torch.tensor([2.0, 1.0, 1.0, 0.0]), SamplingPolicy(top_k=2))
    assert (probs > 0).tolist() == [True, True, True, False]


def test_greedy_is_one_hot_and_the_lowest_id_wins_ties() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0], [-INF, -INF, -2.0]], dtype=torch.bfloat16)
    greedy = SamplingPolicy(temperature=0)
    assert policy_probs(logits, greedy).tolist() == [[0, 1, 0], [0, 0, 1]]


@pytest.mark.parametrize(
    "policy", [SamplingPolicy(), SamplingPolicy(0.5, top_k=3, top_p=0.9, min_p=0.01)], ids=["plain", "all"]
)
def test_masked_tokens_stay_out_in_every_dtype(policy: SamplingPolicy) -> None:
    logits = noise(2, 3, 7)
    logits[..., 2] = -INF
    probs = policy_probs(logits.bfloat16(), policy)
    assert probs.dtype == torch.float32
    assert (probs[..., 2] == 0).all()


def test_a_vanishing_temperature_becomes_greedy_without_overflow() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert policy_probs(logits, SamplingPolicy(temperature=1e-40)).tolist() == [[0, 1, 0]]


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize(("value", "what"), [(math.nan, "NaN"), (INF, r"\+inf")])
def test_bad_logits_are_named_with_their_row(value: float, what: str, greedy: bool) -> None:
    logits = torch.zeros(3, 4)
    logits[2, 1] = value
    with pytest.raises(NonFiniteLogits, match=f"{what} at position 2"):
        policy_probs(logits, SamplingPolicy(temperature=0.0 if greedy else 1.0))


def test_a_row_without_any_token_is_an_error() -> None:
    with pytest.raises(ValueError, match="no finite logit at position 0"):
        policy_probs(torch.full((4,), -INF), SamplingPolicy())


@pytest.mark.parametrize(
    ("policy", "key"),
    [
        (SamplingPolicy(temperature=-1), "temperature"),
        (SamplingPolicy(temperature=INF), "temperature"),
        (SamplingPolicy(temperature=math.nan), "temperature"),
        (SamplingPolicy(temperature=1.1 * HOTTEST), "temperature"),
        (SamplingPolicy(top_k=-1), "top_k"),
        (SamplingPolicy(top_p=0), "top_p"),
        (SamplingPolicy(min_p=1.5), "min_p"),
    ],
)
def test_impossible_policies_are_refused(policy: SamplingPolicy, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        policy_probs(torch.zeros(2, 3), policy)


def test_draw_inverts_the_cumulative_distribution() -> None:
    probs = torch.tensor([0.25, 0.0, 0.5, 0.25]).expand(6, 4)
    uniforms = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 0.9999])
    assert draw(probs, uniforms).tolist() == [0, 0, 2, 2, 3, 3]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([0.0, 1e-30, 1e-8, 0.1, 1.0, 1 / 3]), min_size=1, max_size=12))
def test_draw_never_returns_an_impossible_id(weights: list[float]) -> None:
    probs = torch.tensor(weights)
    if probs.sum() == 0:
        with pytest.raises(ValueError, match="sums to zero"):
            draw(probs, torch.tensor(0.5))
        return
    for uniform in (0.0, 1e-45, 0.5, 1 - 2**-24, 1.0):
        assert probs[draw(probs, torch.tensor(uniform))] > 0


def test_draw_follows_the_probabilities_and_does_not_depend_on_the_batch() -> None:
    probs = torch.softmax(noise(5), -1)
    uniforms = (torch.arange(10_000) + 0.5) / 10_000
    ids = draw(probs.expand(10_000, 5), uniforms)
    torch.testing.assert_close(ids.bincount(minlength=5) / 10_000, probs, atol=2e-4, rtol=0)
    assert draw(probs, uniforms[77]) == ids[77]


@pytest.mark.parametrize(
    "policy", [SamplingPolicy(0.7, 0, 0.9), SamplingPolicy(1.0, 9, 0.6, 0.01), SamplingPolicy(0.0)]
)
def test_without_device_syncs_the_distribution_is_the_same(policy: SamplingPolicy) -> None:
    """Ties too: logits of few levels, so that nuclei end within groups of equal tokens."""
    logits = torch.randint(0, 6, (50, 700), generator=torch.Generator().manual_seed(1)).float()
    wanted, found = policy_probs(logits, policy), policy_probs(logits, policy, reads_are_free=False)
    assert torch.equal(wanted > 0, found > 0)
    torch.testing.assert_close(found, wanted)
    logits[3] = torch.nan
    torch.testing.assert_close(policy_probs(logits, policy, reads_are_free=False)[:3], wanted[:3])  # others do not mind


@pytest.mark.parametrize("width", [5, 256, 700, 1024])
def test_best_ids_are_argmax_ties_and_nan_included(width: int) -> None:
    logits = torch.randint(0, 40, (3, 50, width), generator=torch.Generator().manual_seed(width)).float()
    assert torch.equal(best_ids(logits), logits.argmax(-1)), "many ties"
    logits[0, ::2, width - 1] = 99.0
    logits[1, ::3, width // 2] = torch.nan
    logits[2, 0] = -torch.inf
    assert torch.equal(best_ids(logits), logits.argmax(-1))
    assert best_ids(logits[2, 0]).item() == 0


@pytest.mark.parametrize("policy", [SamplingPolicy(temperature=0.8), SamplingPolicy(temperature=1.0, top_p=0.7)])
def test_gradients_pass(policy: SamplingPolicy) -> None:
    logits = noise(2, 30).requires_grad_()
    with torch.no_grad():
        plain = policy_probs(logits, policy)
    probs = policy_probs(logits, policy)
    assert torch.equal(probs, plain)
    probs.square().sum().backward()
    assert logits.grad is not None
    assert logits.grad.abs().max() > 0
