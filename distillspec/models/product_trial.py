"""A trial of which packed product is the fastest on this machine, once a process, dtype, tokens and threads."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from statistics import geometric_mean, median

import torch
from torch import Tensor
from torch.nn.functional import linear

from distillspec.errors import in_one_line
from distillspec.models.packed_products import KINDS, PackedProduct

log = logging.getLogger(__name__)

TRIED_BYTES = 1 << 26  # weights to try on: more than the caches hold
ROUNDS = 5


def ranked(dtype: torch.dtype, weights: Sequence[Tensor], tokens: tuple[int, ...]) -> tuple[type[PackedProduct], ...]:
    """Return the kinds that are faster than the plain product here over so many `tokens` a pass, the fastest first."""
    key = (dtype, tokens, torch.get_num_threads())
    if key not in _tried:
        _tried[key] = _try(weights, tokens)
    ratios = _tried[key]
    return tuple(sorted((kind for kind in ratios if ratios[kind] < 1), key=lambda kind: ratios[kind]))


def forget_trials() -> None:
    """Try again at the next model: tests change what is tried."""
    _tried.clear()


_tried: dict[tuple[torch.dtype, tuple[int, ...], int], Mapping[type[PackedProduct], float]] = {}


def _try(weights: Sequence[Tensor], tokens: tuple[int, ...]) -> Mapping[type[PackedProduct], float]:
    """Return each kind's time over the plain product's, over weights that the caches do not hold, and log it."""
    ends = accumulate(weight.numel() * weight.element_size() for weight in weights)
    tried = [weight.detach() for weight, end in zip(weights, ends, strict=True) if end <= TRIED_BYTES] or weights[:1]
    ratios = {}
    for kind in KINDS:
        try:
            packed = [kind(weight) for weight in tried]
            ratios[kind] = geometric_mean([_ratio(tried, packed, count) for count in tokens])
        except RuntimeError as error:  # the CPU has no instructions for it
            log.info("weights are not packed by %s: %s", kind.name, in_one_line(error))
        else:
            log.info("products by %s take %.2f times the plain ones' time here", kind.name, ratios[kind])
    return ratios


def _ratio(weights: Sequence[Tensor], packed: Sequence[PackedProduct], tokens: int) -> float:
    """Return packed over plain time for a pass over `tokens` tokens, the median of rounds that take turns."""
    inputs = {weight.shape[1]: weight.new_ones(tokens, weight.shape[1]) for weight in weights}
    ratios = []
    for _ in range(ROUNDS):
        plain_s = seconds(lambda: [linear(inputs[weight.shape[1]], weight) for weight in weights])
        packed_s = seconds(
            lambda: [product(inputs[weight.shape[1]]) for weight, product in zip(weights, packed, strict=True)]
        )
        ratios.append(packed_s / plain_s)
    return median(ratios)


def seconds(run: Callable[[], object]) -> float:
    """Time a call."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
