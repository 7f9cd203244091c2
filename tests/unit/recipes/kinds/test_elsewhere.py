"""The drafts that are judged on other text, the cells they are judged in, and the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distillspec.recipes.kinds.elsewhere import Cell, cells, compared
from distillspec.recipes.kinds.study import Study


def predicted(speedup: float) -> dict[str, Any]:
    return {"predicted": {"1": {"mean": speedup}}}


def test_the_best_kind_is_compared_with_the_one_without_states() -> None:
    kinds = {"eagle": predicted(1.5), "block": predicted(1.6), "tokens": predicted(1.2)}
    assert compared(kinds) == ("block", "tokens")
    assert compared({"eagle": predicted(1.5)}) == ("eagle",)
    assert compared({"eagle": predicted(1.1), "tokens": predicted(1.2)}) == ("tokens",)


def test_other_text_is_judged_as_the_study_was_and_own_text_at_other_temperatures(tmp_path: Path) -> None:
    words = ("data.eval_prompts=8", "draft.vocabulary=64", "data.batch_slots=4")
    study = Study(tmp_path, "a/maths.jsonl", words=words, elsewhere=("code.jsonl",), temperatures=(0.0, 0.7))
    kinds = ("block", "tokens")
    comparisons = cells(study, {"block": predicted(1.6), "tokens": predicted(1.2)})
    assert comparisons == [
        Cell(kinds, "a/maths.jsonl", 0.0),
        Cell(kinds, "a/maths.jsonl", 0.7),
        Cell(kinds, "code.jsonl", 1.0),
    ]
    assert comparisons[2].command(study) == [
        "eval",
        f"drafts=[{tmp_path}/block,{tmp_path}/tokens]",
        "target=smollm2",
        "data.prompts=code.jsonl",
        "sampling.temperature=1",
        "evaluation.measure_speedup=true",
        "evaluation.speedup_batches=[8]",
        "data.eval_prompts=8",
    ]
    assert comparisons[2].folder(study) == tmp_path / "elsewhere" / "code-1-block-tokens"
    others = cells(study, {"eagle": predicted(1.6)})
    assert len({cell.folder(study) for cell in (*comparisons, *others)}) == 6, "of other kinds is another comparison"
