"""The runs of the study, each a `distill quality` with engine settings of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from distillspec.commands.drafts import find_drafts
from distillspec.serving.draft_loading import draft_names

FIXED = "engine.controller=fixed"


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        about: for the table.
        depth: levels of the tree, None where the controller chooses.
        words: settings of the engine.
        lossy: the lossy verification that is compared with the exact one, "" for none.
        drafts: that draft together. 1: the draft alone, or as `words` say.
    """

    about: str
    depth: int | None
    words: tuple[str, ...]
    lossy: str = ""
    drafts: int = 1


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


CELLS: dict[str, Cell] = {
    "chain": given(1, 1, 1, 1, nodes=4),
    "tree-44": given(4, 2, 2, 1, nodes=44),
    "roots-1": given(1, 4, 3, 1, 1, nodes=41, lossy="target_initialised"),
    "roots-2": given(2, 4, 3, 1, 1, nodes=82, lossy="target_initialised"),
    "roots-4": given(4, 2, 2, 1, 1, nodes=60, lossy="target_initialised"),
    "typical": Cell("by goodput", None, (), "typical"),
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
        if cell.drafts == 1:
            return [f"draft.path={self.draft}"]
        paths = [self.draft, *self.further][: cell.drafts]
        names = draft_names(find_drafts(paths))
        return [f"drafts=[{','.join(paths)}]", f"engine.proposer=[{','.join(names)}]"]


def able(drafts: int) -> list[str]:
    """Return the cells that so many drafts are enough for."""
    return [name for name, cell in CELLS.items() if cell.drafts <= drafts]
