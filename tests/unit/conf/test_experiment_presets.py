"""The recipe that the README, the demo and the benchmark quote is one file, `conf/experiment/ten-minutes.yaml`."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from pathlib import Path
from typing import Any

import pytest

from distillspec.composition import compose
from distillspec.recipes.demo.__main__ import overrides

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
PRESET = {
    "draft.kind": "eagle",
    "draft.vocabulary": 2048,
    "data.num_prompts": 4000,
    "data.batch_slots": 96,
    "data.max_minutes": 10,
    "train.max_minutes": 10,
}


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


@functools.cache
def composed(*words: str) -> dict[str, Any]:
    return flat(dataclasses.asdict(compose("train", list(words))))


def test_the_preset_is_the_defaults_and_six_settings() -> None:
    assert composed("experiment=ten-minutes") == {**composed(), **PRESET}


@pytest.fixture
def acceptance(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("acceptance")


def words_of(acceptance: Any, *options: str) -> list[str]:
    words: list[str] = acceptance.train_words(acceptance.read_options(["--prompts", "f.jsonl", *options]))
    return words


def test_the_benchmark_measures_the_preset_and_nothing_else(acceptance: Any) -> None:
    assert words_of(acceptance) == ["experiment=ten-minutes", "data.prompts=f.jsonl"]
    assert composed(*words_of(acceptance)) == {
        **composed("experiment=ten-minutes"),
        "data.prompts": "f.jsonl",
    }
    longer = words_of(acceptance, "--minutes", "60", "--data", "runs/a")
    assert composed(*longer) == {**composed(), **PRESET, "data.cache": "runs/a", "train.max_minutes": 60}


def test_the_benchmark_goes_on_from_a_draft(acceptance: Any, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"minutes": 10.0}')
    words = words_of(acceptance, "--minutes", "60", "--first", str(tmp_path))
    found = composed(*words)
    assert (found["draft.kind"], found["draft.layers"], found["draft.vocabulary"]) == ("pretrained", None, None)
    assert (found["draft.path"], found["data.cache"]) == (f"{tmp_path}/draft", str(tmp_path))
    assert found["train.max_minutes"] == 50


def test_the_demo_runs_the_preset_with_amounts_for_its_time() -> None:
    changed = composed(*overrides(22, "smollm2"))
    assert overrides(22, "smollm2")[0] == "experiment=ten-minutes"
    differing = {key for key, value in changed.items() if value != composed("experiment=ten-minutes")[key]}
    assert {key for key in differing if key.startswith(("draft.", "loss."))} == set()
    assert changed["train.max_minutes"] == pytest.approx(8.8)
