"""Cells say what they lack, and name the drafts that draft in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from distillspec.files import write_json
from distillspec.recipes.trees import __main__ as command
from distillspec.recipes.trees.results import write_results
from distillspec.recipes.trees.study import CELLS, ROOTS, Study, by_draft

HEADS = "heads"


def study(tmp_path: Path, *further: str, medusa: str = "") -> Study:
    return Study(tmp_path, "math.jsonl", "first", further=further, medusa=medusa)


def test_cells_of_heads_run_with_them_alone(tmp_path: Path) -> None:
    trees = study(tmp_path, medusa=HEADS)
    for name in ("medusa", "medusa-16"):
        words = trees.command(name)
        assert {"draft.path=heads", "engine.tree=medusa", "quality.verifications=[exact,typical]"} <= set(words)
        assert CELLS[name].lacks(3, "") == "needs a draft of kind medusa; name it with --medusa RUN"
        assert CELLS[name].lacks(1, HEADS) == ""


@pytest.mark.parametrize("roots", ROOTS)
def test_each_draft_has_cells_of_the_targets_own_roots(roots: str, tmp_path: Path) -> None:
    trees = study(tmp_path, "second", "third")
    first = trees.command(roots)
    for number, path in enumerate(("first", "second", "third"), 1):
        words = trees.command(by_draft(roots, number))
        assert f"draft.path={path}" in words
        differing = {word.split("=")[0] for word in set(words) ^ set(first)}
        assert differing <= {"draft.path", "hydra.run.dir"}, "else the same run"
        assert CELLS[by_draft(roots, number)].lacks(number, "") == ""
    assert CELLS[by_draft(roots, 3)].lacks(2, "") == "needs 3 drafts; name the others with --further RUN"


def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *words: str) -> list[str]:
    """Start the study without running anything. Return the names of its cells."""
    ran: list[str] = []

    def note(words: list[str]) -> int:
        ran.append(next(Path(word.split("=")[1]).name for word in words if word.startswith("hydra.run.dir=")))
        return 0

    monkeypatch.setattr(command, "distill", note)
    (tmp_path / "asked.jsonl").write_text('{"prompt": "Why?"}\n')
    given = ["trees", "--prompts", str(tmp_path / "asked.jsonl"), "--draft", "one", "--output", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", [*given, *words])
    assert command.main() == 0
    return ran


def test_what_there_is_no_draft_for_is_left_out_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = started(monkeypatch, tmp_path)
    shown = capsys.readouterr().out
    assert set(ran) == {name for name in CELLS if not CELLS[name].lacks(1, "")}
    assert "--- medusa is left out: it needs a draft of kind medusa; name it with --medusa RUN" in shown
    assert "--- roots-4-draft-2 is left out: it needs 2 drafts; name the others with --further RUN" in shown


def test_a_named_cell_without_its_draft_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        started(monkeypatch, tmp_path, "--cells", "chain,medusa")
    assert "--cells medusa needs a draft of kind medusa" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "why"), [("eagle", "is of kind eagle"), (None, "is not a draft")])
def test_other_drafts_have_no_heads(
    kind: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "draft"
    folder.mkdir()
    if kind is not None:
        (folder / "distillspec.json").write_text(f'{{"lineage": {{"kind": "{kind}"}}}}')
    with pytest.raises(SystemExit):
        started(monkeypatch, tmp_path, "--medusa", str(folder))
    assert why in capsys.readouterr().err


def test_quality_by_roots_has_a_row_for_each_draft(tmp_path: Path) -> None:
    trees = study(tmp_path, "runs/second/draft")
    for number, name in enumerate(by_draft(roots, draft) for draft in (1, 2) for roots in ("roots-1", "roots-4")):
        _write(trees.folder(name), 2.0 + number)
    table = write_results(trees)
    assert "| draft | roots-1 | roots-2 | roots-4 |" in table
    assert "| first | 0.10 [0.00, 0.20] nats, 2.00 tokens | – | 0.10 [0.00, 0.20] nats, 3.00 tokens |" in table
    assert "| second | 0.10 [0.00, 0.20] nats, 4.00 tokens | – | 0.10 [0.00, 0.20] nats, 5.00 tokens |" in table


def _write(folder: Path, tokens: float) -> None:
    """Write what a run of `distill quality` leaves, as far as it is shown."""
    between = {"mean": 0.1, "low": 0.0, "high": 0.2}
    figures = {"answers": 4, "tokens_per_step": tokens, "accuracy": None, "surprise_over_entropy": between}
    figures |= {"distance": 0.1, "distance_by_chance": 0.1, "tokens_per_s": [9.0]}
    folder.mkdir(parents=True)
    write_json(folder / "summary.json", {"verifications": {"exact": figures, "target_initialised": figures}})
