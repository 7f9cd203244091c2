"""Held-out prompts serve two ends: some choose the best checkpoint, the others are quoted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


def split_held_out(held_out: Sequence[Item], choosing: int) -> tuple[list[Item], list[Item]]:
    """The first `choosing`, which choose, and the rest, which is quoted; no more than half choose.

    The best of ten evaluations on some prompts looks better on these than it is. A single prompt has to do both.
    """
    choosing = min(choosing, len(held_out) // 2)
    if choosing == 0:
        return list(held_out), list(held_out)
    return list(held_out[:choosing]), list(held_out[choosing:])
