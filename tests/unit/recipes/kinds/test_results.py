"""The study's tables, from summaries of runs and of evaluations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distillspec.recipes.kinds.results import best_ratio, tables, write_results
from distillspec.recipes.kinds.study import Study

RECIPE = Path(__file__).parents[4] / "recipes" / "kinds"


def interval(mean: float) -> dict[str, float]:
    return {"mean": mean, "low": mean - 0.1, "high": mean + 0.1}


def judged(alpha: float, served: float | None) -> dict[str, Any]:
    return {
        "alpha_by_position": [interval(alpha)] * 4,
        "tau": [interval(1 + level * alpha / 4) for level in range(1, 5)],
        "cost": {"1": {"c": 0.1, "draft_steps": [1.0, 2.0, 3.0, 4.0]}},
        "speedup": {"1": {"intervals": [interval(1.2), interval(1 + alpha)]}},
        "measured": {"ratio": interval(1.3), "gamma": 2, "served": None if served is None else interval(served)},
        "measured_at": None if served is None else {"8": {"ratio": interval(1.1), "gamma": 1}},
    }


def write(folder: Path, summary: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(summary))


def test_tables_name_the_best_length_and_the_defaults_on_all_text(tmp_path: Path) -> None:
    study = Study(tmp_path, "maths.jsonl", elsewhere=("code.jsonl",))
    write(study.folder("eagle"), {"after": judged(0.5, 1.7), "minutes": 10})
    for folder in ("draft", "data/samples"):
        (study.folder("eagle") / folder).mkdir(parents=True)
    for name, size in (("model.safetensors", 2_000_000), ("tokenizer.json", 1_000_000)):
        (study.folder("eagle") / "draft" / name).write_bytes(bytes(size))
    (study.folder("eagle") / "data/samples/manifest.json").write_text(json.dumps({"seconds": 540.0}))
    write(study.folder("tokens"), {"after": judged(0.4, None), "minutes": 10})
    write(tmp_path / "elsewhere" / "code-1-eagle-tokens", {"results": [judged(0.3, 1.1), judged(0.2, 1.0)]})
    lines = write_results(study).splitlines()
    eagle = "| eagle | 0.500, 0.500, 0.500, 0.500 | 1.50 | 0.100 | 1.07 | 1.50 [1.40, 1.60] | 1.30 [1.20, 1.40] with 2"
    assert f"{eagle} | 1.70 [1.60, 1.80] | 1.10 [1.00, 1.20] with 1 | 9 + 10 | 3 |" in lines
    assert sum(line.startswith("| tokens ") and "with 2 | – | – | 9 + 10 | 0 |" in line for line in lines) == 1
    assert [line.split(" | ")[:3] for line in lines if line.startswith("| code")] == [
        ["| code at T = 1", "eagle", "0.300, 0.300, 0.300, 0.300"],
        ["| code at T = 1", "tokens", "0.200, 0.200, 0.200, 0.200"],
    ]
    record = json.loads((tmp_path / "results.json").read_text())
    assert record["elsewhere"]["code at T = 1"]["tokens"]["alpha"][0]["mean"] == 0.2
    assert tables(record).splitlines() == lines


def test_figures_that_older_results_lack_are_dashes() -> None:
    older = {"alpha": [interval(0.5)] * 4, "tau": [interval(1.5)] * 4, "c": {"1": 0.1}, "predicted": {}}
    row = tables({"kinds": {"eagle": older}}).splitlines()[-1]
    assert row.endswith("| 0.100 | 1.36 | – | – | – | – | – + – | – |")
    told = tables({"kinds": {"eagle": {**older, "minutes": 9.9, "bytes": 25e6}}, "text_minutes": 10.0})
    assert told.splitlines()[-1].endswith("| – | – | – | 10 + 10 | 25 |")


@pytest.mark.parametrize("name", ["whole", "amx"])
def test_the_readme_has_the_table_of_the_kinds(name: str) -> None:
    record = json.loads((RECIPE / "results" / f"{name}.json").read_text())
    assert tables({**record, "elsewhere": None}) in (RECIPE / "README.md").read_text()


def test_the_best_ratio_is_over_all_lengths() -> None:
    assert best_ratio([1.5, 1.8, 1.9], 0.1) == pytest.approx(1.8 / 1.2)
    assert best_ratio([1.5, 1.8, 1.9], 0.0) == 1.9
