"""Conversations with acceptance rates drawn for two drafts, and the gate's scores of them."""

from __future__ import annotations

import numpy
from numpy.typing import ArrayLike, NDArray

from distillspec.serving.online.judging.evidence import Pair
from distillspec.serving.online.judging.score import Score

LONGEST, TOKENS = 4, 128  # speculation length, tokens of an answer
MEAN = 0.5  # acceptance of a conversation
CONCENTRATION = 18.0  # of its Beta distribution: a standard deviation of .115, that of rates between .3 and .7
NOISE = 0.03  # standard deviation of the difference of two equal drafts on one conversation
TAILS = 4  # degrees of freedom of Student's t, of variance 2: some conversations differ by far more


def score(alpha: float) -> Score:
    """Return the score of a draft with an acceptance rate on one answer."""
    tokens_a_block = numpy.cumsum(alpha ** numpy.arange(LONGEST + 1))[1:]
    return Score((float(TOKENS),) * LONGEST, tuple((TOKENS / tokens_a_block).tolist()), alpha * TOKENS, TOKENS)


def rates(dice: numpy.random.Generator, means: ArrayLike, gain: float, noise: float = NOISE) -> NDArray[numpy.float64]:
    """Return acceptance rates `[2, conversations]` of two drafts, the second of which is better by `gain`.

    Args:
        means: of the conversations, before the draw, `[conversations]`.
    """
    expected = numpy.asarray(means, dtype=numpy.float64)
    alike = dice.beta(CONCENTRATION * expected, CONCENTRATION * (1 - expected))
    apart = noise / 2 * dice.standard_t(TAILS, (2, len(expected)))
    drawn: NDArray[numpy.float64] = numpy.clip(alike + apart + numpy.array([[0.0], [gain]]), 0.02, 0.98)
    return drawn


def pairs(dice: numpy.random.Generator, count: int, gain: float) -> list[Pair]:
    """Return the scores of two drafts on `count` conversations of one domain and tenant."""
    before, after = rates(dice, numpy.full(count, MEAN), gain).tolist()
    return [Pair("t", "d", score(old), score(new)) for old, new in zip(before, after, strict=True)]
