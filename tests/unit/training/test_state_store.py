"""States of training text are the target's, wherever a sample lies and however much memory there is."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from distillspec.config import TrainConfig
from distillspec.models import LanguageModel
from distillspec.models.features import read_states
from distillspec.training.feed import SampleFeed
from distillspec.training.state_store import GIB, StateStore, state_room
from distillspec.types import RecordedStates, Sample, StateRequest

IDS = (1, 3)
SAMPLES = [Sample(f"s{i}", "d", (1, 3 + i), tuple(range(20 + i, 24 + i + i % 4))) for i in range(9)]
CONFIG = TrainConfig(max_steps=1, batch_tokens=32, row_tokens=16)


def own_states(target: LanguageModel, sample: Sample) -> torch.Tensor:
    ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
    return read_states(target, ids, torch.arange(ids.shape[1])[None], IDS)[0]


@pytest.mark.parametrize("gib", [None, 0.0, 1e-5])
@pytest.mark.parametrize(("precision", "rounding"), [("bf16", 2**-8), ("fp8", 2**-4)])
def test_batches_hold_each_tokens_states(
    target: LanguageModel, gib: float | None, precision: str, rounding: float
) -> None:
    store = StateStore(target, IDS, gib, precision)
    feed = SampleFeed(SAMPLES, CONFIG, 2, 0, states=store)
    for _ in range(12):
        batch = feed.take()
        assert batch.states is not None
        for row, places, states in zip(batch.input_ids, batch.position_ids, batch.states, strict=True):
            starts = [*(places == 0).nonzero()[:, 0].tolist(), len(row)]
            for start, end in itertools.pairwise(starts):
                sample = next((s for s in SAMPLES if [*s.prompt_ids, *s.response_ids] == row[start:end].tolist()), None)
                if sample is not None:
                    wanted = own_states(target, sample)
                    torch.testing.assert_close(
                        states[start:end].float(),
                        wanted,
                        atol=1e-3 + rounding * 2**-5 * float(wanted.max()),
                        rtol=rounding,
                    )


def test_it_says_what_it_takes(target: LanguageModel) -> None:
    store = StateStore(target, IDS, gib=1.0)
    width = target.model.config.hidden_size
    assert store.bytes_per_token == 2 * width * 2
    assert StateStore(target, IDS, 1.0, "fp8").bytes_per_token == 2 * (width + 4)
    assert "kept in memory" in store.describe(SAMPLES)
    assert "others computed at each use" in StateStore(target, IDS, gib=1e-6).describe(SAMPLES)


def test_the_processes_of_a_run_share_the_memory(target: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distillspec.training.state_store.free_bytes", lambda device: 36 * GIB)
    assert state_room(None) == pytest.approx(12 * GIB)
    assert state_room(None, 3) == pytest.approx(4 * GIB)
    assert state_room(6.0, 3) == 2 * GIB
    assert StateStore(target, IDS, 6.0, processes=3).room == 2 * GIB


def test_states_that_fit_are_computed_once(target: LanguageModel) -> None:
    passes = []
    handle = target.layers[0].register_forward_hook(lambda *_: passes.append(1))
    for gib, expected in ((1.0, 2), (0.0, 6)):  # of two texts
        store = StateStore(target, IDS, gib)
        passes.clear()
        for _ in range(3):
            store.rows([SAMPLES[:2]], 20)
        assert len(passes) == expected
    handle.remove()


def test_a_text_has_the_same_states_whatever_is_beside_it(target: LanguageModel) -> None:
    """Bit for bit: a resumed run meets it beside other texts than the run before."""
    alone, beside = (StateStore(target, IDS, 1.0, "fp8") for _ in range(2))
    first = alone.rows([SAMPLES[:1]], 60)[0, : len(SAMPLES[0])]
    again = beside.rows([[*SAMPLES[1:], SAMPLES[0]]], 80)[0]
    start = sum(len(sample) for sample in SAMPLES[1:])
    assert torch.equal(again[start : start + len(SAMPLES[0])], first)


def test_fresh_text_takes_the_room_of_text_that_is_gone(target: LanguageModel) -> None:
    room = sum(len(sample) for sample in SAMPLES[:3]) * StateStore(target, IDS).bytes_per_token
    store = StateStore(target, IDS, gib=room / GIB)
    feed = SampleFeed(SAMPLES[:3], CONFIG, 2, 0, states=store)
    passes: list[int] = []
    handle = target.layers[0].register_forward_hook(lambda *_: passes.append(1))
    for fresh in (SAMPLES[:3], SAMPLES[4:7]):
        feed.renew(fresh)
        passes.clear()
        for _ in range(2 * len(feed.plan)):  # two epochs
            feed.take()
        assert len(passes) == 3, "each text is read once"
    handle.remove()


@pytest.mark.parametrize("ids", [IDS, (3, 1), (0, 1, 2, 3)])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_recorded_states_are_not_computed_again(target: LanguageModel, ids: tuple[int, ...], precision: str) -> None:
    """Whatever else was recorded, in any order."""
    width = target.model.config.hidden_size
    request = StateRequest(ids, precision)
    recorded = [replace(s, states=request.record(torch.randn(len(s) - 1, len(ids) * width))) for s in SAMPLES[:2]]
    passes: list[int] = []
    handle = target.layers[0].register_forward_hook(lambda *_: passes.append(1))
    store = StateStore(target, IDS, 1.0)
    (rows,) = store.rows([recorded], 20)
    assert not passes
    for start, sample in ((0, recorded[0]), (len(recorded[0]), recorded[1])):
        assert sample.states is not None
        for place, state in enumerate(IDS):
            values = sample.states.of((state,))
            assert values is not None
            found = rows[start : start + len(values), place * width : (place + 1) * width]
            assert torch.equal(found, values)
    assert "100% recorded with the text" in store.describe(recorded)
    store.rows([[recorded[0], SAMPLES[3]]], 20)
    assert len(passes) == 1
    handle.remove()


def test_states_that_were_not_recorded_are_computed(target: LanguageModel) -> None:
    width = target.model.config.hidden_size
    sample = replace(SAMPLES[0], states=RecordedStates((1,), torch.randn(len(SAMPLES[0]) - 1, width).bfloat16()))
    (rows,) = StateStore(target, IDS, 1.0).rows([[sample]], len(sample))
    torch.testing.assert_close(rows.float(), own_states(target, sample), atol=2e-2, rtol=2e-2)
