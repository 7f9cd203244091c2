"""The cells of the study and the commands that fill them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LOSSES = ("ce", "fkl", "rkl", "jsd", "tvd", "lk")
SOURCES = ("fixed", "teacher", "draft", "mixed")
CHOOSING = 12  # prompts that choose a cell's best checkpoint


@dataclass(frozen=True)
class Study:
    """Settings that all cells share."""

    root: Path
    prompts: str
    tokens: int  # response tokens a cell trains on: equal work under any load of the machine
    warm_tokens: int  # of the fine-tuning that all cells share
    data_minutes: float  # of sampling (teacher) or scoring (fixed), shared by all cells of a source
    target: str = "smollm2"
    layers: int = 3
    vocabulary: int = 8192
    num_prompts: int = 1000
    eval_prompts: int = 60  # of a cell. CHOOSING of them choose its best checkpoint, the others are quoted
    max_new_tokens: int = 192
    jobs: int = 1  # cells side by side

    def data_folder(self, source: str) -> Path:
        """Return the folder of a source's samples. On-policy cells use the teacher's prompts and held-out answers."""
        return self.root / "data" / ("fixed" if source == "fixed" else "teacher")

    @property
    def held_out(self) -> int:
        """Number of held-out prompts: those of a cell, and those that choose the warm-up's checkpoint."""
        return self.eval_prompts + min(CHOOSING, self.eval_prompts // 2)

    @property
    def cut(self) -> Path:
        return self.root / "cut"

    @property
    def initial(self) -> Path:
        return self.root / "initial"

    def cell(self, loss: str, source: str) -> Path:
        return self.root / "cells" / f"{loss}-{source}"


def data_command(study: Study, source: str) -> list[str]:
    """Return the `distill generate` command for the fixed or the teacher-written samples."""
    return [
        "generate",
        f"target={study.target}",
        f"data={source}",
        f"data.prompts={study.prompts}",
        f"data.num_prompts={study.num_prompts}",
        *_answers(study, study.held_out),
        f"data.max_minutes={study.data_minutes:g}",
        f"hydra.run.dir={study.data_folder(source)}",
    ]


def cut_command(study: Study) -> list[str]:
    """Return the `distill init-draft` command: the target's layers, with the vocabulary of the teacher's samples."""
    return [
        "init-draft",
        f"target={study.target}",
        "data=teacher",
        *_answers(study, study.eval_prompts),
        f"data.cache={study.data_folder('teacher')}",
        f"draft.layers={study.layers}",
        f"draft.vocabulary={study.vocabulary}",
        f"hydra.run.dir={study.cut}",
    ]


def initial_command(study: Study) -> list[str]:
    """Return the command for the initial draft of all cells, fine-tuned on the file's responses as in the paper.

    The text of an untrained draft is noise, from which on-policy cells could not learn.
    """
    return _train(study, "ce", "fixed", study.cut / "draft", study.warm_tokens, study.initial)


def cell_command(study: Study, loss: str, source: str) -> list[str]:
    """Return the `distill train` command of one cell."""
    return _train(study, loss, source, study.initial / "draft", study.tokens, study.cell(loss, source))


def _answers(study: Study, eval_prompts: int) -> list[str]:
    return [
        f"data.eval_prompts={eval_prompts}",
        f"data.max_new_tokens={study.max_new_tokens}",
    ]


def _train(study: Study, loss: str, source: str, draft: Path, tokens: int, folder: Path) -> list[str]:
    return [
        "train",
        f"target={study.target}",
        f"loss={loss}",
        f"data={source}",
        *_answers(study, study.eval_prompts),
        "data.signal=topk",  # on-policy text is scored once, so that all cells learn from the same kind of signal
        *(("data.refresh_steps=25", "data.refresh_prompts=64") if source in ("draft", "mixed") else ()),
        f"data.cache={study.data_folder(source)}",
        "draft=pretrained",
        f"draft.path={draft}",
        f"train.max_tokens={tokens}",
        f"train.eval_max_prompts={CHOOSING}",
        "evaluation.measure_cost=false",
        f"hydra.run.dir={folder}",
    ]
