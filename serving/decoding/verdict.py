"""Verdicts on drafted trees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class TreeVerdict(NamedTuple):
    """The accepted nodes, root to leaf, and the token of the target's own that follows them.

    `others`: more candidates for that token. With any, it is not decided yet (`decoding.target_initialised`).
    """

    path: tuple[int, ...]
    next_token: int
    others: tuple[int, ...] = ()


@dataclass(frozen=True)
class Judgement:
    """Verdict on a window."""

    verdict: TreeVerdict | None  # None where the target's logits behind the text are NaN
    sound: bool  # False where any of the window's logits is NaN, on the path or off it
