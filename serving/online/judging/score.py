"""Score of a draft on text: what speculative decoding with it would have taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distillspec.evaluation.blocks import count_blocks
from distillspec.evaluation.positions import Positions


@dataclass(frozen=True)
class Score:
    """Expected tokens and blocks by speculation length 1 … G, and Σ α over the positions that p is known at."""

    tokens: tuple[float, ...]
    blocks: tuple[float, ...]
    alpha: float
    positions: int

    @classmethod
    def of(cls, positions: Positions, finished: bool, speculation_length: int, known: int) -> Score:
        """Return the score on one answer with `known` positions that count. See `count_blocks`."""
        counts = count_blocks(positions, finished, speculation_length)
        alpha = float(positions.alpha.sum())
        return cls(tuple(counts.tokens.tolist()), tuple(counts.blocks.tolist()), alpha, known)


def sum_scores(scores: Sequence[Score]) -> Score:
    """Add the scores of answers that are one piece of evidence."""
    return Score(
        tuple(map(sum, zip(*[score.tokens for score in scores], strict=True))),
        tuple(map(sum, zip(*[score.blocks for score in scores], strict=True))),
        sum(score.alpha for score in scores),
        sum(score.positions for score in scores),
    )
