"""The cells of the study and the commands that fill them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

LOSSES = ("ce", "fkl", "rkl", "jsd", "tvd", "lk")
SOURCES = ("fixed", "teacher", "draft", "mixed")


@dataclass(frozen=True)
class Study:
    """What every cell has in common."""

    root: Path
    prompts: str
    minutes: float  # of training a cell
    data_minutes: float  # of sampling (teacher) or scoring (fixed), shared by all cells of a source
    target: str = "smollm2"
    layers: int = 3
    vocabulary: int = 8192
    num_prompts: int = 1000
    eval_prompts: int = 48
    max_new_tokens: int = 192
    jobs: int = 1  # cells side by side

    def data_folder(self, source: str) -> Path:
        """On-policy cells read prompts and held-out answers of the teacher's folder."""
        return self.root / "data" / ("fixed" if source == "fixed" else "teacher")

    @property
    def initial(self) -> Path:
        return self.root / "initial"

    def cell(self, loss: str, source: str) -> Path:
        return self.root / "cells" / f"{loss}-{source}"


def data_command(study: Study, source: str) -> list[str]:
    """`distill generate` for the fixed or the teacher-written samples."""
    return [
        "generate",
        f"target={study.target}",
        f"data={source}",
        *_data(study),
        f"data.max_minutes={study.data_minutes:g}",
        f"hydra.run.dir={study.data_folder(source)}",
    ]


def initial_command(study: Study) -> list[str]:
    """`distill init-draft` for the one draft that every cell starts from; its vocabulary is the teacher's."""
    return [
        "init-draft",
        f"target={study.target}",
        "data=teacher",
        *_data(study),
        f"data.cache={study.data_folder('teacher')}",
        f"draft.layers={study.layers}",
        f"draft.vocabulary={study.vocabulary}",
        f"hydra.run.dir={study.initial}",
    ]


def cell_command(study: Study, loss: str, source: str) -> list[str]:
    """`distill train` for one cell."""
    return [
        "train",
        f"target={study.target}",
        f"loss={loss}",
        f"data={source}",
        *_data(study),
        "data.refresh_steps=50",
        "data.refresh_prompts=48",
        f"data.cache={study.data_folder(source)}",
        "draft=pretrained",
        f"draft.path={study.initial / 'draft'}",
        f"train.max_minutes={study.minutes:g}",
        "train.eval_max_prompts=12",
        "evaluation.measure_cost=false",
        f"hydra.run.dir={study.cell(loss, source)}",
    ]


def summary_of(folder: Path) -> dict | None:
    """A finished run's figures, or None."""
    path = folder / "summary.json"
    return json.loads(path.read_text()) if path.is_file() else None


def _data(study: Study) -> list[str]:
    return [
        f"data.prompts={study.prompts}",
        f"data.num_prompts={study.num_prompts}",
        f"data.eval_prompts={study.eval_prompts}",
        f"data.max_new_tokens={study.max_new_tokens}",
    ]
