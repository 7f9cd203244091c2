"""Sampling: from logits to the distribution that tokens are drawn from, and draws from it.

Training, evaluation and serving all call these functions, so that an acceptance rate measured in one place means the
same in another. The transforms of a `SamplingPolicy` apply in the order temperature, top-k, top-p, min-p, each to the
renormalised result of the one before (as in transformers).

Functions with `reads_are_free` read from the device: whether rows are distributions, and how many tokens a nucleus
needs. With `reads_are_free=False` they read nothing. A row that defines no distribution then gives meaningless numbers,
and nuclei are found by bisection. Valid rows give the same either way.
"""

from distillspec.sampling.checks import NonFiniteLogits, bad_row, check_logits, check_policy
from distillspec.sampling.drawing import best_ids, draw, draw_each, draw_unchecked
from distillspec.sampling.nucleus import largest_probs
from distillspec.sampling.policy import policy_probs

__all__ = [
    "NonFiniteLogits",
    "bad_row",
    "best_ids",
    "check_logits",
    "check_policy",
    "draw",
    "draw_each",
    "draw_unchecked",
    "largest_probs",
    "policy_probs",
]
