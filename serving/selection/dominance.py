"""One draft that is the best for every request: then nothing has to be drawn or reviewed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from distillspec.serving.base.rows import RowView
from distillspec.serving.selection.accepting import domain_index
from distillspec.serving.selection.base import drafts_of

# Standard deviations that the best draft may be worse, and each other one better, and it is still the best.
SURE_DEVIATIONS = 1.5
CALM_ANSWERS = 64  # answers in a row that began with the same draft for certain
ACCEPTANCE_DROP = 0.08  # of P(a token is accepted) since it was certain: more than an estimate wavers, so a change


@dataclass
class Dominance:
    """Notices that one draft is the best for certain, for every kind of request, and that this may have changed.

    Attributes:
        draft: that draft, None while there is none.
    """

    draft: str | None = None
    _certain: dict[Hashable, tuple[str, float]] = field(default_factory=dict)  # kinds seen → best draft, P(accepted)
    _calm: int = 0

    def changed(self) -> None:
        """Begin anew: a draft was replaced, or has changed."""
        self.draft, self._calm = None, 0
        self._certain.clear()

    def doubted(self) -> None:
        """Count an answer for which another draft may be better, or that left its draft."""
        self._calm = 0

    def is_certain(self, kind: Hashable, draft: str, chance: float) -> None:
        """Count an answer of some kind whose draft is the best for certain.

        Args:
            chance: P(a token of it is accepted).
        """
        if any(other != draft for other, _ in self._certain.values()):  # also if this kind had another one before
            self._calm = 0
        self._certain[kind] = draft, chance
        self._calm += 1
        self.draft = draft if self._calm >= CALM_ANSWERS else None

    def covers(self, kind: Hashable, chance: float) -> bool:
        """Return True if the draft is the best for a new answer too. If not, nothing is certain any more."""
        if self.draft is None:
            return False
        known = self._certain.get(kind)
        if known is None:
            self.draft, self._calm = None, 0
        elif chance < known[1] - ACCEPTANCE_DROP:
            self.changed()
        return self.draft is not None


def kind_of(row: RowView, rows: Sequence[RowView]) -> Hashable:
    """Return the kind of a request, by which the best draft is told: its domain, rows that share passes, and drafts."""
    return domain_index(row), len(rows).bit_length(), tuple([option.source for option in drafts_of(row)])
