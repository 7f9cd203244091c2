"""Training of a `StopHead`: it learns a rule that its inputs show."""

from __future__ import annotations

import torch

from distillspec.models.stop_head import StopExamples, StopHead
from distillspec.training.stop_training import BATCH, train_stop


def test_it_learns_what_its_inputs_show() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(4000, 6)
    alpha = torch.sigmoid(2 * inputs[:, 0])
    head = StopHead("state", 6, 16, 3)
    losses = list(train_stop(head, StopExamples(inputs, alpha, alpha), 15, 1e-2, seed=0))
    assert len(losses) == 15
    assert losses[-1] < losses[0]
    predicted = torch.sigmoid(head.eval()(inputs)).detach()
    assert float((predicted - alpha).abs().mean()) < 0.05


def test_the_same_seed_trains_the_same() -> None:
    def trained() -> torch.Tensor:
        torch.manual_seed(0)
        inputs, head = torch.randn(600, 6), StopHead("state", 6, 8, 3)
        list(train_stop(head, StopExamples(inputs, inputs[:, 0].sigmoid(), inputs[:, 0]), 2, 1e-3, seed=5))
        return head(inputs).detach()

    assert torch.equal(trained(), trained())


def test_a_last_lot_of_one_example_is_left_out() -> None:
    """The batch normalisation of one row has no variance."""
    inputs = torch.randn(BATCH + 1, 6)
    head = StopHead("state", 6, 8, 3)
    losses = list(train_stop(head, StopExamples(inputs, inputs[:, 0].sigmoid(), inputs[:, 0]), 2, 1e-3, seed=5))
    assert all(loss > 0 for loss in losses)
