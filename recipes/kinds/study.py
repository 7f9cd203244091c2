"""The runs of the study, one for each kind of draft."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FIRST = "eagle"  # its run writes the text that all kinds learn from
TOKENS = "tokens"  # reads no states of the target
SIDE_BY_SIDE = "8"  # prompts that speed-ups are measured on, beside one alone
SPEED = ("evaluation.measure_speedup=true", f"evaluation.speedup_batches=[{SIDE_BY_SIDE}]")
JUDGED = ("data.eval_prompts=", "data.max_new_tokens=")  # settings of the held-out answers, the same for all kinds
KINDS: dict[str, tuple[str, ...]] = {
    FIRST: (),
    "block": ("draft=block",),
    "hydra": ("draft=medusa", "draft.sequential=true"),
    "medusa": ("draft=medusa",),
    "features": ("draft=pruned", "draft.layers=3", "draft.features=true"),
    TOKENS: ("draft=pruned", "draft.layers=3"),
}


@dataclass(frozen=True)
class Study:
    """Settings of the study.

    Attributes:
        root: where everything goes.
        prompts: prompt file of the text.
        minutes: of training, each kind.
        text_minutes: of writing text, once.
        words: further settings of every run. Those that choose the training text go to the first run alone.
        elsewhere: further prompt files, on which the best kind and `TOKENS` are judged.
        temperatures: further ones, at which these two are judged on `prompts`.
        states: those of the target that are recorded with the text. (): those that the first kind reads.
    """

    root: Path
    prompts: str
    minutes: float = 10.0
    text_minutes: float = 10.0
    target: str = "smollm2"
    kinds: tuple[str, ...] = tuple(KINDS)
    words: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    temperatures: tuple[float, ...] = ()
    states: tuple[int, ...] = ()

    def folder(self, kind: str) -> Path:
        """Return the run folder of a kind."""
        return self.root / kind

    def command(self, kind: str) -> list[str]:
        """Return the `distill train` command of a kind. All take the first one's text."""
        first = kind == FIRST
        text = f"data.prompts={self.prompts}" if first else f"data.cache={self.folder(FIRST)}"
        return [
            "train",
            "experiment=ten-minutes",
            f"target={self.target}",
            *KINDS[kind],
            text,
            *([f"data.max_minutes={self.text_minutes:g}"] if first else []),
            *([f"data.state_ids={list(self.states)}".replace(" ", "")] if first and self.states else []),
            f"train.max_minutes={self.minutes:g}",
            *SPEED,
            *(word for word in self.words if first or word.startswith(JUDGED) or not word.startswith("data.")),
        ]
