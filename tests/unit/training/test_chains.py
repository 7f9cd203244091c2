"""Chains that train go on within their response, in the share that was asked for."""

from __future__ import annotations

import pytest
import torch

from distillspec.data.packing import collate
from distillspec.training.chains import Unrolling
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
    assert Unrolling(3, 0.5).first_weight(3) == pytest.approx(1 / 1.75)
    assert Unrolling(3, 0.5).first_weight(1) == 1


def test_the_first_position_trains_alone_at_first() -> None:
    unrolling = Unrolling(3, 0.5, begins=0.4)
    assert [unrolling.positions(done) for done in (0.0, 0.39, 0.4, 1.0)] == [1, 1, 3, 3]
