"""The runs of the study, each a `distill quality` with engine settings of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distillspec.commands.drafts import find_drafts
from distillspec.serving.draft_loading import draft_names

FIXED = "engine.controller=fixed"
MEDUSA = "engine.tree=medusa"
MOST_DRAFTS = 3


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        about: for the table.
        depth: levels of the tree, None where the controller chooses.
        words: settings of the engine.
        lossy: the lossy verification that is compared with the exact one, "" for none.
        drafts: that draft together. 1: the draft alone, or as `words` say.
        alone: the last of these drafts drafts by itself.
        medusa: the draft of Medusa's heads drafts in place of these.
    """

    about: str
    depth: int | None
    words: tuple[str, ...]
    lossy: str = ""
    drafts: int = 1
    alone: bool = False
    medusa: bool = False

    def lacks(self, drafts: int, medusa: str) -> str:
        """Return what is missing to run it with so many drafts, and `medusa` for one of heads. "": nothing."""
        if self.medusa and not medusa:
            return "needs a draft of kind medusa; name it with --medusa RUN"
        return "" if self.drafts <= drafts else f"needs {self.drafts} drafts; name the others with --further RUN"


def given(*widths: int, nodes: int, lossy: str = "") -> Cell:
    """Return the cell of a tree with so many children at each level."""
    shape = ", ".join(map(str, widths))
    length = f"engine.speculation_length={len(widths)}"
    words = (FIXED, "engine.tree=given", length, f"engine.widths=[{','.join(map(str, widths))}]")
    return Cell(f"({shape}), {nodes} tokens", len(widths), (*words, f"engine.nodes={nodes}"), lossy)


def joined(*proposers: str) -> Cell:
    """Return the cell of several sources, each with a chain of three tokens."""
    words = (FIXED, f"engine.proposer=[{','.join(proposers)}]", "engine.tree=off", "engine.speculation_length=3")
    return Cell(" + ".join(proposers), 3, words)


def together(drafts: int) -> Cell:
    """Return the cell of several drafts, each with a chain of three tokens."""
    return Cell(f"{drafts} drafts", 3, (FIXED, "engine.tree=off", "engine.speculation_length=3"), drafts=drafts)


def heads(about: str, *words: str) -> Cell:
    """Return the cell of Medusa's heads alone, with their own kind of trees."""
    return Cell(f"heads, {about}", None, (MEDUSA, "engine.proposer=draft_model", *words), "typical", medusa=True)


def of_draft(cell: Cell, number: int) -> Cell:
    """Return the same cell with another draft: the second, …."""
    return replace(cell, about=f"{cell.about}, draft {number}", drafts=number, alone=True)


ROOTS = {
    "roots-1": given(1, 4, 3, 1, 1, nodes=41, lossy="target_initialised"),
    "roots-2": given(2, 4, 3, 1, 1, nodes=82, lossy="target_initialised"),
    "roots-4": given(4, 2, 2, 1, 1, nodes=60, lossy="target_initialised"),
}


def by_draft(roots: str, number: int) -> str:
    """Return the name of one of `ROOTS` with a draft, the first, second, …."""
    return roots if number == 1 else f"{roots}-draft-{number}"


CELLS: dict[str, Cell] = {
    "chain": given(1, 1, 1, 1, nodes=4),
    "tree-44": given(4, 2, 2, 1, nodes=44),
    **ROOTS,
    **{
        by_draft(name, number): of_draft(cell, number)
        for number in range(2, 1 + MOST_DRAFTS)
        for name, cell in ROOTS.items()
    },
    "typical": Cell("by goodput", None, (), "typical"),
    "medusa": heads("by goodput"),
    "medusa-16": heads("the best 16 tokens", FIXED, "engine.speculation_length=4", "engine.nodes=16"),
    "one-source": joined("draft_model"),
    "two-sources": joined("suffix", "draft_model"),
    "three-sources": joined("suffix", "recycling", "draft_model"),
    "two-drafts": together(2),
    "three-drafts": together(3),
}


@dataclass(frozen=True)
class Study:
    """Settings of the study.

    Attributes:
        root: where everything goes.
        further: drafts beside the first, for the cells of several.
        medusa: a draft of heads, for the cells of these. "": none.
        count: prompts of each run.
        words: further settings of every run.
    """

    root: Path
    prompts: str
    draft: str
    target: str = "smollm2"
    count: int = 64
    cells: tuple[str, ...] = tuple(CELLS)
    words: tuple[str, ...] = ()
    further: tuple[str, ...] = ()
    medusa: str = ""

    @property
    def drafts(self) -> Sequence[str]:
        """All drafts but the one of heads."""
        return (self.draft, *self.further)

    def folder(self, name: str) -> Path:
        """Return the run folder of a cell."""
        return self.root / name

    def command(self, name: str) -> list[str]:
        """Return the `distill quality` command of a cell."""
        cell = CELLS[name]
        verifications = ",".join(["exact", *filter(None, [cell.lossy])])
        return [
            "quality",
            f"target={self.target}",
            *self._drafts(cell),
            f"quality.prompts=[{self.prompts}]",
            f"quality.verifications=[{verifications}]",
            f"quality.count={self.count}",
            "sampling.temperature=0.7",  # the paper's
            "engine.max_slots=1",
            "engine.compile=false",  # in the background it would slow a part of the answers
            *cell.words,
            *self.words,
            f"hydra.run.dir={self.folder(name)}",
        ]

    def _drafts(self, cell: Cell) -> list[str]:
        """Return the words that name a cell's drafts, and the order in which their tokens are tried."""
        paths = self.drafts[: cell.drafts]
        if cell.medusa or cell.alone or cell.drafts == 1:
            return [f"draft.path={self.medusa if cell.medusa else paths[-1]}"]
        names = draft_names(find_drafts(paths))
        return [f"drafts=[{','.join(paths)}]", f"engine.proposer=[{','.join(names)}]"]
