"""The accept rule and the residual."""

from __future__ import annotations

import torch

from distillspec.rejection_sampling import accepts, residual_probs


def test_a_token_is_accepted_with_probability_p_over_q() -> None:
    uniforms = (torch.arange(1000) + 0.5) / 1000
    p, q = torch.tensor([0.2, 0.3, 0.0]), torch.tensor([0.8, 0.1, 0.5])
    rates = accepts(p[:, None], q[:, None], uniforms).float().mean(1)
    torch.testing.assert_close(rates, torch.tensor([0.25, 1.0, 0.0]))


def test_the_residual_is_what_the_draft_proposes_too_seldom() -> None:
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.7, 0.1]])
    torch.testing.assert_close(residual_probs(p, q), torch.tensor([[0.3, 0.0, 0.1]]))


def test_rows_without_a_residual_keep_the_target_and_others_do_not() -> None:
    p = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    q = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    torch.testing.assert_close(residual_probs(p, q), torch.tensor([[0.5, 0.5], [0.0, 0.5]]))
