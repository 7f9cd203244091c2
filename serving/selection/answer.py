"""One running answer, as a selection by goodput knows it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from distillspec.serving.selection.batch import Prospect
from distillspec.serving.selection.estimate import Tried
from distillspec.types import Floats


@dataclass
class Answer:
    """A running answer."""

    draft: str
    draft_since: int  # tokens of its text when it got this draft
    features: Floats  # where it was at its last review
    # P(a token of its draft is accepted) by these, before its own trials. Drawn, or optimistic, while it is on trial.
    # None: the answer has a source without a model alone.
    belief: float | None
    kind: Hashable = None  # of its request, for which drafts are tried
    loss: float = 0.0  # tokens that all rows lose for each that it writes, if its draft is not expected to be the best
    coming: str | None = None  # the draft that it switches to once that draft has read its text
    coming_loss: float = 0.0  # its `loss` from then on
    # What drafts would bring it. Before that, their names, and True if it is alone.
    prospect: tuple[tuple[Sequence[str], bool], Prospect] | None = None
    learnt: dict[str, Tried] = field(default_factory=dict)  # tokens of each draft that were learnt from
    # Steps, tokens tried and tokens accepted of each draft since then.
    unlearnt: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    steps: int = 0  # so far
    free_steps: int = 0  # those in which a source without a model drafted
