"""A trial of which packed product is the fastest on this machine, once a process, dtype, tokens and threads."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import geometric_mean, median

import torch
from torch import Tensor
from torch.nn.functional import linear

from distillspec.errors import in_one_line
from distillspec.models.packed_products import KINDS, PackedProduct

log = logging.getLogger(__name__)

TRIED_BYTES = 1 << 26  # weights to try on: more than the caches hold
ROUNDS = 5
ROUND_S = 0.1  # that the plain products of a round may take. Where types are emulated fewer weights are tried
MOST_BESIDE = 8  # tokens that are read together, to see whether they change each other
# (dtype, tokens, threads) → the kinds that work here, with their time over the plain product's.
trials: dict[tuple[torch.dtype, int, int], Mapping[type[PackedProduct], float]] = {}


def sample(weights: Iterable[Tensor]) -> list[Tensor]:
    """Return the first weights to try on, `TRIED_BYTES` together but at least one."""
    sampled: list[Tensor] = []
    size = 0
    for weight in weights:
        size += weight.numel() * weight.element_size()
        if sampled and size > TRIED_BYTES:
            break
        sampled.append(weight.detach())
    return sampled


def ranked(dtype: torch.dtype, weights: Sequence[Tensor], tokens: Sequence[int]) -> tuple[type[PackedProduct], ...]:
    """Return the kinds that are faster than the plain product here over so many `tokens` a pass, the fastest first."""
    keys = {count: (dtype, count, _threads(dtype, count)) for count in tokens}
    if missing := [count for count in tokens if keys[count] not in trials]:
        trials.update({keys[count]: ratios for count, ratios in _try(weights, missing).items()})
    works = set.intersection(*(set(trials[key]) for key in keys.values()))
    means = {kind: geometric_mean([trials[key][kind] for key in keys.values()]) for kind in KINDS if kind in works}
    return tuple(sorted((kind for kind in means if means[kind] < 1), key=lambda kind: means[kind]))


def _threads(dtype: torch.dtype, count: int) -> int:
    """Return the threads to try with: those of an earlier trial, if they were more.

    A draft that is swapped in is loaded by one thread beside steps, which later use it with all threads.
    """
    earlier = [threads for tried_dtype, tokens, threads in trials if tried_dtype == dtype and tokens == count]
    return max([torch.get_num_threads(), *earlier])


def _try(weights: Sequence[Tensor], tokens: Sequence[int]) -> dict[int, dict[type[PackedProduct], float]]:
    """Return each kind's time over the plain product's by number of tokens, and log it."""
    ratios_at: dict[int, dict[type[PackedProduct], float]] = {count: {} for count in tokens}
    for kind in KINDS:
        try:
            packed = [kind(weight) for weight in weights]
            if not keeps_rows_apart(packed[0], weights[0]):
                log.info("weights are not packed by %s: here a token's product depends on those beside it", kind.name)
                continue
            ratios = [_ratio(weights, packed, count) for count in tokens]
        except RuntimeError as error:  # the CPU has no instructions for it
            log.info("weights are not packed by %s: %s", kind.name, in_one_line(error))
            continue
        for count, ratio in zip(tokens, ratios, strict=True):
            ratios_at[count][kind] = ratio
        shown = ", ".join(f"{ratio:.2f} at {count}" for count, ratio in zip(tokens, ratios, strict=True))
        log.info("products by %s over the plain ones' time here, by tokens: %s", kind.name, shown)
    return ratios_at


def keeps_rows_apart(product: PackedProduct, weight: Tensor) -> bool:
    """Return True if a token's product does not depend on the tokens beside it. FBGEMM's does on AVX2."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(MOST_BESIDE, weight.shape[1], generator=generator).to(weight.dtype)
    alone = product(x[:1])
    return all(torch.equal(product(x[:rows])[:1], alone) for rows in range(2, 1 + MOST_BESIDE))


def _ratio(weights: Sequence[Tensor], packed: Sequence[PackedProduct], tokens: int) -> float:
    """Return packed over plain time for a pass over `tokens` tokens, the median of rounds that take turns."""
    inputs = {weight.shape[1]: weight.new_ones(tokens, weight.shape[1]) for weight in weights}
    tried = _affordable(weights, inputs)
    ratios = []
    for _ in range(ROUNDS):
        plain_s = seconds(lambda: [linear(inputs[weight.shape[1]], weight) for weight in tried])
        packed_s = seconds(
            lambda: [product(inputs[weight.shape[1]]) for weight, product in zip(tried, packed, strict=False)]
        )
        ratios.append(packed_s / plain_s)
    return median(ratios)


def _affordable(weights: Sequence[Tensor], inputs: Mapping[int, Tensor]) -> Sequence[Tensor]:
    """Return the first weights whose plain products take `ROUND_S`, at least one."""
    started = time.perf_counter()
    for count, weight in enumerate(weights, 1):
        linear(inputs[weight.shape[1]], weight)
        if time.perf_counter() - started >= ROUND_S:
            return weights[:count]
    return weights


def seconds(run: Callable[[], object]) -> float:
    """Time a call."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
