"""Figs. 15 and 16 of the SmartSpec study live, on the tiny target."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from distillspec.config import DraftConfig, TargetConfig
from distillspec.models import initialise_draft, load_target, save_draft
from distillspec.recipes.smartspec import __main__ as smartspec

SHORT = "--target tiny --loads 0.3 --rounds 2 --seconds 0.3 --slots 2 --count 8 --tokens 8 --output out"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Change to a folder with prompts and a draft. Return the words that name them."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"What is {i} plus {i + 1}?"} for i in range(8)]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    target = load_target(TargetConfig(path="tiny"))
    save_draft(initialise_draft(DraftConfig(layers=2), target), Path("draft"), target)
    return "--live --prompts prompts.jsonl --draft draft"


def run(words: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["smartspec", *words.split()])
    return smartspec.main()


def test_trees_meet_the_same_loads_as_chains_and_fixed_shapes(
    files: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"{files} {SHORT} --fixed fixed-1 topk-2-1", monkeypatch) == 0
    found = json.loads(Path("out/live.json").read_text())
    load = found["loads"]["0.3"]
    names = {"none", "fixed-1", "topk-2-1", "goodput-chains", "goodput"}
    assert load["latency_s"].keys() == names
    assert load["best_fixed"] in ("none", "fixed-1", "topk-2-1")
    assert all(load[f"trees_over_{other}"]["mean"] > 0 for other in ("best_fixed", "none", "goodput-chains"))
    assert load["rate"] == pytest.approx(0.3 * found["capacity_requests_per_s"])
    answered = json.loads(Path("out/requests.json").read_text())
    arrivals = {name: [(one["round"], one["arrived_s"]) for one in answered if one["policy"] == name] for name in names}
    assert len({tuple(sorted(own)) for own in arrivals.values()}) == 1, "all sides had the same arrivals"
    assert "| 0.3 |" in capsys.readouterr().out
    assert Path("out/load.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--live", "--live needs --prompts and --draft"),
        ("--live --prompts none.jsonl --draft draft", "--prompts none.jsonl: no such file"),
        ("FILES --rounds 1", "--rounds 1: an odd and an even one are needed, so at least 2"),
        ("FILES --tokens 0", "--tokens 0 must be at least 1"),
        ("FILES --count 9", "has 8 short prompts that no draft has seen, not 9"),
        ("FILES --fixed fast", "policy fast is not known"),
        ("FILES --fixed medusa-3", "tree=medusa needs a draft of kind medusa, not pruned"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    files: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, problem: str
) -> None:
    code: object = None
    try:
        code = run(f"{SHORT} {words.replace('FILES', files)}", monkeypatch)
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert problem in capsys.readouterr().err
    assert not Path("out/live.json").exists()
