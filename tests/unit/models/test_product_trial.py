"""The trial of products: the fastest first, slower ones and impossible ones never."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distillspec.models import product_trial
from distillspec.models.packed_products import HalfProduct, OneDnnProduct

WEIGHTS = [torch.ones(64, 32)]
TOKENS = (1, 5, 32)


@pytest.fixture(autouse=True)
def tried_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two kinds, which every machine has."""
    monkeypatch.setattr(product_trial, "KINDS", (OneDnnProduct, HalfProduct))
    monkeypatch.setattr(product_trial, "keeps_rows_apart", lambda product, weight: True)
    monkeypatch.setattr(product_trial, "trials", {})


def clock(monkeypatch: pytest.MonkeyPatch, *, onednn: float, half: float) -> list[float]:
    """Let a plain product take a second, and packed ones these."""
    each = product_trial.ROUNDS * len(TOKENS)
    left = [1.0, onednn] * each + [1.0, half] * each
    monkeypatch.setattr(product_trial, "seconds", lambda run: (run(), left.pop(0))[1])
    return left


@pytest.mark.parametrize(
    ("onednn", "half", "wanted"),
    [
        pytest.param(0.9, 0.5, (HalfProduct, OneDnnProduct), id="both"),
        pytest.param(0.9, 1.1, (OneDnnProduct,), id="one"),
        pytest.param(1.5, 1.1, (), id="none"),
    ],
)
def test_the_fastest_come_first_and_all_are_logged(
    onednn: float, half: float, wanted: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left = clock(monkeypatch, onednn=onednn, half=half)
    with caplog.at_level("INFO"):
        assert product_trial.ranked(torch.float32, WEIGHTS, TOKENS) == wanted
    assert not left
    assert product_trial.ranked(torch.float32, WEIGHTS, TOKENS) == wanted, "no second trial"
    assert f"by tokens: {onednn:.2f} at 1, {onednn:.2f} at 5, {onednn:.2f} at 32" in caplog.text
    assert f"by tokens: {half:.2f} at 1, {half:.2f} at 5, {half:.2f} at 32" in caplog.text


def test_only_what_was_not_tried_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, onednn=0.9, half=0.5)
    product_trial.ranked(torch.float32, WEIGHTS, TOKENS)
    one = product_trial.ROUNDS
    left = [1.0, 0.5] * one + [1.0, 2.0] * one  # at 64 tokens
    monkeypatch.setattr(product_trial, "seconds", lambda run: (run(), left.pop(0))[1])
    assert product_trial.ranked(torch.float32, WEIGHTS, (5, 64)) == (OneDnnProduct,), "half: √(.5 · 2)"
    assert not left


def test_kinds_whose_tokens_change_each_other_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(product_trial, "trials", {})
    plain = OneDnnProduct.__call__

    def with_rows(self: OneDnnProduct, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        return plain(self, x, bias) + len(x)

    monkeypatch.setattr(product_trial, "KINDS", (OneDnnProduct,))
    monkeypatch.setattr(OneDnnProduct, "__call__", with_rows)
    with caplog.at_level("INFO"):
        assert product_trial.ranked(torch.float32, WEIGHTS, TOKENS) == ()
    assert "weights are not packed by oneDNN: here a token's product depends on those beside it" in caplog.text


def test_the_trial_takes_the_first_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_trial, "TRIED_BYTES", 4 * 30)
    weights = [torch.full((2, 5), float(i)) for i in range(5)]
    assert [float(weight[0, 0]) for weight in product_trial.sample(weights)] == [0, 1, 2]
    monkeypatch.setattr(product_trial, "TRIED_BYTES", 1)
    assert len(product_trial.sample(weights)) == 1


@pytest.mark.parametrize(("seconds", "tried"), [(0.0, 1), (1e9, 3)])
def test_slow_products_are_tried_on_fewer_weights(monkeypatch: pytest.MonkeyPatch, seconds: float, tried: int) -> None:
    """Such as those of a type that the CPU emulates: a trial of all would keep the server from starting."""
    plain: list[torch.Tensor] = []
    multiply = product_trial.linear

    def counted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        plain.append(weight)
        return multiply(x, weight)

    monkeypatch.setattr(product_trial, "linear", counted)
    monkeypatch.setattr(product_trial, "ROUND_S", seconds)
    monkeypatch.setattr(product_trial, "KINDS", (OneDnnProduct,))
    product_trial.ranked(torch.float32, WEIGHTS * 3, TOKENS)
    assert len(plain) == len(TOKENS) * tried * (1 + product_trial.ROUNDS)


def test_a_cpu_without_the_instructions_keeps_plain_products(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Any, weight: torch.Tensor) -> None:
        raise RuntimeError("needs avx512")

    monkeypatch.setattr(OneDnnProduct, "__init__", refuse)
    monkeypatch.setattr(HalfProduct, "__init__", refuse)
    with caplog.at_level("INFO"):
        assert product_trial.ranked(torch.float32, WEIGHTS, TOKENS) == ()
    assert "weights are not packed by oneDNN: needs avx512" in caplog.text
    assert "weights are not packed by FBGEMM in float16: needs avx512" in caplog.text
