"""Block efficiency from text against the speculative process itself, enumerated path by path."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from distillspec.config import EvaluationConfig
from distillspec.evaluation import plain_generate, speculative_generate
from distillspec.evaluation.acceptance import evaluate
from distillspec.evaluation.blocks import count_blocks
from distillspec.evaluation.bootstrap import interval
from distillspec.evaluation.positions import Positions, measure_positions
from distillspec.models import LanguageModel
from distillspec.types import Sample, SamplingPolicy

FIRST = 0  # the prompt is this token


def enumerate_process(p: list[list[float]], q: list[list[float]], gamma: int, starts: int, stop: int | None) -> float:
    """Return τ = E[tokens] / E[blocks] of speculative decoding on Markov chains, without blocks from `starts` on."""

    def outcomes(state: int, left: int) -> Iterator[tuple[float, list[int]]]:
        """Everything a block with `left` proposals may emit after `state`, each with its probability."""
        if left == 0:
            yield from ((mass, [bonus]) for bonus, mass in enumerate(p[state]))
            return
        residual = [max(0.0, a - b) for a, b in zip(p[state], q[state], strict=True)]
        for token, drawn in enumerate(q[state]):
            accept = min(1.0, p[state][token] / drawn) if drawn > 0 else 0.0
            if token == stop:
                yield drawn * accept, [token]
            else:
                for chance, rest in outcomes(token, left - 1):
                    yield drawn * accept * chance, [token, *rest]
            if drawn > 0 and accept < 1:
                for other, mass in enumerate(residual):
                    yield drawn * (1 - accept) * mass / sum(residual), [other]

    @cache
    def counts(state: int, place: int) -> tuple[float, float]:
        if place >= starts or state == stop:
            return 0.0, 0.0
        tokens, blocks = 0.0, 1.0
        for chance, emitted in outcomes(state, gamma):
            if chance > 0:
                later = counts(emitted[-1], place + len(emitted))
                tokens += chance * (len(emitted) + later[0])
                blocks += chance * later[1]
        return tokens, blocks

    tokens, blocks = counts(FIRST, 0)
    return tokens / blocks


def all_texts(p: list[list[float]], length: int, stop: int | None) -> Iterator[tuple[float, tuple[int, ...]]]:
    def grow(text: tuple[int, ...], chance: float) -> Iterator[tuple[float, tuple[int, ...]]]:
        if len(text) == length or (text and text[-1] == stop):
            yield chance, text
            return
        for token, mass in enumerate(p[text[-1] if text else FIRST]):
            if mass > 0:
                yield from grow((*text, token), chance * mass)

    yield from grow((), 1.0)


def estimate(target: LanguageModel, draft: LanguageModel, length: int, gamma: int, stop: int | None) -> float:
    """The estimator's expectation: its counts on every text, weighted by how likely the target writes it."""
    table = torch.softmax(target.table.double(), -1).tolist()  # type: ignore[attr-defined]
    tokens = blocks = 0.0
    for chance, text in all_texts(table, length, stop):
        finished = text[-1] == stop
        sample = Sample("t", "d", (FIRST,), text, finished=finished)
        counts = count_blocks(measure_positions(draft, target, sample, SamplingPolicy()), finished, gamma)
        tokens += chance * float(counts.tokens[-1])
        blocks += chance * float(counts.blocks[-1])
    return tokens / blocks


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_tau_equals_the_enumerated_process_on_cut_text(gamma: int, markov: Callable) -> None:
    generator = torch.Generator().manual_seed(1)
    tables = 1.5 * torch.randn(2, 3, 3, generator=generator)
    p, q = torch.softmax(tables.double(), -1).tolist()
    length = 6
    found = estimate(markov(tables[0]), markov(tables[1]), length, gamma, stop=None)
    assert found == pytest.approx(enumerate_process(p, q, gamma, length - gamma, None), rel=1e-5)


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_tau_equals_the_enumerated_process_on_text_that_stops_by_itself(gamma: int, markov: Callable) -> None:
    """Tokens only rise, so that every text reaches the stop token 4 within four steps."""
    generator = torch.Generator().manual_seed(2)
    tables = 1.5 * torch.randn(2, 5, 5, generator=generator)
    tables = tables.masked_fill(torch.tril(torch.ones(5, 5)).bool(), -math.inf)
    tables[:, 4] = 0.0  # never followed
    p, q = torch.softmax(tables.double(), -1).tolist()
    found = estimate(markov(tables[0], stops=(4,)), markov(tables[1]), 10, gamma, stop=4)
    assert found == pytest.approx(enumerate_process(p, q, gamma, 10, 4), rel=1e-5)


def given(accepted: Tensor) -> Positions:
    accepted = accepted.double()
    return Positions(accepted, accepted, accepted, accepted, torch.ones_like(accepted), accepted)


@pytest.mark.parametrize(("accepted", "tau"), [(0.0, [1, 1, 1]), (1.0, [2, 3, 4])])
def test_the_targets_own_token_counts(accepted: float, tau: list[int]) -> None:
    counts = count_blocks(given(torch.full((120,), accepted)), finished=True, speculation_length=3)
    assert (counts.tokens / counts.blocks).tolist() == pytest.approx(tau, rel=0.03)


def test_hard_text_weighs_by_the_blocks_it_takes() -> None:
    """Half the text at 5 tokens a block and half at 1: 5/3, not the mean 3 over places."""
    counts = count_blocks(given(torch.cat([torch.ones(500), torch.zeros(500)])), finished=True, speculation_length=4)
    assert float(counts.tokens[3] / counts.blocks[3]) == pytest.approx(5 / 3, rel=0.01)


def test_survival_follows_the_path_and_is_no_product_of_averages() -> None:
    """Acceptances come in pairs after a sure rejection. A product of averages would be 1 + 2/3 + 4/9."""
    counts = count_blocks(given(torch.tensor([0.0, 1.0, 1.0] * 300)), finished=True, speculation_length=2)
    # Block of 1, then blocks of 3 (two accepted and a bonus, which is the next rejection's place).
    assert float(counts.tokens[1] / counts.blocks[1]) == pytest.approx(3.0, rel=0.02)


def test_a_cut_response_shorter_than_the_window_still_counts() -> None:
    counts = count_blocks(given(torch.tensor([0.5, 0.5])), finished=False, speculation_length=8)
    assert (counts.blocks == 1).all()
    assert float(counts.tokens[7]) == pytest.approx(1.75)


def test_tau_equals_what_the_reference_decoder_measures(
    draft: LanguageModel, target: LanguageModel, samples: list[Sample]
) -> None:
    gamma, policy = 3, SamplingPolicy()
    config = EvaluationConfig(speculation_length=gamma, measure_cost=False)
    estimated = evaluate(draft, target, samples, policy, config).tau[gamma - 1]
    tokens, blocks = [], []
    for i, sample in enumerate(samples):
        out = speculative_generate(draft, target, sample.prompt_ids, policy, gamma, 30, stop_ids=(), seed=100 + i)
        # Proposals shrink at the length limit: leave such steps out, as the estimator does.
        whole = [n for n, k in zip(out.accepted_per_step, out.proposed_per_step, strict=True) if k == gamma]
        tokens.append(sum(whole) + len(whole))
        blocks.append(len(whole))
    measured = interval(tokens, blocks, samples=500, seed=0)
    assert 1.2 < estimated.mean < gamma + 0.8  # far from both bounds, or the test would say nothing
    assert estimated.low <= measured.high
    assert measured.low <= estimated.high
    assert measured.mean == pytest.approx(estimated.mean, rel=0.15)


def test_greedy_tau_is_exactly_what_greedy_decoding_takes(
    draft: LanguageModel, target: LanguageModel, prompts: list[tuple[int, ...]]
) -> None:
    """At temperature 0 nothing is random: the estimate on greedy text is the decoder's own count."""
    policy, ids = SamplingPolicy(0.0), prompts[0]
    text = plain_generate(target, ids, policy, 40, stop_ids=()).token_ids
    out = speculative_generate(draft, target, ids, policy, 3, 40, stop_ids=())
    positions = measure_positions(draft, target, Sample("p", "d", ids, text), policy)
    counts = count_blocks(positions, finished=True, speculation_length=3)
    assert float(counts.blocks[2]) == pytest.approx(out.steps)


def test_a_block_meets_each_depth_at_its_own_place() -> None:
    """Depths alternate between sure and impossible. Against a walk over blocks, one after another."""
    generator = torch.Generator().manual_seed(3)
    tables = torch.randint(0, 2, (3, 40), generator=generator).double()
    first, *deeper = (given(table) for table in tables)
    positions = replace(first, deeper=tuple(deeper))
    for gamma in (1, 2, 3):
        place = blocks = 0
        while place < 40:
            depth = 0
            while depth < gamma and place + depth < 40 and tables[depth, place + depth]:
                depth += 1
            place, blocks = place + depth + 1, blocks + 1
        counts = count_blocks(positions, finished=True, speculation_length=3)
        assert float(counts.blocks[gamma - 1]) == pytest.approx(blocks)
