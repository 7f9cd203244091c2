"""Keyed noise: the numbers of its definition, uniform and independent along every part of its key."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from distillspec.serving.decoding import noise
from distillspec.serving.decoding.noise import exponentials, hashed_ids, key_tensor, noise_bits, noise_key

MASK = 2**31 - 1
IDS = torch.arange(20_000)


def mixed(value: int, halfway: int = 0) -> int:
    """The hash in whole numbers of any size."""
    value = ((value ^ (value >> 16)) * 0x7FEB352D) & MASK ^ halfway
    value = ((value ^ (value >> 15)) * 0x046CA68B) & MASK
    return value ^ (value >> 16)


def bits(keys: list[tuple[int, int]], ids: Tensor = IDS) -> Tensor:
    return noise_bits(key_tensor(keys), hashed_ids(ids))


def along(part: str, count: int = 60) -> list[tuple[int, int]]:
    """Keys that differ in one part by 1 each."""
    return [noise_key(**{"seed": 5, "index": 0, "position": 9, part: n}) for n in range(count)]


def test_bits_are_those_of_whole_numbers() -> None:
    keys, ids = [noise_key(7, 1, 30), (MASK, 0), (0, MASK)], [0, 1, 77, 49151, 262143]
    wanted = [[mixed(mixed(token) ^ one, two) for token in ids] for one, two in keys]
    assert bits(keys, torch.tensor(ids)).tolist() == wanted


def test_a_key_and_its_noise_never_change() -> None:
    """Seeded text depends on these numbers. A change of them belongs in CHANGELOG.md."""
    assert noise_key(1, 0, 2) == (898840149, 1502362054)
    assert bits([noise_key(1, 0, 2)], torch.tensor([0, 1, 2])).tolist() == [[1688086799, 1452519829, 844877161]]


def test_kept_columns_have_the_noise_of_their_ids() -> None:
    kept = torch.tensor([3, 500, 19_999])
    assert torch.equal(bits(along("seed"), kept), bits(along("seed"))[:, kept])


def test_noise_is_finite_at_the_ends_of_its_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "noise_bits", lambda keys, hashed: torch.tensor([[0, 1, MASK - 1, MASK]]).int())
    found = exponentials(torch.zeros(1, 2), torch.zeros(4))[0]
    assert found[0].item() == pytest.approx(2**-32, rel=1e-6)
    assert found[-1].item() == pytest.approx(22 * math.log(2), rel=1e-2)
    assert bool((found > 0).all())


def test_noise_is_exponential() -> None:
    """Kolmogorov–Smirnov against 1 − exp(−x)."""
    drawn = exponentials(key_tensor(along("position")), hashed_ids(IDS)).double().flatten().sort().values
    levels = torch.arange(1, len(drawn) + 1) / len(drawn)
    assert float((-torch.expm1(-drawn) - levels).abs().max()) * len(drawn) ** 0.5 < 1.8  # 0.3 % of true samples


def chi_square_excess(counts: Tensor) -> float:
    """(χ² − df) / √(2 df) of counts `[n, cells]` that should be equal within each row."""
    wanted = counts.sum(-1, keepdim=True).double() / counts.shape[-1]
    statistic = float(((counts - wanted) ** 2 / wanted).sum())
    degrees = counts.shape[0] * (counts.shape[1] - 1)
    return (statistic - degrees) / (2 * degrees) ** 0.5


def worst_excess(found: Tensor) -> float:
    """The largest excess of single bytes, and of pairs of 16 levels: neighbouring ids, and neighbouring keys."""
    tests = [torch.stack([((row >> s) & 255).bincount(minlength=256) for row in found]) for s in (0, 8, 16, 23)]
    top = (found >> 27).long()
    for one, two in ((top[:, 1:], top[:, :-1]), (top[:, 256:], top[:, :-256]), (top[1:], top[:-1])):
        tests.append(torch.stack([pair.bincount(minlength=256) for pair in 16 * one + two]))
    return max(abs(chi_square_excess(counts)) for counts in tests)


@pytest.mark.parametrize("part", ["seed", "index", "position"])
def test_bits_are_uniform_and_independent(part: str) -> None:
    assert worst_excess(bits(along(part))) < 5


WEAK: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "one product": lambda keys, hashed: ((hashed ^ keys[:, :1]) * 0x7FEB352D) & MASK,
    "added keys": lambda keys, hashed: (hashed + keys[:, :1]) & MASK,
    "no key": lambda keys, hashed: hashed.expand(len(keys), -1),
}


@pytest.mark.parametrize("weak", WEAK)
def test_a_weak_hash_is_found_out(weak: str) -> None:
    keys = [(n, n) for n in range(60)] if weak != "no key" else along("seed")
    assert worst_excess(WEAK[weak](key_tensor(keys), hashed_ids(IDS))) > 20


def chosen(probs: Tensor, race: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Counts `[W]` of the ids that seeded rows of distribution `probs [W]` write."""
    keys = key_tensor(noise_key(*key) for key in product(range(50), range(4), range(200)))
    winners = race(probs, exponentials(keys, hashed_ids(torch.arange(len(probs)) * 11))).argmax(-1)
    return winners.bincount(minlength=len(probs)).double()


def excess_over(counts: Tensor, probs: Tensor) -> float:
    wanted = probs.double() * counts.sum()
    return (float(((counts - wanted) ** 2 / wanted).sum()) - (len(probs) - 1)) / (2 * (len(probs) - 1)) ** 0.5


def test_the_winner_of_the_race_is_a_draw() -> None:
    probs = torch.softmax(1.5 * torch.randn(64, generator=torch.Generator().manual_seed(0)), -1)
    assert abs(excess_over(chosen(probs, lambda p, e: p / e), probs)) < 5
    assert abs(excess_over(chosen(probs, lambda p, e: p.log() - e.log()), probs)) < 5, "Gumbel-max"
    assert excess_over(chosen(probs, lambda p, e: p.log() + e), probs) > 20, "a mutant: noise that is not Gumbel"
