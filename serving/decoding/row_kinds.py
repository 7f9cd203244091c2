"""Kinds of rows, by how their tokens are verified."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.tree import TokenTree

Kind = Literal["greedy", "seeded", "drawn", "block", "kernel", "typical", "held", "rooted", "decided"]
BLOCK = 2  # tokens of the shortest chain that is verified as a whole. For one token it is the usual rule


def kind_of(sequence: SequenceState, tree: TokenTree, verification: str, kernel: bool) -> Kind:
    """Return the kind of a row. Greedy and seeded ones are verified exactly in every mode.

    `held`, `rooted` and `decided` are those of `decoding.target_initialised`.

    Args:
        kernel: rows that draw or are seeded are left to the C++ kernel (`decoding.kernel_verdicts`).
    """
    params = sequence.params
    if params.is_greedy:
        return "greedy"
    if not params.draws:
        return "kernel" if kernel else "seeded"
    if verification == "typical" and len(tree):
        return "typical"
    if kernel and verification in ("exact", "exact_by_token"):
        return "kernel"
    if verification == "exact" and len(tree) >= BLOCK and tree.is_drawn_chain:
        return "block"
    if verification != "target_initialised" or not (tree or sequence.candidates):
        return "drawn"
    if not len(tree):
        return "decided"
    return "rooted" if tree.roots else "held"


def by_kind(
    sequences: Sequence[SequenceState], trees: Sequence[TokenTree], verification: str, kernel: bool
) -> dict[Kind, list[int]]:
    """Return the places of the rows of each kind."""
    kinds: dict[Kind, list[int]] = {}
    for place, (sequence, tree) in enumerate(zip(sequences, trees, strict=True)):
        kinds.setdefault(kind_of(sequence, tree, verification, kernel), []).append(place)
    return kinds
