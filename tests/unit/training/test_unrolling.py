"""Chains that train go on within their response, in the share that was asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from distillspec.config import DraftConfig, TrainCommand, TrainConfig
from distillspec.data.packing import collate
from distillspec.errors import ConfigError
from distillspec.models.state_input import ADDED, JOINED, StateInput
from distillspec.training.unrolling import Unrolling
from distillspec.types import Sample, TokenBatch


def batch(first: int = 5) -> TokenBatch:
    """Two rows, of one and two samples."""
    texts = [Sample(f"s{i}", "d", (1, 3, first), tuple(range(20, 20 + n))) for i, n in enumerate((90, 40, 45))]
    return collate([texts[:1], texts[1:]], 100, 0)


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_a_chain_goes_on_from_the_token_before(share: float) -> None:
    found = batch()
    rows = Unrolling(4, share).rows(found)
    before = torch.arange(len(found.loss_index))
    for own in rows:
        assert torch.isin(own - 1, before).all()
        tokens, previous = found.loss_index[own], found.loss_index[own - 1]
        assert (tokens == previous + 1).all()
        assert (found.position_ids.flatten()[tokens] > 2).all(), "no chain begins in a prompt"
        assert torch.equal(own, own.unique())
        before = own
    candidates = 175.0
    for own in rows:
        candidates = share * (candidates if share < 1 else candidates - 3)
        assert len(own) == pytest.approx(candidates, abs=4)


def test_a_batch_decides_and_batches_differ() -> None:
    rows = Unrolling(2, 0.5).rows
    assert torch.equal(rows(batch())[0], rows(batch())[0])
    assert any(not torch.equal(rows(batch(first))[0], rows(batch())[0]) for first in range(6, 12))


def test_one_step_has_no_chains() -> None:
    assert Unrolling(1, 0.5).rows(batch()) == []


def test_all_positions_together_weigh_as_much_as_one() -> None:
    assert Unrolling(3, 0.5).loss_weights(3) == pytest.approx([1 / 1.75] * 3)
    assert Unrolling(3, 0.5).loss_weights(1) == [1]


def test_weights_of_positions_do_not_depend_on_how_many_chains_go_on() -> None:
    weights = (1.0, 0.4, 0.1)
    assert Unrolling(3, 1.0, weights=weights).loss_weights(3) == pytest.approx([1 / 1.5, 0.4 / 1.5, 0.1 / 1.5])
    assert Unrolling(3, 0.5, weights=weights).loss_weights(3) == pytest.approx([1 / 1.5, 0.8 / 1.5, 0.4 / 1.5])
    assert Unrolling(3, 0.5, weights=weights).loss_weights(1) == [1]
    with pytest.raises(ConfigError, match="the draft trains 4 drafted positions; give as many weights"):
        Unrolling(4, 0.5, weights=weights).checked()


def test_settings_of_training_are_taken_over() -> None:
    plain = TrainConfig(max_steps=1)
    assert Unrolling.of(plain) == Unrolling.of(plain, StateInput(JOINED, (1,), 8, 8)) == Unrolling(3, 0.5, 0.35)
    assert Unrolling.of(plain, StateInput(ADDED, (1,), 8, 8)) == Unrolling(3, 0.5, 0.75)
    assert Unrolling.of(replace(plain, unroll_from=0.5), StateInput(ADDED, (1,), 8, 8)) == Unrolling(3, 0.5, 0.5)
    weighted = TrainConfig(max_steps=1, unroll=2, unroll_decay=1.0, unroll_from=0.0, unroll_weights=[1, 0.5])
    assert Unrolling.of(weighted) == Unrolling(2, weights=(1, 0.5))


@pytest.mark.parametrize(
    ("draft", "positions"), [(DraftConfig(kind="eagle"), 3), (DraftConfig(kind="medusa", positions=2), 2)]
)
def test_other_numbers_of_weights_are_refused_before_anything_is_done(draft: DraftConfig, positions: int) -> None:
    train = TrainConfig(max_steps=1, unroll_weights=[1.0] * 4)
    with pytest.raises(ConfigError, match=f"must be {positions} numbers, one for each drafted position that trains"):
        TrainCommand(draft=draft, train=train)
    TrainCommand(draft=draft, train=replace(train, unroll_weights=[1.0] * positions))


@pytest.mark.parametrize("weights", [[], [0, 1], [1, -1], [1, float("inf")]])
def test_weights_that_are_none_are_refused(weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="must be finite numbers from 0 on, the first above 0"):
        TrainConfig(max_steps=1, unroll_weights=weights)


def test_the_first_position_trains_alone_at_first() -> None:
    unrolling = Unrolling(3, 0.5, begins=0.4)
    assert [unrolling.positions(done) for done in (0.0, 0.39, 0.4, 1.0)] == [1, 1, 3, 3]
