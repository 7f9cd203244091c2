"""`distill quality` from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distillspec.errors import RunError

WORDS = ["target=tiny", "engine.compile=false", "engine.max_slots=4", "engine.max_model_len=128"]
WORDS += ["engine.measure_costs_s=0", "hydra.run.dir=run"]
SHORT = ["quality.count=4", "quality.rounds=2", "quality.max_tokens=12", "sampling.temperature=1.5"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [{"id": str(i), "prompt": f"{i} and 1", "response": i + 1} for i in range(6)]  # numbers, as in a CSV file
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def draft(distill: Any, tmp_path: Path) -> Path:
    assert distill("init-draft", "target=tiny", "draft=pruned", "draft.layers=2", "hydra.run.dir=init").code == 0
    return tmp_path / "init"


def test_verifications_are_compared(distill: Any, tmp_path: Path, prompts: Path, draft: Path) -> None:
    trees = ["engine.controller=fixed", "engine.tree=given", "engine.widths=[2,2]"]
    named = ["exact", "typical", "target_initialised"]
    outcome = distill(
        "quality",
        *(*WORDS, *SHORT, *trees),
        f"quality.prompts=[{prompts}]",
        f"quality.verifications=[{','.join(named)}]",
        f"draft.path={draft}",
    )
    assert outcome.code == 0, outcome.err
    assert outcome.out.rstrip().endswith("results: run")
    found = json.loads((tmp_path / "run/summary.json").read_text())["verifications"]
    answers = json.loads((tmp_path / "run/answers.json").read_text())
    assert set(found) == set(answers) == set(named)
    for name, own in found.items():
        assert own["answers"] == len(answers[name]) == 4
        assert own["accuracy"] is not None
        assert own["tokens"] >= 4
        assert len(own["tokens_per_s"]) == 2
        assert own["tokens_per_step"] > 0
    assert found["exact"]["times_faster"]["mean"] == 1


def test_answers_are_kept_where_judging_fails(
    distill: Any, tmp_path: Path, prompts: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RunError("the memory is full")

    monkeypatch.setattr("distillspec.serving.commands.quality.likelihood", fail)
    chosen = [f"quality.prompts=[{prompts}]", "quality.verifications=[exact]", f"draft.path={draft}"]
    outcome = distill("quality", *WORDS, *SHORT, *chosen)
    assert (outcome.code, "the memory is full" in outcome.err) == (1, True), outcome
    answers = json.loads((tmp_path / "run/answers.json").read_text())["exact"]
    assert [answer["id"] for answer in answers] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name the prompts to answer"),
        (["quality.prompts=[nowhere.jsonl]"], "nowhere.jsonl: no such file"),
        (["quality.prompts=[p.jsonl]", "quality.verifications=[loose]"], "quality.verifications=loose"),
        (["quality.prompts=[p.jsonl]", "sampling.temperature=0"], "sampling.temperature=0"),
        (
            ["quality.prompts=[p.jsonl]", "quality.verifications=[exact,target_initialised]"],
            "verification=target_initialised needs controller=fixed tree=given",
        ),
        (["quality.prompts=[p.jsonl]", "quality.rounds=9", "quality.count=2"], "quality.rounds=9"),
    ],
)
def test_bad_settings_are_one_line(distill: Any, tmp_path: Path, words: list[str], message: str) -> None:
    outcome = distill("quality", *WORDS, *words)
    assert outcome.code == 2
    assert message in outcome.err
    assert len(outcome.err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()
