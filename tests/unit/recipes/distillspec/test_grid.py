"""Prompts that a cell of the DistillSpec study is quoted on."""

from __future__ import annotations

from pathlib import Path

import pytest

from distillspec.data.held_out import split_held_out
from distillspec.recipes.distillspec.grid import Study, cell_command, data_command, initial_command


def number(command: list[str], key: str) -> int:
    return next(int(word.partition("=")[2]) for word in command if word.startswith(f"{key}="))


@pytest.mark.parametrize(("eval_prompts", "quoted"), [(60, 48), (4, 2)])
def test_a_cell_quotes_all_but_its_own_choosing_prompts(eval_prompts: int, quoted: int) -> None:
    """The warm-up's draft remembers the prompts that chose its checkpoint, and no cell may use them."""
    study = Study(Path("out"), "p.jsonl", 100, 100, 1.0, eval_prompts=eval_prompts)
    warm, cell = initial_command(study), cell_command(study, "fkl", "teacher")
    for source in ("teacher", "fixed"):
        held_out = range(number(data_command(study, source), "data.eval_prompts"))
        known, _ = split_held_out(held_out[: number(warm, "data.eval_prompts")], number(warm, "train.eval_max_prompts"))
        unseen = [prompt for prompt in held_out if prompt not in known]
        wanted = number(cell, "data.eval_prompts")
        assert len(unseen) >= wanted  # else "only N held-out prompts" is printed
        assert len(split_held_out(unseen[:wanted], number(cell, "train.eval_max_prompts"))[1]) == quoted
