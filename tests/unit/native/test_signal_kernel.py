"""Signals in one call: torch's most probable tokens and log Z, and the replay log's record of a step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from distillspec.native.signal_kernel import bytes_of, signal_kernel_for
from distillspec.recording import TopSignal
from distillspec.serving.base.tree import DraftProbs
from distillspec.serving.online.log import signal as module
from distillspec.serving.online.log.signal import LoggedDraft, Packed, Recorded, read, record

pytestmark = pytest.mark.skipif(signal_kernel_for(torch.zeros(1, 8)) is None, reason="no compiler here")
WIDTHS = [40, 259, 4099, 49_152]
DTYPES = [torch.float32, torch.bfloat16]


def some_logits(rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (4 * torch.randn(rows, width, generator=torch.Generator().manual_seed(width))).to(dtype)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_most_probable_tokens_are_torchs(width: int, dtype: torch.dtype) -> None:
    logits = some_logits(5, width + 3, dtype)[:, :width]  # rows that lie apart
    kernel = signal_kernel_for(logits)
    assert kernel is not None
    found = kernel.top(logits, 32)
    best = logits.float().topk(32, -1)
    log_z = torch.logsumexp(logits.double(), -1)
    torch.testing.assert_close(found.log_z.double(), log_z, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(found.logprobs.double(), best.values - log_z[:, None], atol=1e-5, rtol=0)
    assert torch.equal(logits.float().gather(1, found.ids.long()), best.values)
    assert all(len(set(ids)) == 32 for ids in found.ids.tolist())


def test_equals_come_in_the_order_of_their_ids() -> None:
    logits = torch.zeros(1, 9000)
    logits[0, [8000, 17, 4000]] = 1.0
    kernel = signal_kernel_for(logits)
    assert kernel is not None
    assert kernel.top(logits, 6).ids.tolist() == [[17, 4000, 8000, 0, 1, 2]]


def test_all_tokens_of_a_small_vocabulary() -> None:
    logits = torch.tensor([[-torch.inf, 2.0, 1.0, -torch.inf]])
    kernel = signal_kernel_for(logits)
    assert kernel is not None
    found = kernel.top(logits, 4)
    assert found.ids.tolist() == [[1, 2, 0, 3]]
    assert found.logprobs[0, 2:].tolist() == [-math.inf, -math.inf]


def test_nan_stays_in_its_row() -> None:
    logits = some_logits(2, 4099)
    logits[0, 4000] = torch.nan
    kernel = signal_kernel_for(logits)
    assert kernel is not None
    found = kernel.top(logits, 8)
    assert bool(found.logprobs[0].isnan().all())
    assert found.log_z.isnan().tolist() == [True, False]
    assert found.ids[1].tolist() == logits[1].topk(8).indices.tolist()


def test_other_tensors_are_left_to_torch() -> None:
    assert signal_kernel_for(torch.zeros(2, 8, dtype=torch.float64)) is None
    assert signal_kernel_for(torch.zeros(8, 2).T) is None


def step_of(width: int) -> tuple[list[int], list[int], list[float | None], list[LoggedDraft]]:
    """Rows, emitted tokens, temperatures and drafted tokens of every kind."""
    kept = torch.arange(1, width, 3)
    generator = torch.Generator().manual_seed(1)
    whole = DraftProbs(torch.softmax(3 * torch.randn(4, width, generator=generator), -1))
    few = DraftProbs(torch.softmax(9 * torch.randn(4, len(kept), generator=generator), -1), kept)
    certain = torch.zeros(1, width)
    certain[0, 7] = 1.0
    heat = [1.0, 0.7, 1.5, 0.0, None, 1.0, 0.6]
    drafted = [
        LoggedDraft(0, 9, whole, 2),
        LoggedDraft(1, 7, few, 3),
        LoggedDraft(1, 16, few, 0),
        LoggedDraft(0, 5),
        LoggedDraft(3),
        LoggedDraft(0, 7, DraftProbs(certain)),
        LoggedDraft(2),
    ]
    return [6, 0, 3, 3, 1, 2, 5], [3, 11, 38, 0, 6, 7, 20], heat, drafted


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_is_recorded_as_torch_records_it(
    width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, (rows, tokens, heat, drafted) = some_logits(7, width, dtype), step_of(width)
    found = record(logits, rows, tokens, heat, drafted, 24)
    monkeypatch.setattr(module, "signal_kernel_for", lambda _: None)
    wanted = record(logits, rows, tokens, heat, drafted, 24)
    assert found.content.shape == wanted.content.shape == (7, bytes_of(24))
    ours, theirs = recorded(found), recorded(wanted)
    assert torch.equal(*(logits[rows].float().gather(1, own.ids.long()) for own in (ours, theirs)))
    torch.testing.assert_close(ours.logprobs, theirs.logprobs, atol=0.01, rtol=1e-3)
    torch.testing.assert_close(ours.tail, theirs.tail, atol=1e-3, rtol=0)
    for name in ("policy_logprobs", "policy_log_z", "draft_probs", "draft_entropies"):
        own, other = (getattr(each, name).float() for each in (ours, theirs))
        torch.testing.assert_close(own, other, atol=0.02, rtol=2e-3, equal_nan=True)


def recorded(packed: Packed) -> Recorded:
    return read([(packed, 0, len(packed.content))])


def test_the_policys_figures_are_exact_to_their_rounding() -> None:
    """Against whole distributions: log p(x) at the temperature, and log Σ p^(1/temperature)."""
    logits, (rows, tokens, heat, drafted) = some_logits(7, 4099), step_of(4099)
    found = recorded(record(logits, rows, tokens, heat, drafted, 24))
    for place, (row, token, own) in enumerate(zip(rows, tokens, heat, strict=True)):
        if not own:
            continue
        raw = torch.log_softmax(logits[row].double(), -1)
        wanted = torch.log_softmax(raw / own, -1)[token]
        assert float(found.policy_logprobs[place]) == pytest.approx(float(wanted), rel=1e-3)
        log_z = torch.logsumexp(raw / own, -1)
        assert float(found.policy_log_z[place]) == pytest.approx(float(log_z), rel=1e-3, abs=1e-5)


def test_parts_sum_to_one() -> None:
    logits = some_logits(3, 4099)
    found = recorded(record(logits, [0, 1, 2], [1, 2, 3], [1.0] * 3, [LoggedDraft(3)] * 3, 24))
    signal = TopSignal(found.ids, found.logprobs, found.tail, torch.empty(0), torch.empty(0))
    torch.testing.assert_close(signal.logprobs.float().exp().sum(-1) + signal.tail, torch.ones(3))
