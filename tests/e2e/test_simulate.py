"""`distill simulate` and the SmartSpec recipe from the command line."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from distillspec.recipes.smartspec import __main__ as recipe

SMALL = ["workload.requests=12", "workload.output_tokens=20", "workload.rates=[2,8]", "hydra.run.dir=run"]


def test_a_run_leaves_figures_a_table_and_a_picture(distill: Any, tmp_path: Path) -> None:
    outcome = distill("simulate", *SMALL, "hardware=h200-8b", "policies=[none,fixed-2,oracle]", "seed=4")
    assert outcome.code == 0, outcome.err
    assert "H200" in outcome.out
    assert outcome.out.rstrip().endswith("results: run")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert [(run["policy"], run["rate"]) for run in summary["runs"]] == [
        (policy, rate) for rate in (2.0, 8.0) for policy in ("none", "fixed-2", "oracle")
    ]
    with (tmp_path / "run/results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["mean_latency_s"]) for row in rows] == pytest.approx(
        [run["mean_latency_s"] for run in summary["runs"]], rel=1e-4
    )
    assert (tmp_path / "run/latency.png").read_bytes()[:4] == b"\x89PNG"
    again = distill("simulate", *SMALL[:-1], "hydra.run.dir=again", "hardware=h200-8b", "policies=[fixed-2]", "seed=4")
    assert again.code == 0
    (_, first), (_, second) = enumerate(json.loads((tmp_path / "again/summary.json").read_text())["runs"])
    assert [first, second] == [run for run in summary["runs"] if run["policy"] == "fixed-2"]


def test_selections_are_compared_on_several_drafts(distill: Any, tmp_path: Path) -> None:
    words = [*SMALL, "hardware=a100-7b-five", "workload=five-domains", "policies=[none,fixed-2]"]
    outcome = distill("simulate", *words, "selections=[goodput,s68m,oracle]")
    assert outcome.code == 0, outcome.err
    runs = json.loads((tmp_path / "run/summary.json").read_text())["runs"]
    sides = [f"{policy} {chosen}" for policy in ("none", "fixed-2") for chosen in ("goodput", "s68m", "oracle")]
    assert [run["policy"] for run in runs if run["rate"] == 2.0] == sides
    for mistake, told in {
        "selections=[best]": "selections: best is no selection and no draft; use some of goodput",
        "workload=even": "workload.alphas must name the drafts s1b, s1b4, s265m, s616m, s68m",
        "workload.alphas.chat.s68m=2": "workload.alphas.chat.s68m=2 must be a number in [0, 1]",
    }.items():
        failed = distill("simulate", *words, "hydra.run.dir=other", mistake)
        assert (failed.code, told in failed.err) == (2, True), failed.err
    alone = distill("simulate", *SMALL, "selections=[goodput]")
    assert (alone.code, "name them in hardware.drafts" in alone.err) == (2, True), alone.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hardware=a100-8b"], "hardware=a100-8b is not known; use one of a100-13b-five"),
        (["workload.rates=[-1]"], "workload.rates: -1.0 must be finite and above 0"),
        (["workload.requests=0"], "the workload is empty"),
        (["policies=[none,fast]"], "policies: fast is not known; use some of none"),
        (["policies=[]"], "name the policies"),
        (["workload.trace=trace.jsonl"], "trace.jsonl:2: prompt_tokens=0"),
        (["workload.trace=nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["workload.prompt_tokens=5000"], "do not fit 4096"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(distill: Any, tmp_path: Path, words: list[str], said: str) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"arrival_s": 0, "prompt_tokens": 3, "output_tokens": 3}
    trace.write_text(json.dumps(line) + "\n" + json.dumps({**line, "prompt_tokens": 0}) + "\n")
    outcome = distill("simulate", *words)
    assert outcome.code == 2, outcome
    assert outcome.err.count("\n") == 1
    assert said in outcome.err
    assert list(tmp_path.iterdir()) == [trace]


def test_the_recipe_draws_and_judges_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--output", str(tmp_path), "--scale", "0.03", "--figures", "fig05", "fig01-expansion", "fig16"]
    monkeypatch.setattr(sys, "argv", ["smartspec", *words])
    assert recipe.main() == 0
    results = json.loads((tmp_path / "results.json").read_text())["figures"]
    assert list(results) == ["fig01-expansion", "fig05", "fig16"]
    assert all(seconds > 0 for at in results["fig01-expansion"]["mean_latency_s"].values() for seconds in at.values())
    for name in results:
        assert (tmp_path / f"{name}.csv").stat().st_size > 100
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
    assert "| fig01-expansion | k = 3 or 5 is best at 4 requests/s |" in (tmp_path / "agreement.md").read_text()

    before = {file.name: file.stat().st_mtime_ns for file in tmp_path.glob("*.csv")}
    assert recipe.main() == 0  # everything is there
    assert before == {file.name: file.stat().st_mtime_ns for file in tmp_path.glob("*.csv")}
