"""The trial of products: the fastest first, slower ones and impossible ones never."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from distillspec.models import product_trial
from distillspec.models.packed_products import HalfProduct, OneDnnProduct

WEIGHTS = [torch.ones(64, 32)]
TOKENS = (1, 5, 32)


@pytest.fixture(autouse=True)
def tried_anew() -> Iterator[None]:
    product_trial.forget_trials()
    yield
    product_trial.forget_trials()


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
    assert f"oneDNN take {onednn:.2f} times the plain" in caplog.text
    assert f"float16 take {half:.2f} times the plain" in caplog.text


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
