"""How far a target moved, against the sums written out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from distillspec.evaluation import TargetStates
from distillspec.evaluation.target_change import TargetChange, target_change
from distillspec.types import Sample

OLD = torch.tensor([[2.0, 0.0, 1.0], [0.0, 0.5, 3.0], [1.0, 1.5, 0.0]])
NEW = torch.tensor([[0.0, 2.0, 1.0], [0.0, 1.5, 2.0], [3.0, 1.5, 0.5]])
SAMPLES = [Sample("a", "d", (0, 1), (2, 0, 1)), Sample("b", "d", (2,), (1,))]
READ = [(1, 2), (2, 0), (0, 1), (2, 1)]  # the token before, and the token of the answer


def test_it_is_the_mean_over_the_answers_tokens(markov: Callable[..., Any]) -> None:
    old, new = (TargetStates(markov(table)) for table in (OLD, NEW))
    found = target_change(old, new, SAMPLES)
    p, q = (torch.softmax(table.double(), -1).tolist() for table in (OLD, NEW))
    assert found.tokens == 4
    assert found.old_nll == pytest.approx(-sum(math.log(p[a][b]) for a, b in READ) / 4, rel=1e-5)
    assert found.new_nll == pytest.approx(-sum(math.log(q[a][b]) for a, b in READ) / 4, rel=1e-5)
    divergence = sum(p[a][x] * math.log(p[a][x] / q[a][x]) for a, _ in READ for x in range(3)) / 4
    assert found.kl == pytest.approx(divergence, rel=1e-5)
    assert found.agreement == 0.25  # behind token 1 alone


def test_a_target_that_stayed_has_not_moved(markov: Callable[..., Any]) -> None:
    states = TargetStates(markov(OLD))
    found = target_change(states, states, SAMPLES)
    assert (found.kl, found.agreement, found.old_nll) == (0, 1, found.new_nll)


def test_it_is_said_in_one_line() -> None:
    line = TargetChange(4096, 1.25, 1.5, 0.03, 0.975).line()
    assert "\n" not in line
    for words in ("4096 tokens", "1.2500 → 1.5000 nats", "KL 0.0300", "97.5%"):
        assert words in line
