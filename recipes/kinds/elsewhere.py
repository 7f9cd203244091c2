"""The best kind, and drafts that read tokens alone, judged on other text and at other temperatures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from distillspec.recipes.kinds.study import JUDGED, SPEED, TOKENS, Study


class Cell(NamedTuple):
    """One comparison of kinds: prompts that no draft was trained on, and the temperature of their answers."""

    kinds: tuple[str, ...]
    prompts: str
    temperature: float

    @property
    def name(self) -> str:
        return f"{Path(self.prompts).stem} at T = {self.temperature:g}"

    def folder(self, study: Study) -> Path:
        return study.root / "elsewhere" / "-".join((Path(self.prompts).stem, f"{self.temperature:g}", *self.kinds))

    def command(self, study: Study) -> list[str]:
        """Return the `distill eval` command, without its folder."""
        return [
            "eval",
            f"drafts=[{','.join(str(study.folder(kind)) for kind in self.kinds)}]",
            f"target={study.target}",
            f"data.prompts={self.prompts}",
            f"sampling.temperature={self.temperature:g}",
            *SPEED,
            *(word for word in study.words if word.startswith(JUDGED)),
        ]


def cells(study: Study, figures: Mapping[str, Mapping[str, Any]]) -> list[Cell]:
    """Return the comparisons: the study's own prompts at other temperatures, other prompts at temperature 1.

    Args:
        figures: of the finished kinds.
    """
    kinds = compared(figures)
    at_temperatures = [Cell(kinds, study.prompts, temperature) for temperature in study.temperatures]
    return at_temperatures + [Cell(kinds, prompts, 1.0) for prompts in study.elsewhere]


def compared(kinds: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the kind of the highest predicted speed-up at batch 1, and the one that reads tokens alone.

    Args:
        kinds: the figures of the finished ones.
    """
    best = max(kinds, key=lambda kind: kinds[kind]["predicted"]["1"]["mean"])
    return (best, *({TOKENS} & kinds.keys() - {best}))
