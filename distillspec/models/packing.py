"""Packing of a model's weights: a kind of product for passes of few tokens, and one for passes of many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distillspec.models import product_trial
from distillspec.models.packed_products import OpaqueProduct, PackedProduct, Product

FEW = 8  # tokens, at most
FEW_TOKENS, MANY_TOKENS = (1, 5), (16, 64)  # of the passes that the trial times


class ByTokens(OpaqueProduct):
    """A weight packed twice: for at most `FEW` tokens, and for more."""

    def __init__(self, few: Product, many: Product, out: int) -> None:
        super().__init__(out)
        self.few, self.many = few, many

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        tokens = x.numel() // x.shape[-1]
        return (self.few if tokens <= FEW else self.many)(x, bias)


@dataclass(frozen=True)
class Packing:
    """The kinds of product that a model's weights are packed for."""

    few: type[PackedProduct]
    many: type[PackedProduct]

    @property
    def kinds(self) -> tuple[type[PackedProduct], ...]:
        """The kinds that there are copies of."""
        return (self.few,) if self.few is self.many else (self.few, self.many)

    @property
    def name(self) -> str:
        """Return the name for the log."""
        if self.few is self.many:
            return self.few.name
        return f"{self.few.name} for up to {FEW} tokens and by {self.many.name} for more"

    def pack(self, weight: Tensor) -> Product:
        """Return the packed weight `[out, in]`."""
        first, *others = [kind(weight) for kind in self.kinds]
        return ByTokens(first, others[0], len(weight)) if others else first

    def size(self, weight: Tensor) -> int:
        """Return the bytes of all copies."""
        return sum(kind.size(weight) for kind in self.kinds)

    def fits(self, weight: Tensor, *, exact: bool) -> bool:
        """Return True if the weight can be packed, with `exact` only if products keep the dtype's precision."""
        return all(kind.fits(weight, exact=exact) for kind in self.kinds)


def packings(dtype: torch.dtype, weights: Iterable[Tensor], tokens: Sequence[int] | None) -> list[Packing]:
    """Return the packings that are faster than plain products on this machine, the best first.

    Args:
        tokens: typical numbers of tokens of a pass. None: few and many, which may each have a kind of their own.
    """
    weights = product_trial.sample(weights)
    if tokens is not None:
        return [Packing(kind, kind) for kind in product_trial.ranked(dtype, weights, tuple(tokens))]
    alone = product_trial.ranked(dtype, weights, FEW_TOKENS + MANY_TOKENS)  # first: one trial packs once for all
    few, many = (product_trial.ranked(dtype, weights, counts) for counts in (FEW_TOKENS, MANY_TOKENS))
    both = [Packing(few[0], many[0])] if few and many and few[0] is not many[0] else []
    return both + [Packing(kind, kind) for kind in alone]
