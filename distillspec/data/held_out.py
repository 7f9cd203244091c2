"""Split of the held-out prompts: some choose the best checkpoint, the others give the reported figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


def split_held_out(held_out: Sequence[Item], choosing: int) -> tuple[list[Item], list[Item]]:
    """Return the first `choosing` items (at most half) and the rest.

    The first choose the best checkpoint. The rest give the reported figures. The best of ten evaluations looks too good
    on the prompts that chose it. A single prompt does both.
    """
    choosing = min(choosing, len(held_out) // 2)
    if choosing == 0:
        return list(held_out), list(held_out)
    return list(held_out[:choosing]), list(held_out[choosing:])
