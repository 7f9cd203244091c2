"""An endless, repeatable sequence of batches."""

from __future__ import annotations

import itertools

import pytest
import torch

from distillspec.config import TrainConfig
from distillspec.training.feed import SampleFeed
from distillspec.types import Sample, TokenBatch

CONFIG = TrainConfig(max_steps=1, batch_tokens=32, row_tokens=16)
SAMPLES = [Sample(f"s{i}", "d", (1, 3 + i), tuple(range(20 + i, 24 + i + i % 4))) for i in range(23)]


def make(rank: int = 0, world: int = 1, samples: list[Sample] = SAMPLES, seed: int = 0) -> SampleFeed:
    return SampleFeed(samples, CONFIG, 2, seed, rank, world)


def take(feed: SampleFeed, count: int) -> list[TokenBatch]:
    return [feed.take() for _ in range(count)]


def same(ours: list[TokenBatch], theirs: list[TokenBatch]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(a.input_ids.shape == b.input_ids.shape and torch.equal(a.input_ids, b.input_ids) for a, b in pairs)


def names(batches: list[TokenBatch]) -> list[int]:
    """Samples by their second prompt token, which no two share."""
    found = []
    for batch in batches:
        starts = (batch.position_ids == 0) & (batch.input_ids == 1)
        found += (batch.input_ids[:, 1:][starts[:, :-1]] - 3).tolist()
    return found


def test_each_epoch_holds_every_sample_once_in_another_order() -> None:
    feed = make()
    epochs: list[list[TokenBatch]] = [[], [], []]
    while feed.epoch < 3:
        batch = feed.take()
        if feed.epoch < 3:
            epochs[feed.epoch].append(batch)
    assert [sorted(names(epoch)) for epoch in epochs] == [list(range(23))] * 3
    assert not same(epochs[0], epochs[1])


@pytest.mark.parametrize("taken", [0, 1, 5, 9, 14])
def test_a_restored_feed_meets_the_same_batches(taken: int) -> None:
    feed = make()
    take(feed, taken)
    state = feed.state()
    again = make()
    again.restore(state)
    assert same(take(again, 12), take(feed, 12))


def test_a_sample_longer_than_a_row_is_used_whole() -> None:
    """`train=careful` has rows of 512, and default lengths allow samples of 768."""
    long = Sample("long", "d", (1, 40), tuple(range(50, 50 + 30)))
    feed = make(samples=[long, *SAMPLES[:3]])
    batches = take(feed, len(feed.plan))
    assert sum(batch.response_tokens for batch in batches) == sum(len(s.response_ids) for s in [long, *SAMPLES[:3]])
    assert set(long.response_ids) <= set(torch.cat([batch.labels for batch in batches]).tolist())


def test_seeds_differ() -> None:
    assert not same(take(make(seed=0), 4), take(make(seed=1), 4))


def test_processes_share_an_epoch_without_overlap_and_in_equal_parts() -> None:
    whole = take(make(), len(make().plan))
    parts = [take(make(rank, 2), len(whole) // 2) for rank in range(2)]
    assert len({len(make(rank, 2).plan) for rank in range(2)}) == 1
    dealt = [batch for pair in zip(*parts, strict=True) for batch in pair]
    assert same(dealt, whole[: len(dealt)])


def test_with_fewer_batches_than_processes_each_still_gets_one() -> None:
    few = SAMPLES[:3]
    feeds = [make(rank, 4, few) for rank in range(4)]
    rows = [names(take(feed, 1)) for feed in feeds]
    assert all(rows)
    assert set(itertools.chain.from_iterable(rows)) == {0, 1, 2}


def test_new_samples_start_from_their_first_batch() -> None:
    feed = make()
    take(feed, 3)
    feed.renew(SAMPLES[:2])
    assert sorted(names(take(feed, 1))) == [0, 1]


def test_the_refresh_before_is_used_again() -> None:
    """Its text was drafted and judged at a price."""
    feed = SampleFeed([], CONFIG, 2, 0, keep=2)
    seen = []
    for first in (0, 3, 6):
        feed.renew(SAMPLES[first : first + 3])
        seen.append(sorted(names(take(feed, len(feed.plan)))))
    assert seen == [[0, 1, 2], [0, 1, 2, 3, 4, 5], [3, 4, 5, 6, 7, 8]]
    again = SampleFeed([], CONFIG, 2, 0, keep=2)
    again.restore(feed.state(), feed.samples)
    again.renew(SAMPLES[9:12])
    assert sorted(names(take(again, len(again.plan)))) == [6, 7, 8, 9, 10, 11]


def test_an_empty_feed_waits_for_its_first_samples() -> None:
    feed = make(samples=[])
    feed.renew(SAMPLES[:2])
    assert sorted(names(take(feed, 1))) == [0, 1]
