"""Rows hold every sample once, nothing leaks between samples, and the first response token counts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distillspec.data.packing import collate, plan_epoch
from distillspec.signals import TeacherSignal
from distillspec.types import Sample

PAD = 2
lengths = st.lists(st.integers(2, 40), min_size=1, max_size=60)


def sample(number: int, prompt: int, response: int, **extra) -> Sample:
    ids = [3 + (7 * number + 11 * i) % 250 for i in range(prompt + response)]
    return Sample(f"s{number}", f"d{number}", tuple(ids[:prompt]), tuple(ids[prompt:]), **extra)


def signal(rows: int, first: int = 0, kind="topk") -> TeacherSignal:
    ids = torch.arange(first, first + rows, dtype=torch.int32)[:, None].repeat(1, 2)
    return TeacherSignal(kind, ids, torch.full((rows, 2), -1.0, dtype=torch.float16), torch.full((rows,), 0.25))


@given(lengths, st.integers(8, 32), st.integers(1, 4), st.integers(0, 5), st.integers(0, 3))
def test_an_epoch_holds_every_sample_once_within_the_limits(
    sizes: list[int], row_tokens: int, rows: int, seed: int, epoch: int
) -> None:
    plan = plan_epoch(sizes, row_tokens, rows, seed, epoch)
    assert sorted(i for batch in plan for row in batch for i in row) == list(range(len(sizes)))
    assert all(1 <= len(batch) <= rows for batch in plan)
    assert all(len(batch) == rows for batch in plan[:-1])
    for row in (row for batch in plan for row in batch):
        assert row
        assert sum(min(sizes[i], row_tokens) for i in row) <= row_tokens
    assert plan == plan_epoch(sizes, row_tokens, rows, seed, epoch)


@given(lengths)
def test_rows_are_filled_well(sizes: list[int]) -> None:
    """First fit: no two rows of one window could have been one."""
    rows = [sum(sizes[i] for i in row) for batch in plan_epoch(sizes, 64, 2, 0, 0) for row in batch]
    if sum(sizes) <= 16 * 2 * 64:
        assert all(a + b > 64 for k, a in enumerate(rows) for b in rows[k + 1 :])


def test_epochs_and_seeds_are_different_orders() -> None:
    plans = [str(plan_epoch([9] * 40, 32, 2, seed, epoch)) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert len(set(plans)) == 3


def test_loss_positions_by_hand() -> None:
    first, second = sample(0, prompt=3, response=2), sample(1, prompt=1, response=3, source="draft")
    third = sample(2, prompt=2, response=1)
    batch = collate([[first, second], [third]], 12, PAD)
    assert batch.input_ids.shape == (2, 9)
    assert batch.input_ids[1].tolist() == [*third.prompt_ids, *third.response_ids, *[PAD] * 6]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3], [0, 1, 2, 0, 1, 2, 3, 4, 5]]
    # The last prompt token predicts the first response token.
    assert batch.loss_index.tolist() == [2, 3, 5, 6, 7, 9 + 1]
    assert batch.labels.tolist() == [*first.response_ids, *second.response_ids, *third.response_ids]
    assert batch.input_ids.flatten()[batch.loss_index + 1].tolist() == batch.labels.tolist()
    assert batch.sample_index.tolist() == [0, 0, 1, 1, 1, 2]
    assert batch.domains == ("d0", "d1", "d2")
    assert batch.from_draft.tolist() == [False, False, True, True, True, False]
    assert batch.signal is None
    assert batch.response_tokens == 6


def test_an_overlong_sample_keeps_its_prompt_and_as_much_response_as_fits() -> None:
    long = sample(0, prompt=4, response=9, signal=signal(9))
    batch = collate([[long]], 10, PAD)
    assert batch.input_ids[0].tolist() == [*long.prompt_ids, *long.response_ids[:6]]
    assert batch.loss_index.tolist() == [3, 4, 5, 6, 7, 8]
    assert batch.signal is not None
    assert batch.signal.ids[:, 0].tolist() == list(range(6))


@pytest.mark.parametrize("limit", [2, 3, 8])
def test_an_overlong_prompt_loses_its_start(limit: int) -> None:
    long = sample(0, prompt=8, response=5)
    batch = collate([[long]], limit, PAD)
    assert batch.input_ids[0].tolist() == [*long.prompt_ids[-(limit - 1) :], long.response_ids[0]]
    assert batch.labels.tolist() == [long.response_ids[0]]


def test_signals_are_joined_in_the_order_of_the_loss_positions() -> None:
    rows = [
        [sample(0, 2, 2, signal=signal(2, 10)), sample(1, 2, 1, signal=signal(1, 20))],
        [sample(2, 2, 1, signal=signal(1, 30))],
    ]
    batch = collate(rows, 16, PAD)
    assert batch.signal is not None
    assert batch.signal.ids[:, 0].tolist() == [10, 11, 20, 30]
    assert batch.signal.logprobs.dtype == batch.signal.tail.dtype == torch.float32
    assert len(batch.signal) == len(batch.labels)


@pytest.mark.parametrize("other", [None, signal(1, kind="sampled")])
def test_a_signal_that_not_all_share_is_dropped(other: TeacherSignal | None) -> None:
    batch = collate([[sample(0, 2, 2, signal=signal(2)), sample(1, 2, 1, signal=other)]], 16, PAD)
    assert batch.signal is None


@pytest.mark.numerics
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "mistral", "gpt2", "smollm3"])
def test_packed_rows_think_what_separate_sequences_think(kind: str, random_model) -> None:
    model = random_model(kind, torch.float64)
    samples = [sample(0, 9, 12), sample(1, 3, 6), sample(2, 5, 15), sample(3, 2, 2)]
    batch = collate([[samples[0], samples[1]], [samples[2], samples[3]]], 40, PAD)
    with torch.no_grad():
        hidden = model.hidden(batch.input_ids, batch.position_ids)
        packed = model.head.logits(hidden).flatten(0, 1)[batch.loss_index]
        alone = []
        for one in samples:
            ids = torch.tensor([one.prompt_ids + one.response_ids])
            alone.append(model.logits(ids)[0, len(one.prompt_ids) - 1 : -1])
    torch.testing.assert_close(packed, torch.cat(alone), atol=1e-9, rtol=1e-9)
