"""Ancestors of the nodes of token trees, as bits in words of 64: what a node attends to among its tree."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

WORD = 64  # bits of a word
KEPT = 256  # shapes of trees whose ancestors are kept: a plan repeats its shapes from step to step


def ancestor_words(rows: Sequence[Sequence[int]], width: int) -> NDArray[numpy.int64]:
    """Return the ancestors of each row's nodes, themselves among them: `[B, width, words]`, [row, node, word].

    Bit i of word w is node 64 · w + i.

    Args:
        rows: the parent of each node, an earlier one of the row or −1. Further nodes continue the one before them.
        width: nodes a row.
    """
    return numpy.stack([_words_of(tuple(parents), width) for parents in rows])


def ancestor_sets(parents: Sequence[int], width: int) -> list[int]:
    """Return the ancestors of each node and itself, as the bits of a number. For the arguments see `ancestor_words`."""
    sets: list[int] = []
    for node in range(width):
        parent = parents[node] if node < len(parents) else node - 1
        sets.append((0 if parent < 0 else sets[parent]) | 1 << node)
    return sets


def see_each_other(words: NDArray[numpy.int64], count: int, mutual: int) -> None:
    """Let the last `mutual` of the first `count` nodes of a row `[width, words]` see all of these, in place."""
    bits = ((1 << count) - 1).to_bytes(words.shape[1] * WORD // 8, "little")
    words[count - mutual : count] = numpy.frombuffer(bits, dtype="<i8")


@lru_cache(maxsize=KEPT)
def _words_of(parents: tuple[int, ...], width: int) -> NDArray[numpy.int64]:
    """Return the words of one row `[width, words]`, read-only."""
    size = -(-width // WORD) * WORD // 8
    packed = b"".join([bits.to_bytes(size, "little") for bits in ancestor_sets(parents, width)])
    return numpy.frombuffer(packed, dtype="<i8").astype(numpy.int64, copy=False).reshape(width, -1)


def signed_word(bits: int) -> int:
    """Return 64 bits as the signed number that has them."""
    return bits - (1 << WORD) if bits >> (WORD - 1) else bits


def ancestor_mask(words: Tensor) -> Tensor:
    """Return `[B, q, q]` bool of `words [B, q, words]`: [row, node, ancestor]."""
    bits = words[..., None] >> torch.arange(WORD, device=words.device) & 1
    return bits.flatten(-2)[..., : words.shape[1]].bool()
