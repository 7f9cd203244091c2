"""Exactness of verification, by counting, and mutations that counting must catch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from distillspec.evaluation import verification
from distillspec.evaluation.verification import next_probs, verify_chain, verify_greedy
from distillspec.sampling import draw

TRIALS = 40_000


def distributions(vocab: int, steps: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Target `[steps + 1, V]` and draft `[steps, V]` of opposite tastes: logits and their negatives."""
    logits = 0.7 * torch.randn(steps + 1, vocab, generator=torch.Generator().manual_seed(seed))
    return torch.softmax(logits, -1), torch.softmax(-logits[:-1], -1)


def emitted_pairs(target_probs: Tensor, draft_probs: Tensor, *, shared_stream: bool = False) -> tuple[Tensor, Tensor]:
    """Return the first two tokens of `TRIALS` sequences. Tokens that a block lacks are drawn from the target."""
    steps, generator = len(draft_probs), torch.Generator().manual_seed(1)

    def uniforms(*shape: int) -> Tensor:
        return torch.rand(TRIALS, *shape, generator=generator, dtype=torch.float64)

    drafted = draw(draft_probs.expand(TRIALS, -1, -1), uniforms(steps))
    accept, following = uniforms(steps), uniforms()
    verdict = verify_chain(
        target_probs.expand(TRIALS, -1, -1),
        draft_probs.expand(TRIALS, -1, -1),
        drafted,
        accept,
        accept[:, 0] if shared_stream else following,
    )
    fresh = draw(target_probs.expand(TRIALS, -1, -1), uniforms(steps + 1))
    places = torch.arange(steps + 1)
    sequence = torch.where(
        places == verdict.accepted[:, None],
        verdict.next_token[:, None],
        torch.where(places < verdict.accepted[:, None], torch.cat([drafted, fresh[:, -1:]], 1), fresh),
    )
    return sequence[:, 0], sequence[:, 1]


def chi_square_excess(counts: Tensor, probs: Tensor) -> float:
    """(χ² − df) / √(2 df): about standard normal where `counts` are draws from `probs`."""
    expected = probs.flatten().double() * counts.sum()
    assert expected.min() > 5
    statistic = ((counts.flatten() - expected) ** 2 / expected).sum()
    freedom = expected.numel() - 1
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


def excess(target_probs: Tensor, draft_probs: Tensor, **kwargs: bool) -> float:
    first, second = emitted_pairs(target_probs, draft_probs, **kwargs)
    vocab = target_probs.shape[-1]
    counts = torch.bincount(first * vocab + second, minlength=vocab**2)
    return chi_square_excess(counts, target_probs[0][:, None] * target_probs[1][None])


@pytest.mark.parametrize(("vocab", "steps"), [(16, 3), (6, 1), (6, 5)])
def test_emitted_tokens_are_the_targets(vocab: int, steps: int) -> None:
    assert abs(excess(*distributions(vocab, steps))) < 4


def test_a_truncated_draft_changes_nothing() -> None:
    target_probs, draft_probs = distributions(16, 2)
    draft_probs = draft_probs.clone()
    draft_probs[:, ::2] = 0
    assert abs(excess(target_probs, draft_probs / draft_probs.sum(-1, keepdim=True))) < 4


def target_as_residual(target_probs: Tensor, draft_probs: Tensor, accepted: Tensor) -> Tensor:
    return verification.row_of(target_probs, accepted)


def absolute_residual(target_probs: Tensor, draft_probs: Tensor, accepted: Tensor) -> Tensor:
    padded = torch.cat([draft_probs, torch.zeros_like(draft_probs[..., :1, :])], -2)
    return (verification.row_of(target_probs, accepted) - verification.row_of(padded, accepted)).abs()


@pytest.mark.parametrize("mutant", [target_as_residual, absolute_residual])
def test_a_wrong_residual_is_caught(mutant: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "next_probs", mutant)
    assert excess(*distributions(16, 3)) > 50


def test_a_residual_draw_from_the_acceptance_stream_is_caught() -> None:
    assert excess(*distributions(16, 3), shared_stream=True) > 50


def test_proposals_are_accepted_at_the_rate_of_the_overlap() -> None:
    target_probs, draft_probs = distributions(16, 1)
    generator = torch.Generator().manual_seed(2)
    accept, following, propose = torch.rand(3, TRIALS, generator=generator, dtype=torch.float64)
    drafted = draw(draft_probs.expand(TRIALS, -1, -1), propose[:, None])
    wide = target_probs.expand(TRIALS, -1, -1), draft_probs.expand(TRIALS, -1, -1)
    accepted = verify_chain(*wide, drafted, accept[:, None], following).accepted
    alpha = float(torch.minimum(target_probs[0], draft_probs[0]).sum())
    assert float(accepted.double().mean()) == pytest.approx(alpha, abs=4 * (alpha * (1 - alpha) / TRIALS) ** 0.5)


def test_no_proposal_draws_from_the_target() -> None:
    probs = torch.tensor([[0.25, 0.75]])
    for uniform, token in ((0.2, 0), (0.3, 1)):
        verdict = verify_chain(
            probs, probs[:0], torch.empty(0, dtype=torch.int64), torch.empty(0), torch.tensor(uniform)
        )
        assert (int(verdict.accepted), int(verdict.next_token)) == (0, token)


def test_equal_distributions_accept_everything_and_a_residual_of_nothing_falls_back_to_the_target() -> None:
    probs = torch.tensor([[0.5, 0.5], [0.1, 0.9]])
    almost_one = torch.tensor([1 - 1e-12], dtype=torch.float64)
    verdict = verify_chain(probs, probs[:1], torch.tensor([1]), almost_one, torch.tensor(0.5))
    assert (int(verdict.accepted), int(verdict.next_token)) == (1, 1)
    assert torch.equal(next_probs(probs, probs[:1], torch.tensor(0)), probs[0])


def test_greedy_stops_at_the_first_difference_and_puts_the_targets_choice_there() -> None:
    verdict = verify_greedy(torch.tensor([4, 5, 6, 7]), torch.tensor([4, 9, 6]))
    assert (int(verdict.accepted), int(verdict.next_token)) == (1, 5)
