"""The share of the machine's bandwidth that plain decoding reaches: weights read a step, over the best rate there is.

That rate is what the fastest kind of prepacked product reaches over one token, with weights that no cache holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from distillspec.models import LanguageModel
from distillspec.models.packed_products import KINDS
from distillspec.native.library import NotBuilt

UNCACHED = 1 << 28  # bytes of weights that are read before one of them is read again
MOST_COPIES = 32  # of the weights of a trial model
ROUNDS = 10
PLAIN = "not packed"


def read_share(target: LanguageModel, tokens_per_s: float) -> dict[str, Any]:
    """Return what plain decoding of one row reads a second, beside the best rate.

    Args:
        tokens_per_s: of one row, a token a step.
    """
    size, weight = read_bytes(target), target.head.weight.detach()
    weight_bytes = weight.numel() * weight.element_size()
    rates = {name: weight_bytes / seconds for name, seconds in product_seconds(weight, 1).items()}
    best = max((name for name in rates if name != PLAIN), key=lambda name: rates[name], default=PLAIN)
    return {
        "read_mb_a_step": size / 1e6,
        "read_gb_per_s": size * tokens_per_s / 1e9,
        "best_gb_per_s": rates[best] / 1e9,
        "best_product": best,
        "share": size * tokens_per_s / rates[best],
    }


def read_bytes(model: LanguageModel) -> int:
    """Return the bytes of the weights that one token reads: all but an input table that is not the head too."""
    embedding = model.model.get_input_embeddings().weight
    tied = embedding is model.model.get_output_embeddings().weight
    total = sum(parameter.numel() * parameter.element_size() for parameter in model.model.parameters())
    return total if tied else total - embedding.numel() * embedding.element_size()


@torch.inference_mode()
def product_seconds(weight: Tensor, tokens: int) -> dict[str, float]:
    """Return the least seconds of a product of so many tokens with a weight `[out, in]`, by kind, and not packed.

    Kinds that do not work here are left out.
    """
    copies = min(MOST_COPIES, max(2, -(-UNCACHED // (weight.numel() * weight.element_size()))))
    x = weight.new_ones(tokens, weight.shape[1])
    least_s = {PLAIN: _least([partial(linear, weight=weight.clone()) for _ in range(copies)], x)}
    for kind in KINDS:
        try:
            if kind.fits(weight, exact=False):
                least_s[kind.name] = _least([kind(weight) for _ in range(copies)], x)
        except (RuntimeError, NotBuilt):  # the CPU has no instructions for it
            continue
    return least_s


def _least(products: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> float:
    """Return the seconds a product of the fastest round over all."""
    rounds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for product in products:
            product(x)
        rounds.append(time.perf_counter() - started)
    return min(rounds) / len(products)
